//! Loads weights: allocates memory as planned, then reads the data into it.

use super::Weights;
use super::plan::{Group, PlannedTensor, WeightPlan, groups};
use crate::error::{Error, Result};
use crate::model::ModelOptions;
use samite_core::{
    Buffer, BufferType, CancelToken, Device, HostMemory, LockedMemory, StoredTensor, TensorGroup,
    TensorRef, Usage, same_buffer_type,
};
use samite_gguf::{GgufFile, LoadOptions, TensorInfo};
use samite_sched::DeviceSet;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Approximate size of the pieces in which several threads read large tensors. A piece is still in
/// the second-level cache when it is packed.
const CHUNK_BYTES: usize = 1 << 20;

impl WeightPlan {
    /// Loads the planned weights from the file that they were planned for.
    pub fn load(
        &self,
        file: &GgufFile,
        devices: &DeviceSet,
        options: &ModelOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Weights> {
        let mut weights = Weights {
            bytes: self.bytes()?,
            have_data: true,
            ..Weights::default()
        };
        let slots = allocate(self.tensors.clone(), file, devices)?;

        let firsts = || slots.iter().filter(|slot| slot.tensor.same_as.is_none());
        let infos = |in_place: bool| {
            let picked = firsts().filter(move |slot| slot.tensor.in_place == in_place);
            picked.map(|slot| &slot.tensor.data).collect::<Vec<_>>()
        };
        let in_place = infos(true);
        let moved = without_repeats(infos(false));
        // One piece of data can have two destinations: an embedding that is also the output, on
        // different devices.
        let mut places: BTreeMap<&str, Vec<&TensorRef>> = BTreeMap::new();
        for slot in firsts().filter(|slot| !slot.tensor.in_place) {
            let places = places.entry(&slot.tensor.data.name).or_default();
            places.push(slot.stored.tensor());
        }
        let places_of = |info: &TensorInfo| places.get(&*info.name).map_or(&[][..], Vec::as_slice);

        let size = |infos: &[&TensorInfo]| infos.iter().map(|info| info.size as u64).sum::<u64>();
        let moved_bytes = size(&moved);
        let read_bytes = moved_bytes + size(&in_place);
        let to_lock = if options.lock {
            lockable(&slots)?
        } else {
            Vec::new()
        };
        let lock_bytes = to_lock.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>();
        let total = read_bytes + lock_bytes;
        let cancelled = || options.cancel.is_cancelled();
        let default = LoadOptions::default();
        let threads = options.threads.unwrap_or(default.threads).max(1);
        let report_moved = |done: u64, _: u64| progress(done, total);
        let report_in_place = |done: u64, _: u64| progress(moved_bytes + done, total);
        let load = LoadOptions {
            threads,
            system: &*options.environment.threads,
            // Do not touch pages of the mapping for data that is copied to other memory.
            in_place: false,
            progress: &report_moved,
            cancel: &cancelled,
        };
        let most = if options.environment.buggify.fires("small-chunks") {
            1
        } else {
            CHUNK_BYTES
        };
        let chunk_bytes = |info: &TensorInfo| chunk_bytes(info, places_of(info), most);
        file.load_chunks(moved, chunk_bytes, &load, |info, offset, bytes| {
            places_of(info)
                .iter()
                .try_for_each(|place| place.write(offset, bytes))
                .map_err(Error::from)
        })?;
        // Page in mapped data, so that the first token does not wait for the disk.
        let load = LoadOptions {
            in_place: true,
            progress: &report_in_place,
            ..load
        };
        file.load(in_place, &load, |_, _| Ok::<_, Error>(()))?;

        if options.lock {
            // Whole pages are larger than the tensors, and memory of devices is not locked.
            let report = |done: usize, of: usize| {
                let share = done as f64 / of.max(1) as f64;
                progress(read_bytes + (lock_bytes as f64 * share) as u64, total);
            };
            lock(&mut weights, to_lock, &options.cancel, &report)?;
        }
        for slot in slots {
            let weight = slot.tensor.weight(slot.stored);
            weights.tensors.insert(slot.tensor.name, weight);
        }
        Ok(weights)
    }
}

/// Returns the tensors to lock, each once, with their sizes in bytes.
fn lockable(slots: &[Slot]) -> Result<Vec<(TensorRef, usize)>> {
    let firsts = slots.iter().filter(|slot| slot.tensor.same_as.is_none());
    firsts
        .map(|Slot { tensor, stored }| {
            let bytes = tensor.memory.alloc_size(&tensor.described())?;
            Ok((stored.tensor().clone(), bytes))
        })
        .collect()
}

/// Locks weights in host memory. They are already loaded, so this is fast.
fn lock(
    weights: &mut Weights,
    tensors: Vec<(TensorRef, usize)>,
    cancel: &CancelToken,
    progress: &dyn Fn(usize, usize),
) -> Result<()> {
    match LockedMemory::lock(tensors, cancel, progress)? {
        Ok(locked) => {
            if locked.bytes() == 0 {
                tracing::warn!("no weights lie in host memory: there is nothing to lock");
            }
            weights.locked = Some(locked);
        }
        Err(refused) => {
            tracing::warn!("{refused}");
            weights.lock_refused = Some(refused);
        }
    }
    Ok(())
}

/// A tensor with its memory; `S` is optional while memory is assigned.
struct Slot<S = Arc<StoredTensor>> {
    tensor: PlannedTensor,
    stored: S,
}

/// Creates memory for every tensor: imported, allocated together by kind, or shared with an earlier
/// tensor.
fn allocate(
    tensors: Vec<PlannedTensor>,
    file: &GgufFile,
    devices: &DeviceSet,
) -> Result<Vec<Slot>> {
    let mut slots: Vec<Slot<Option<Arc<StoredTensor>>>> = Vec::with_capacity(tensors.len());
    let mut imports = Imports::default();
    for mut tensor in tensors {
        let mut stored = None;
        if tensor.in_place && tensor.same_as.is_none() {
            stored = imports.tensor(file, devices.get(tensor.device), &tensor)?;
            // A tensor that cannot be used in its mapping is copied.
            tensor.in_place = stored.is_some();
        }
        slots.push(Slot { tensor, stored });
    }
    let mut allocated = Vec::new();
    for Group { memory, members } in groups(slots.iter().map(|slot| &slot.tensor)) {
        let described: Vec<_> = members
            .iter()
            .map(|&(_, tensor)| tensor.described())
            .collect();
        let bytes = TensorGroup::planned_size(&memory, &described)?;
        if let Some((_, first)) = members.first() {
            devices.get(first.device).check_free(bytes, "weights")?;
        }
        let group = TensorGroup::allocate_described(&memory, Usage::Weights, &described)?;
        let numbers = members.into_iter().map(|(i, _)| i);
        allocated.extend(numbers.zip(group.tensors));
    }
    for (i, stored) in allocated {
        slots[i].stored = Some(stored);
    }
    let mut filled: Vec<Slot> = Vec::with_capacity(slots.len());
    for Slot { tensor, stored } in slots {
        let stored = match (stored, tensor.same_as.and_then(|first| filled.get(first))) {
            (Some(stored), _) => stored,
            (None, Some(first)) => {
                let place = first.stored.tensor();
                tensor.store(Arc::clone(&place.buffer), place.slot.offset)?
            }
            (None, None) => return Err(Error::invalid("a planned tensor has no memory")),
        };
        filled.push(Slot { tensor, stored });
    }
    Ok(filled)
}

/// Mapped files as buffers of devices.
#[derive(Default)]
struct Imports {
    mapped: BTreeMap<usize, Arc<HostMemory>>,
    known: Vec<Import>,
}

/// A mapped file as a buffer; `None` if the device rejected it.
struct Import {
    memory: Arc<dyn BufferType>,
    file: usize,
    buffer: Option<Arc<dyn Buffer>>,
}

impl Imports {
    /// Returns a tensor in its mapping. Returns `None` if it is not mapped, or if `device` cannot
    /// use it there.
    fn tensor(
        &mut self,
        file: &GgufFile,
        device: &Arc<dyn Device>,
        tensor: &PlannedTensor,
    ) -> Result<Option<Arc<StoredTensor>>> {
        let number = tensor.data.file;
        let part = file.parts().get(number);
        let Some(mapping) = part.and_then(|part| part.mapping()) else {
            return Ok(None);
        };
        let known = self
            .known
            .iter()
            .find(|known| known.file == number && same_buffer_type(&known.memory, &tensor.memory));
        let buffer = match known {
            Some(known) => known.buffer.clone(),
            None => {
                let memory = self
                    .mapped
                    .entry(number)
                    .or_insert_with(|| mapping.host_memory());
                let buffer = match device.import_host(Arc::clone(memory), Usage::Weights) {
                    Ok(buffer) => Some(buffer),
                    Err(error @ samite_core::Error::DeviceLost { .. }) => return Err(error.into()),
                    Err(error) => {
                        let device = device.name();
                        tracing::info!(device, %error, "the mapped file is copied");
                        None
                    }
                };
                self.known.push(Import {
                    memory: Arc::clone(&tensor.memory),
                    file: number,
                    buffer: buffer.clone(),
                });
                buffer
            }
        };
        // Offsets in a mapping fit into `usize`.
        let offset = usize::try_from(tensor.data.offset).unwrap_or(usize::MAX);
        buffer
            .map(|buffer| tensor.store(buffer, offset))
            .transpose()
    }
}

/// Returns the size of the pieces in which a tensor is read for its destinations in `places`: about
/// `most` bytes, but whole groups of rows.
fn chunk_bytes(info: &TensorInfo, places: &[&TensorRef], most: usize) -> usize {
    let groups = places
        .iter()
        .map(|place| place.buffer.buffer_type().row_group());
    let Some(group) = groups.reduce(|a, b| Some(a?.max(b?))).flatten() else {
        return info.size;
    };
    let rows = info.shape[1..].iter().product::<usize>().max(1);
    let group_bytes = (info.size / rows).saturating_mul(group).max(1);
    (most / group_bytes).max(1) * group_bytes
}

/// Returns each tensor once, even if it has several destinations.
fn without_repeats(mut infos: Vec<&TensorInfo>) -> Vec<&TensorInfo> {
    let mut seen = BTreeSet::new();
    infos.retain(|info| seen.insert(&*info.name));
    infos
}
