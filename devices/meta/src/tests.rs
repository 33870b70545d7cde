//! Checks that the members' combined results equal those of one device.
#![allow(clippy::unwrap_used)]

mod bench;
mod cases;
mod mistakes;
mod rules;
