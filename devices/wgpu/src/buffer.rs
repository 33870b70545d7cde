//! Device memory.

use crate::gpu::{DriverBuffer, Gpu, Opened};
use samite_core::{
    Buffer, BufferType, Error, Layout, Location, MemoryId, Result, Slot, TensorInfo, TensorRef,
    Usage,
};
use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// Alignment of tensors. Every adapter can start a binding at a multiple of it.
const ALIGNMENT: usize = 256;

/// Size unit of buffers in bytes: kernels bind buffers as arrays of `vec4<u32>`.
pub const BUFFER_UNIT: usize = 16;

/// Bytes that one write of a fill covers.
const FILL_PIECE: usize = 1 << 20;

/// The memory of one adapter. All devices of the adapter share it, whatever their options.
#[derive(Debug)]
pub struct WgpuBufferType {
    gpu: Arc<Gpu>,
    this: Weak<WgpuBufferType>,
}

impl WgpuBufferType {
    pub fn new(gpu: Arc<Gpu>) -> Arc<Self> {
        Arc::new_cyclic(|this| WgpuBufferType {
            gpu,
            this: Weak::clone(this),
        })
    }
}

impl BufferType for WgpuBufferType {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn alignment(&self) -> usize {
        ALIGNMENT
    }

    fn max_size(&self) -> usize {
        usize::try_from(self.gpu.limits.max_buffer_size).unwrap_or(usize::MAX) & !(BUFFER_UNIT - 1)
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        Ok(tensor.layout.bytes().next_multiple_of(BUFFER_UNIT))
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        let too_much = || self.too_much(size);
        // alive while a caller holds it
        let buffer_type = self.this.upgrade().ok_or_else(too_much)?;
        let buffer = self.create(buffer_type, size, usage)?;
        Ok(Arc::new(buffer))
    }
}

impl WgpuBufferType {
    /// Creates a buffer that reports `buffer_type` as its type.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`] if the driver cannot allocate it.
    pub fn create(
        &self,
        buffer_type: Arc<dyn BufferType>,
        size: usize,
        usage: Usage,
    ) -> Result<WgpuBuffer> {
        let opened = self.gpu.open()?;
        let whole = size
            .max(BUFFER_UNIT)
            .checked_next_multiple_of(BUFFER_UNIT)
            .filter(|&whole| whole <= self.max_size());
        let whole = whole.ok_or_else(|| self.too_much(size))?;
        let usages = wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_SRC
            | wgpu::BufferUsages::COPY_DST;
        let raw = opened.create("a buffer", whole as u64, usages)?;
        opened.allocated.fetch_add(whole as u64, Ordering::Relaxed);
        Ok(WgpuBuffer {
            gpu: Arc::clone(&self.gpu),
            buffer_type,
            memory: DriverBuffer {
                raw,
                id: MemoryId::unique(),
            },
            size,
            usage,
        })
    }

    fn too_much(&self, asked: usize) -> Error {
        Error::OutOfMemory {
            device: self.gpu.name().into(),
            what: format!("a buffer ({} at most)", self.max_size()).into(),
            asked,
            free: None,
        }
    }
}

/// A storage buffer.
#[derive(Debug)]
pub struct WgpuBuffer {
    gpu: Arc<Gpu>,
    buffer_type: Arc<dyn BufferType>,
    pub memory: DriverBuffer,
    size: usize,
    usage: Usage,
}

impl WgpuBuffer {
    /// Returns the buffer of `tensor` if `gpu` owns it.
    pub fn of<'a>(tensor: &'a TensorRef, gpu: &Arc<Gpu>) -> Option<&'a WgpuBuffer> {
        let buffer = tensor.buffer.as_any().downcast_ref::<WgpuBuffer>()?;
        buffer.is_of(gpu).then_some(buffer)
    }

    /// Returns whether `gpu` owns the buffer.
    pub fn is_of(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(&self.gpu, gpu)
    }

    /// Returns the byte offset in the buffer of `len` bytes at `offset` of a tensor. The range must
    /// lie inside the tensor and the buffer.
    pub fn range(&self, tensor: Slot, offset: usize, len: usize) -> Result<u64> {
        let outside = || {
            Error::invalid(format!(
                "bytes {offset}..+{len} of a tensor at {} are outside of a buffer of {} bytes",
                tensor.offset, self.size
            ))
        };
        let start = tensor.offset.checked_add(offset).ok_or_else(outside)?;
        let end = start.checked_add(len).ok_or_else(outside)?;
        if end > self.size {
            return Err(outside());
        }
        Ok(start as u64)
    }

    pub fn opened(&self) -> Result<&Opened> {
        self.gpu.open()
    }
}

impl Drop for WgpuBuffer {
    fn drop(&mut self) {
        if let Some(opened) = self.gpu.opened() {
            let size = self.memory.raw.size();
            opened.allocated.fetch_sub(size, Ordering::Relaxed);
        }
    }
}

impl Buffer for WgpuBuffer {
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
            memory: self.memory.id,
            offset: 0,
        }
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        let start = self.range(tensor, offset, data.len())?;
        self.opened()?.write(&self.memory.raw, start, data)
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        let start = self.range(tensor, offset, out.len())?;
        self.opened()?.read(&self.memory.raw, start, out)
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        let start = self.range(tensor, offset, len)?;
        let opened = self.opened()?;
        if value == 0 && start.is_multiple_of(4) && len.is_multiple_of(4) && len > 0 {
            let mut encoder = opened.encoder();
            encoder.clear_buffer(&self.memory.raw, start, Some(len as u64));
            return opened.submit(Some(encoder)).map(drop);
        }
        let bytes = vec![value; len.min(FILL_PIECE)];
        let mut at = 0;
        while at < len {
            let piece = &bytes[..FILL_PIECE.min(len - at)];
            opened.write(&self.memory.raw, start + at as u64, piece)?;
            at += piece.len();
        }
        Ok(())
    }

    fn clear(&self, value: u8) -> Result<()> {
        let whole = Slot {
            offset: 0,
            layout: Layout::contiguous(samite_core::DType::I8, [self.size, 1, 1, 1])?,
        };
        self.fill(whole, 0, self.size, value)
    }

    fn copy_from(&self, to: Slot, from: &TensorRef) -> Result<bool> {
        let Some(source) = WgpuBuffer::of(from, &self.gpu) else {
            return Ok(false);
        };
        let len = to.layout.bytes();
        let target = self.range(to, 0, len)?;
        let start = source.range(from.slot, 0, len)?;
        let opened = self.opened()?;
        opened.copy((&source.memory, start), (&self.memory, target), len as u64)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
