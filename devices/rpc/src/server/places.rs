//! Resolves a client's numbers: its buffers, and addresses in them.
//!
//! Addresses are virtual: each buffer starts at a multiple of a terabyte. A tensor's location is
//! the number of a buffer, which must belong to this client, and an address. The whole range of the
//! tensor must lie in that buffer.

use samite_core::{
    Buffer, Charge, Device, Layout, Ledger, Slot, TensorRef, Usage, same_buffer_type, unallocated,
};
use samite_wire::import::Tensors;
use samite_wire::numbers::{MAX_SRC, Release};
use samite_wire::rpc::graph::{GraphMessage, MAX_SOURCES};
use samite_wire::rpc::record::Record;
use samite_wire::{Description, UnsupportedConversion};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// A buffer of a client.
pub(super) struct ClientBuffer {
    pub buffer: Arc<dyn Buffer>,
    /// Virtual start address.
    pub base: u64,
    slot: u64,
    _charge: Charge,
}

/// The buffers of one client.
#[derive(Default)]
pub(super) struct Buffers {
    held: HashMap<u64, ClientBuffer>,
    /// Last number assigned. Numbers are never reused.
    last: u64,
    /// Address ranges that were in use and are free.
    free: Vec<u64>,
    slots: u64,
}

impl Buffers {
    /// Distance between the start addresses of buffers in bytes.
    pub const DISTANCE: u64 = 1 << 40;

    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Adds a buffer and returns its number.
    pub fn add(&mut self, buffer: Arc<dyn Buffer>, charge: Charge) -> u64 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots += 1;
            self.slots
        });
        self.last += 1;
        let held = ClientBuffer {
            buffer,
            base: slot.saturating_mul(Self::DISTANCE),
            slot,
            _charge: charge,
        };
        self.held.insert(self.last, held);
        self.last
    }

    pub fn get(&self, number: u64) -> Result<&ClientBuffer, UnsupportedConversion> {
        let unknown = || format!("there is no buffer {number:#x} of this client").into();
        self.held.get(&number).ok_or_else(unknown)
    }

    pub fn remove(&mut self, number: u64) -> Result<(), UnsupportedConversion> {
        self.get(number)?;
        if let Some(held) = self.held.remove(&number) {
            self.free.push(held.slot);
        }
        Ok(())
    }

    /// Returns the location of a tensor, if it lies in its buffer.
    pub fn place(
        &self,
        record: &Record,
        layout: Layout,
    ) -> Result<TensorRef, UnsupportedConversion> {
        if record.buffer == 0 || record.data == 0 {
            return Err(format!("'{}' lies in no buffer", record.name()).into());
        }
        let held = self.get(record.buffer)?;
        let offset = record.data.checked_sub(held.base);
        let offset = offset.and_then(|offset| usize::try_from(offset).ok());
        let size = held.buffer.size();
        let inside = offset.filter(|offset| {
            let end = offset.checked_add(layout.bytes());
            end.is_some_and(|end| end <= size)
        });
        let offset = inside.ok_or_else(|| {
            format!(
                "'{}' ({layout}) at {:#x} does not lie in its buffer of {size} bytes at {:#x}",
                record.name(),
                record.data,
                held.base
            )
        })?;
        check_repeated(record, &layout, size)?;
        Ok(TensorRef {
            buffer: Arc::clone(&held.buffer),
            slot: Slot { offset, layout },
        })
    }
}

/// Checks that a tensor does not have many more elements than its memory holds.
fn check_repeated(
    record: &Record,
    layout: &Layout,
    buffer: usize,
) -> Result<(), UnsupportedConversion> {
    let checked = samite_core::check_repeated(&record.name(), layout, buffer);
    checked.map_err(|error| error.to_string().into())
}

/// Returns the layout of a tensor.
pub(super) fn layout(record: &Record, release: &Release) -> Result<Layout, UnsupportedConversion> {
    samite_wire::import::layout(&record.description(release))
}

/// A graph whose tensors lie in a client's buffers.
pub(super) struct ClientGraph<'a> {
    pub graph: &'a GraphMessage,
    /// Numbers of its operations and types.
    pub release: &'static Release,
    pub buffers: &'a Buffers,
    pub device: &'a dyn Device,
    pub ledger: &'a Arc<Ledger>,
    /// Numbers of the buffers in use.
    pub used: &'a mut BTreeSet<u64>,
    /// Charges for the memory of intermediate results.
    pub charges: &'a mut Vec<Charge>,
}

/// Allocates memory of a device for a client.
pub(super) fn allocate(
    device: &dyn Device,
    bytes: usize,
    ledger: &Arc<Ledger>,
    charges: &mut Vec<Charge>,
) -> Result<Arc<dyn Buffer>, UnsupportedConversion> {
    let charge = ledger.take(bytes);
    let charge =
        charge.ok_or_else(|| format!("{bytes} bytes are more than this client may take"))?;
    let buffer = device.buffer_type().allocate(bytes, Usage::Compute);
    charges.push(charge);
    buffer.map_err(|error| error.to_string().into())
}

impl Tensors for ClientGraph<'_> {
    type Key = usize;

    fn describe(&self, key: usize) -> Description {
        self.graph.tensors[key].description(self.release)
    }

    fn sources(&self, key: usize) -> [Option<usize>; MAX_SRC] {
        let sources = self.graph.tensors[key].src;
        sources.map(|id| self.graph.place(id))
    }

    fn name(&self, key: usize) -> String {
        self.graph.tensors[key].name()
    }

    fn is_placed(&self, key: usize) -> bool {
        self.graph.tensors[key].buffer != 0
    }

    fn uses(&self, key: usize) -> Option<usize> {
        usize::try_from(self.graph.tensors[key].use_count).ok()
    }

    fn place(&mut self, key: usize, layout: Layout) -> Result<TensorRef, UnsupportedConversion> {
        let record = &self.graph.tensors[key];
        if layout.is_empty() {
            check_repeated(record, &layout, 0)?;
            // Use its buffer if it has one, because some devices check if they can access it.
            let slot = Slot { offset: 0, layout };
            if let Ok(held) = self.buffers.get(record.buffer) {
                self.used.insert(record.buffer);
                let buffer = Arc::clone(&held.buffer);
                return Ok(TensorRef { buffer, slot });
            }
            let buffer = unallocated(&self.device.buffer_type(), 0, Usage::Compute);
            return Ok(TensorRef { buffer, slot });
        }
        let place = self.buffers.place(record, layout)?;
        let memory = place.buffer.buffer_type();
        if !same_buffer_type(memory, &self.device.buffer_type())
            && !self.device.supports_buffer_type(memory)
        {
            return Err(format!(
                "'{}' lies in memory of type '{}', which {} cannot use",
                record.name(),
                memory.name(),
                self.device.name()
            )
            .into());
        }
        self.used.insert(record.buffer);
        Ok(place)
    }

    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, UnsupportedConversion> {
        let buffer = allocate(self.device, layout.bytes(), self.ledger, self.charges)?;
        let slot = Slot { offset: 0, layout };
        Ok(TensorRef { buffer, slot })
    }
}

/// A node and its operands before they have memory.
pub(super) struct SupportQuery<'a> {
    pub device: &'a dyn Device,
    /// Numbers of the operation and types.
    pub release: &'static Release,
    pub sources: &'a [Record; MAX_SOURCES],
    pub tensor: &'a Record,
}

impl SupportQuery<'_> {
    /// Key of the node.
    pub const NODE: usize = MAX_SOURCES;

    fn record(&self, key: usize) -> &Record {
        self.sources.get(key).unwrap_or(self.tensor)
    }
}

impl Tensors for SupportQuery<'_> {
    type Key = usize;

    fn describe(&self, key: usize) -> Description {
        self.record(key).description(self.release)
    }

    fn sources(&self, key: usize) -> [Option<usize>; MAX_SRC] {
        let is_there = |index: usize| key == Self::NODE && self.sources[index].id != 0;
        std::array::from_fn(|index| is_there(index).then_some(index))
    }

    fn name(&self, key: usize) -> String {
        self.record(key).name()
    }

    fn is_placed(&self, _: usize) -> bool {
        false
    }

    fn uses(&self, _: usize) -> Option<usize> {
        None
    }

    fn place(&mut self, _: usize, layout: Layout) -> Result<TensorRef, UnsupportedConversion> {
        self.temporary(layout)
    }

    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, UnsupportedConversion> {
        let memory = self.device.buffer_type();
        Ok(TensorRef {
            buffer: unallocated(&memory, isize::MAX as usize, Usage::Any),
            slot: Slot { offset: 0, layout },
        })
    }
}
