//! Stand-ins for members in other processes. Each process has one real member and stand-ins for the
//! others, so that all processes plan the same.
//!
//! A stand-in answers planning queries like the device of this process, and describes itself as its
//! process reported. It computes nothing and allocates no memory.

use crate::comm::ProcessGroup;
use samite_core::{Device, DeviceKind, DeviceWrapper, Error, MemoryInfo, Result, WrappedDevice};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Description of a device, sent to the other processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct DeviceDescription {
    host: String,
    name: String,
    description: String,
    kind: DeviceKind,
    physical_id: Option<String>,
    free: Option<usize>,
    total: Option<usize>,
}

/// A member as all processes see it. It wraps the device of this process.
struct StandInDevice {
    inner: Arc<dyn Device>,
    name: String,
    about: DeviceDescription,
}

impl DeviceWrapper for StandInDevice {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        self.about.description.clone()
    }

    fn kind(&self) -> DeviceKind {
        self.about.kind
    }

    fn physical_id(&self) -> Option<String> {
        let id = self.about.physical_id.as_ref()?;
        Some(format!("{}/{id}", self.about.host))
    }

    /// Returns the memory that was free at the start. All processes must see the same value, or
    /// their plans would differ.
    fn memory(&self) -> MemoryInfo {
        MemoryInfo {
            free: self.about.free,
            total: self.about.total,
        }
    }
}

/// Returns the members of all processes. `own` is this process's device.
pub(crate) fn members(
    own: &Arc<dyn Device>,
    group: &ProcessGroup,
    host: &str,
) -> Result<Vec<Arc<dyn Device>>> {
    let memory = own.memory();
    let about = DeviceDescription {
        host: host.to_owned(),
        name: own.name().to_owned(),
        description: own.description(),
        kind: own.kind(),
        physical_id: own.physical_id(),
        free: memory.free,
        total: memory.total,
    };
    let strange = |error| Error::device("meta", format!("what processes tell each other: {error}"));
    let mine = serde_json::to_vec(&about).map_err(strange)?;
    let told = group.tell(&mine)?;
    let member = |(rank, told): (usize, &Vec<u8>)| {
        let about: DeviceDescription = serde_json::from_slice(told).map_err(strange)?;
        Ok(WrappedDevice::device(StandInDevice {
            inner: Arc::clone(own),
            name: format!("rank{rank}:{}", about.name),
            about,
        }))
    };
    told.iter().enumerate().map(member).collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::comm::played::Played;
    use crate::comm::{ProcessGroup, ProcessOptions};
    use crate::{MetaDevice, MetaOptions};
    use samite_core::{Cut, DType, Device, Layout, MemoryInfo, StoredTensor, TensorInfo, Usage};
    use samite_cpu::{CpuDevice, CpuOptions};
    use std::sync::Arc;

    #[test]
    fn each_process_allocates_only_its_own_shard() {
        let work = |end: Played| {
            let group = ProcessGroup::new(Box::new(end), ProcessOptions::default());
            let rank = group.rank();
            let name = format!("cpu{rank}");
            let own: Arc<dyn Device> =
                CpuDevice::with_name(&name, CpuOptions::default().with_threads(1));
            let device = MetaDevice::among(&own, group, &name, MetaOptions::default()).unwrap();
            let names: Vec<_> = device.members().iter().map(|m| m.name()).collect();
            assert_eq!(names, ["rank0:cpu0", "rank1:cpu1", "rank2:cpu2"]);
            // Each has two of six rows.
            let layout = Layout::contiguous(DType::F32, [4, 6, 1, 1]).unwrap();
            let info = TensorInfo {
                cut: Some(Cut::new(1, 1, 0)),
                ..TensorInfo::new("w", layout, Usage::Weights)
            };
            let memory = device.buffer_type();
            let size = memory.alloc_size(&info).unwrap();
            let buffer = memory.allocate(size, Usage::Weights).unwrap();
            let stored = StoredTensor::described(&info, buffer, 0).unwrap();
            let bytes: Vec<u8> = (0..96).collect();
            stored.tensor().write(0, &bytes).unwrap();
            let mut rows = [0; 32];
            stored.tensor().read(32 * rank, &mut rows).unwrap();
            assert_eq!(rows, bytes[32 * rank..][..32]);
            let error = stored.tensor().read(0, &mut [0; 96]).unwrap_err();
            assert!(error.to_string().contains("another process"), "{error}");
            let (_, parts) = device.plain_memory().locals(&stored).unwrap();
            for (member, part) in parts.iter().enumerate() {
                let buffer = &part.as_ref().unwrap().tensor().buffer;
                assert_eq!(buffer.host().is_some(), member == rank);
            }
            for (member, memory) in device.member_memories().iter().enumerate() {
                let buffer = memory.allocate(64, Usage::Compute).unwrap();
                assert_eq!(buffer.host().is_some(), member == rank);
            }
            let MemoryInfo { free, total } = device.memory();
            (device.description(), free, total)
        };
        let seen: Vec<_> = std::thread::scope(|scope| {
            let work = &work;
            let ends = Played::all(3).into_iter();
            let all: Vec<_> = ends.map(|end| scope.spawn(move || work(end))).collect();
            all.into_iter().map(|p| p.join().unwrap()).collect()
        });
        // All processes plan with the same figures.
        assert!(seen.iter().all(|theirs| *theirs == seen[0]), "{seen:?}");
    }
}
