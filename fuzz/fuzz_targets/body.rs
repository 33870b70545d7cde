//! Bodies of HTTP requests, as [`samite_fuzz::body`] describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| samite_fuzz::body(bytes));
