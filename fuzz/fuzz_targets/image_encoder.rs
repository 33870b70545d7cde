//! Descriptions of image encoders, as [`samite_fuzz::image_encoder`] describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| samite_fuzz::image_encoder(bytes));
