//! What members compute on their own, put together, is what one device computes.
#![allow(clippy::unwrap_used)]

mod bench;
mod cases;
mod mistakes;
mod rules;
