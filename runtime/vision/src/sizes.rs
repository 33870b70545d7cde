//! Sizes to which images are resized.

use crate::resample::MAX_EXTENT;
use std::ops::RangeInclusive;

/// Size to which images are resized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSize {
    /// This width and height.
    Fixed(usize),
    /// The image's own aspect ratio, in multiples of `unit`, with a number of pixels in `pixels`.
    Dynamic {
        /// Width and height of the patches that become one row.
        unit: usize,
        /// Number of pixels.
        pixels: RangeInclusive<usize>,
    },
    /// The image's own aspect ratio, in multiples of `unit`. Only larger images are resized.
    LongestSide {
        /// Width and height of the patches that become one row.
        unit: usize,
        /// Maximum width and height, before they become multiples of `unit`.
        longest: usize,
    },
    /// The image's own aspect ratio, in multiples of `unit`, with as many rows as possible.
    Filled {
        /// Width and height of the patches that become one row.
        unit: usize,
        /// Maximum number of rows.
        count: usize,
        /// Maximum width and height.
        longest: usize,
    },
}

impl ImageSize {
    /// Returns the maximum number of pixels of a resized image.
    pub(crate) fn max_pixels(&self) -> usize {
        match self {
            ImageSize::Fixed(side) => side * side,
            ImageSize::Dynamic { pixels, .. } => *pixels.end(),
            ImageSize::LongestSide { unit, longest } => (longest.div_ceil(*unit) * unit).pow(2),
            ImageSize::Filled { unit, count, .. } => count * unit * unit,
        }
    }
}

/// Returns the size nearest to `size`, in multiples of `unit`, with a number of pixels in `pixels`:
/// `smart_resize` of Hugging Face's processors.
pub(crate) fn dynamic_size(
    size: [usize; 2],
    unit: usize,
    pixels: &RangeInclusive<usize>,
) -> [usize; 2] {
    let real = size.map(|extent| extent as f64);
    let area = real[0] * real[1];
    let unit_size = unit as f64;
    let multiple = |count: f64| (count as usize).max(1) * unit;
    let near = real.map(|extent| multiple((extent / unit_size).round_ties_even()));
    let near_area = near[0].saturating_mul(near[1]);
    let [least, most] = [*pixels.start(), *pixels.end()];
    let sized = if near_area > most {
        let shrink = (area / most as f64).sqrt();
        real.map(|extent| multiple((extent / shrink / unit_size).floor()))
    } else if near_area < least {
        let grow = (least as f64 / area).sqrt();
        real.map(|extent| multiple((extent * grow / unit_size).ceil()))
    } else {
        near
    };
    // A side of one unit does not shrink further, so the other one must.
    let limit = |extent: usize, other: usize| {
        let extent = extent.min((most / other / unit).max(1) * unit);
        extent.min(MAX_EXTENT / unit * unit)
    };
    [limit(sized[0], sized[1]), limit(sized[1], sized[0])]
}

/// Returns the size of an image whose sides become `longest` pixels at most and then multiples of
/// `unit`, as the processor of Pixtral does it.
pub(crate) fn longest_side_size(size: [usize; 2], unit: usize, longest: usize) -> [usize; 2] {
    let ratio = |extent: usize| extent as f64 / longest as f64;
    let ratio = ratio(size[0]).max(ratio(size[1])).max(1.0);
    let shrunk = size.map(|extent| (extent as f64 / ratio) as usize);
    shrunk.map(|extent| extent.max(1).div_ceil(unit) * unit)
}

/// Returns the largest size with this aspect ratio in multiples of `unit`, rounded down, with up to
/// `count` rows and sides of at most `longest` pixels: as the processor of Gemma 4 does it.
pub(crate) fn filled_size(
    size: [usize; 2],
    unit: usize,
    count: usize,
    longest: usize,
) -> [usize; 2] {
    let real = size.map(|extent| extent as f64);
    let factor = ((count * unit * unit) as f64 / (real[0] * real[1])).sqrt();
    let units = real.map(|extent| (factor * extent / unit as f64) as usize);
    let other = |axis: usize| ((real[axis] / real[1 - axis]) as usize).min(count);
    let units = match units {
        [0, height] if height > 0 => [1, other(1)],
        [width, 0] if width > 0 => [other(0), 1],
        units => units,
    };
    units.map(|units| units.clamp(1, (longest / unit).max(1)) * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_processor() {
        // Of transformers' Qwen2VLImageProcessor with these bounds.
        let pixels = 56 * 56..=28 * 28 * 1280;
        for (size, expected) in [
            ([640, 480], [644, 476]),
            ([28, 28], [56, 56]),
            ([1, 1], [56, 56]),
            ([4000, 3000], [1148, 840]),
            ([42, 70], [56, 56]),
            ([98, 126], [112, 112]),
        ] {
            assert_eq!(dynamic_size(size, 28, &pixels), expected, "{size:?}");
        }
    }

    #[test]
    fn no_size_exceeds_the_maximum() {
        let pixels = 28 * 28 * 8..=28 * 28 * 100;
        for size in [
            [20_000, 1],
            [1, 20_000],
            [1, 1],
            [3000, 2],
            [65_535, 65_535],
        ] {
            let [width, height] = dynamic_size(size, 28, &pixels);
            assert!(width >= 28 && height >= 28 && width % 28 == 0 && height % 28 == 0);
            assert!(
                width * height <= *pixels.end(),
                "{size:?}: {width} x {height}"
            );
        }
    }

    #[test]
    fn filled_sizes_stay_within_their_bounds() {
        for (count, longest) in [(1, 480), (6, 480), (280, 48_000)] {
            for size in [
                [1, 1],
                [20_000, 1],
                [1, 20_000],
                [65_535, 65_535],
                [500, 499],
            ] {
                let [width, height] = filled_size(size, 48, count, longest);
                assert!(width.min(height) >= 48 && width.max(height) <= longest);
                assert!(width * height <= count * 48 * 48, "{size:?}");
            }
        }
    }
}
