//! Simulated memory, which observes every host access.

use crate::fault::Fault;
use crate::shadow::MemoryAccess;
use crate::world::World;
use samite_core::memory::HOST_ALIGNMENT;
use samite_core::{
    Buffer, BufferType, Error, HostMemory, Location, MemoryId, Result, Slot, TensorInfo, TensorRef,
    Usage, host_buffer,
};
use std::any::Any;
use std::sync::{Arc, Weak};

/// A memory type of a simulated device.
#[derive(Debug)]
pub(crate) struct SimMemory {
    /// Reference to itself, passed to buffers.
    this: Weak<SimMemory>,
    world: Arc<World>,
    device: usize,
    name: String,
    alignment: usize,
    max_size: usize,
    /// Maximum number of bytes in all buffers together.
    limit: usize,
    /// True for plain host memory, which other devices may use.
    is_host: bool,
}

impl SimMemory {
    pub fn new(
        world: &Arc<World>,
        device: usize,
        options: &crate::device::SimOptions,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| SimMemory {
            this: Weak::clone(this),
            world: Arc::clone(world),
            device,
            name: options.name.clone(),
            alignment: options.alignment.next_power_of_two(),
            max_size: options.max_buffer_size,
            limit: options.memory_limit,
            is_host: options.host_memory,
        })
    }

    /// Returns the bytes in use.
    fn used(&self) -> usize {
        self.world.with(|state| {
            let mut live = state.live();
            live.find(|(name, _)| *name == self.name)
                .map_or(0, |(_, live)| live.bytes)
        })
    }

    /// Returns the bytes that can still be allocated.
    pub fn free(&self) -> usize {
        self.limit.saturating_sub(self.used())
    }

    fn buffer(
        &self,
        memory: Arc<HostMemory>,
        usage: Usage,
        is_imported: bool,
    ) -> Result<Arc<dyn Buffer>> {
        let owner = self
            .this
            .upgrade()
            .ok_or_else(|| Error::device(&self.name, "its memory is going away"))?;
        let location = if self.is_host || is_imported {
            memory.location()
        } else {
            Location {
                memory: MemoryId::unique(),
                offset: 0,
            }
        };
        if !is_imported {
            let is_compute = usage == Usage::Compute;
            self.world.with(|state| {
                state.allocated(&self.name, memory.len(), is_compute);
                // Other devices may write to plain host memory without a call.
                if is_compute && !self.is_host {
                    state.begin_undefined(location, memory.len());
                }
            });
        }
        Ok(Arc::new(SimBuffer {
            buffer_type: Arc::clone(&owner) as Arc<dyn BufferType>,
            bytes: host_buffer(Arc::clone(&memory), usage),
            owner,
            location,
            memory,
            usage,
            is_imported,
        }))
    }

    /// Returns a buffer over existing host memory.
    pub fn import(&self, memory: Arc<HostMemory>, usage: Usage) -> Result<Arc<dyn Buffer>> {
        self.world
            .call(self.device, "import", Some(Fault::Import))?;
        self.buffer(memory, usage, true)
    }
}

impl BufferType for SimMemory {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn max_size(&self) -> usize {
        self.max_size
    }

    fn is_host(&self) -> bool {
        self.is_host
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        self.world
            .call(self.device, "allocate", Some(Fault::Allocate))?;
        let free = self.free();
        if size > self.max_size || size > free {
            return Err(Error::OutOfMemory {
                device: self.name.as_str().into(),
                what: "a buffer".into(),
                asked: size,
                free: Some(free.min(self.max_size)),
            });
        }
        let memory = HostMemory::allocate(size, &self.name, "a buffer")?;
        self.buffer(memory, usage, false)
    }
}

/// A buffer in simulated memory.
#[derive(Debug)]
pub(crate) struct SimBuffer {
    owner: Arc<SimMemory>,
    /// Same object as `owner`.
    buffer_type: Arc<dyn BufferType>,
    location: Location,
    memory: Arc<HostMemory>,
    /// Memory as seen by kernels.
    bytes: Arc<dyn Buffer>,
    usage: Usage,
    is_imported: bool,
}

impl Drop for SimBuffer {
    fn drop(&mut self) {
        let (name, location, bytes) = (&self.owner.name, self.location, self.memory.len());
        let is_compute = self.usage == Usage::Compute;
        self.owner.world.with(|state| {
            if self.is_imported {
                state.let_go(name, location, bytes)
            } else {
                state.freed(name, location, bytes, is_compute)
            }
        });
    }
}

impl SimBuffer {
    /// Records a host call that accesses bytes.
    fn host_access(
        &self,
        what: &str,
        fault: Fault,
        offset: usize,
        len: usize,
        writes: bool,
    ) -> Result<()> {
        self.owner
            .world
            .call(self.owner.device, what, Some(fault))?;
        if offset
            .checked_add(len)
            .is_none_or(|end| end > self.memory.len())
        {
            let mistake = format!(
                "{what}: bytes {offset}..+{len} of a buffer of {} bytes",
                self.memory.len()
            );
            self.owner.world.with(|state| state.violate(mistake));
        }
        let start = self.location.offset + offset;
        let access = MemoryAccess {
            memory: self.location.memory,
            bytes: start..start + len,
            writes,
            is_partial: false,
            what: self.owner.name.as_str().into(),
        };
        self.owner
            .world
            .with(|state| state.touch_by_host(what, &[access]));
        Ok(())
    }

    fn place(&self, slot: Slot) -> TensorRef {
        TensorRef {
            buffer: Arc::clone(&self.bytes),
            slot,
        }
    }
}

/// Returns a tensor's bytes as seen by kernels, in the memory of any simulated device or the host.
pub(crate) fn bytes_of(tensor: &TensorRef) -> Result<TensorRef> {
    match tensor.buffer.as_any().downcast_ref::<SimBuffer>() {
        Some(own) => Ok(own.place(tensor.slot)),
        None if tensor.buffer.host().is_some() => Ok(tensor.clone()),
        None => Err(Error::invalid(format!(
            "a tensor lies in memory of type '{}', which is not simulated",
            tensor.buffer.buffer_type().name()
        ))),
    }
}

/// Returns an access to a whole tensor.
pub(crate) fn access(tensor: &TensorRef, writes: bool, what: impl Into<Arc<str>>) -> MemoryAccess {
    let Location { memory, offset } = tensor.location();
    MemoryAccess {
        memory,
        bytes: offset..offset + tensor.layout().bytes(),
        writes,
        is_partial: false,
        what: what.into(),
    }
}

impl Buffer for SimBuffer {
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
        self.location
    }

    fn host(&self) -> Option<&Arc<HostMemory>> {
        self.owner.is_host.then_some(&self.memory)
    }

    fn is_writable(&self) -> bool {
        self.memory.is_writable()
    }

    fn init_tensor(&self, offset: usize, tensor: &TensorInfo<'_>) -> Result<()> {
        let alignment = if self.is_imported {
            1
        } else {
            self.owner.alignment.min(HOST_ALIGNMENT)
        };
        if !offset.is_multiple_of(alignment) {
            let mistake = format!(
                "'{}' lies at byte {offset} of {}",
                tensor.name, self.owner.name
            );
            self.owner.world.with(|state| state.violate(mistake));
        }
        Ok(())
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        let at = tensor.offset + offset;
        self.host_access("write", Fault::Write, at, data.len(), true)?;
        self.bytes.write(tensor, offset, data)
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        let at = tensor.offset + offset;
        self.host_access("read", Fault::Read, at, out.len(), false)?;
        self.bytes.read(tensor, offset, out)
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        let at = tensor.offset + offset;
        self.host_access("fill", Fault::Write, at, len, true)?;
        self.bytes.fill(tensor, offset, len, value)
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.host_access("clear", Fault::Write, 0, self.memory.len(), true)?;
        self.bytes.clear(value)
    }

    fn copy_from(&self, to: Slot, from: &TensorRef) -> Result<bool> {
        let Some(source) = from.buffer.as_any().downcast_ref::<SimBuffer>() else {
            return Ok(false);
        };
        if !Arc::ptr_eq(&source.owner, &self.owner) {
            return Ok(false);
        }
        let len = to.layout.bytes();
        source.host_access("copy", Fault::Read, from.slot.offset, len, false)?;
        self.host_access("copy", Fault::Write, to.offset, len, true)?;
        self.place(to).copy_from(&source.place(from.slot))?;
        Ok(true)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
