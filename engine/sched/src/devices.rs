//! Devices of one scheduler, in order of preference, and their memories.

use samite_core::{BufferType, Device, DeviceKind, Error, Result, StoredTensor, same_buffer_type};
use std::sync::Arc;

/// Devices in order of preference. The last one, usually the CPU, is where inputs start and to
/// which everything can fall back.
#[derive(Clone, Debug)]
pub struct DeviceSet {
    devices: Vec<Arc<dyn Device>>,
    /// Memory of each device, as an index into `memories`.
    memory_of: Vec<usize>,
    memories: Vec<Arc<dyn BufferType>>,
    /// Memories of each device's members. Members have separate memories even if these have one
    /// type.
    members: Vec<Vec<usize>>,
    /// Usable memories, by device and memory.
    usable: Vec<Vec<bool>>,
}

impl DeviceSet {
    /// Creates a set of devices.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are no devices or a name appears twice, ignoring case.
    pub fn new(devices: Vec<Arc<dyn Device>>) -> Result<Self> {
        if devices.is_empty() {
            return Err(Error::invalid("a scheduler needs at least one device"));
        }
        for (i, device) in devices.iter().enumerate() {
            if devices[..i]
                .iter()
                .any(|other| other.name().eq_ignore_ascii_case(device.name()))
            {
                return Err(Error::invalid(format!(
                    "device '{}' is given twice",
                    device.name()
                )));
            }
        }
        // Results in host memory may be copied to or from a device.
        let quick: Vec<_> = devices
            .iter()
            .filter_map(|device| device.host_buffer_type())
            .collect();
        let mut memories: Vec<Arc<dyn BufferType>> = Vec::new();
        let memory_of = devices
            .iter()
            .map(|device| {
                let own = device.buffer_type();
                let mut quick = quick.iter();
                let quick = quick.find(|m| own.is_host() && device.supports_buffer_type(m));
                let memory = quick.cloned().unwrap_or(own);
                memories
                    .iter()
                    .position(|known| same_buffer_type(known, &memory))
                    .unwrap_or_else(|| {
                        memories.push(memory);
                        memories.len() - 1
                    })
            })
            .collect();
        let mut members = Vec::new();
        for device in &devices {
            let first = memories.len();
            memories.extend(device.member_memories());
            members.push((first..memories.len()).collect());
        }
        let usable = devices
            .iter()
            .map(|d| memories.iter().map(|m| d.supports_buffer_type(m)).collect())
            .collect();
        Ok(DeviceSet {
            devices,
            memory_of,
            members,
            memories,
            usable,
        })
    }

    /// Returns the number of devices.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Returns false: there is at least one device.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Returns the device number `index`.
    pub fn get(&self, index: usize) -> &Arc<dyn Device> {
        &self.devices[index]
    }

    /// Iterates over all devices, in order of preference.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<dyn Device>> {
        self.devices.iter()
    }

    /// Returns the last device, where inputs start.
    pub fn last(&self) -> usize {
        self.devices.len() - 1
    }

    /// Returns the index of the device called `name`, ignoring case.
    pub fn position(&self, name: &str) -> Option<usize> {
        let mut devices = self.devices.iter();
        devices.position(|device| device.name().eq_ignore_ascii_case(name))
    }

    /// Returns the names of all devices, for messages.
    pub fn names(&self) -> String {
        self.devices
            .iter()
            .map(|device| device.name())
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Returns the distinct memories.
    pub fn memories(&self) -> &[Arc<dyn BufferType>] {
        &self.memories
    }

    /// Returns the memory of results on `device`, as an index into
    /// [`MemoryPlan::chunks`](crate::memory_plan::MemoryPlan::chunks). This is the device's own
    /// memory. A device that works on host memory gets the [host memory](Device::host_buffer_type)
    /// of the first device whose host memory it can use, so that copies between them are fast.
    pub fn memory_of(&self, device: usize) -> usize {
        self.memory_of[device]
    }

    /// Returns the memories of a device's members, as indices. A device with members plans
    /// intermediate results itself.
    pub fn members_of(&self, device: usize) -> &[usize] {
        &self.members[device]
    }

    /// Returns the first device that uses this memory for results.
    pub(crate) fn owner_of(&self, memory: usize) -> Option<usize> {
        (0..self.len()).find(|&d| self.memory_of[d] == memory || self.members[d].contains(&memory))
    }

    /// Returns whether `device` can work on results of `other`.
    pub(crate) fn shares_memory(&self, device: usize, other: usize) -> bool {
        self.usable[device][self.memory_of[other]]
    }

    /// Returns whether `device` can use `stored` without a copy.
    pub(crate) fn can_use(&self, device: usize, stored: &StoredTensor) -> bool {
        self.devices[device].supports_buffer_type(stored.tensor().buffer.buffer_type())
    }

    /// Returns whether work on `device` runs asynchronously to the host.
    pub(crate) fn is_asynchronous(&self, device: usize) -> bool {
        self.devices[device].capabilities().asynchronous
    }

    /// Returns whether copies by `device` have their own stream, so that they overlap with
    /// computation.
    pub(crate) fn has_copy_stream(&self, device: usize) -> bool {
        let can = self.devices[device].capabilities();
        can.asynchronous && can.events && can.streams
    }

    /// Returns whether the device is the fallback of last resort and not something faster.
    pub(crate) fn is_host(&self, device: usize) -> bool {
        device == self.last()
            && (self.devices.len() == 1 || self.devices[device].kind() == DeviceKind::Cpu)
            || self.devices[device].kind() == DeviceKind::Cpu
                && self.devices[device].buffer_type().is_host()
    }
}
