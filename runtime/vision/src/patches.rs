//! The patches of an image in the order in which an encoder reads them.
//!
//! Patches that become one row are adjacent, so that merging them is a change of shape. With
//! windows, the patches of a window are adjacent, and windows of one size follow each other, so
//! that attention within windows is one operation for each size.

use crate::projector::PositionTable;
use crate::resample::{Filter, TapRange, spans};
use crate::rgb::RgbImage;
use crate::spec::VisionSpec;

/// Windows of one size that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowGroup {
    /// Index of the first patch.
    pub first: usize,
    /// Number of patches in a window.
    pub patches: usize,
    /// Number of windows.
    pub windows: usize,
}

/// The order of the patches of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PatchOrder {
    /// Number of columns and rows of patches.
    pub grid: [usize; 2],
    /// Column and row of each patch.
    pub patches: Vec<[usize; 2]>,
    /// Runs of windows. Without windows, one run of one window.
    pub windows: Vec<WindowGroup>,
    /// Index of each row of the result in the image, from left to right and top to bottom.
    pub rows: Vec<usize>,
}

impl PatchOrder {
    /// Returns the order for an image of `grid` columns and rows of patches.
    pub fn new(spec: &VisionSpec, grid: [usize; 2]) -> Self {
        let merge = spec.merge;
        let cells = grid.map(|extent| extent / merge);
        let side = spec.windows.map(|windows| windows.size / merge);
        let steps = cells.map(|extent| side.unwrap_or(extent).max(1));
        // Windows by their width and height, the most frequent size first.
        let mut runs: Vec<([usize; 2], Vec<[usize; 2]>)> = Vec::new();
        for top in (0..cells[1]).step_by(steps[1]) {
            for left in (0..cells[0]).step_by(steps[0]) {
                let size = [cells[0] - left, cells[1] - top];
                let size = [size[0].min(steps[0]), size[1].min(steps[1])];
                match runs.iter_mut().find(|(known, _)| *known == size) {
                    Some((_, corners)) => corners.push([left, top]),
                    None => runs.push((size, vec![[left, top]])),
                }
            }
        }
        let mut order = PatchOrder {
            grid,
            patches: Vec::with_capacity(grid[0] * grid[1]),
            windows: Vec::with_capacity(runs.len()),
            rows: Vec::with_capacity(cells[0] * cells[1]),
        };
        for ([width, height], corners) in runs {
            order.windows.push(WindowGroup {
                first: order.patches.len(),
                patches: width * height * merge * merge,
                windows: corners.len(),
            });
            for [left, top] in corners {
                for row in top..top + height {
                    for column in left..left + width {
                        order.rows.push(row * cells[0] + column);
                        let inner = (0..merge * merge).map(|at| [at % merge, at / merge]);
                        let patches = inner.map(|[x, y]| [column * merge + x, row * merge + y]);
                        order.patches.extend(patches);
                    }
                }
            }
        }
        order
    }

    /// Returns the number of patches.
    pub fn len(&self) -> usize {
        self.patches.len()
    }

    /// Returns the pixels of all patches: normalized, each channel by channel and row by row.
    pub fn pixels(&self, spec: &VisionSpec, image: &RgbImage) -> Vec<f32> {
        let side = spec.patch_size;
        // As processors do it: x / 255, minus the mean, divided by the deviation.
        let table: [Vec<f32>; 3] = std::array::from_fn(|channel| {
            let value = |byte: u8| f32::from(byte) / 255.0;
            let normal = |byte| (value(byte) - spec.mean[channel]) / spec.std[channel];
            (0..=u8::MAX).map(normal).collect()
        });
        let mut values = Vec::with_capacity(self.len() * side * side * 3);
        for [column, row] in &self.patches {
            for (channel, table) in table.iter().enumerate() {
                for y in row * side..(row + 1) * side {
                    let first = (y * image.width() + column * side) * 3 + channel;
                    let pixels = image.pixels()[first..].iter().step_by(3).take(side);
                    values.extend(pixels.map(|&pixel| table[usize::from(pixel)]));
                }
            }
        }
        values
    }

    /// Returns the positions of all patches for rotations: rows, columns, and both again.
    pub fn positions(&self) -> Vec<i32> {
        let axis = |axis: usize| self.patches.iter().map(move |patch| patch[axis] as i32);
        axis(1)
            .chain(axis(0))
            .chain(axis(1))
            .chain(axis(0))
            .collect()
    }

    /// Returns the rows of the table of positions, and their weights. `class` rows precede those of
    /// the patches.
    pub fn table_inputs(&self, spec: &VisionSpec, class: usize) -> (Vec<i32>, Vec<f32>) {
        let side = spec.table_side;
        match spec.projector.table() {
            PositionTable::None => Default::default(),
            PositionTable::Plain => {
                let rows = self.patches.iter().map(|[x, y]| class + y * side + x);
                let rows = (0..class).chain(rows).map(|row| row as i32);
                (rows.collect(), Vec::new())
            }
            PositionTable::Stretched => self.interpolation(side),
            PositionTable::Axes => {
                let columns = self.patches.iter().map(|[x, _]| *x as i32);
                let rows = self.patches.iter().map(|[_, y]| (side + y) as i32);
                (columns.chain(rows).collect(), Vec::new())
            }
            PositionTable::Resized => {
                let rows = (0..side * side).map(|row| row as i32);
                (rows.collect(), self.resized_table(side))
            }
        }
    }

    /// Returns the weights of all rows of a table of `side` x `side` positions for each patch, for
    /// a table that is resized to the grid of patches with a triangle filter.
    fn resized_table(&self, side: usize) -> Vec<f32> {
        let axis = |extent: usize| spans(side, extent, Filter::Bilinear).collect::<Vec<TapRange>>();
        let [columns, rows] = self.grid.map(axis);
        let mut weights = vec![0.0; self.len() * side * side];
        for (table, &[column, row]) in weights.chunks_exact_mut(side * side).zip(&self.patches) {
            let (left, widths) = &columns[column];
            let (top, heights) = &rows[row];
            for (y, height) in heights.iter().enumerate() {
                for (x, width) in widths.iter().enumerate() {
                    table[(top + y) * side + left + x] = (width * height) as f32;
                }
            }
        }
        weights
    }

    /// Returns the rows of a table of `side` x `side` positions between which each patch lies, and
    /// their weights, for a table that is stretched over the image: the four neighbours of all
    /// patches, one after the other.
    fn interpolation(&self, side: usize) -> (Vec<i32>, Vec<f32>) {
        let last = side - 1;
        // As numpy's linspace from 0 to the last row, in F32.
        let scaled = |at: usize, extent: usize| {
            let step = last as f32 / (extent.max(2) - 1) as f32;
            let place = at as f32 * step;
            let low = (place as usize).min(last);
            (low, (low + 1).min(last), place - low as f32)
        };
        let mut rows: [Vec<i32>; 4] = Default::default();
        let mut weights: [Vec<f32>; 4] = Default::default();
        for [column, row] in &self.patches {
            let (left, right, x) = scaled(*column, self.grid[0]);
            let (top, bottom, y) = scaled(*row, self.grid[1]);
            let corners = [
                (top, left, (1.0 - y) * (1.0 - x)),
                (top, right, (1.0 - y) * x),
                (bottom, left, y * (1.0 - x)),
                (bottom, right, y * x),
            ];
            for (corner, (y, x, weight)) in corners.into_iter().enumerate() {
                rows[corner].push((y * side + x) as i32);
                weights[corner].push(weight);
            }
        }
        (rows.concat(), weights.concat())
    }
}
