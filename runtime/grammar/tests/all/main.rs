//! Grammars from outside: what they let through, what they refuse, and how they fail.

#![allow(clippy::unwrap_used)] // helpers of tests may, as tests do

mod common;
mod constraint;
mod errors;
mod judge;
mod languages;
mod lazy;
mod schema;
mod suite;
