//! Division of images into tiles, which an encoder encodes one by one.

use crate::error::Result;
use crate::resample::Filter;
use crate::rgb::RgbImage;
use std::ops::RangeInclusive;

/// Method of dividing images into tiles of a fixed size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tiling {
    /// The longer side becomes `longest` pixels, and both sides become whole tiles.
    LongestSide {
        /// Pixels of the longer side, before it becomes whole tiles.
        longest: usize,
    },
    /// The grid whose aspect ratio is nearest to the image's.
    AspectRatio {
        /// Number of tiles.
        tiles: RangeInclusive<usize>,
    },
    /// The grid whose aspect ratio is nearest to the image's, for images of over `pixels` pixels.
    LargeOnly {
        /// Number of tiles.
        tiles: RangeInclusive<usize>,
        /// Width and height of a tile.
        side: usize,
        /// Maximum number of pixels of an image without tiles, with sides rounded to `unit`.
        pixels: usize,
        /// Unit of the width and height for this comparison.
        unit: usize,
        /// Minimum width and height for this comparison.
        least: usize,
    },
}

/// Maximum number of pixels of the longer side of a divided image, in Hugging Face's processors.
const MAX_LONGEST: usize = 4096;

/// Maximum width of a square around an image.
const MAX_SQUARE: usize = 8192;

/// The tiles of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TilePlan {
    /// Sizes to which the image is resized, one after the other, before it is cut.
    steps: Vec<[usize; 2]>,
    /// Columns and rows of tiles. 0 without tiles.
    grid: [usize; 2],
    /// Width and height of a tile.
    tile: usize,
    /// Size of the whole image, which follows its tiles.
    whole: [usize; 2],
    /// True if the whole image is resized from the last step, false if it is from the original.
    is_whole_resized_twice: bool,
    /// Color around the image in a square, before it is resized.
    background: Option<[u8; 3]>,
    filter: Filter,
}

impl TilePlan {
    /// Plans an image without tiles, which is resized to `size`.
    pub(crate) fn whole(size: [usize; 2], filter: Filter) -> Self {
        TilePlan {
            steps: Vec::new(),
            grid: [0; 2],
            tile: 0,
            whole: size,
            is_whole_resized_twice: false,
            background: None,
            filter,
        }
    }

    /// Puts the image in the middle of a square of this color first.
    pub(crate) fn in_square(self, background: [u8; 3]) -> Self {
        TilePlan {
            background: Some(background),
            ..self
        }
    }

    /// Plans the tiles of an image of this size, besides the whole image.
    pub(crate) fn tiled(self, tiling: &Tiling, size: [usize; 2]) -> Self {
        match tiling {
            Tiling::LongestSide { longest } => self.with_longest_side(size, *longest),
            Tiling::AspectRatio { tiles } => {
                let tile = self.whole[0];
                self.with_grid(nearest_grid(size, tile, tiles), tile)
            }
            Tiling::LargeOnly {
                tiles,
                side,
                pixels,
                unit,
                least,
            } => {
                let rounded = |extent: usize| {
                    let count = (extent as f64 / *unit as f64).round_ties_even();
                    (count as usize * unit).max(*least)
                };
                if rounded(size[0]).saturating_mul(rounded(size[1])) <= *pixels {
                    return self;
                }
                self.with_grid(nearest_grid(size, *side, tiles), *side)
            }
        }
    }

    /// Plans this grid of tiles. A single tile would be the whole image.
    fn with_grid(self, grid: [usize; 2], tile: usize) -> Self {
        if grid == [1, 1] {
            return self;
        }
        TilePlan {
            steps: vec![grid.map(|extent| extent * tile)],
            grid,
            tile,
            ..self
        }
    }

    /// Plans tiles as the processor of Idefics3 does.
    fn with_longest_side(self, size: [usize; 2], longest: usize) -> Self {
        let tile = self.whole[0];
        let is_wide = |size: [usize; 2]| size[0] >= size[1];
        let scaled = |longer: usize, size: [usize; 2]| {
            let (ratio, longer_side) = (size[0] as f64 / size[1] as f64, longer as f64);
            if is_wide(size) {
                [longer, (longer_side / ratio) as usize]
            } else {
                [(longer_side * ratio) as usize, longer]
            }
        };
        let mut first = scaled(longest, size);
        let shorter = usize::from(is_wide(size));
        first[shorter] = (first[shorter] + first[shorter] % 2).max(1);
        if first[0].max(first[1]) > MAX_LONGEST {
            first = scaled(MAX_LONGEST, first).map(|extent| extent.max(1));
        }
        let whole_tiles = |extent: usize| extent.div_ceil(tile) * tile;
        let second = scaled(whole_tiles(first[0].max(first[1])), first);
        let second = second.map(|extent| whole_tiles(extent.max(1)));
        let grid = match second.map(|extent| extent / tile) {
            [1, 1] => [0, 0],
            grid => grid,
        };
        TilePlan {
            steps: vec![first, second],
            grid,
            tile,
            is_whole_resized_twice: true,
            ..self
        }
    }

    /// Returns the numbers of columns and rows of tiles: 0 for an image without tiles.
    pub fn grid(&self) -> [usize; 2] {
        self.grid
    }

    /// Returns the sizes of all tiles in order: those of the grid from left to right and top to
    /// bottom, and the whole image.
    pub fn sizes(&self) -> Vec<[usize; 2]> {
        let mut sizes = vec![[self.tile; 2]; self.grid[0] * self.grid[1]];
        sizes.push(self.whole);
        sizes
    }

    /// Returns the bytes of memory that [`cut`](Self::cut) takes at most, besides the image itself.
    pub fn cutting_bytes(&self) -> usize {
        let pixels = |[width, height]: &[usize; 2]| width * height;
        let steps = self.steps.iter().map(pixels).sum::<usize>();
        let tiles = self.sizes().iter().map(pixels).sum::<usize>();
        // Resizing has one side of the image before and one after.
        3 * (2 * steps + 2 * tiles)
    }

    /// Returns the pixels of all tiles of an image of the planned size.
    ///
    /// # Errors
    /// Returns [`Error::Image`](crate::Error::Image) if a size is too large.
    pub fn cut(&self, image: &RgbImage) -> Result<Vec<RgbImage>> {
        let square;
        let image = match self.background {
            Some(color) => {
                square = self.squared(image, color)?;
                &square
            }
            None => image,
        };
        let mut resized = None;
        for &[width, height] in &self.steps {
            let from = resized.as_ref().unwrap_or(image);
            resized = Some(from.resized(width, height, self.filter)?);
        }
        let resized = resized.as_ref().unwrap_or(image);
        let mut tiles = Vec::with_capacity(self.grid[0] * self.grid[1] + 1);
        for row in 0..self.grid[1] {
            for column in 0..self.grid[0] {
                let corner = [column * self.tile, row * self.tile];
                tiles.push(resized.cropped(corner, [self.tile; 2])?);
            }
        }
        let [width, height] = self.whole;
        let from = if self.is_whole_resized_twice {
            resized
        } else {
            image
        };
        tiles.push(from.resized(width, height, self.filter)?);
        Ok(tiles)
    }

    /// Returns the image in the middle of a square. One that would be too large shrinks first.
    fn squared(&self, image: &RgbImage, color: [u8; 3]) -> Result<RgbImage> {
        let size = [image.width(), image.height()];
        let longer = size[0].max(size[1]);
        if longer <= MAX_SQUARE {
            return image.squared(color);
        }
        let [width, height] = size.map(|extent| (extent * MAX_SQUARE / longer).max(1));
        image.resized(width, height, self.filter)?.squared(color)
    }
}

/// Returns the columns and rows of tiles whose aspect ratio is nearest to that of `size`. Of equal
/// ones, the smallest grid is chosen, or a larger one if the image fills over half of it.
fn nearest_grid(size: [usize; 2], tile: usize, tiles: &RangeInclusive<usize>) -> [usize; 2] {
    let most = *tiles.end();
    let columns = 1..=most;
    let grids = columns.flat_map(|columns| (1..=most).map(move |rows| [columns, rows]));
    let mut grids: Vec<_> = grids
        .filter(|[columns, rows]| tiles.contains(&(columns * rows)))
        .collect();
    grids.sort_by_key(|[columns, rows]| columns * rows);
    let ratio = |[width, height]: [usize; 2]| width as f64 / height as f64;
    let area = size[0] as f64 * size[1] as f64;
    let (mut nearest, mut least) = ([1, 1], f64::INFINITY);
    for grid in grids {
        let difference = (ratio(size) - ratio(grid)).abs();
        let pixels = tile * tile * grid[0] * grid[1];
        if difference < least || difference == least && area > 0.5 * pixels as f64 {
            (nearest, least) = (grid, difference);
        }
    }
    nearest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_images_shrink_before_they_get_a_square() {
        let plan = TilePlan::whole([8, 8], Filter::Bicubic).in_square([1, 2, 3]);
        let image = RgbImage::new(65_535, 1, vec![200; 3 * 65_535]).unwrap();
        let square = plan.squared(&image, [1, 2, 3]).unwrap();
        assert_eq!([square.width(), square.height()], [MAX_SQUARE; 2]);
        let rows: Vec<_> = square.pixels().chunks_exact(3 * MAX_SQUARE).collect();
        let place = rows.iter().position(|row| row[0] == 200);
        assert_eq!(place, Some((MAX_SQUARE - 1) / 2));
        assert_eq!(rows[0][..6], [1, 2, 3, 1, 2, 3]);
    }
}
