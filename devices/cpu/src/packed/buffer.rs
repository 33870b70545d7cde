//! The buffer type of packed weights, and its memory.

use super::layout::PackedLayout;
use crate::table::kernel_for;
use samite_core::memory::HOST_ALIGNMENT;
use samite_core::{
    Buffer, BufferType, Error, HostMemory, Layout, Location, Node, Op, Result, Slot, Support,
    TensorInfo, Usage,
};
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// The buffer type of packed weights. There is one for the whole process.
pub(crate) fn packed_buffer_type() -> Arc<dyn BufferType> {
    static PACKED: OnceLock<Arc<dyn BufferType>> = OnceLock::new();
    Arc::clone(PACKED.get_or_init(|| Arc::new(PackedBufferType)))
}

#[derive(Debug)]
struct PackedBufferType;

impl PackedBufferType {
    fn layout(&self, layout: &Layout) -> Result<PackedLayout> {
        PackedLayout::new(layout).ok_or_else(|| {
            let what = format!("a tensor of {layout}");
            Error::unsupported(self.name(), what, "it cannot be packed")
        })
    }
}

impl BufferType for PackedBufferType {
    fn name(&self) -> &str {
        "cpu-packed"
    }

    fn alignment(&self) -> usize {
        HOST_ALIGNMENT
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        Ok(self.layout(&tensor.layout)?.bytes())
    }

    fn accepts(&self, node: Node<'_>) -> Support {
        if !matches!(
            node.op(),
            Op::MulMat { .. } | Op::MulMatId { .. } | Op::GetRows
        ) {
            return Support::no("only products and rows by number use packed weights");
        }
        let weights = node
            .source(0)
            .filter(|source| source.tensor().view.is_none());
        if weights.is_none_or(|weights| PackedLayout::new(weights.layout()).is_none()) {
            return Support::no("such weights cannot be packed");
        }
        match kernel_for(node) {
            Ok(_) => Support::Yes,
            Err(reason) => Support::No(reason),
        }
    }

    fn row_group(&self) -> Option<usize> {
        Some(super::PANEL)
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(PackedBuffer {
            buffer_type: packed_buffer_type(),
            memory: HostMemory::allocate(size, "cpu", "packed weights")?,
            usage,
        }))
    }
}

/// Packed tensors in host memory.
#[derive(Debug)]
pub(crate) struct PackedBuffer {
    buffer_type: Arc<dyn BufferType>,
    memory: Arc<HostMemory>,
    usage: Usage,
}

/// What a range of a tensor's bytes has in common with one panel.
struct Part {
    /// Where the panel lies in the buffer.
    at: usize,
    /// Bytes of the panel's rows, unpacked.
    len: usize,
    /// The common part in the unpacked rows.
    in_rows: Range<usize>,
    /// The common part in the range.
    in_range: Range<usize>,
}

impl PackedBuffer {
    /// The memory, which holds panels.
    pub fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    /// The layout of a tensor that lies here.
    fn layout(&self, tensor: Slot) -> Result<PackedLayout> {
        let layout = PackedBufferType.layout(&tensor.layout)?;
        if tensor
            .offset
            .checked_add(layout.bytes())
            .is_none_or(|end| end > self.memory.len())
        {
            return Err(Error::invalid(format!(
                "{} at byte {} do not fit into a buffer of {} bytes",
                tensor.layout,
                tensor.offset,
                self.memory.len()
            )));
        }
        Ok(layout)
    }

    /// Calls `f` for each panel that `len` bytes from byte `offset` of the tensor touch.
    fn each_panel(
        &self,
        tensor: Slot,
        offset: usize,
        len: usize,
        mut f: impl FnMut(&PackedLayout, Part) -> Result<()>,
    ) -> Result<()> {
        let layout = self.layout(tensor)?;
        let bytes = tensor.layout.bytes();
        let end = offset
            .checked_add(len)
            .filter(|&end| end <= bytes)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "bytes {offset}..+{len} of a tensor of {bytes} bytes"
                ))
            })?;
        let mut at = offset;
        while at < end {
            let row = at / layout.row_bytes;
            let (matrix, row) = (row / layout.rows, row % layout.rows);
            let first = row / super::PANEL * super::PANEL;
            let rows = super::PANEL.min(layout.rows - first);
            let start = (matrix * layout.rows + first) * layout.row_bytes;
            let len = rows * layout.row_bytes;
            let stop = end.min(start + len);
            let part = Part {
                at: tensor.offset + layout.panel_of(matrix, row),
                len,
                in_rows: at - start..stop - start,
                in_range: at - offset..stop - offset,
            };
            f(&layout, part)?;
            at = stop;
        }
        Ok(())
    }

    /// Changes a part of a panel: `change` gets the bytes of rows that are in the part.
    fn change_part(
        &self,
        layout: &PackedLayout,
        part: Part,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let mut rows = vec![0; part.len];
        // In one visit: what others write to the panel between two would be lost.
        self.memory
            .with_bytes_mut(part.at, layout.panel_bytes, |panel| {
                layout.unpack(panel, &mut rows);
                change(&mut rows[part.in_rows]);
                layout.pack(&rows, panel);
            })
    }
}

impl Buffer for PackedBuffer {
    fn buffer_type(&self) -> &Arc<dyn BufferType> {
        &self.buffer_type
    }

    fn size(&self) -> usize {
        self.memory.len()
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn location(&self) -> Location {
        self.memory.location()
    }

    fn init_tensor(&self, offset: usize, tensor: &TensorInfo<'_>) -> Result<()> {
        let layout = tensor.layout;
        self.layout(Slot { offset, layout }).map(|_| ())
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        self.each_panel(tensor, offset, data.len(), |layout, part| {
            let data = &data[part.in_range.clone()];
            if data.len() == part.len {
                self.memory
                    .with_bytes_mut(part.at, layout.panel_bytes, |panel| {
                        layout.pack(data, panel)
                    })
            } else {
                self.change_part(layout, part, |rows| rows.copy_from_slice(data))
            }
        })
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        let mut rows = Vec::new();
        self.each_panel(tensor, offset, out.len(), |layout, part| {
            rows.resize(part.len, 0);
            self.memory
                .with_bytes(part.at, layout.panel_bytes, |panel| {
                    layout.unpack(panel, &mut rows)
                })?;
            out[part.in_range].copy_from_slice(&rows[part.in_rows]);
            Ok(())
        })
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        self.each_panel(tensor, offset, len, |layout, part| {
            self.change_part(layout, part, |rows| rows.fill(value))
        })
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.memory.fill(0, self.memory.len(), value)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_core::{DType, Graph, StoredTensor, TensorGroup, TensorRef, host_buffer_type};

    fn tensor(layout: Layout) -> Arc<StoredTensor> {
        let wanted = [("a", layout), ("b", layout)];
        let group = TensorGroup::allocate(&packed_buffer_type(), Usage::Weights, &wanted).unwrap();
        Arc::clone(&group.tensors[1])
    }

    fn noise(len: usize) -> Vec<u8> {
        (0..len as u32)
            .map(|i| (i.wrapping_mul(0x9e37_79b9) >> 24) as u8)
            .collect()
    }

    #[test]
    fn what_is_written_in_any_pieces_is_read_back() {
        for dtype in [DType::Q8_0, DType::Q4_0, DType::Q4_K, DType::Q6_K] {
            let layout = Layout::contiguous(dtype, [256, 37, 2, 1]).unwrap();
            let tensor = tensor(layout);
            let data = noise(layout.bytes());
            for piece in [layout.bytes(), layout.row_bytes() * 5, 1001] {
                tensor.tensor().buffer.clear(0).unwrap();
                for (i, bytes) in data.chunks(piece).enumerate() {
                    tensor.tensor().write(i * piece, bytes).unwrap();
                }
                let mut back = vec![0; data.len()];
                tensor.tensor().read(0, &mut back).unwrap();
                assert!(back == data, "{dtype} in pieces of {piece}");
                let mut part = [0; 99];
                tensor.tensor().read(4567, &mut part).unwrap();
                assert_eq!(part, data[4567..][..99]);
            }
        }
    }

    #[test]
    fn copies_and_fills() {
        let layout = Layout::contiguous(DType::Q4_0, [64, 19, 1, 1]).unwrap();
        let (to, data) = (tensor(layout), noise(layout.bytes()));
        let wanted = [("host", layout)];
        let host = TensorGroup::allocate(&host_buffer_type(), Usage::Any, &wanted).unwrap();
        let host: &TensorRef = host.tensors[0].tensor();
        host.write(0, &data).unwrap();
        to.tensor().copy_from(host).unwrap();
        let buffer = &to.tensor().buffer;
        buffer.fill(to.tensor().slot, 100, 50, 7).unwrap();
        host.copy_from(to.tensor()).unwrap();
        let mut back = vec![0; data.len()];
        host.read(0, &mut back).unwrap();
        assert_eq!(back[..100], data[..100]);
        assert_eq!(back[100..150], [7; 50]);
        assert_eq!(back[150..], data[150..]);
        assert!(to.tensor().write(data.len() - 1, &[0; 2]).is_err());
        assert!(
            buffer
                .write(to.tensor().slot, data.len() - 1, &[0; 2])
                .is_err()
        );
        assert!(buffer.host().is_none());
    }

    #[test]
    fn only_what_kernels_use_is_accepted() {
        let memory = packed_buffer_type();
        let accepts = |dtype, shape| {
            let mut g = Graph::new();
            let w = g.leaf("w", dtype, shape).unwrap();
            let x = g.input("x", DType::F32, [shape[0], 2, 1, 1]).unwrap();
            let y = g.mul_mat(w, x).unwrap();
            memory.accepts(g.node(y)).is_yes()
        };
        assert!(accepts(DType::Q8_0, [64, 5, 1, 1]));
        assert!(accepts(DType::Q4_K, [256, 5, 1, 1]));
        assert!(accepts(DType::F32, [63, 5, 1, 1]));
        assert!(!accepts(DType::IQ2_XXS, [256, 5, 1, 1]));
        let mut g = Graph::new();
        let a = g.leaf("a", DType::Q8_0, [64, 5, 1, 1]).unwrap();
        let b = g.cont(a).unwrap();
        assert!(!memory.accepts(g.node(b)).is_yes());
        let integers = Layout::contiguous(DType::I32, [64, 5, 1, 1]).unwrap();
        let integers = TensorInfo::new("i", integers, Usage::Weights);
        assert!(memory.alloc_size(&integers).is_err());
    }
}
