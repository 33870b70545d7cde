//! The samite program.
fn main() {}
