//! Image files, as [`samite_fuzz::image`] describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| samite_fuzz::image(bytes));
