//! Chat templates, as [`samite_fuzz::template`] describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| samite_fuzz::template(bytes));
