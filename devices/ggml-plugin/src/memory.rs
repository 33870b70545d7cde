//! Maps the memory of ggml's tensors to samite's.

use crate::buffers::{Kind, Packed, kind, packed_of, packed_slot};
use crate::device::plugin;
use samite_core::{
    Buffer as SamiteBuffer, BufferType as SamiteBufferType, Error, HostMemory, Layout, Location,
    MemoryId, Result, Slot, TensorRef, Usage, host_buffer, host_buffer_type,
};
use samite_ggml::abi::{Buffer, Tensor};
use samite_ggml::convert::UnsupportedConversion;
use samite_ggml::convert::import::{TensorMemory, temporary};
use std::any::Any;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// Actual locations of tensors, for graphs that will run.
#[derive(Default)]
pub struct TensorLocations {
    buffers: HashMap<*const Buffer, (Arc<dyn SamiteBuffer>, usize)>,
    nothing: Option<Arc<dyn SamiteBuffer>>,
}

impl TensorMemory for TensorLocations {
    fn place(
        &mut self,
        tensor: &Tensor,
        layout: Layout,
    ) -> Result<TensorRef, UnsupportedConversion> {
        if layout.is_empty() {
            let nothing = self.nothing.get_or_insert_with(nowhere);
            let slot = Slot { offset: 0, layout };
            return Ok(TensorRef {
                buffer: Arc::clone(nothing),
                slot,
            });
        }
        // SAFETY: the host passes valid tensors.
        let kind = unsafe { kind(tensor) };
        if tensor.buffer.is_null() || tensor.data.is_null() {
            return Err(format!("'{}' lies in no buffer", tensor.name()).into());
        }
        match kind {
            Kind::Host => {
                let (memory, base) = match self.buffers.get(&(tensor.buffer.cast_const())) {
                    Some(known) => known,
                    None => {
                        let new = borrow(tensor.buffer)?;
                        self.buffers.entry(tensor.buffer).or_insert(new)
                    }
                };
                let offset = (tensor.data as usize).checked_sub(*base).ok_or_else(|| {
                    UnsupportedConversion::from("a tensor lies before its buffer")
                })?;
                let slot = Slot { offset, layout };
                Ok(TensorRef {
                    buffer: Arc::clone(memory),
                    slot,
                })
            }
            Kind::Packed => {
                // SAFETY: the host passes valid tensors, and this one lies in a packed buffer.
                let Packed(memory) = unsafe { packed_of(tensor.buffer) };
                let slot = packed_slot(tensor, layout).ok_or_else(|| {
                    UnsupportedConversion::from("a tensor lies before its buffer")
                })?;
                Ok(TensorRef {
                    buffer: Arc::clone(memory),
                    slot,
                })
            }
            Kind::Asked | Kind::PackedAsked => Err("a buffer is empty".into()),
            Kind::Foreign => {
                Err(format!("'{}' lies in another device's memory", tensor.name()).into())
            }
        }
    }

    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, UnsupportedConversion> {
        temporary(layout)
    }
}

/// Wraps a ggml host buffer in samite's memory. Returns it with its address.
fn borrow(buffer: *mut Buffer) -> Result<(Arc<dyn SamiteBuffer>, usize), UnsupportedConversion> {
    // SAFETY: the host passes valid buffers; a host buffer has an address.
    let (base, size) = unsafe {
        let get_base = (*buffer).iface.get_base.ok_or("a buffer has no address")?;
        (get_base(buffer), plugin().host.fields(buffer).size)
    };
    let base = NonNull::new(base.cast::<u8>()).ok_or("a buffer has no address")?;
    // SAFETY: the host owns the memory and does not access it while a graph runs. It is only used
    // then, because prepared graphs are dropped when buffers are freed. Read-only memory, such as a
    // mapped file, is never the result of a node in the host's graphs.
    let memory = unsafe { HostMemory::borrow(base, size, true, Box::new(())) };
    Ok((host_buffer(memory, Usage::Any), base.as_ptr() as usize))
}

/// Placeholder locations for support queries, for which memory need not exist yet.
#[derive(Default)]
pub struct QueryLocations;

impl TensorMemory for QueryLocations {
    fn place(
        &mut self,
        tensor: &Tensor,
        layout: Layout,
    ) -> Result<TensorRef, UnsupportedConversion> {
        // SAFETY: the host passes valid tensors.
        match unsafe { kind(tensor) } {
            Kind::Packed => TensorLocations::default().place(tensor, layout),
            Kind::Foreign => Err("it lies in another device's memory".into()),
            Kind::Host | Kind::Asked | Kind::PackedAsked => Ok(TensorRef {
                buffer: nowhere(),
                slot: Slot { offset: 0, layout },
            }),
        }
    }

    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, UnsupportedConversion> {
        Ok(TensorRef {
            buffer: nowhere(),
            slot: Slot { offset: 0, layout },
        })
    }
}

/// Returns host memory without bytes and with unlimited size. Each has its own location, because
/// tensors in different ones do not overlap.
fn nowhere() -> Arc<dyn SamiteBuffer> {
    Arc::new(Unplaced {
        buffer_type: host_buffer_type(),
        location: Location {
            memory: MemoryId::unique(),
            offset: 0,
        },
    })
}

#[derive(Debug)]
struct Unplaced {
    buffer_type: Arc<dyn SamiteBufferType>,
    location: Location,
}

fn no_bytes() -> Error {
    Error::invalid("this memory only stands for memory that is not there yet")
}

impl SamiteBuffer for Unplaced {
    fn buffer_type(&self) -> &Arc<dyn SamiteBufferType> {
        &self.buffer_type
    }
    fn size(&self) -> usize {
        isize::MAX as usize
    }
    fn usage(&self) -> Usage {
        Usage::Any
    }
    fn location(&self) -> Location {
        self.location
    }
    fn write(&self, _: Slot, _: usize, _: &[u8]) -> Result<()> {
        Err(no_bytes())
    }
    fn read(&self, _: Slot, _: usize, _: &mut [u8]) -> Result<()> {
        Err(no_bytes())
    }
    fn fill(&self, _: Slot, _: usize, _: usize, _: u8) -> Result<()> {
        Err(no_bytes())
    }
    fn clear(&self, _: u8) -> Result<()> {
        Err(no_bytes())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
