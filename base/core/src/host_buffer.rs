//! Buffers of plain host memory.

use crate::buffer::{Buffer, BufferType, Slot, Usage};
use crate::error::{Error, Result};
use crate::memory::{HOST_ALIGNMENT, HostMemory, Location};
use crate::tensor_ref::TensorRef;
use std::any::Any;
use std::sync::{Arc, OnceLock};

/// Returns plain host memory, the buffer type of every device that computes on the host.
///
/// The whole process has one, so that devices share it without copies.
pub fn host_buffer_type() -> Arc<dyn BufferType> {
    static HOST: OnceLock<Arc<dyn BufferType>> = OnceLock::new();
    Arc::clone(HOST.get_or_init(|| Arc::new(HostBufferType)))
}

#[derive(Debug)]
struct HostBufferType;

impl BufferType for HostBufferType {
    fn name(&self) -> &str {
        "host"
    }

    fn alignment(&self) -> usize {
        HOST_ALIGNMENT
    }

    fn is_host(&self) -> bool {
        true
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        Ok(host_buffer(
            HostMemory::allocate(size, "host", "a buffer")?,
            usage,
        ))
    }
}

/// Returns a buffer over existing host memory, such as a mapped file.
pub fn host_buffer(memory: Arc<HostMemory>, usage: Usage) -> Arc<dyn Buffer> {
    host_buffer_of(host_buffer_type(), memory, usage)
}

/// Returns a buffer over host memory of another [host buffer type](BufferType::is_host).
pub fn host_buffer_of(
    buffer_type: Arc<dyn BufferType>,
    memory: Arc<HostMemory>,
    usage: Usage,
) -> Arc<dyn Buffer> {
    Arc::new(HostBuffer {
        buffer_type,
        memory,
        usage,
    })
}

#[derive(Debug)]
struct HostBuffer {
    buffer_type: Arc<dyn BufferType>,
    memory: Arc<HostMemory>,
    usage: Usage,
}

/// Returns the place of byte `offset` of a tensor in its buffer.
fn place(tensor: Slot, offset: usize) -> Result<usize> {
    tensor
        .offset
        .checked_add(offset)
        .ok_or_else(|| Error::invalid("the offset overflows"))
}

impl Buffer for HostBuffer {
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

    fn host(&self) -> Option<&Arc<HostMemory>> {
        Some(&self.memory)
    }

    fn is_writable(&self) -> bool {
        self.memory.is_writable()
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        self.memory.write(place(tensor, offset)?, data)
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        self.memory.read(place(tensor, offset)?, out)
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        self.memory.fill(place(tensor, offset)?, len, value)
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.memory.fill(0, self.memory.len(), value)
    }

    fn copy_from(&self, to: Slot, from: &TensorRef) -> Result<bool> {
        let len = to.layout.bytes();
        match from.buffer.host() {
            Some(memory) => memory.copy_to(from.slot.offset, &self.memory, to.offset, len)?,
            // Reading directly into host memory would hold its lock while another device works, so
            // the copy takes a detour.
            None => return Ok(false),
        }
        Ok(true)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
