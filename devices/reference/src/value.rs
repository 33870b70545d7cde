//! Tensors as plain arrays in logical order, and their conversion from and to bytes.

use crate::buffer::{float64, memory};
use crate::float64::Float64;
use samite_core::{DIMS, DType, Error, Layout, Result, Shape, TensorRef};
use samite_quant::{
    can_decode, can_encode, decode_row, encode_row, f32_to_bf16, f32_to_f8_e4m3, f32_to_f16,
};

/// Returns an empty list with memory for `count` elements, which may fail.
///
/// # Errors
/// [`Error::OutOfMemory`], which [`Kernel::run`](crate::kernels::Kernel::run) completes.
pub(crate) fn room<T>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    match list.try_reserve_exact(count) {
        Ok(()) => Ok(list),
        Err(_) => Err(Error::OutOfMemory {
            device: "reference".into(),
            what: "an operation".into(),
            asked: count.saturating_mul(size_of::<T>()),
            free: None,
        }),
    }
}

/// Does what [`room`] does, and adds `elements`, at most `count` of them.
pub(crate) fn gathered<T>(count: usize, elements: impl Iterator<Item = T>) -> Result<Vec<T>> {
    let mut list = room(count)?;
    list.extend(elements);
    Ok(list)
}

/// Returns a copy of some bytes.
pub(crate) fn copied(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut copy = room(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// Does what [`room`] does, with `count` zeros.
pub(crate) fn zeros(count: usize) -> Result<Vec<f64>> {
    let mut list = room(count)?;
    list.resize(count, 0.0);
    Ok(list)
}

/// The elements of a tensor, dimension 0 fastest, without gaps.
pub(crate) struct Grid<T> {
    pub shape: Shape,
    pub values: Vec<T>,
}

impl<T: Copy> Grid<T> {
    /// Returns the element at `[i0, i1, i2, i3]`.
    pub fn at(&self, [i0, i1, i2, i3]: [usize; DIMS]) -> T {
        let [n0, n1, n2, _] = self.shape;
        self.values[i0 + n0 * (i1 + n1 * (i2 + n2 * i3))]
    }

    /// Returns the element at `position` of the infinite repetition of this tensor.
    pub fn at_repeated(&self, position: [usize; DIMS]) -> T {
        self.at(std::array::from_fn(|d| position[d] % self.shape[d]))
    }

    /// Returns row `[i1, i2, i3]`.
    pub fn row(&self, [i1, i2, i3]: [usize; 3]) -> &[T] {
        let [n0, n1, n2, _] = self.shape;
        let start = n0 * (i1 + n1 * (i2 + n2 * i3));
        &self.values[start..start + n0]
    }

    /// Iterates over all rows, dimension 1 fastest.
    pub fn rows(&self) -> impl Iterator<Item = &[T]> {
        rows(self.shape).map(|row| self.row(row))
    }
}

/// Iterates over every `[i1, i2, i3]` of `shape`, dimension 1 fastest.
pub(crate) fn rows([_, n1, n2, n3]: Shape) -> impl Iterator<Item = [usize; 3]> {
    (0..n3).flat_map(move |i3| (0..n2).flat_map(move |i2| (0..n1).map(move |i1| [i1, i2, i3])))
}

/// Iterates over every `[i0, i1, i2, i3]` of `shape`, dimension 0 fastest.
pub(crate) fn positions(shape: Shape) -> impl Iterator<Item = [usize; DIMS]> {
    rows(shape).flat_map(move |[i1, i2, i3]| (0..shape[0]).map(move |i0| [i0, i1, i2, i3]))
}

/// The blocks of a tensor without decoding and without gaps. A plain number is a block of one.
pub(crate) struct TensorBlocks {
    /// Extents in blocks.
    pub shape: Shape,
    pub bytes: Vec<u8>,
    size: usize,
}

impl TensorBlocks {
    /// Returns the block at `[i0, i1, i2, i3]`.
    pub fn at(&self, [i0, i1, i2, i3]: [usize; DIMS]) -> &[u8] {
        let [n0, n1, n2, _] = self.shape;
        let start = self.size * (i0 + n0 * (i1 + n1 * (i2 + n2 * i3)));
        &self.bytes[start..start + self.size]
    }
}

/// Returns the extents of `layout` in blocks.
pub(crate) fn block_shape(layout: &Layout) -> Shape {
    let mut shape = layout.shape();
    shape[0] /= layout.dtype().block_len();
    shape
}

/// Iterates over the byte offsets of all blocks in logical order.
fn block_offsets(layout: Layout) -> impl Iterator<Item = usize> {
    let strides = layout.strides();
    positions(block_shape(&layout)).map(move |p| p.iter().zip(strides).map(|(i, s)| i * s).sum())
}

/// Returns the float64 memory of an F32 tensor, if it is kept in float64.
fn kept_in_float64(tensor: &TensorRef) -> Option<&Float64> {
    float64(&tensor.buffer).filter(|_| tensor.layout().dtype() == DType::F32)
}

/// Returns the type in which a tensor's elements are stored, and its blocks are read and written.
pub(crate) fn kept_as(tensor: &TensorRef) -> DType {
    match kept_in_float64(tensor) {
        Some(_) => DType::F64,
        None => tensor.layout().dtype(),
    }
}

/// Reads a tensor's blocks.
pub(crate) fn read_blocks(tensor: &TensorRef) -> Result<TensorBlocks> {
    let layout = tensor.layout();
    if let Some(numbers) = kept_in_float64(tensor) {
        let start = tensor.slot.offset;
        return Ok(TensorBlocks {
            shape: layout.shape(),
            bytes: numbers.read(
                layout.elements(),
                block_offsets(*layout).map(|at| start + at),
            )?,
            size: size_of::<f64>(),
        });
    }
    let size = layout.dtype().block_bytes();
    let bytes =
        memory(&tensor.buffer)?.with_bytes(tensor.slot.offset, layout.bytes(), |span| {
            if layout.is_contiguous() {
                return copied(span);
            }
            let blocks = block_offsets(*layout).map(|at| &span[at..at + size]);
            let count: usize = block_shape(layout).iter().product();
            gathered(count.saturating_mul(size), blocks.flatten().copied())
        })??;
    Ok(TensorBlocks {
        shape: block_shape(layout),
        bytes,
        size,
    })
}

/// Writes a tensor's blocks, given in logical order.
pub(crate) fn write_blocks(tensor: &TensorRef, bytes: &[u8]) -> Result<()> {
    let layout = tensor.layout();
    let memory = memory(&tensor.buffer)?;
    let rounded;
    let mut bytes = bytes;
    if let Some(numbers) = kept_in_float64(tensor) {
        let start = tensor.slot.offset;
        numbers.write(block_offsets(*layout).map(|at| start + at), bytes);
        let values = bytes.as_chunks().0.iter();
        rounded = gathered(
            bytes.len() / 2,
            values.flat_map(|v| (f64::from_le_bytes(*v) as f32).to_le_bytes()),
        )?;
        bytes = &rounded;
    }
    if layout.is_contiguous() {
        return memory.write(tensor.slot.offset, bytes);
    }
    let size = layout.dtype().block_bytes();
    block_offsets(*layout)
        .zip(bytes.chunks_exact(size))
        .try_for_each(|(at, block)| memory.write(tensor.slot.offset + at, block))
}

/// Reads one row of a tensor whose rows have no gaps, as numbers.
pub(crate) fn read_row(tensor: &TensorRef, [i1, i2, i3]: [usize; 3]) -> Result<Vec<f64>> {
    let layout = tensor.layout();
    let at = tensor.slot.offset + layout.row_offset(i1, i2, i3);
    if let Some(numbers) = kept_in_float64(tensor) {
        let offsets = (0..layout.shape()[0]).map(|i| at + 4 * i);
        return decode(
            DType::F64,
            layout.shape()[0],
            &numbers.read(layout.shape()[0], offsets)?,
        );
    }
    memory(&tensor.buffer)?.with_bytes(at, layout.row_bytes(), |bytes| {
        decode(layout.dtype(), layout.shape()[0], bytes)
    })?
}

/// Writes one row of a tensor whose rows have no gaps.
pub(crate) fn write_row(tensor: &TensorRef, [i1, i2, i3]: [usize; 3], row: &[f64]) -> Result<()> {
    let layout = tensor.layout();
    let at = tensor.slot.offset + layout.row_offset(i1, i2, i3);
    if let Some(numbers) = kept_in_float64(tensor) {
        let offsets = (0..row.len()).map(|i| at + 4 * i);
        numbers.write(offsets, &encode(DType::F64, row.len(), row)?);
    }
    memory(&tensor.buffer)?.write(at, &encode(layout.dtype(), row.len(), row)?)
}

/// Returns whether [`decode`] supports `dtype`.
pub(crate) fn is_readable(dtype: DType) -> bool {
    can_decode(dtype) || dtype.is_integer()
}

/// Returns whether [`encode`] supports `dtype`.
pub(crate) fn is_writable(dtype: DType) -> bool {
    can_encode(dtype) || dtype.is_integer() || dtype == DType::F64
}

/// Decodes integers from bytes without gaps.
pub(crate) fn decode_integers(dtype: DType, bytes: &[u8]) -> Result<Vec<i64>> {
    fn each<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> i64) -> Result<Vec<i64>> {
        let integers = bytes.as_chunks().0;
        gathered(integers.len(), integers.iter().map(|b| convert(*b)))
    }
    match dtype {
        DType::I8 => each(bytes, |b| i8::from_le_bytes(b).into()),
        DType::I16 => each(bytes, |b| i16::from_le_bytes(b).into()),
        DType::I32 => each(bytes, |b| i32::from_le_bytes(b).into()),
        _ => each(bytes, i64::from_le_bytes),
    }
}

/// Decodes numbers from rows of `n0` elements without gaps.
pub(crate) fn decode(dtype: DType, n0: usize, bytes: &[u8]) -> Result<Vec<f64>> {
    if dtype.is_integer() {
        let integers = decode_integers(dtype, bytes)?;
        return gathered(integers.len(), integers.iter().map(|&i| i as f64));
    }
    if dtype == DType::F64 {
        let numbers = bytes.as_chunks().0;
        return gathered(
            numbers.len(),
            numbers.iter().map(|b| f64::from_le_bytes(*b)),
        );
    }
    let row_bytes = dtype.row_bytes(n0)?;
    let mut row = gathered(n0, std::iter::repeat_n(0.0, n0))?;
    let mut values = room(bytes.len() / row_bytes.max(1) * n0)?;
    for bytes in bytes.chunks_exact(row_bytes.max(1)) {
        decode_row(dtype, bytes, &mut row)?;
        values.extend(row.iter().map(|&x| f64::from(x)));
    }
    Ok(values)
}

/// Encodes `count` integers as bytes without gaps. Values out of range become the nearest number of
/// the type.
pub(crate) fn encode_integers(
    dtype: DType,
    count: usize,
    values: impl Iterator<Item = i64>,
) -> Result<Vec<u8>> {
    fn limit<T: TryFrom<i64>>(value: i64, min: T, max: T) -> T {
        T::try_from(value).unwrap_or(if value < 0 { min } else { max })
    }
    match dtype {
        DType::I8 => gathered(
            count,
            values.flat_map(|v| limit(v, i8::MIN, i8::MAX).to_le_bytes()),
        ),
        DType::I16 => gathered(
            2 * count,
            values.flat_map(|v| limit(v, i16::MIN, i16::MAX).to_le_bytes()),
        ),
        DType::I32 => gathered(
            4 * count,
            values.flat_map(|v| limit(v, i32::MIN, i32::MAX).to_le_bytes()),
        ),
        _ => gathered(8 * count, values.flat_map(i64::to_le_bytes)),
    }
}

/// Encodes numbers as rows of `n0` elements without gaps, each rounded once. Integer types
/// truncate.
pub(crate) fn encode(dtype: DType, n0: usize, values: &[f64]) -> Result<Vec<u8>> {
    let count = values.len();
    let numbers = values.iter();
    match dtype {
        dtype if dtype.is_integer() => encode_integers(dtype, count, numbers.map(|&v| v as i64)),
        DType::F64 => gathered(8 * count, numbers.flat_map(|v| v.to_le_bytes())),
        DType::F32 => gathered(4 * count, numbers.flat_map(|&v| (v as f32).to_le_bytes())),
        DType::F16 => gathered(
            2 * count,
            numbers.flat_map(|&v| f32_to_f16(to_odd(v)).to_le_bytes()),
        ),
        DType::BF16 => gathered(
            2 * count,
            numbers.flat_map(|&v| f32_to_bf16(to_odd(v)).to_le_bytes()),
        ),
        DType::F8_E4M3 => gathered(count, numbers.map(|&v| f32_to_f8_e4m3(to_odd(v)))),
        _ => {
            let row_bytes = dtype.row_bytes(n0)?;
            let mut bytes = room(count / n0.max(1) * row_bytes)?;
            let mut rounded: Vec<f32> = room(n0)?;
            for row in values.chunks_exact(n0.max(1)) {
                rounded.clear();
                rounded.extend(row.iter().map(|&v| v as f32));
                let at = bytes.len();
                bytes.resize(at + row_bytes, 0);
                encode_row(dtype, &rounded, &mut bytes[at..])?;
            }
            Ok(bytes)
        }
    }
}

/// Returns the f32 next to `value` that another rounding, to a shorter format, treats like `value`
/// itself. If `value` is not an f32, this is the neighbour with an odd last bit, which is never a
/// tie of the shorter format.
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || !near.is_finite() || near.to_bits() & 1 == 1 {
        near
    } else if f64::from(near) < value {
        near.next_up()
    } else {
        near.next_down()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_are_rounded_once() {
        // Just above the tie between 1 and 1 + 2^-10 in f16. Rounding to f32 first would land on
        // the tie and round down.
        let above = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(
            encode(DType::F16, 1, &[above]).unwrap(),
            0x3c01u16.to_le_bytes()
        );
        let tie = 1.0 + 2f64.powi(-11);
        assert_eq!(
            encode(DType::F16, 1, &[tie]).unwrap(),
            0x3c00u16.to_le_bytes()
        );
        let above = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        assert_eq!(
            encode(DType::BF16, 1, &[above]).unwrap(),
            0x3f81u16.to_le_bytes()
        );
        let above = 1.0 + 2f64.powi(-4) + 2f64.powi(-40);
        assert_eq!(encode(DType::F8_E4M3, 1, &[above]).unwrap(), [0x39]);
    }

    #[test]
    fn integers_truncate_and_saturate() {
        let bytes = encode(DType::I8, 4, &[-1.9, 2.9, 1000.0, f64::NAN]).unwrap();
        assert_eq!(decode_integers(DType::I8, &bytes).unwrap(), [-1, 2, 127, 0]);
        let bytes = encode_integers(DType::I32, 2, [i64::MIN, 7].into_iter()).unwrap();
        assert_eq!(
            decode_integers(DType::I32, &bytes).unwrap(),
            [i32::MIN.into(), 7]
        );
    }

    #[test]
    fn positions_iterate_dimension_0_first() {
        let all: Vec<_> = positions([2, 1, 2, 1]).collect();
        assert_eq!(
            all,
            [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [1, 0, 1, 0]]
        );
        assert_eq!(positions([0, 3, 1, 1]).count(), 0);
    }
}
