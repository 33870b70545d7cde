//! The devices of one scheduler, in order of preference, and the kinds of memory that they bring.

use samite_core::{BufferType, Device, DeviceKind, Error, Result, StoredTensor, same_buffer_type};
use std::sync::Arc;

/// Devices in order of preference. The last one is where inputs start and where everything can fall back to,
/// usually the CPU.
#[derive(Clone, Debug)]
pub struct DeviceSet {
    devices: Vec<Arc<dyn Device>>,
    /// The memory of each device, as an index into `memories`.
    memory_of: Vec<usize>,
    memories: Vec<Arc<dyn BufferType>>,
    /// By device: the memories of its members, each apart also where members have memory of one type.
    members: Vec<Vec<usize>>,
    /// By device and memory.
    usable: Vec<Vec<bool>>,
}

impl DeviceSet {
    /// Declares the devices.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is none or a name appears twice, in whatever case.
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
        // Results in host memory may be copied to a device, or come from there.
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

    /// Number of devices.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Never: there is at least one device.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// The device number `index`.
    pub fn get(&self, index: usize) -> &Arc<dyn Device> {
        &self.devices[index]
    }

    /// All devices, most wanted first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<dyn Device>> {
        self.devices.iter()
    }

    /// The last device, where inputs start.
    pub fn last(&self) -> usize {
        self.devices.len() - 1
    }

    /// The number of the device called `name`, in any mixture of upper and lower case.
    pub fn position(&self, name: &str) -> Option<usize> {
        let mut devices = self.devices.iter();
        devices.position(|device| device.name().eq_ignore_ascii_case(name))
    }

    /// The names of all devices, for messages.
    pub fn names(&self) -> String {
        self.devices
            .iter()
            .map(|device| device.name())
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// The different kinds of memory.
    pub fn memories(&self) -> &[Arc<dyn BufferType>] {
        &self.memories
    }

    /// Which memory results on `device` get, by its position in [`MemoryPlan::chunks`](crate::memory_plan::MemoryPlan::chunks): its own, or for a device that works on host memory the
    /// [host memory](Device::host_buffer_type) of the first device that has some which it can use, so that copies between them are quick.
    pub fn memory_of(&self, device: usize) -> usize {
        self.memory_of[device]
    }

    /// The memories of a device's members, by their positions: a device with some plans intermediate results itself.
    pub fn members_of(&self, device: usize) -> &[usize] {
        &self.members[device]
    }

    /// The first device that this memory is for.
    pub(crate) fn owner_of(&self, memory: usize) -> Option<usize> {
        (0..self.len()).find(|&d| self.memory_of[d] == memory || self.members[d].contains(&memory))
    }

    /// Whether `device` can work on results of `other`.
    pub(crate) fn shares_memory(&self, device: usize, other: usize) -> bool {
        self.usable[device][self.memory_of[other]]
    }

    /// Whether `device` can work on `stored` where it is.
    pub(crate) fn can_use(&self, device: usize, stored: &StoredTensor) -> bool {
        self.devices[device].supports_buffer_type(stored.tensor().buffer.buffer_type())
    }

    /// Whether work on `device` goes on while the host does something else.
    pub(crate) fn is_asynchronous(&self, device: usize) -> bool {
        self.devices[device].capabilities().asynchronous
    }

    /// Whether copies that `device` makes have a stream of their own, so that they overlap with what it computes.
    pub(crate) fn has_copy_stream(&self, device: usize) -> bool {
        let can = self.devices[device].capabilities();
        can.asynchronous && can.events && can.streams
    }

    /// Whether the device is the place of last resort rather than something faster.
    pub(crate) fn is_host(&self, device: usize) -> bool {
        device == self.last()
            && (self.devices.len() == 1 || self.devices[device].kind() == DeviceKind::Cpu)
            || self.devices[device].kind() == DeviceKind::Cpu
                && self.devices[device].buffer_type().is_host()
    }
}
