//! Device memory.

use crate::driver::Address;
use crate::gpu::{Gpu, OpenedCard};
use samite_core::{
    Buffer, BufferType, Error, Location, MemoryId, Result, Slot, TensorInfo, TensorRef, Usage,
};
use std::any::Any;
use std::sync::{Arc, Weak};

/// Alignment of tensors. Kernels load vectors of 16 bytes, and a transaction has 128.
const ALIGNMENT: usize = 256;

/// Unit of a tensor's size in bytes, so that vector loads may read the end of the last row.
const SIZE_UNIT: usize = 16;

/// The memory of one card.
#[derive(Debug)]
pub struct CudaBufferType {
    gpu: Arc<Gpu>,
    this: Weak<CudaBufferType>,
}

impl CudaBufferType {
    pub fn new(gpu: Arc<Gpu>) -> Arc<Self> {
        Arc::new_cyclic(|this| CudaBufferType {
            gpu,
            this: Weak::clone(this),
        })
    }
}

impl BufferType for CudaBufferType {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn alignment(&self) -> usize {
        ALIGNMENT
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        let bytes = tensor.layout.bytes();
        bytes
            .checked_next_multiple_of(SIZE_UNIT)
            .ok_or_else(|| Error::invalid("the size of a tensor overflows"))
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        // alive while a caller holds it
        let this = self.this.upgrade();
        let buffer_type = this.ok_or_else(|| Error::invalid("the buffer type is gone"))?;
        Ok(Arc::new(self.create(buffer_type, size, usage)?))
    }
}

impl CudaBufferType {
    /// Allocates a buffer that reports `buffer_type` as its type.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or the driver's error.
    pub fn create(
        &self,
        buffer_type: Arc<dyn BufferType>,
        size: usize,
        usage: Usage,
    ) -> Result<CudaBuffer> {
        let opened = self.gpu.open()?;
        let address = opened.alloc(size.max(SIZE_UNIT), "a buffer")?;
        let buffer = CudaBuffer {
            gpu: Arc::clone(&self.gpu),
            opened: Arc::clone(opened),
            buffer_type,
            address,
            memory: MemoryId::unique(),
            size,
            usage,
        };
        opened.fill(address, size.max(SIZE_UNIT), 0)?;
        Ok(buffer)
    }
}

/// A piece of a card's memory.
#[derive(Debug)]
pub struct CudaBuffer {
    gpu: Arc<Gpu>,
    opened: Arc<OpenedCard>,
    buffer_type: Arc<dyn BufferType>,
    address: Address,
    memory: MemoryId,
    size: usize,
    usage: Usage,
}

impl CudaBuffer {
    /// Returns the buffer of `tensor` if `gpu` owns it.
    pub fn from_tensor<'a>(tensor: &'a TensorRef, gpu: &Arc<Gpu>) -> Option<&'a CudaBuffer> {
        let buffer = tensor.buffer.as_any().downcast_ref::<CudaBuffer>()?;
        buffer.is_of(gpu).then_some(buffer)
    }

    /// Returns whether `gpu` owns the buffer.
    pub fn is_of(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(&self.gpu, gpu)
    }

    pub fn address(&self) -> Address {
        self.address
    }

    pub fn opened(&self) -> &Arc<OpenedCard> {
        &self.opened
    }

    /// Returns the address of `len` bytes at `offset` of a tensor.
    ///
    /// # Errors
    /// If the range is outside of the buffer.
    pub fn range(&self, tensor: Slot, offset: usize, len: usize) -> Result<Address> {
        let start = tensor.offset.checked_add(offset);
        let end = start.and_then(|start| start.checked_add(len));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.size => Ok(self.address + start as u64),
            _ => Err(Error::invalid(format!(
                "bytes {offset}..+{len} of a tensor at {} are outside of a buffer of {} bytes",
                tensor.offset, self.size
            ))),
        }
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        self.opened.free(self.address);
    }
}

impl Buffer for CudaBuffer {
    fn buffer_type(&self) -> &Arc<dyn BufferType> {
        &self.buffer_type
    }

    fn size(&self) -> usize {
        self.size
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn location(&self) -> Location {
        Location {
            memory: self.memory,
            offset: 0,
        }
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        let to = self.range(tensor, offset, data.len())?;
        self.opened.write(to, data)
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        let from = self.range(tensor, offset, out.len())?;
        self.opened.read(from, out)
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        let to = self.range(tensor, offset, len)?;
        self.opened.fill(to, len, value)
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.opened.fill(self.address, self.size, value)
    }

    fn copy_from(&self, to: Slot, from: &TensorRef) -> Result<bool> {
        let Some(source) = CudaBuffer::from_tensor(from, &self.gpu) else {
            return Ok(false);
        };
        let len = to.layout.bytes();
        let target = self.range(to, 0, len)?;
        let start = source.range(from.slot, 0, len)?;
        if target == start {
            return Ok(true);
        }
        if target.abs_diff(start) < len as u64 {
            return Ok(false);
        }
        self.opened.copy(target, start, len)?;
        Ok(true)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
