//! Untrusted grammars: which texts they allow, which they reject, and how they fail.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod common;
mod constraint;
mod errors;
mod judge;
mod languages;
mod lazy;
mod schema;
mod suite;
