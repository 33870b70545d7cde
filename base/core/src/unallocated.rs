//! Buffers without memory, for planning before any allocation.

use crate::buffer::{Buffer, BufferType, Slot, Usage};
use crate::error::{Error, Result};
use crate::memory::{Location, MemoryId};
use std::any::Any;
use std::sync::Arc;

/// Returns a planned buffer. It has a type, a size and a location, but no bytes. Graphs whose
/// stored tensors lie in such buffers can be placed and planned, which yields exact sizes, but they
/// cannot run.
pub fn unallocated(
    buffer_type: &Arc<dyn BufferType>,
    size: usize,
    usage: Usage,
) -> Arc<dyn Buffer> {
    Arc::new(Unallocated {
        buffer_type: Arc::clone(buffer_type),
        size,
        usage,
        memory: MemoryId::unique(),
    })
}

#[derive(Debug)]
struct Unallocated {
    buffer_type: Arc<dyn BufferType>,
    size: usize,
    usage: Usage,
    memory: MemoryId,
}

impl Unallocated {
    fn no_bytes<T>(&self) -> Result<T> {
        let name = self.buffer_type.name();
        Err(Error::invalid(format!(
            "a buffer in {name} is only planned: it has no bytes yet"
        )))
    }
}

impl Buffer for Unallocated {
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

    fn write(&self, _: Slot, _: usize, _: &[u8]) -> Result<()> {
        self.no_bytes()
    }

    fn read(&self, _: Slot, _: usize, _: &mut [u8]) -> Result<()> {
        self.no_bytes()
    }

    fn fill(&self, _: Slot, _: usize, _: usize, _: u8) -> Result<()> {
        self.no_bytes()
    }

    fn clear(&self, _: u8) -> Result<()> {
        self.no_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
