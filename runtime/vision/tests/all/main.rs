//! Images and encoders against other implementations: fixtures of `oracle.py`.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod encoders;
mod images;
mod plans;
mod tiles;

use samite_vision::RgbImage;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    folder.join(name)
}

/// Expectations of a fixture.
fn expectations(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture(name)).unwrap()).unwrap()
}

/// The hash FNV-1a.
fn fnv(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// The image of this size that `oracle.py` computes in the same way.
fn image(width: usize, height: usize) -> RgbImage {
    let pixels = (0..width as u64 * height as u64 * 3).map(|at| ((at * 2_654_435_761) >> 13) as u8);
    RgbImage::new(width, height, pixels.collect()).unwrap()
}
