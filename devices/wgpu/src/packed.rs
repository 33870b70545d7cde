//! Memory of packed weights.

use crate::buffer::{WgpuBuffer, WgpuBufferType};
use crate::gpu::Gpu;
use samite_core::{BufferType, Result, TensorRef, Usage};
use samite_quant::{PackableMemory, PackedBuffer, PackedMemory};
use std::sync::Arc;

/// Returns the packed rows of `tensor` if it is packed and `gpu` owns it.
pub fn packed_rows<'a>(tensor: &'a TensorRef, gpu: &Arc<Gpu>) -> Option<&'a WgpuBuffer> {
    let buffer = tensor.buffer.as_any();
    let buffer = buffer.downcast_ref::<PackedBuffer<WgpuBuffer>>()?;
    buffer.rows().is_of(gpu).then_some(buffer.rows())
}

impl PackableMemory for WgpuBufferType {
    type Buffer = WgpuBuffer;

    fn create(
        &self,
        buffer_type: Arc<dyn BufferType>,
        size: usize,
        usage: Usage,
    ) -> Result<WgpuBuffer> {
        WgpuBufferType::create(self, buffer_type, size, usage)
    }
}

impl PackedMemory for WgpuBuffer {
    fn size(&self) -> usize {
        samite_core::Buffer::size(self)
    }

    fn read(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.opened()?.read(&self.memory.raw, at as u64, out)
    }

    fn write(&self, at: usize, data: &[u8]) -> Result<()> {
        self.opened()?.write(&self.memory.raw, at as u64, data)
    }
}
