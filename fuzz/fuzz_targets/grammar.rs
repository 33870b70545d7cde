//! Grammars, as [`samite_fuzz::grammar`] describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| samite_fuzz::grammar(bytes));
