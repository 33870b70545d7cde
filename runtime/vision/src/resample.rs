//! Resizing, bit by bit as Pillow does it: models were trained on its results.
//!
//! A row of weights for each result pixel comes from a filter, stretched where the image shrinks.
//! Weights have 22 bits after the point. The width is resized first, or the height if it shrinks
//! by over twice as many pixels, since Pillow 13. torchvision has its own precision of weights.

use crate::error::{Error, Result};
use crate::rgb::RgbImage;
use std::f64::consts::PI;

/// A filter of Pillow or torchvision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Triangle, from -1 to 1.
    Bilinear,
    /// Cubic with a = -0.5, from -2 to 2.
    Bicubic,
    /// Truncated sinc, from -3 to 3.
    Lanczos,
    /// Triangle, with weights of 15 bits, as torchvision computes it for bytes.
    TorchBilinear,
}

impl Filter {
    /// Returns the distance beyond which the filter is 0.
    fn support(self) -> f64 {
        match self {
            Filter::Bilinear | Filter::TorchBilinear => 1.0,
            Filter::Bicubic => 2.0,
            Filter::Lanczos => 3.0,
        }
    }

    fn at(self, x: f64) -> f64 {
        match self {
            Filter::Bilinear | Filter::TorchBilinear => (1.0 - x.abs()).max(0.0),
            Filter::Bicubic => {
                const A: f64 = -0.5;
                let x = x.abs();
                if x < 1.0 {
                    ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
                } else if x < 2.0 {
                    (((x - 5.0) * x + 8.0) * x - 4.0) * A
                } else {
                    0.0
                }
            }
            Filter::Lanczos => {
                let sinc = |x: f64| match x * PI {
                    0.0 => 1.0,
                    x => x.sin() / x,
                };
                if (-3.0..3.0).contains(&x) {
                    sinc(x) * sinc(x / 3.0)
                } else {
                    0.0
                }
            }
        }
    }
}

/// Bits of a weight after the point: 32, without those of a pixel and two for sums above 1.
const FRACTION_BITS: u32 = 32 - 8 - 2;

/// Maximum extent of a result.
pub(crate) const MAX_EXTENT: usize = 1 << 16;

/// Source pixels of a result pixel on one axis: the first one, and the weights of those from there.
pub(crate) type TapRange = (usize, Vec<f64>);

/// Returns the source pixels of each result pixel of an axis.
pub(crate) fn spans(from: usize, to: usize, filter: Filter) -> impl Iterator<Item = TapRange> {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let support = filter.support() * stretch;
    let most = most_pixels(from, to, filter);
    (0..to).map(move |index| {
        let center = (index as f64 + 0.5) * scale;
        // Conversions of floats truncate and saturate.
        let first = (center - support + 0.5) as usize;
        let end = ((center + support + 0.5) as usize).min(from);
        let count = end.saturating_sub(first).min(most);
        let at = |at: usize| filter.at(((at + first) as f64 - center + 0.5) * stretch.recip());
        let mut weights: Vec<f64> = (0..count).map(at).collect();
        let sum: f64 = weights.iter().sum();
        if sum != 0.0 {
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        (first, weights)
    })
}

/// Returns the maximum number of source pixels of a result pixel.
fn most_pixels(from: usize, to: usize, filter: Filter) -> usize {
    let stretch = (from as f64 / to as f64).max(1.0);
    (filter.support() * stretch).ceil() as usize * 2 + 1
}

/// Weights of source pixels for each result pixel of one axis.
struct FilterWeights {
    /// First source pixel, and number of source pixels, for each result pixel.
    spans: Vec<(usize, usize)>,
    /// Weights; those of a result pixel begin at its index times `stride`.
    weights: Vec<i32>,
    stride: usize,
    /// Bits of a weight after the point.
    fraction_bits: u32,
}

impl FilterWeights {
    fn new(from: usize, to: usize, filter: Filter) -> Self {
        let stride = most_pixels(from, to, filter);
        let fraction_bits = match filter {
            Filter::TorchBilinear => {
                let weights = spans(from, to, filter).flat_map(|(_, weights)| weights);
                torch_bits(weights.fold(0.0, f64::max))
            }
            _ => FRACTION_BITS,
        };
        let mut kernel = FilterWeights {
            spans: Vec::with_capacity(to),
            weights: vec![0; to * stride],
            stride,
            fraction_bits,
        };
        for (index, (first, weights)) in spans(from, to, filter).enumerate() {
            let fixed = &mut kernel.weights[index * stride..];
            for (fixed, weight) in fixed.iter_mut().zip(&weights) {
                let half = if *weight < 0.0 { -0.5 } else { 0.5 };
                *fixed = (half + weight * f64::from(1 << fraction_bits)) as i32;
            }
            kernel.spans.push((first, weights.len()));
        }
        kernel
    }

    fn rows(&self) -> impl Iterator<Item = (usize, &[i32])> {
        let rows = self.weights.chunks_exact(self.stride);
        let rows = self.spans.iter().zip(rows);
        rows.map(|(&(first, count), weights)| (first, &weights[..count]))
    }
}

impl FilterWeights {
    /// Returns the start of a sum: a half, so that its end is rounded.
    fn half(&self) -> i32 {
        1 << (self.fraction_bits - 1)
    }

    fn rounded(&self, sum: i32) -> u8 {
        (sum >> self.fraction_bits).clamp(0, 255) as u8
    }
}

/// Returns the bits after the point with which all weights up to `most` have 15 bits at most.
fn torch_bits(most: f64) -> u32 {
    let fits = |bits: &u32| 0.5 + most * f64::from(1u32 << bits) < f64::from(1 << 15);
    (1..=22).take_while(fits).last().unwrap_or(1)
}

impl RgbImage {
    /// Returns the image resized to this width and height.
    ///
    /// # Errors
    /// Returns [`Error::Image`] if an extent is 0 or above 65,536.
    pub fn resized(&self, width: usize, height: usize, filter: Filter) -> Result<RgbImage> {
        if [width, height]
            .iter()
            .any(|extent| !(1..=MAX_EXTENT).contains(extent))
        {
            return Err(Error::image(format!(
                "an image cannot have {width} x {height} pixels: from 1 to {MAX_EXTENT} in both directions"
            )));
        }
        let less = |from: usize, to: usize| from as i64 - to as i64;
        let shrinks = less(self.height(), height);
        let may_turn = filter != Filter::TorchBilinear;
        if may_turn && shrinks > 0 && shrinks > 2 * less(self.width(), width) {
            self.with_height(height, filter)?.with_width(width, filter)
        } else {
            self.with_width(width, filter)?.with_height(height, filter)
        }
    }

    fn with_width(&self, width: usize, filter: Filter) -> Result<RgbImage> {
        if width == self.width() {
            return Ok(self.clone());
        }
        let kernel = FilterWeights::new(self.width(), width, filter);
        let pixels = resized_rows(self.pixels(), self.width(), width, &kernel);
        RgbImage::new(width, self.height(), pixels)
    }

    fn with_height(&self, height: usize, filter: Filter) -> Result<RgbImage> {
        if height == self.height() {
            return Ok(self.clone());
        }
        let kernel = FilterWeights::new(self.height(), height, filter);
        let pixels = resized_columns(self.pixels(), self.width(), height, &kernel);
        RgbImage::new(self.width(), height, pixels)
    }
}

fn resized_rows(source: &[u8], from: usize, to: usize, kernel: &FilterWeights) -> Vec<u8> {
    let rows = source.len() / (3 * from);
    let mut result = Vec::with_capacity(rows * to * 3);
    for row in source.chunks_exact(3 * from) {
        for (first, weights) in kernel.rows() {
            let mut sums = [kernel.half(); 3];
            for (pixel, weight) in row[3 * first..].chunks_exact(3).zip(weights) {
                for (sum, &channel) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(channel) * weight;
                }
            }
            result.extend(sums.map(|sum| kernel.rounded(sum)));
        }
    }
    result
}

fn resized_columns(source: &[u8], width: usize, to: usize, kernel: &FilterWeights) -> Vec<u8> {
    let row = 3 * width;
    let mut result = Vec::with_capacity(row * to);
    let mut sums = vec![0; row];
    for (first, weights) in kernel.rows() {
        sums.fill(kernel.half());
        for (values, weight) in source[row * first..].chunks_exact(row).zip(weights) {
            for (sum, &value) in sums.iter_mut().zip(values) {
                *sum += i32::from(value) * weight;
            }
        }
        result.extend(sums.iter().map(|&sum| kernel.rounded(sum)));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grey_image_stays_grey_at_any_size() {
        let image = RgbImage::new(7, 5, vec![77; 7 * 5 * 3]).unwrap();
        for filter in [
            Filter::Bilinear,
            Filter::Bicubic,
            Filter::Lanczos,
            Filter::TorchBilinear,
        ] {
            for size in [[1, 1], [3, 9], [40, 2], [7, 5], [65, 64]] {
                let resized = image.resized(size[0], size[1], filter).unwrap();
                assert_eq!([resized.width(), resized.height()], size);
                assert!(resized.pixels().iter().all(|&value| value == 77));
            }
        }
    }

    #[test]
    fn extents_are_checked_before_memory_is_allocated() {
        let image = RgbImage::new(1, 1, vec![0; 3]).unwrap();
        for size in [[0, 1], [1, 0], [MAX_EXTENT + 1, 1], [1, usize::MAX]] {
            let error = image.resized(size[0], size[1], Filter::Bicubic);
            assert!(error.unwrap_err().to_string().contains("65536"));
        }
    }
}
