//! Memory of one device, which the host cannot access directly.

use crate::fault::FaultPlan;
use crate::float64::Float64;
use samite_core::{
    Buffer, BufferType, Error, HostMemory, Location, Result, Slot, TensorInfo, TensorRef, Usage,
};
use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Memory type of one device instance.
#[derive(Debug)]
pub(crate) struct ReferenceBufferType {
    /// Reference to itself, for buffers.
    this: Weak<ReferenceBufferType>,
    name: String,
    alignment: usize,
    max_size: usize,
    limit: Option<usize>,
    used: AtomicUsize,
    float64: bool,
    faults: Option<Arc<FaultPlan>>,
}

impl ReferenceBufferType {
    pub fn new(options: &crate::ReferenceOptions) -> Arc<Self> {
        Arc::new_cyclic(|this| ReferenceBufferType {
            this: Weak::clone(this),
            name: options.name.clone(),
            alignment: options.alignment.next_power_of_two(),
            max_size: options.max_buffer_size,
            limit: options.memory_limit,
            used: AtomicUsize::new(0),
            float64: options.float64,
            faults: options.faults.clone(),
        })
    }

    /// Returns the bytes that can still be allocated, if there is a limit.
    pub fn free(&self) -> Option<usize> {
        let used = self.used.load(Ordering::SeqCst);
        self.limit.map(|limit| limit.saturating_sub(used))
    }

    /// Charges `size` bytes to the limit.
    fn take(&self, size: usize) -> Result<()> {
        let limit = self.limit.unwrap_or(usize::MAX);
        let taken = self
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
                used.checked_add(size).filter(|&used| used <= limit)
            });
        match taken {
            Ok(_) if size <= self.max_size => Ok(()),
            Ok(_) => {
                self.used.fetch_sub(size, Ordering::SeqCst);
                Err(self.out_of_memory(size))
            }
            Err(_) => Err(self.out_of_memory(size)),
        }
    }

    fn out_of_memory(&self, asked: usize) -> Error {
        Error::OutOfMemory {
            device: self.name.as_str().into(),
            what: "a buffer".into(),
            asked,
            free: self.free().map(|free| free.min(self.max_size)),
        }
    }

    /// Returns a buffer in `memory`, for which `charged` bytes were charged to the limit.
    fn buffer(
        &self,
        memory: Arc<HostMemory>,
        charged: usize,
        usage: Usage,
    ) -> Result<Arc<dyn Buffer>> {
        let owner = self
            .this
            .upgrade()
            .ok_or_else(|| Error::device(&self.name, "its memory is going away"))?;
        // Imported memory may change without the device's knowledge.
        let float64 = (self.float64 && charged > 0)
            .then(|| Float64::new(charged))
            .transpose()?;
        Ok(Arc::new(ReferenceBuffer {
            float64,
            buffer_type: Arc::clone(&owner) as Arc<dyn BufferType>,
            owner,
            memory,
            charged,
            usage,
        }))
    }

    /// Returns a buffer over existing memory.
    pub fn import(&self, memory: Arc<HostMemory>, usage: Usage) -> Result<Arc<dyn Buffer>> {
        FaultPlan::check(self.faults.as_ref(), &self.name, "import_host")?;
        self.buffer(memory, 0, usage)
    }
}

impl BufferType for ReferenceBufferType {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn max_size(&self) -> usize {
        self.max_size
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        FaultPlan::check(self.faults.as_ref(), &self.name, "allocate")?;
        self.take(size)?;
        let buffer = HostMemory::allocate(size, &self.name, "a buffer")
            .and_then(|memory| self.buffer(memory, size, usage));
        if buffer.is_err() {
            self.used.fetch_sub(size, Ordering::SeqCst);
        }
        buffer
    }
}

/// A piece of a device's memory.
#[derive(Debug)]
pub(crate) struct ReferenceBuffer {
    owner: Arc<ReferenceBufferType>,
    /// The owner, as a trait object.
    buffer_type: Arc<dyn BufferType>,
    memory: Arc<HostMemory>,
    charged: usize,
    usage: Usage,
    float64: Option<Float64>,
}

impl ReferenceBuffer {
    /// Records that bytes were written from outside.
    fn written(&self, offset: usize, len: usize) -> Result<()> {
        match &self.float64 {
            Some(float64) => float64.refresh(&self.memory, offset, len),
            None => Ok(()),
        }
    }

    fn check(&self, what: &str) -> Result<()> {
        FaultPlan::check(self.owner.faults.as_ref(), &self.owner.name, what)
    }
}

impl Drop for ReferenceBuffer {
    fn drop(&mut self) {
        self.owner.used.fetch_sub(self.charged, Ordering::SeqCst);
    }
}

fn position(tensor: Slot, offset: usize) -> Result<usize> {
    tensor
        .offset
        .checked_add(offset)
        .ok_or_else(|| Error::invalid(format!("byte {offset} of a tensor overflows")))
}

impl Buffer for ReferenceBuffer {
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

    fn is_writable(&self) -> bool {
        self.memory.is_writable()
    }

    fn init_tensor(&self, _offset: usize, _tensor: &TensorInfo<'_>) -> Result<()> {
        self.check("init_tensor")
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        self.check("write")?;
        let at = position(tensor, offset)?;
        self.memory.write(at, data)?;
        self.written(at, data.len())
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check("read")?;
        self.memory.read(position(tensor, offset)?, out)
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        self.check("fill")?;
        let at = position(tensor, offset)?;
        self.memory.fill(at, len, value)?;
        self.written(at, len)
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.check("clear")?;
        self.memory.fill(0, self.memory.len(), value)?;
        self.written(0, self.memory.len())
    }

    fn copy_from(&self, to: Slot, from: &TensorRef) -> Result<bool> {
        let Some(source) = from.buffer.as_any().downcast_ref::<ReferenceBuffer>() else {
            return Ok(false);
        };
        if !Arc::ptr_eq(&source.owner, &self.owner) {
            return Ok(false);
        }
        self.check("copy")?;
        let len = from.slot.layout.bytes();
        source
            .memory
            .copy_to(from.slot.offset, &self.memory, to.offset, len)?;
        if let (Some(mine), Some(theirs)) = (&self.float64, &source.float64) {
            mine.copy_from(to.offset, theirs, from.slot.offset, len)?;
        }
        Ok(true)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Returns the bytes of a buffer that a reference device can work on.
pub(crate) fn memory(buffer: &Arc<dyn Buffer>) -> Result<&Arc<HostMemory>> {
    match buffer.as_any().downcast_ref::<ReferenceBuffer>() {
        Some(own) => Ok(&own.memory),
        None => buffer.host().ok_or_else(|| {
            Error::invalid(format!(
                "a tensor lies in memory of type '{}', which a reference device cannot see",
                buffer.buffer_type().name()
            ))
        }),
    }
}

/// Returns the numbers of a buffer whose device keeps them in float64.
pub(crate) fn float64(buffer: &Arc<dyn Buffer>) -> Option<&Float64> {
    let own = buffer.as_any().downcast_ref::<ReferenceBuffer>()?;
    own.float64.as_ref()
}
