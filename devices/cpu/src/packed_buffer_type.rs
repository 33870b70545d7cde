//! Buffer type of packed weights. Models store weights in it that kernels can use packed.

use crate::packed::PANEL;
use crate::packed::buffer::{self, PackedBuffer};
use crate::packed::layout::PackedLayout;
use crate::table::kernel_for;
use samite_core::memory::HOST_ALIGNMENT;
use samite_core::{
    Buffer, BufferType, Error, HostMemory, Node, Op, Result, Support, TensorInfo, Usage,
};
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

/// Allocator of zeroed host memory of the given size.
type Allocate = Box<dyn Fn(usize) -> Result<Arc<HostMemory>> + Send + Sync>;

/// Returns the buffer type of packed weights in ordinary memory. The whole process has one.
pub(crate) fn packed_buffer_type() -> Arc<dyn BufferType> {
    static PACKED: OnceLock<Arc<dyn BufferType>> = OnceLock::new();
    let allocate = |size| HostMemory::allocate(size, "cpu", "packed weights");
    Arc::clone(PACKED.get_or_init(|| packed_in(buffer::NAME, Box::new(allocate))))
}

/// Returns a buffer type of packed weights in memory of another kind.
pub(crate) fn packed_in(name: &'static str, allocate: Allocate) -> Arc<dyn BufferType> {
    Arc::new_cyclic(|itself| PackedBufferType {
        name,
        allocate,
        itself: Weak::clone(itself),
    })
}

struct PackedBufferType {
    name: &'static str,
    allocate: Allocate,
    itself: Weak<Self>,
}

impl fmt::Debug for PackedBufferType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedBufferType({})", self.name)
    }
}

impl BufferType for PackedBufferType {
    fn name(&self) -> &str {
        self.name
    }

    fn alignment(&self) -> usize {
        HOST_ALIGNMENT
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        Ok(buffer::layout_of(&tensor.layout)?.bytes())
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
        Some(PANEL)
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        let itself = self.itself.upgrade();
        let itself = itself.ok_or_else(|| Error::invalid("the buffer type is being dropped"))?;
        Ok(Arc::new(PackedBuffer::new(
            itself,
            (self.allocate)(size)?,
            usage,
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_core::{
        DType, Graph, Layout, StoredTensor, TensorGroup, TensorRef, host_buffer_type,
    };

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
    fn weights_written_in_any_chunks_are_read_back() {
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
    fn packed_buffers_support_copies_and_fills() {
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
    fn only_weights_with_packed_kernels_are_accepted() {
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
