//! Packed rows: a layout of quantized rows from which GPU kernels can load 16 bytes at once.
//!
//! A block of a quantized type has codes, scales and more. A packed row stores the codes of all
//! blocks first, then the next part of all blocks, and so on. The bytes are the same in another
//! order, plus up to 15 unused ones at the end, because each row starts at a multiple of 16.
//! Reading a tensor back returns the bytes that were written.

use samite_core::{DType, Error, Layout, Result, Slot};
use std::ops::Range;

/// Alignment of packed rows in bytes.
const ROW_UNIT: usize = 16;

/// Bytes of packed rows per access to the memory.
const PIECE: usize = 4 << 20;

/// Returns the parts of a block in the order of a packed row, or `None` for types that are not
/// packed.
fn parts(dtype: DType) -> Option<&'static [Range<usize>]> {
    Some(match dtype {
        DType::Q4_0 => &[2..18, 0..2],
        DType::Q8_0 => &[2..34, 0..2],
        DType::Q4_K => &[16..144, 0..16],
        DType::Q5_K => &[48..176, 16..48, 0..16],
        DType::Q6_K => &[0..128, 128..192, 192..208, 208..210],
        _ => return None,
    })
}

/// Returns whether rows of this type can be packed.
pub fn has_packed_rows(dtype: DType) -> bool {
    parts(dtype).is_some()
}

/// Returns the distance in bytes between packed rows of `length` elements.
pub fn packed_row_bytes(dtype: DType, length: usize) -> usize {
    (length / dtype.block_len() * dtype.block_bytes()).next_multiple_of(ROW_UNIT)
}

/// Memory that holds packed rows.
pub trait PackedMemory {
    /// Returns the size in bytes.
    fn size(&self) -> usize;

    /// Reads from byte `at`.
    ///
    /// # Errors
    /// If the memory's device fails.
    fn read(&self, at: usize, out: &mut [u8]) -> Result<()>;

    /// Writes at byte `at`.
    ///
    /// # Errors
    /// If the memory's device fails.
    fn write(&self, at: usize, data: &[u8]) -> Result<()>;
}

/// A tensor with packed rows.
#[derive(Clone, Copy, Debug)]
pub struct RowPacking {
    parts: &'static [Range<usize>],
    /// Size in bytes of a block; `row` and `packed` are those of a plain row and a packed row.
    block: usize,
    row: usize,
    packed: usize,
    rows: usize,
}

impl RowPacking {
    /// Describes a tensor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if its rows cannot be packed.
    pub fn new(layout: &Layout) -> Result<Self> {
        let dtype = layout.dtype();
        let parts = parts(dtype).filter(|_| layout.is_contiguous());
        let parts = parts.ok_or_else(|| {
            Error::unsupported(
                "packed memory",
                format!("a tensor of {layout}"),
                "it cannot be packed",
            )
        })?;
        let length = layout.shape()[0];
        Ok(RowPacking {
            parts,
            block: dtype.block_bytes(),
            row: length / dtype.block_len() * dtype.block_bytes(),
            packed: packed_row_bytes(dtype, length),
            rows: layout.rows(),
        })
    }

    /// Returns the bytes that the tensor takes.
    ///
    /// # Errors
    /// If the size overflows.
    pub fn bytes(&self) -> Result<usize> {
        let size = self.rows.checked_mul(self.packed);
        size.ok_or_else(|| Error::invalid(format!("{} packed rows are too large", self.rows)))
    }

    /// Describes the tensor at `slot`, and checks that it and `len` of its bytes from `offset` on
    /// lie in `memory`.
    ///
    /// # Errors
    /// If they do not.
    pub fn in_memory(
        slot: Slot,
        offset: usize,
        len: usize,
        memory: &dyn PackedMemory,
    ) -> Result<Self> {
        let packing = RowPacking::new(&slot.layout)?;
        let end = slot.offset.checked_add(packing.bytes()?);
        let bytes = packing.rows * packing.row;
        if end.is_none_or(|end| end > memory.size())
            || offset.checked_add(len).is_none_or(|end| end > bytes)
        {
            return Err(Error::invalid(format!(
                "bytes {offset}..+{len} of {} at byte {} are outside of the tensor, or of a \
                 buffer of {} bytes",
                slot.layout,
                slot.offset,
                memory.size()
            )));
        }
        Ok(packing)
    }

    /// Writes `data` at byte `offset` of the tensor at `slot`, in the standard layout. Rows that
    /// are written in part are read first.
    ///
    /// # Errors
    /// If the range is outside of the tensor, or the memory's device fails.
    pub fn write(slot: Slot, offset: usize, data: &[u8], memory: &dyn PackedMemory) -> Result<()> {
        let packing = RowPacking::in_memory(slot, offset, data.len(), memory)?;
        for rows in packing.pieces(offset, data.len()) {
            let begin = rows.start * packing.row;
            let end = rows.end * packing.row;
            let (from, to) = (begin.max(offset), end.min(offset + data.len()));
            let new = &data[from - offset..to - offset];
            let packed = if new.len() == end - begin {
                packing.pack(new)
            } else {
                let mut whole = packing.read_rows(slot, rows.clone(), memory)?;
                whole[from - begin..to - begin].copy_from_slice(new);
                packing.pack(&whole)
            };
            memory.write(slot.offset + rows.start * packing.packed, &packed)?;
        }
        Ok(())
    }

    /// Reads from byte `offset` of the tensor at `slot`, in the standard layout.
    ///
    /// # Errors
    /// As [`write`](RowPacking::write).
    pub fn read(
        slot: Slot,
        offset: usize,
        out: &mut [u8],
        memory: &dyn PackedMemory,
    ) -> Result<()> {
        let len = out.len();
        let packing = RowPacking::in_memory(slot, offset, len, memory)?;
        for rows in packing.pieces(offset, len) {
            let begin = rows.start * packing.row;
            let end = rows.end * packing.row;
            let (from, to) = (begin.max(offset), end.min(offset + len));
            let whole = packing.read_rows(slot, rows, memory)?;
            out[from - offset..to - offset].copy_from_slice(&whole[from - begin..to - begin]);
        }
        Ok(())
    }

    /// Sets `len` bytes at byte `offset` of the tensor at `slot`.
    ///
    /// # Errors
    /// As [`write`](RowPacking::write).
    pub fn fill(
        slot: Slot,
        (offset, len): (usize, usize),
        value: u8,
        memory: &dyn PackedMemory,
    ) -> Result<()> {
        let packing = RowPacking::in_memory(slot, offset, len, memory)?;
        for rows in packing.pieces(offset, len) {
            let from = (rows.start * packing.row).max(offset);
            let to = (rows.end * packing.row).min(offset + len);
            RowPacking::write(slot, from, &vec![value; to - from], memory)?;
        }
        Ok(())
    }

    fn read_rows(
        &self,
        slot: Slot,
        rows: Range<usize>,
        memory: &dyn PackedMemory,
    ) -> Result<Vec<u8>> {
        let mut packed = vec![0; rows.len() * self.packed];
        memory.read(slot.offset + rows.start * self.packed, &mut packed)?;
        Ok(self.unpack(&packed))
    }

    /// Splits the rows that overlap `len` bytes from byte `offset` on into pieces.
    fn pieces(&self, offset: usize, len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let row = self.row.max(1);
        let (first, last) = (offset / row, (offset + len).div_ceil(row));
        let step = (PIECE / self.packed.max(1)).max(1);
        let last = if len == 0 { first } else { last };
        (first..last)
            .step_by(step)
            .map(move |at| at..(at + step).min(last))
    }

    /// Calls `f` for each part of each block, with its range in the row and in the packed row.
    fn each_part(&self, mut f: impl FnMut(Range<usize>, Range<usize>)) {
        let mut to = 0;
        for part in self.parts {
            for block in (0..self.row).step_by(self.block) {
                let len = part.len();
                f(block + part.start..block + part.end, to..to + len);
                to += len;
            }
        }
    }

    fn pack(&self, rows: &[u8]) -> Vec<u8> {
        let mut all = vec![0; rows.len() / self.row.max(1) * self.packed];
        let pairs = rows
            .chunks_exact(self.row.max(1))
            .zip(all.chunks_exact_mut(self.packed.max(1)));
        for (row, packed) in pairs {
            self.each_part(|from, to| packed[to].copy_from_slice(&row[from]));
        }
        all
    }

    fn unpack(&self, packed: &[u8]) -> Vec<u8> {
        let mut all = vec![0; packed.len() / self.packed.max(1) * self.row];
        let pairs = packed
            .chunks_exact(self.packed.max(1))
            .zip(all.chunks_exact_mut(self.row.max(1)));
        for (packed, row) in pairs {
            self.each_part(|to, from| row[to].copy_from_slice(&packed[from]));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    struct Bytes(RefCell<Vec<u8>>);

    impl PackedMemory for Bytes {
        fn size(&self) -> usize {
            self.0.borrow().len()
        }

        fn read(&self, at: usize, out: &mut [u8]) -> Result<()> {
            out.copy_from_slice(&self.0.borrow()[at..at + out.len()]);
            Ok(())
        }

        fn write(&self, at: usize, data: &[u8]) -> Result<()> {
            self.0.borrow_mut()[at..at + data.len()].copy_from_slice(data);
            Ok(())
        }
    }

    #[test]
    fn packed_rows_read_back_as_written() {
        for dtype in [
            DType::Q4_0,
            DType::Q8_0,
            DType::Q4_K,
            DType::Q5_K,
            DType::Q6_K,
        ] {
            let length = 3 * dtype.block_len();
            let layout = Layout::contiguous(dtype, [length, 5, 1, 1]).unwrap();
            let slot = Slot { offset: 32, layout };
            let size = 32 + RowPacking::new(&layout).unwrap().bytes().unwrap();
            let memory = Bytes(RefCell::new(vec![0; size]));
            let data: Vec<u8> = (0..layout.bytes()).map(|i| (i * 7 % 251) as u8).collect();
            RowPacking::write(slot, 0, &data, &memory).unwrap();
            // The first codes are those of the first block, then those of the second.
            let first = parts(dtype).unwrap()[0].clone();
            let codes = memory.0.borrow()[32..32 + 2 * first.len()].to_vec();
            let block = dtype.block_bytes();
            assert_eq!(codes[..first.len()], data[first.clone()]);
            assert_eq!(
                codes[first.len()..],
                data[block + first.start..block + first.end]
            );
            let mut part = vec![0; block + 9];
            RowPacking::read(slot, block - 3, &mut part, &memory).unwrap();
            assert_eq!(part, data[block - 3..2 * block + 6]);
            RowPacking::fill(slot, (block, 4), 9, &memory).unwrap();
            let mut all = vec![0; data.len()];
            RowPacking::read(slot, 0, &mut all, &memory).unwrap();
            assert_eq!(all[..block], data[..block]);
            assert_eq!(all[block..block + 4], [9; 4]);
            assert_eq!(all[block + 4..], data[block + 4..]);
            assert!(RowPacking::write(slot, data.len() - 1, &[0; 2], &memory).is_err());
        }
        let plain = Layout::contiguous(DType::F16, [32, 1, 1, 1]).unwrap();
        assert!(RowPacking::new(&plain).is_err());
    }
}
