//! Clients of a remote server, as [`samite_fuzz::remote`] describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| samite_fuzz::remote(bytes));
