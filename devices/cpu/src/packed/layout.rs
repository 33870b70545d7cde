//! Layout of blocks in a panel.

use super::decode::Format;
use super::formats::for_format;
use super::{LANES, PANEL};
use crate::activations::SLAB;
use samite_core::{DType, Layout};
use std::ops::Range;

/// Bytes of a block that stay together for each row: offset in the block, length, and the number of
/// bytes of one row that are next to those of the next row.
pub(crate) type BlockField = (usize, usize, usize);

/// Returns the fields of a block, in panel order. Every byte of a block is in one of them.
fn fields(dtype: DType) -> Option<&'static [BlockField]> {
    match dtype {
        DType::F32 => Some(&[(0, 4, 4)]),
        DType::F16 | DType::BF16 => Some(&[(0, 2, 2)]),
        _ => for_format!(dtype, F => F::FIELDS),
    }
}

/// Layout of a matrix of one type and width in packed memory.
///
/// A panel is a sequence of slabs of up to [`SLAB`] elements. A slab has the fields of the first
/// [`LANES`] rows one after the other, then those of the others. A field has, for block after block
/// and unit after unit, the unit of each row. A matrix is therefore read sequentially, which is
/// fastest. A panel with missing rows is padded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedLayout {
    fields: &'static [BlockField],
    block_bytes: usize,
    /// Number of blocks of a row.
    blocks: usize,
    /// Number of blocks of a row in a slab.
    slab_blocks: usize,
    /// Bytes of a row as in a file.
    pub row_bytes: usize,
    /// Number of rows of a matrix.
    pub rows: usize,
    /// Bytes of a panel: a multiple of a cache line.
    pub panel_bytes: usize,
    /// Number of panels of a matrix.
    pub panels: usize,
    /// Number of matrices.
    pub matrices: usize,
}

impl PackedLayout {
    /// Returns the layout of tensors without gaps of a type that can be packed. `None` for others,
    /// or if a size overflows.
    pub fn new(layout: &Layout) -> Option<Self> {
        let dtype = layout.dtype();
        let [k, rows, n2, n3] = layout.shape();
        let fields = fields(dtype)?;
        if !layout.is_contiguous() {
            return None;
        }
        let row_bytes = layout.row_bytes();
        let packed = PackedLayout {
            fields,
            block_bytes: dtype.block_bytes(),
            blocks: k / dtype.block_len(),
            slab_blocks: SLAB / dtype.block_len(),
            row_bytes,
            rows,
            panel_bytes: row_bytes.checked_mul(PANEL)?.checked_next_multiple_of(64)?,
            panels: rows.div_ceil(PANEL),
            matrices: n2.checked_mul(n3)?,
        };
        packed
            .panels
            .checked_mul(packed.matrices)?
            .checked_mul(packed.panel_bytes)?;
        Some(packed)
    }

    /// Returns the bytes of all matrices.
    pub fn bytes(&self) -> usize {
        self.panels * self.matrices * self.panel_bytes
    }

    /// Returns the offset of the panel with a row of a matrix.
    pub fn panel_of(&self, matrix: usize, row: usize) -> usize {
        (matrix * self.panels + row / PANEL) * self.panel_bytes
    }

    /// Calls `f` for each unit of block `block` of row `row` of a panel, with its bytes in the
    /// block and its start in the panel.
    #[inline]
    fn units(&self, row: usize, block: usize, mut f: impl FnMut(Range<usize>, usize)) {
        let first = block / self.slab_blocks * self.slab_blocks;
        let count = self.slab_blocks.min(self.blocks - first);
        let (half, lane) = (row / LANES, row % LANES);
        let mut stream = (first * PANEL + half * count * LANES) * self.block_bytes;
        for &(offset, len, unit) in self.fields {
            let start = stream + (block - first) * len * LANES + lane * unit;
            for i in 0..len / unit {
                let from = offset + i * unit;
                f(from..from + unit, start + i * unit * LANES);
            }
            stream += count * len * LANES;
        }
    }

    /// Packs rows: `rows` has up to [`PANEL`] of them, one after the other.
    pub fn pack(&self, rows: &[u8], panel: &mut [u8]) {
        // Slab by slab: the rows of a slab share cache lines.
        let step = self.slab_row_bytes();
        let slabs = panel.chunks_mut(step * PANEL);
        for (start, slab) in (0..self.row_bytes).step_by(step).zip(slabs) {
            let end = self.row_bytes.min(start + step);
            let halves = rows.chunks(self.row_bytes * LANES);
            for (rows, half) in halves.zip(slab.chunks_mut((end - start) * LANES)) {
                self.pack_half(rows, start..end, half);
            }
        }
    }

    /// Packs up to [`LANES`] rows of a slab: the bytes `range` of each.
    fn pack_half(&self, rows: &[u8], range: Range<usize>, mut half: &mut [u8]) {
        // Elements that are blocks of their own are stored like units of one block.
        let whole = [(0, range.len(), self.block_bytes)];
        let (fields, block_bytes) = match self.block_bytes {
            2 | 4 => (&whole[..], range.len()),
            _ => (self.fields, self.block_bytes),
        };
        for &(offset, len, unit) in fields {
            let (field, others) = half.split_at_mut(range.len() / block_bytes * len * LANES);
            half = others;
            let part = FieldPlace {
                row_bytes: self.row_bytes,
                start: range.start + offset,
                block_bytes,
                len,
            };
            match unit {
                1 => part.interleave::<1, 16>(rows, field),
                2 => part.interleave::<2, 8>(rows, field),
                _ => part.interleave::<4, 4>(rows, field),
            }
        }
    }

    /// Inverts [`pack`](PackedLayout::pack).
    pub fn unpack(&self, panel: &[u8], rows: &mut [u8]) {
        let step = self.slab_row_bytes();
        for (slab, start) in (0..self.row_bytes).step_by(step).enumerate() {
            let range = start..self.row_bytes.min(start + step);
            let halves = panel[start * PANEL..].chunks(range.len() * LANES);
            let rows = rows.chunks_mut(self.row_bytes * LANES);
            for (number, (rows, half)) in rows.zip(halves).enumerate() {
                if rows.len() == self.row_bytes * LANES && self.block_bytes > 4 {
                    self.unpack_half(half, range.clone(), rows);
                    continue;
                }
                for (row, bytes) in rows.chunks_exact_mut(self.row_bytes).enumerate() {
                    self.unpack_slab(panel, number * LANES + row, slab, &mut bytes[range.clone()]);
                }
            }
        }
    }

    /// Inverts `pack_half` for [`LANES`] rows of blocks.
    fn unpack_half(&self, mut half: &[u8], range: Range<usize>, rows: &mut [u8]) {
        for &(offset, len, unit) in self.fields {
            let (field, others) = half.split_at(range.len() / self.block_bytes * len * LANES);
            half = others;
            let part = FieldPlace {
                row_bytes: self.row_bytes,
                start: range.start + offset,
                block_bytes: self.block_bytes,
                len,
            };
            match unit {
                1 => part.separate::<1, 16>(field, rows),
                2 => part.separate::<2, 8>(field, rows),
                _ => part.separate::<4, 4>(field, rows),
            }
        }
    }

    /// Returns the bytes of a row in a whole slab.
    pub fn slab_row_bytes(&self) -> usize {
        self.slab_blocks * self.block_bytes
    }

    /// Unpacks one row of a panel in a slab.
    pub fn unpack_slab(&self, panel: &[u8], row: usize, slab: usize, out: &mut [u8]) {
        match self.block_bytes {
            2 => return unpack_elements::<2>(panel, row, slab, out),
            4 => return unpack_elements::<4>(panel, row, slab, out),
            _ => {}
        }
        for (block, out) in out.chunks_exact_mut(self.block_bytes).enumerate() {
            self.units(row, slab * self.slab_blocks + block, |to, from| {
                let len = to.len();
                out[to].copy_from_slice(&panel[from..from + len]);
            });
        }
    }
}

/// Place of one field of a slab's blocks in the rows.
struct FieldPlace {
    row_bytes: usize,
    /// Offset of the field in a row's first block.
    start: usize,
    block_bytes: usize,
    /// Bytes of the field in a block.
    len: usize,
}

impl FieldPlace {
    /// Moves units of `UNIT` bytes of up to [`LANES`] rows to their places.
    #[inline]
    fn interleave<const UNIT: usize, const ROWS: usize>(&self, rows: &[u8], field: &mut [u8]) {
        let is_whole = rows.len() == self.row_bytes * LANES;
        let in_tiles = if is_whole { self.len / 16 * 16 } else { 0 };
        if in_tiles > 0 {
            self.interleave_tiles::<UNIT, ROWS>(rows, field);
        }
        for (block, field) in field.chunks_exact_mut(self.len * LANES).enumerate() {
            let places = field[in_tiles * LANES..].chunks_exact_mut(LANES * UNIT);
            for (i, places) in places.enumerate() {
                let at = self.start + block * self.block_bytes + in_tiles + i * UNIT;
                let units = rows.chunks_exact(self.row_bytes);
                let units = units.map(|row| row[at..].as_chunks::<UNIT>().0[0]);
                for (place, unit) in places.as_chunks_mut::<UNIT>().0.iter_mut().zip(units) {
                    *place = unit;
                }
            }
        }
    }

    /// Interleaves [`LANES`] rows, 16 bytes of `ROWS` of them at a time, which compilers vectorise.
    #[inline]
    fn interleave_tiles<const UNIT: usize, const ROWS: usize>(
        &self,
        rows: &[u8],
        field: &mut [u8],
    ) {
        for first in (0..LANES).step_by(ROWS) {
            let mut starts: [&[u8]; ROWS] = [&[]; ROWS];
            for (row, start) in starts.iter_mut().enumerate() {
                *start = &rows[(first + row) * self.row_bytes..][self.start..self.row_bytes];
            }
            for (block, field) in field.chunks_exact_mut(self.len * LANES).enumerate() {
                for (i, places) in field.chunks_exact_mut(16 * LANES).enumerate() {
                    let at = block * self.block_bytes + 16 * i;
                    let mut tile = [[0; 16]; ROWS];
                    for (to, row) in tile.iter_mut().zip(starts) {
                        *to = row[at..].as_chunks::<16>().0[0];
                    }
                    let places = places[first * UNIT..].chunks_mut(LANES * UNIT);
                    for (places, units) in places.zip(turn::<UNIT, ROWS>(tile)) {
                        places[..16].copy_from_slice(&units);
                    }
                }
            }
        }
    }

    /// Inverts [`interleave`](FieldPlace::interleave), for [`LANES`] rows.
    #[inline]
    fn separate<const UNIT: usize, const ROWS: usize>(&self, field: &[u8], rows: &mut [u8]) {
        for (block, field) in field.chunks_exact(self.len * LANES).enumerate() {
            let at = self.start + block * self.block_bytes;
            let tiles = field.chunks_exact(16 * LANES);
            let in_tiles = self.len / 16 * 16;
            for (i, places) in tiles.enumerate() {
                for first in (0..LANES).step_by(ROWS) {
                    let mut tile = [[0; 16]; ROWS];
                    for (unit, to) in tile.iter_mut().enumerate() {
                        *to = places[(unit * LANES + first) * UNIT..].as_chunks::<16>().0[0];
                    }
                    for (row, bytes) in turn::<UNIT, ROWS>(tile).iter().enumerate() {
                        let at = (first + row) * self.row_bytes + at + 16 * i;
                        rows[at..at + 16].copy_from_slice(bytes);
                    }
                }
            }
            let places = field[in_tiles * LANES..].chunks_exact(LANES * UNIT);
            for (i, places) in places.enumerate() {
                let at = at + in_tiles + i * UNIT;
                let rows = rows.chunks_exact_mut(self.row_bytes);
                for (row, unit) in rows.zip(places.as_chunks::<UNIT>().0) {
                    row[at..at + UNIT].copy_from_slice(unit);
                }
            }
        }
    }
}

/// Transposes units: unit `i` of row `j` becomes unit `j` of row `i`. It is its own inverse.
#[inline(always)]
fn turn<const UNIT: usize, const ROWS: usize>(rows: [[u8; 16]; ROWS]) -> [[u8; 16]; ROWS] {
    const { assert!(UNIT * ROWS == 16) };
    let mut turned = [[0; 16]; ROWS];
    for (i, to) in turned.iter_mut().enumerate() {
        for (j, from) in rows.iter().enumerate() {
            to[UNIT * j..][..UNIT].copy_from_slice(&from[UNIT * i..][..UNIT]);
        }
    }
    turned
}

/// Does what [`PackedLayout::unpack_slab`] does, for blocks of one element of `N` bytes.
fn unpack_elements<const N: usize>(panel: &[u8], row: usize, slab: usize, out: &mut [u8]) {
    let (panel, elements) = (panel.as_chunks::<N>().0, out.as_chunks_mut::<N>().0);
    let start = slab_start(row, slab, elements.len());
    let places = panel[start..].iter().step_by(LANES);
    elements
        .iter_mut()
        .zip(places)
        .for_each(|(to, from)| *to = *from);
}

/// Returns the offset of the first element of a row in a slab of `len` elements, counted in
/// elements of the panel.
fn slab_start(row: usize, slab: usize, len: usize) -> usize {
    slab * SLAB * PANEL + row / LANES * len * LANES + row % LANES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_byte_belongs_to_one_field() {
        let mut packable = 0;
        for dtype in DType::all() {
            let Some(fields) = fields(dtype) else {
                continue;
            };
            packable += 1;
            let blocks = for_format!(dtype, F => F::BLOCK);
            assert_eq!(blocks.unwrap_or(1), dtype.block_len(), "{dtype}");
            let mut seen = vec![0; dtype.block_bytes()];
            for &(offset, len, unit) in fields {
                assert_eq!(len % unit, 0);
                seen[offset..offset + len].iter_mut().for_each(|n| *n += 1);
            }
            assert!(seen.iter().all(|&n| n == 1), "{dtype}");
        }
        assert!(packable >= 4);
    }

    #[test]
    fn unpacking_is_the_inverse_of_packing() {
        for dtype in DType::all().filter(|&dtype| fields(dtype).is_some()) {
            for (blocks, rows) in [(1, 1), (2, 32), (9, 21), (300, 20)] {
                let shape = [blocks * dtype.block_len(), rows, 1, 1];
                let layout = Layout::contiguous(dtype, shape).unwrap();
                let packed = PackedLayout::new(&layout).unwrap();
                let bytes: Vec<u8> = (0..layout.bytes())
                    .map(|i| (i * 7 + i / 251) as u8)
                    .collect();
                let mut panel = vec![0; packed.panel_bytes];
                packed.pack(&bytes, &mut panel);
                let mut back = vec![0; bytes.len()];
                packed.unpack(&panel, &mut back);
                assert!(back == bytes, "{dtype} {blocks} {rows}");
                if rows == PANEL {
                    let sum = |bytes: &[u8]| bytes.iter().map(|&b| u64::from(b)).sum::<u64>();
                    assert_eq!(sum(&panel), sum(&bytes));
                }
            }
        }
    }

    #[test]
    fn matrices_are_padded_to_whole_panels() {
        let layout = Layout::contiguous(DType::Q8_0, [32, 33, 3, 2]).unwrap();
        let packed = PackedLayout::new(&layout).unwrap();
        assert_eq!((packed.panels, packed.matrices), (2, 6));
        assert_eq!(packed.panel_bytes, 1088);
        assert_eq!(packed.bytes(), 12 * 1088);
        assert_eq!(packed.panel_of(1, 32), 3 * 1088);
        let gaps = Layout::strided(DType::Q8_0, [32, 2, 1, 1], [34, 68, 136, 136]).unwrap();
        assert!(PackedLayout::new(&gaps).is_none());
        let numbers = Layout::contiguous(DType::I32, [32, 2, 1, 1]).unwrap();
        assert!(PackedLayout::new(&numbers).is_none());
    }
}
