//! Saved sequences, as [`samite_fuzz::session`] describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| samite_fuzz::session(bytes));
