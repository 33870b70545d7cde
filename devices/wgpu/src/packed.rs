//! Packed weights: a layout of quantized rows from which kernels can load 16 bytes at once.
//!
//! A block of a quantized type has codes, scales and more. A packed row stores the codes of all
//! blocks first, then the next part of all blocks, and so on. The bytes are the same in another
//! order, plus up to 15 unused ones at the end, because each row starts at a multiple of 16.
//! Reading a tensor back returns the bytes that were written.

use crate::buffer::{BUFFER_UNIT, WgpuBuffer, WgpuBufferType};
use crate::fuse::is_packable;
use crate::gpu::Gpu;
use samite_core::{
    Buffer, BufferType, DType, Error, Layout, Location, Node, Op, Result, Slot, Support,
    TensorInfo, TensorRef, Usage,
};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Bytes of packed rows per driver write.
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
pub fn is_packed_type(dtype: DType) -> bool {
    parts(dtype).is_some()
}

/// Returns the distance in bytes between packed rows of `length` elements.
pub fn row_bytes(dtype: DType, length: usize) -> usize {
    (length / dtype.block_len() * dtype.block_bytes()).next_multiple_of(BUFFER_UNIT)
}

/// The packing of a tensor's rows.
struct RowPacking {
    parts: &'static [Range<usize>],
    /// Size in bytes of a block; `row` and `packed` are those of a plain row and a packed row.
    block: usize,
    row: usize,
    packed: usize,
    rows: usize,
}

impl RowPacking {
    fn new(layout: &Layout) -> Result<Self> {
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
            packed: row_bytes(dtype, length),
            rows: layout.rows(),
        })
    }

    /// Calls `f` for each piece, with its range in the row and in the packed row.
    fn each_piece(&self, mut f: impl FnMut(Range<usize>, Range<usize>)) {
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
            self.each_piece(|from, to| packed[to].copy_from_slice(&row[from]));
        }
        all
    }

    fn unpack(&self, packed: &[u8]) -> Vec<u8> {
        let mut all = vec![0; packed.len() / self.packed.max(1) * self.row];
        let pairs = packed
            .chunks_exact(self.packed.max(1))
            .zip(all.chunks_exact_mut(self.row.max(1)));
        for (packed, row) in pairs {
            self.each_piece(|to, from| row[to].copy_from_slice(&packed[from]));
        }
        all
    }
}

/// The memory of packed weights on one adapter.
pub struct PackedBufferType {
    name: String,
    memory: Arc<WgpuBufferType>,
    this: Weak<PackedBufferType>,
}

impl fmt::Debug for PackedBufferType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedBufferType({})", self.name)
    }
}

impl PackedBufferType {
    pub fn new(memory: &Arc<WgpuBufferType>) -> Arc<Self> {
        Arc::new_cyclic(|this| PackedBufferType {
            name: format!("{}-packed", memory.name()),
            memory: Arc::clone(memory),
            this: Weak::clone(this),
        })
    }
}

impl BufferType for PackedBufferType {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        self.memory.alignment()
    }

    fn max_size(&self) -> usize {
        self.memory.max_size()
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        let packing = RowPacking::new(&tensor.layout)?;
        let size = packing.rows.checked_mul(packing.packed);
        size.ok_or_else(|| Error::invalid(format!("a tensor of {} is too large", tensor.layout)))
    }

    fn accepts(&self, node: Node<'_>) -> Support {
        if !matches!(
            node.op(),
            Op::MulMat { .. } | Op::MulMatId { .. } | Op::GetRows
        ) {
            return Support::no("only products and rows by number use packed weights");
        }
        if node.source(0).is_some_and(is_packable) {
            Support::Yes
        } else {
            Support::no("such weights cannot be packed")
        }
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        let this = self.this.upgrade();
        let this = this.ok_or_else(|| Error::invalid("the buffer type is being dropped"))?;
        Ok(Arc::new(PackedBuffer {
            words: self.memory.create(this, size, usage)?,
        }))
    }
}

/// A buffer of packed tensors.
#[derive(Debug)]
pub struct PackedBuffer {
    words: WgpuBuffer,
}

impl PackedBuffer {
    /// Returns the buffer of `tensor` if it is packed and `gpu` owns it.
    pub fn of<'a>(tensor: &'a TensorRef, gpu: &Arc<Gpu>) -> Option<&'a PackedBuffer> {
        let buffer = tensor.buffer.as_any().downcast_ref::<PackedBuffer>()?;
        buffer.words.is_of(gpu).then_some(buffer)
    }

    /// Returns the underlying buffer of packed rows.
    pub fn words(&self) -> &WgpuBuffer {
        &self.words
    }

    fn packing(&self, tensor: Slot, offset: usize, len: usize) -> Result<RowPacking> {
        let packing = RowPacking::new(&tensor.layout)?;
        let end = tensor.offset.checked_add(packing.rows * packing.packed);
        let bytes = packing.rows * packing.row;
        if end.is_none_or(|end| end > self.words.size())
            || offset.checked_add(len).is_none_or(|end| end > bytes)
        {
            return Err(Error::invalid(format!(
                "bytes {offset}..+{len} of {} at byte {} are outside of the tensor, or of a buffer of {} bytes",
                tensor.layout,
                tensor.offset,
                self.words.size()
            )));
        }
        Ok(packing)
    }

    fn read_rows(&self, packing: &RowPacking, tensor: Slot, rows: Range<usize>) -> Result<Vec<u8>> {
        let mut packed = vec![0; rows.len() * packing.packed];
        let at = tensor.offset + rows.start * packing.packed;
        let opened = self.words.opened()?;
        opened.read(&self.words.memory.raw, at as u64, &mut packed)?;
        Ok(packing.unpack(&packed))
    }

    /// Splits the rows that overlap `len` bytes from byte `offset` on into pieces.
    fn pieces(
        packing: &RowPacking,
        offset: usize,
        len: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let row = packing.row.max(1);
        let (first, last) = (offset / row, (offset + len).div_ceil(row));
        let step = (PIECE / packing.packed.max(1)).max(1);
        let last = if len == 0 { first } else { last };
        (first..last)
            .step_by(step)
            .map(move |at| at..(at + step).min(last))
    }
}

impl Buffer for PackedBuffer {
    fn buffer_type(&self) -> &Arc<dyn BufferType> {
        self.words.buffer_type()
    }

    fn size(&self) -> usize {
        self.words.size()
    }

    fn usage(&self) -> Usage {
        self.words.usage()
    }

    fn location(&self) -> Location {
        self.words.location()
    }

    fn init_tensor(&self, offset: usize, tensor: &TensorInfo<'_>) -> Result<()> {
        let layout = tensor.layout;
        self.packing(Slot { offset, layout }, 0, 0).map(drop)
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        let packing = self.packing(tensor, offset, data.len())?;
        let opened = self.words.opened()?;
        for rows in Self::pieces(&packing, offset, data.len()) {
            let begin = rows.start * packing.row;
            let end = rows.end * packing.row;
            let (from, to) = (begin.max(offset), end.min(offset + data.len()));
            let new = &data[from - offset..to - offset];
            let packed = if new.len() == end - begin {
                packing.pack(new)
            } else {
                let mut whole = self.read_rows(&packing, tensor, rows.clone())?;
                whole[from - begin..to - begin].copy_from_slice(new);
                packing.pack(&whole)
            };
            let at = tensor.offset + rows.start * packing.packed;
            opened.write(&self.words.memory.raw, at as u64, &packed)?;
        }
        Ok(())
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        let packing = self.packing(tensor, offset, out.len())?;
        let len = out.len();
        for rows in Self::pieces(&packing, offset, len) {
            let begin = rows.start * packing.row;
            let end = rows.end * packing.row;
            let (from, to) = (begin.max(offset), end.min(offset + len));
            let whole = self.read_rows(&packing, tensor, rows)?;
            out[from - offset..to - offset].copy_from_slice(&whole[from - begin..to - begin]);
        }
        Ok(())
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        let packing = self.packing(tensor, offset, len)?;
        for rows in Self::pieces(&packing, offset, len) {
            let from = (rows.start * packing.row).max(offset);
            let to = (rows.end * packing.row).min(offset + len);
            self.write(tensor, from, &vec![value; to - from])?;
        }
        Ok(())
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.words.clear(value)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
