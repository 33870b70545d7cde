//! The elements of tensors of any type and any strides, row by row.

use crate::row::decode_row;
use samite_core::{DType, Error, Layout, Result};

/// Writes the blocks of a tensor's row number `row` (of [`Layout::rows`]) to `out`, one after the
/// other. `span` holds the bytes of the tensor from its first element to its last one.
///
/// # Errors
/// [`Error::InvalidArgument`] if the row does not exist or `span` is too short.
pub fn gather_row(layout: &Layout, span: &[u8], row: usize, out: &mut Vec<u8>) -> Result<()> {
    out.clear();
    if row >= layout.rows() || span.len() < layout.bytes() {
        return Err(Error::invalid(format!(
            "row {row} of {layout} is not in {} bytes",
            span.len()
        )));
    }
    let size = layout.dtype().block_bytes();
    let [i1, i2, i3] = layout.row_index(row);
    let start = layout.row_offset(i1, i2, i3);
    if layout.has_contiguous_rows() {
        out.extend_from_slice(&span[start..start + layout.row_bytes()]);
        return Ok(());
    }
    for block in 0..layout.shape()[0] / layout.dtype().block_len() {
        let at = start + block * layout.strides()[0];
        out.extend_from_slice(&span[at..at + size]);
    }
    Ok(())
}

/// Reader of rows of tensors as numbers. It reuses its memory from row to row.
#[derive(Debug, Default)]
pub struct RowReader {
    bytes: Vec<u8>,
    floats: Vec<f32>,
    values: Vec<f64>,
}

impl RowReader {
    /// Returns the elements of a tensor's row number `row`. `span` holds the bytes of the tensor
    /// from its first element to its last one.
    ///
    /// # Errors
    /// As [`gather_row`]. [`Error::InvalidArgument`] for a type that [cannot be
    /// decoded](crate::can_decode).
    pub fn read(&mut self, layout: &Layout, span: &[u8], row: usize) -> Result<&[f64]> {
        gather_row(layout, span, row, &mut self.bytes)?;
        let (bytes, values) = (&*self.bytes, &mut self.values);
        values.clear();
        match layout.dtype() {
            DType::I8 => each(bytes, values, |b| i8::from_le_bytes(b).into()),
            DType::I16 => each(bytes, values, |b| i16::from_le_bytes(b).into()),
            DType::I32 => each(bytes, values, |b| i32::from_le_bytes(b).into()),
            DType::I64 => each(bytes, values, |b| i64::from_le_bytes(b) as f64),
            DType::F64 => each(bytes, values, f64::from_le_bytes),
            dtype => {
                self.floats.resize(layout.shape()[0], 0.0);
                decode_row(dtype, bytes, &mut self.floats)?;
                values.extend(self.floats.iter().copied().map(f64::from));
            }
        }
        Ok(values)
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut Vec<f64>, convert: impl Fn([u8; N]) -> f64) {
    out.extend(bytes.as_chunks().0.iter().map(|b| convert(*b)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(layout: &Layout, span: &[u8]) -> Vec<Vec<f64>> {
        let mut reader = RowReader::default();
        let rows = 0..layout.rows();
        rows.map(|row| reader.read(layout, span, row).unwrap().to_vec())
            .collect()
    }

    #[test]
    fn rows_are_read_by_their_strides() {
        let bytes: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let plain = Layout::contiguous(DType::F32, [3, 2, 1, 1]).unwrap();
        assert_eq!(rows(&plain, &bytes), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]);
        let turned = plain.permuted([1, 0, 2, 3]).unwrap();
        assert_eq!(rows(&turned, &bytes), [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]);
    }

    #[test]
    fn elements_of_every_type_are_read() {
        let layout = |dtype, n| Layout::contiguous(dtype, [n, 1, 1, 1]).unwrap();
        assert_eq!(rows(&layout(DType::I8, 2), &[1, 255]), [[1.0, -1.0]]);
        assert_eq!(rows(&layout(DType::I16, 1), &[254, 255]), [[-2.0]]);
        let wide = [i32::MIN.to_le_bytes(), 7i32.to_le_bytes()].concat();
        assert_eq!(rows(&layout(DType::I32, 2), &wide), [[-2147483648.0, 7.0]]);
        let one = 1i64.to_le_bytes();
        assert_eq!(rows(&layout(DType::I64, 1), &one), [[1.0]]);
        assert_eq!(rows(&layout(DType::F64, 1), &0.1f64.to_le_bytes()), [[0.1]]);
        assert_eq!(rows(&layout(DType::F16, 1), &[0, 0x3c]), [[1.0]]);
        let mut block = [0u8; 34];
        (block[1], block[2]) = (0x3c, 5);
        assert_eq!(rows(&layout(DType::Q8_0, 32), &block)[0][..2], [5.0, 0.0]);
    }

    #[test]
    fn missing_rows_and_bytes_are_an_error() {
        let layout = Layout::contiguous(DType::F32, [3, 2, 1, 1]).unwrap();
        let mut reader = RowReader::default();
        assert!(reader.read(&layout, &[0; 24], 2).is_err());
        assert!(reader.read(&layout, &[0; 23], 0).is_err());
    }
}
