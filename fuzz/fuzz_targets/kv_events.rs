//! Peers of KV events, as [`samite_fuzz::kv_events`] describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| samite_fuzz::kv_events(bytes));
