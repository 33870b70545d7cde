//! Strided pieces of a tensor, for two-dimensional writes and reads.

use crate::error::{Error, Result};

/// Rows at equal distances, for two-dimensional writes and reads: `count` pieces of `len` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Byte offset of the first piece in the tensor.
    pub offset: usize,
    /// Bytes of each piece.
    pub len: usize,
    /// Number of pieces.
    pub count: usize,
    /// Distance of pieces in the tensor, in bytes.
    pub stride: usize,
    /// Distance of pieces in host memory, in bytes.
    pub host_stride: usize,
}

impl Rows {
    /// Calls `f` with each piece's byte offset in a tensor of `tensor` bytes and its range in
    /// `host` bytes.
    ///
    /// # Errors
    /// If a piece is outside either side, before anything is done. Otherwise the first error of
    /// `f`.
    pub fn each(
        &self,
        tensor: usize,
        host: usize,
        mut f: impl FnMut(usize, std::ops::Range<usize>) -> Result<()>,
    ) -> Result<()> {
        if !self.check(tensor, host)? {
            return Ok(());
        }
        for row in 0..self.count {
            f(self.tensor_offset(row)?, self.host_piece(row, host)?)?;
        }
        Ok(())
    }

    /// Returns whether there is work to do, after checking that every piece is inside both sides.
    pub(crate) fn check(&self, tensor: usize, host: usize) -> Result<bool> {
        if self.len == 0 || self.count == 0 {
            return Ok(false);
        }
        let last = self.count - 1;
        self.host_piece(last, host)?;
        let end = self.tensor_offset(last)?.checked_add(self.len);
        if end.is_none_or(|end| end > tensor) {
            return Err(Error::invalid(format!(
                "row {last} of {self:?} is outside of a tensor of {tensor} bytes"
            )));
        }
        Ok(true)
    }

    fn tensor_offset(&self, row: usize) -> Result<usize> {
        row.checked_mul(self.stride)
            .and_then(|distance| distance.checked_add(self.offset))
            .ok_or_else(|| Error::invalid(format!("row {row} of {self:?} overflows")))
    }

    fn host_piece(&self, row: usize, available: usize) -> Result<std::ops::Range<usize>> {
        let start = row.checked_mul(self.host_stride);
        match start.and_then(|start| Some(start..start.checked_add(self.len)?)) {
            Some(range) if range.end <= available => Ok(range),
            _ => Err(Error::invalid(format!(
                "row {row} of {self:?} is outside of the {available} bytes given"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Layout, Slot, TensorRef, Usage, host_buffer_type};
    use std::sync::Arc;

    fn f32s(n: usize) -> Layout {
        Layout::contiguous(DType::F32, [n, 1, 1, 1]).unwrap()
    }

    #[test]
    fn rows_are_written_and_read_at_their_strides() {
        let buffer = host_buffer_type().allocate(64, Usage::Any).unwrap();
        let slot = Slot {
            offset: 0,
            layout: f32s(16),
        };
        let rows = Rows {
            offset: 4,
            len: 2,
            count: 3,
            stride: 8,
            host_stride: 3,
        };
        buffer
            .write_rows(slot, rows, &[1, 2, 9, 3, 4, 9, 5, 6])
            .unwrap();
        let mut all = [0; 24];
        buffer.read(slot, 0, &mut all).unwrap();
        assert_eq!(
            all[4..22],
            [1, 2, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0, 5, 6]
        );
        let mut back = [0; 8];
        buffer.read_rows(slot, rows, &mut back).unwrap();
        assert_eq!(back, [1, 2, 0, 3, 4, 0, 5, 6]);
        assert!(buffer.write_rows(slot, rows, &[0; 7]).is_err());
        assert!(
            buffer
                .write_rows(
                    slot,
                    Rows {
                        stride: usize::MAX,
                        ..rows
                    },
                    &[0; 8]
                )
                .is_err()
        );
    }

    #[test]
    fn out_of_bounds_rows_are_refused() {
        let buffer = host_buffer_type().allocate(64, Usage::Any).unwrap();
        let [a, _b] = [0, 32].map(|offset| TensorRef {
            buffer: Arc::clone(&buffer),
            slot: Slot {
                offset,
                layout: f32s(8),
            },
        });
        let rows = Rows {
            offset: 0,
            len: 4,
            count: 3,
            stride: 16,
            host_stride: 4,
        };
        let error = a.write_rows(rows, &[1; 12]).unwrap_err().to_string();
        assert!(error.contains("outside of a tensor of 32 bytes"), "{error}");
        assert!(a.read_rows(rows, &mut [0; 12]).is_err());
        let two = Rows { count: 2, ..rows };
        a.write_rows(two, &[1; 8]).unwrap();
        let mut out = [0; 8];
        a.read_rows(two, &mut out).unwrap();
        assert_eq!(out, [1; 8]);
        // An empty transfer returns at once.
        let none = Rows {
            len: 0,
            count: usize::MAX,
            ..rows
        };
        a.write_rows(none, &[]).unwrap();
    }
}
