//! Tensors in the form that kernels use: address, type, extents and strides.

use crate::detect::{Isa, vectorized};
use crate::packed::memory_of;
use half::f16;
use samite_core::{DType, Error, Layout, Node, Result, Shape, TensorId, TensorInfo, TensorRef};
use std::ops::Range;

/// Number of elements converted at a time through a buffer on the stack.
const CHUNK: usize = 256;

/// A tensor in host memory, resolved to its address.
///
/// The creator guarantees that `layout.bytes()` bytes from `base` stay valid. Callers of the unsafe
/// methods guarantee that the memory is [locked](samite_core::MemorySet), and that no other worker
/// writes to what they read or touches what they write.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: an operand is an address. The contract of the unsafe methods governs its use.
unsafe impl Send for Operand {}
// SAFETY: a shared operand only returns the address. The unsafe methods require their callers to
// keep workers apart.
unsafe impl Sync for Operand {}

/// Elements of one row: `len` elements from element `start`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub row: [usize; 3],
    pub start: usize,
    pub len: usize,
}

impl Operand {
    /// Resolves a tensor in host memory, and checks its bounds and alignment.
    pub fn resolve(place: &TensorRef, what: &str) -> Result<Self> {
        let Some(memory) = memory_of(place) else {
            return Err(Error::invalid(format!(
                "'{what}' lies in {} memory, which the cpu cannot reach",
                place.buffer.buffer_type().name()
            )));
        };
        let slot = place.slot;
        // A packed tensor takes more than its bytes.
        let bytes = place.buffer.buffer_type().alloc_size(&TensorInfo::new(
            what,
            slot.layout,
            place.buffer.usage(),
        ))?;
        if slot
            .offset
            .checked_add(bytes)
            .is_none_or(|end| end > memory.len())
        {
            return Err(Error::invalid(format!(
                "'{what}' ({}) at byte {} does not fit into a buffer of {} bytes",
                slot.layout,
                slot.offset,
                memory.len()
            )));
        }
        let base = memory.base().as_ptr().wrapping_add(slot.offset);
        if !(base as usize).is_multiple_of(alignment(slot.layout.dtype())) {
            return Err(Error::invalid(format!(
                "'{what}' ({}) at byte {} is not aligned",
                slot.layout, slot.offset
            )));
        }
        Ok(Operand {
            base,
            layout: slot.layout,
        })
    }

    pub fn dtype(&self) -> DType {
        self.layout.dtype()
    }

    pub fn shape(&self) -> Shape {
        self.layout.shape()
    }

    pub fn strides(&self) -> Shape {
        self.layout.strides()
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn rows(&self) -> usize {
        self.layout.rows()
    }

    pub fn elements(&self) -> usize {
        self.layout.elements()
    }

    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Returns the same memory as one row, if it has no gaps.
    pub fn flat(&self) -> Option<Operand> {
        let shape = [self.elements(), 1, 1, 1];
        if !self.layout.is_contiguous() {
            return None;
        }
        let layout = Layout::contiguous(self.dtype(), shape).ok()?;
        Some(Operand { layout, ..*self })
    }

    /// Returns `len` columns from column `start`. Only for types that are not quantized.
    pub fn columns(&self, start: usize, len: usize) -> Result<Operand> {
        let [n0, n1, n2, n3] = self.shape();
        if start.checked_add(len).is_none_or(|end| end > n0) {
            return Err(Error::invalid("there are not so many columns"));
        }
        Ok(Operand {
            base: self.base.wrapping_add(start * self.strides()[0]),
            layout: Layout::strided(self.dtype(), [len, n1, n2, n3], self.strides())?,
        })
    }

    /// Returns the address of the first element of a row.
    #[inline]
    pub fn at(&self, [i1, i2, i3]: [usize; 3]) -> *mut u8 {
        self.base.wrapping_add(self.layout.row_offset(i1, i2, i3))
    }

    /// Returns whether the elements of each row follow one another.
    pub fn has_dense_rows(&self) -> bool {
        self.layout.has_contiguous_rows()
    }

    /// Returns a row of dense elements of type `T`, which must be the operand's.
    ///
    /// # Safety
    /// See [`Operand`]. `row` must be inside the shape, and rows must be dense.
    #[inline]
    pub unsafe fn row<'a, T: bytemuck::Pod>(&self, row: [usize; 3]) -> &'a [T] {
        debug_assert_eq!(size_of::<T>(), self.dtype().block_bytes());
        // SAFETY: the row is inside the operand's memory and aligned, by the caller's contract and
        // `resolve`.
        unsafe { std::slice::from_raw_parts(self.at(row).cast(), self.shape()[0]) }
    }

    /// Does what [`row`](Operand::row) does, for writing.
    ///
    /// # Safety
    /// As [`row`](Operand::row), and no other code may use the row meanwhile.
    #[inline]
    pub unsafe fn row_mut<'a, T: bytemuck::Pod>(&self, row: [usize; 3]) -> &'a mut [T] {
        debug_assert_eq!(size_of::<T>(), self.dtype().block_bytes());
        // SAFETY: the row is inside the operand's memory and aligned, as in `row`, and no other
        // code uses it meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.at(row).cast(), self.shape()[0]) }
    }

    /// Returns element `i` of a row of integers, I32 or I64.
    ///
    /// # Safety
    /// See [`Operand`]; the element must be inside the shape.
    #[inline]
    pub unsafe fn integer(&self, row: [usize; 3], i: usize) -> i64 {
        let at = self.at(row).wrapping_add(i * self.strides()[0]);
        // SAFETY: the element is inside the shape, so its bytes are in the operand's memory.
        // `resolve` checked that the base is aligned, and strides are multiples of an element's
        // size.
        unsafe {
            match self.dtype() {
                DType::I64 => *at.cast::<i64>(),
                _ => i64::from(*at.cast::<i32>()),
            }
        }
    }

    /// Reads elements `start..` of a row as f32. Supports floats, I32, and decodable quantized
    /// types at block boundaries. Does nothing if `out` is the same memory, as it is when an
    /// operation runs in place.
    ///
    /// # Safety
    /// See [`Operand`]. The elements must be inside the shape, and the type must be decodable.
    #[inline]
    pub unsafe fn load(&self, row: [usize; 3], start: usize, out: &mut [f32]) {
        let (dtype, stride) = (self.dtype(), self.strides()[0]);
        let dense = self.has_dense_rows();
        let first = self
            .at(row)
            .wrapping_add(start / dtype.block_len() * stride);
        // SAFETY: all addresses lie inside the row, by the caller's contract.
        unsafe {
            match dtype {
                DType::F32 if dense => {
                    let from = first.cast::<f32>();
                    if from.cast_const() != out.as_ptr() {
                        std::ptr::copy(from, out.as_mut_ptr(), out.len());
                    }
                }
                DType::F32 => {
                    for (i, x) in out.iter_mut().enumerate() {
                        *x = *first.add(i * stride).cast::<f32>();
                    }
                }
                DType::I32 => {
                    for (i, x) in out.iter_mut().enumerate() {
                        *x = *first.add(i * stride).cast::<i32>() as f32;
                    }
                }
                DType::F16 if !dense => {
                    for (i, x) in out.iter_mut().enumerate() {
                        *x = (*first.add(i * stride).cast::<f16>()).to_f32();
                    }
                }
                DType::BF16 if !dense => {
                    for (i, x) in out.iter_mut().enumerate() {
                        *x = f32::from_bits(u32::from(*first.add(i * stride).cast::<u16>()) << 16);
                    }
                }
                DType::F8_E4M3 if !dense => {
                    for (i, x) in out.iter_mut().enumerate() {
                        *x = samite_quant::f8_e4m3_to_f32(*first.add(i * stride));
                    }
                }
                DType::F64 if !dense => {
                    for (i, x) in out.iter_mut().enumerate() {
                        *x = *first.add(i * stride).cast::<f64>() as f32;
                    }
                }
                _ => {
                    let bytes = out.len() / dtype.block_len() * dtype.block_bytes();
                    let bytes = std::slice::from_raw_parts(first, bytes);
                    let decoded = samite_quant::decode_row(dtype, bytes, out);
                    debug_assert!(decoded.is_ok(), "{decoded:?}");
                }
            }
        }
    }

    /// Writes f32 numbers to elements `start..` of a row. Supports floats, I32, and encodable
    /// quantized types at block boundaries.
    ///
    /// # Safety
    /// See [`Operand`]. The elements must be inside the shape, and the type must be encodable.
    #[inline]
    pub unsafe fn store(&self, isa: Isa, row: [usize; 3], start: usize, from: &[f32]) {
        let (dtype, stride) = (self.dtype(), self.strides()[0]);
        let dense = self.has_dense_rows();
        let first = self
            .at(row)
            .wrapping_add(start / dtype.block_len() * stride);
        // SAFETY: all addresses lie inside the row, by the caller's contract.
        unsafe {
            match dtype {
                DType::F32 if dense => {
                    std::ptr::copy(from.as_ptr(), first.cast::<f32>(), from.len());
                }
                DType::F32 => {
                    for (i, x) in from.iter().enumerate() {
                        *first.add(i * stride).cast::<f32>() = *x;
                    }
                }
                DType::I32 => {
                    for (i, x) in from.iter().enumerate() {
                        *first.add(i * stride).cast::<i32>() = *x as i32;
                    }
                }
                // The usual type of caches.
                DType::F16 if dense => {
                    let to = std::slice::from_raw_parts_mut(first.cast::<f16>(), from.len());
                    round_to_halves(isa, from, to);
                }
                DType::F16 => {
                    for (i, x) in from.iter().enumerate() {
                        *first.add(i * stride).cast::<f16>() = samite_quant::f32_to_f16(*x);
                    }
                }
                DType::BF16 if !dense => {
                    for (i, x) in from.iter().enumerate() {
                        *first.add(i * stride).cast::<u16>() = samite_quant::f32_to_bf16(*x);
                    }
                }
                DType::F8_E4M3 if !dense => {
                    for (i, x) in from.iter().enumerate() {
                        *first.add(i * stride) = samite_quant::f32_to_f8_e4m3(*x);
                    }
                }
                _ => {
                    let bytes = from.len() / dtype.block_len() * dtype.block_bytes();
                    let bytes = std::slice::from_raw_parts_mut(first, bytes);
                    let encoded = samite_quant::encode_row(dtype, from, bytes);
                    debug_assert!(encoded.is_ok(), "{encoded:?}");
                }
            }
        }
    }

    /// Lets `fill` write a piece of a row as f32: in place if the operand is F32, else through a
    /// buffer in several calls. `fill` gets the piece and its memory.
    ///
    /// # Safety
    /// As [`store`](Operand::store), and the operand must not be quantized.
    #[inline]
    pub unsafe fn write_with(
        &self,
        isa: Isa,
        piece: Piece,
        mut fill: impl FnMut(Piece, &mut [f32]),
    ) {
        let Piece { row, start, len } = piece;
        if self.dtype() == DType::F32 && self.has_dense_rows() {
            let first = self.at(row).wrapping_add(start * 4).cast::<f32>();
            // SAFETY: the piece is inside the row, and only the caller uses it.
            fill(piece, unsafe { std::slice::from_raw_parts_mut(first, len) });
            return;
        }
        let mut buffer = [0.0; CHUNK];
        let mut done = 0;
        while done < len {
            let part = CHUNK.min(len - done);
            let buffer = &mut buffer[..part];
            let piece = Piece {
                row,
                start: start + done,
                len: part,
            };
            fill(piece, buffer);
            // SAFETY: the part is inside the piece.
            unsafe { self.store(isa, row, piece.start, buffer) };
            done += part;
        }
    }
}

vectorized! {
    fn round_to_halves(from: &[f32], to: &mut [f16]) {
        to.iter_mut().zip(from).for_each(|(to, x)| *to = samite_quant::f32_to_f16(*x));
    }
}

/// Returns the alignment that kernels need for elements or blocks of `dtype`.
pub(crate) fn alignment(dtype: DType) -> usize {
    match dtype {
        DType::F64 | DType::I64 => 8,
        DType::F32 | DType::I32 | DType::Q8_K => 4,
        DType::I8 | DType::F8_E4M3 => 1,
        DType::MXFP4 | DType::NVFP4 | DType::IQ1_M | DType::Q1_0 | DType::Q2_0 => 1,
        _ => 2,
    }
}

/// Splits a range of elements, counted in logical order, into pieces of rows of `shape`.
#[inline]
pub(crate) fn pieces(layout: &Layout, range: Range<usize>, mut f: impl FnMut(Piece)) {
    let n0 = layout.shape()[0];
    let (mut at, end) = (range.start, range.end);
    while at < end {
        let (row, start) = (at / n0, at % n0);
        let len = (n0 - start).min(end - at);
        f(Piece {
            row: layout.row_index(row),
            start,
            len,
        });
        at += len;
    }
}

/// Returns the memory of a tensor without gaps: its owner, and the offset in it.
pub(crate) fn whole(node: Node<'_>) -> Option<(TensorId, usize)> {
    let place = match node.tensor().view {
        Some(view) => (view.base, view.offset),
        None => (node.id(), 0),
    };
    node.layout().is_contiguous().then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_pieces_cover_every_element_once() {
        let layout = Layout::contiguous(DType::F32, [5, 2, 3, 1]).unwrap();
        for (start, end) in [(0, 30), (3, 17), (7, 7), (4, 6)] {
            let mut next = start;
            pieces(&layout, start..end, |piece| {
                let [i1, i2, i3] = piece.row;
                assert_eq!(piece.start + 5 * (i1 + 2 * (i2 + 3 * i3)), next);
                assert!(piece.start + piece.len <= 5);
                next += piece.len;
            });
            assert_eq!(next, end);
        }
    }

    #[test]
    fn alignments_divide_block_sizes() {
        for dtype in DType::all() {
            assert_eq!(dtype.block_bytes() % alignment(dtype), 0, "{dtype}");
        }
    }
}
