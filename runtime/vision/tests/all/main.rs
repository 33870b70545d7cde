//! Images and encoders against other implementations: fixtures of `oracle.py`.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod encoders;
mod images;
mod plans;

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

/// The image of this size that `oracle.py` computes in the same way.
fn image(width: usize, height: usize) -> RgbImage {
    let pixels = (0..width as u64 * height as u64 * 3).map(|at| ((at * 2_654_435_761) >> 13) as u8);
    RgbImage::new(width, height, pixels.collect()).unwrap()
}
