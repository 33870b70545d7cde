//! Grammars from outside: what they let through, what they refuse, and how they fail.

mod common;
mod constraint;
mod errors;
mod judge;
mod languages;
mod lazy;
mod schema;
