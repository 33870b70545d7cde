//! Images as RGB bytes.

use crate::error::{Error, Result};

/// An image with 8 bits for each of red, green and blue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RgbImage {
    width: usize,
    height: usize,
    /// Rows from top to bottom, each with three bytes for each pixel.
    pixels: Vec<u8>,
}

impl RgbImage {
    /// Creates an image from its pixels: rows from top to bottom, three bytes for each pixel.
    ///
    /// # Errors
    /// Returns [`Error::Image`] if an extent is 0, or if the number of bytes is wrong.
    pub fn new(width: usize, height: usize, pixels: Vec<u8>) -> Result<Self> {
        let bytes = width
            .checked_mul(height)
            .and_then(|count| count.checked_mul(3));
        if pixels.is_empty() || bytes != Some(pixels.len()) {
            return Err(Error::image(format!(
                "an image of {width} x {height} pixels has three bytes for each, not {} in all",
                pixels.len()
            )));
        }
        Ok(RgbImage {
            width,
            height,
            pixels,
        })
    }

    /// Returns the width in pixels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the height in pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Returns the pixels: rows from top to bottom, three bytes for each pixel.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// Returns a rectangle of the image, which begins at column and row `corner`.
    ///
    /// # Errors
    /// Returns [`Error::Image`] if the rectangle is empty or not within the image.
    pub(crate) fn cropped(
        &self,
        [left, top]: [usize; 2],
        [width, height]: [usize; 2],
    ) -> Result<RgbImage> {
        if left.saturating_add(width) > self.width || top.saturating_add(height) > self.height {
            return Err(Error::image(format!(
                "{width} x {height} pixels at {left}, {top} are not within an image of {} x {}",
                self.width, self.height
            )));
        }
        let rows = self.pixels.chunks_exact(3 * self.width);
        let rows = rows.skip(top).take(height);
        let pixels = rows.flat_map(|row| &row[3 * left..][..3 * width]);
        RgbImage::new(width, height, pixels.copied().collect())
    }

    /// Returns a square of this color with the image in its middle.
    pub(crate) fn squared(&self, color: [u8; 3]) -> Result<RgbImage> {
        let side = self.width.max(self.height);
        let [left, top] = [self.width, self.height].map(|extent| (side - extent) / 2);
        let mut pixels = color.repeat(side * side);
        let rows = pixels.chunks_exact_mut(3 * side).skip(top);
        for (row, own) in rows.zip(self.pixels.chunks_exact(3 * self.width)) {
            row[3 * left..][..own.len()].copy_from_slice(own);
        }
        RgbImage::new(side, side, pixels)
    }

    /// Returns the hash of the size and of all pixels.
    pub fn hash(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for extent in [self.width, self.height] {
            hasher.update(&(extent as u64).to_le_bytes());
        }
        hasher.update(&self.pixels);
        hasher.finalize().into()
    }
}
