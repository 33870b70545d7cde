//! Memory of packed weights.

use crate::buffer::{CudaBuffer, CudaBufferType};
use crate::gpu::Gpu;
use samite_core::{BufferType, Result, TensorRef, Usage};
use samite_quant::{PackableMemory, PackedBuffer, PackedMemory};
use std::sync::Arc;

/// Returns the packed rows of `tensor` if it is packed and `gpu` owns it.
pub fn packed_rows<'a>(tensor: &'a TensorRef, gpu: &Arc<Gpu>) -> Option<&'a CudaBuffer> {
    let buffer = tensor.buffer.as_any();
    let buffer = buffer.downcast_ref::<PackedBuffer<CudaBuffer>>()?;
    buffer.rows().is_of(gpu).then_some(buffer.rows())
}

impl PackableMemory for CudaBufferType {
    type Buffer = CudaBuffer;

    fn create(
        &self,
        buffer_type: Arc<dyn BufferType>,
        size: usize,
        usage: Usage,
    ) -> Result<CudaBuffer> {
        CudaBufferType::create(self, buffer_type, size, usage)
    }
}

impl PackedMemory for CudaBuffer {
    fn size(&self) -> usize {
        samite_core::Buffer::size(self)
    }

    fn read(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.opened().read(self.address() + at as u64, out)
    }

    fn write(&self, at: usize, data: &[u8]) -> Result<()> {
        self.opened().write(self.address() + at as u64, data)
    }
}
