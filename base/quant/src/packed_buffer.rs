//! Buffers and buffer types of packed weights, for devices with memory of their own.

use crate::packing::{PackedMemory, RowPacking, has_packed_rows};
use samite_core::{
    Buffer, BufferType, Error, Location, Node, Op, Result, Slot, Support, TensorInfo, Usage,
};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Weak};

/// Returns whether a tensor can lie in packed memory: it must be a whole matrix of a packed type.
pub fn is_packable(weights: Node<'_>) -> bool {
    weights.tensor().view.is_none()
        && has_packed_rows(weights.dtype())
        && weights.layout().is_contiguous()
        && !weights.layout().is_empty()
}

/// Returns whether a node can read source 0 from packed memory.
pub fn reads_packed(node: Node<'_>) -> bool {
    let reads = matches!(
        node.op(),
        Op::MulMat { .. } | Op::MulMatId { .. } | Op::GetRows
    );
    reads && node.source(0).is_some_and(is_packable)
}

/// A device's ordinary memory, in which packed rows are stored.
pub trait PackableMemory: BufferType + 'static {
    /// Its buffers.
    type Buffer: Buffer + PackedMemory + 'static;

    /// Allocates a buffer that reports `buffer_type` as its type.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn create(
        &self,
        buffer_type: Arc<dyn BufferType>,
        size: usize,
        usage: Usage,
    ) -> Result<Self::Buffer>;
}

/// The memory of packed weights on one device.
pub struct PackedBufferType<M> {
    name: String,
    memory: Arc<M>,
    this: Weak<PackedBufferType<M>>,
}

impl<M> fmt::Debug for PackedBufferType<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedBufferType({})", self.name)
    }
}

impl<M: PackableMemory> PackedBufferType<M> {
    /// Creates the type for a device with the ordinary memory `memory`.
    pub fn new(memory: &Arc<M>) -> Arc<Self> {
        Arc::new_cyclic(|this| PackedBufferType {
            name: format!("{}-packed", memory.name()),
            memory: Arc::clone(memory),
            this: Weak::clone(this),
        })
    }
}

impl<M: PackableMemory> PackedBufferType<M> {
    /// Returns whether `buffer_type` is this one.
    pub fn is(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(buffer_type), self)
    }

    /// Returns whether source `index` of a node is stored in this memory.
    pub fn stores(&self, node: Node<'_>, index: usize) -> bool {
        let stored = node.source(index).and_then(Node::stored);
        stored.is_some_and(|stored| self.is(stored.tensor().buffer.buffer_type()))
    }

    /// Returns whether source 0 of a node is stored in this memory.
    ///
    /// # Errors
    /// The refusal, if another source is, or if the node has no use for packed weights.
    pub fn check_sources(&self, node: Node<'_>) -> Result<bool, Support> {
        let mut sources = 0..node.tensor().sources.len();
        let packed = sources.find(|&index| self.stores(node, index));
        if packed.is_some_and(|index| index > 0 || !self.accepts(node).is_yes()) {
            return Err(Support::no(
                "packed weights are for products and rows by number",
            ));
        }
        Ok(packed.is_some())
    }
}

impl<M: PackableMemory> BufferType for PackedBufferType<M> {
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
        RowPacking::new(&tensor.layout)?.bytes()
    }

    fn accepts(&self, node: Node<'_>) -> Support {
        if reads_packed(node) {
            Support::Yes
        } else {
            Support::no("only products and rows by number use packed weights, of some types")
        }
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        let this = self.this.upgrade();
        let this = this.ok_or_else(|| Error::invalid("the buffer type is being dropped"))?;
        Ok(Arc::new(PackedBuffer {
            rows: self.memory.create(this, size, usage)?,
        }))
    }
}

/// A buffer of packed tensors.
#[derive(Debug)]
pub struct PackedBuffer<B> {
    rows: B,
}

impl<B> PackedBuffer<B> {
    /// Returns the underlying buffer of packed rows.
    pub fn rows(&self) -> &B {
        &self.rows
    }
}

impl<B: Buffer + PackedMemory + 'static> Buffer for PackedBuffer<B> {
    fn buffer_type(&self) -> &Arc<dyn BufferType> {
        self.rows.buffer_type()
    }

    fn size(&self) -> usize {
        Buffer::size(&self.rows)
    }

    fn usage(&self) -> Usage {
        self.rows.usage()
    }

    fn location(&self) -> Location {
        self.rows.location()
    }

    fn init_tensor(&self, offset: usize, tensor: &TensorInfo<'_>) -> Result<()> {
        let layout = tensor.layout;
        RowPacking::in_memory(Slot { offset, layout }, 0, 0, &self.rows).map(drop)
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        RowPacking::write(tensor, offset, data, &self.rows)
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        RowPacking::read(tensor, offset, out, &self.rows)
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        RowPacking::fill(tensor, (offset, len), value, &self.rows)
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.rows.clear(value)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
