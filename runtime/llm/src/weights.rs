//! The weights of a model: checked against what the architecture expects, planned, then loaded as planned.

use crate::arch::{Architecture, TensorList, TensorSpec, WeightUse};
use crate::error::{Error, Result};
use crate::hparams::Hyperparameters;
use crate::rules::{self, Choice, Placement, PlacementRule};
use samite_core::{
    Buffer, BufferType, CancelToken, DType, Device, HostMemory, Layout, Role, StoredTensor,
    Support, TensorGroup, TensorRef, Usage, same_buffer_type,
};
use samite_gguf::{GgufFile, LoadOptions, TensorInfo};
use samite_sched::DeviceSet;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Data of the file is used in place if it begins at a multiple of this: what GGUF files have unless told otherwise.
const IN_PLACE_ALIGNMENT: u64 = 32;

/// Large tensors are read in pieces of about this size, by several threads: what was read is still in a second-level
/// cache when it is packed.
const CHUNK_BYTES: usize = 1 << 20;

/// Where one tensor goes.
#[derive(Clone, Debug)]
pub struct PlannedTensor {
    /// Name in the graph; the name of [`data`](Self::data) differs if another tensor's data is used.
    pub name: String,
    /// The data in the file.
    pub data: TensorInfo,
    /// The number of the device in the model's set.
    pub device: usize,
    /// The memory that it lies in.
    pub memory: Arc<dyn BufferType>,
    /// Whether it is used where the file is mapped, without a copy.
    pub in_place: bool,
    layout: Layout,
    role: Role,
    explicit: bool,
    /// An earlier tensor that is the same data in the same memory.
    same_as: Option<usize>,
}

impl PlannedTensor {
    /// The tensor at `offset` of its memory.
    fn store(&self, buffer: Arc<dyn Buffer>, offset: usize) -> Result<Arc<StoredTensor>> {
        let stored = StoredTensor::with_role(&*self.name, buffer, offset, self.layout, self.role)?;
        Ok(stored)
    }

    fn weight(&self, stored: Arc<StoredTensor>) -> Weight {
        Weight {
            stored,
            data: self.data.name.clone(),
            device: self.device,
            explicit: self.explicit,
        }
    }

    /// What its memory is told about it.
    fn described(&self) -> samite_core::TensorInfo<'_> {
        samite_core::TensorInfo {
            role: self.role,
            ..samite_core::TensorInfo::new(&self.name, self.layout, Usage::Weights)
        }
    }
}

/// Which tensor goes where, before anything is loaded.
#[derive(Clone, Debug)]
pub(crate) struct WeightPlan {
    pub tensors: Vec<PlannedTensor>,
    pub kv: Vec<Choice>,
}

/// A weight with what is known about it.
#[derive(Debug)]
struct Weight {
    stored: Arc<StoredTensor>,
    /// Name of its data in the file.
    data: Box<str>,
    device: usize,
    /// Whether a rule put it there.
    explicit: bool,
}

/// The weights of a model by name.
#[derive(Debug, Default)]
pub struct Weights {
    tensors: HashMap<String, Weight>,
    /// Bytes by name of the memory.
    bytes: BTreeMap<String, usize>,
}

impl Weights {
    /// The weight called `name`, if the model has it.
    pub fn get(&self, name: &str) -> Option<&Arc<StoredTensor>> {
        self.tensors.get(name).map(|weight| &weight.stored)
    }

    /// The name in the file of the data of the weight called `name`: another one for an embedding that is the output, too.
    pub fn data_name(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|weight| &*weight.data)
    }

    /// The number of the device that the weight called `name` is for.
    pub fn device(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|weight| weight.device)
    }

    /// The device on which operations with the weight called `name` must run, by number, if a rule says so.
    pub fn assigned(&self, name: &str) -> Option<usize> {
        let weight = self.tensors.get(name)?;
        weight.explicit.then_some(weight.device)
    }

    /// Bytes by name of the memory, mapped ones included.
    pub fn bytes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.bytes
            .iter()
            .map(|(name, &bytes)| (name.as_str(), bytes))
    }
}

/// A tensor that the architecture wants and the file has.
struct Found<'a> {
    spec: TensorSpec,
    info: &'a TensorInfo,
}

/// Finds every expected tensor in the file and checks its shape.
fn find_tensors<'a>(
    file: &'a GgufFile,
    arch: &dyn Architecture,
    hparams: &Hyperparameters,
) -> Result<Vec<Found<'a>>> {
    let in_file = |message: String| Error::model(format!("{}: {message}", file.path().display()));
    let mut list = TensorList::new(hparams);
    arch.tensors(&mut list);
    let mut found = Vec::new();
    for spec in list.into_specs() {
        let data = file.tensor(&spec.name).or_else(|| {
            let other = spec.otherwise?;
            file.tensor(other)
        });
        let info = match data {
            Some(info) => info,
            None if spec.required => file.require_tensor(&spec.name)?,
            None => continue,
        };
        if info.shape != spec.shape {
            return Err(in_file(format!(
                "tensor \"{}\" has shape {:?}, but by the hyper-parameters it must be {:?}",
                info.name,
                short(info.shape),
                short(spec.shape)
            )));
        }
        found.push(Found { spec, info });
    }
    let known: HashSet<&str> = found.iter().map(|f| &*f.info.name).collect();
    if let Some(info) = file
        .tensors()
        .iter()
        .find(|info| !known.contains(&*info.name))
    {
        return Err(in_file(format!(
            "tensor {:?} is not known for architecture {}: without it, results would be wrong",
            info.name,
            arch.name()
        )));
    }
    Ok(found)
}

/// A shape without the ones at its end.
fn short(shape: [usize; 4]) -> Vec<usize> {
    let dims = shape
        .iter()
        .rposition(|&n| n != 1)
        .map_or(1, |last| last + 1);
    shape[..dims].to_vec()
}

/// Whether `device` can use a weight as the model does.
fn can_use(device: &Arc<dyn Device>, spec: &TensorSpec, dtype: DType) -> Result<Support> {
    let (graph, node) = spec.sample(dtype)?;
    Ok(device.supports(graph.node(node)))
}

/// The memory for a weight on `device`: the first special layout that takes it, if one is wanted, else the device's own.
/// The flag says whether it is a special one.
fn memory_for(
    device: &Arc<dyn Device>,
    spec: &TensorSpec,
    dtype: DType,
    repack: bool,
) -> Result<(Arc<dyn BufferType>, bool)> {
    let (graph, node) = spec.sample(dtype)?;
    let mut extra = device.extra_buffer_types().into_iter().filter(|_| repack);
    Ok(
        match extra.find(|memory| memory.accepts(graph.node(node)).is_yes()) {
            Some(memory) => (memory, true),
            None => (device.buffer_type(), false),
        },
    )
}

impl WeightPlan {
    /// Checks the tensors of `file` and decides where each goes.
    pub fn new(
        file: &GgufFile,
        arch: &dyn Architecture,
        hparams: &Hyperparameters,
        devices: &DeviceSet,
        rules: &[PlacementRule],
        base: Option<&[usize]>,
        repack: bool,
    ) -> Result<Self> {
        let found = find_tensors(file, arch, hparams)?;
        let roles: Vec<_> = found
            .iter()
            .map(|f| (f.spec.name.as_str(), f.spec.role))
            .collect();
        let n_layer = hparams.n_layer();
        let Placement { tensors, kv } = rules::resolve(rules, base, devices, n_layer, &roles)?;
        // A table that is only looked up gains nothing by another layout, and can stay where it is mapped.
        let in_products: HashSet<&str> = found
            .iter()
            .filter(|f| f.spec.usage != WeightUse::Rows)
            .map(|f| &*f.info.name)
            .collect();
        let mut plan = WeightPlan {
            tensors: Vec::with_capacity(found.len()),
            kv,
        };
        for (Found { spec, info }, choice) in found.into_iter().zip(tensors) {
            let choice = willing_device(devices, &spec, info, choice)?;
            let device = devices.get(choice.device);
            let repack = repack && in_products.contains(&*info.name);
            let (memory, packed) = memory_for(device, &spec, info.dtype, repack)?;
            let part = file.parts().get(info.file);
            let in_place = !packed
                && device.capabilities().import_host
                && part.is_some_and(|part| part.mapping().is_some())
                && info
                    .offset
                    .is_multiple_of(IN_PLACE_ALIGNMENT.max(device.import_alignment() as u64));
            let same_as = plan.tensors.iter().position(|other| {
                other.data.name == info.name && same_buffer_type(&other.memory, &memory)
            });
            plan.tensors.push(PlannedTensor {
                layout: spec.layout(info.dtype)?,
                role: spec.weight_role(),
                name: spec.name,
                data: info.clone(),
                device: choice.device,
                memory,
                in_place,
                explicit: choice.explicit,
                same_as,
            });
        }
        Ok(plan)
    }

    /// Bytes by name of the memory.
    pub fn bytes(&self) -> Result<BTreeMap<String, usize>> {
        let mut bytes = BTreeMap::new();
        for tensor in self
            .tensors
            .iter()
            .filter(|tensor| tensor.same_as.is_none())
        {
            *bytes.entry(tensor.memory.name().to_owned()).or_insert(0) +=
                tensor.memory.alloc_size(&tensor.described())?;
        }
        Ok(bytes)
    }

    /// Bytes of the buffers that will be allocated, by number of the device; mapped tensors take none.
    pub fn bytes_by_device(&self, n_devices: usize) -> Result<Vec<usize>> {
        let mut bytes = vec![0usize; n_devices];
        for (memory, members) in self.groups() {
            let described: Vec<_> = members
                .iter()
                .map(|&i| self.tensors[i].described())
                .collect();
            if let Some(&first) = members.first() {
                let owner = &mut bytes[self.tensors[first].device];
                *owner = owner.saturating_add(TensorGroup::planned_size(&memory, &described)?);
            }
        }
        Ok(bytes)
    }

    /// The tensors that get memory of their own, together with those in memory of the same type.
    fn groups(&self) -> Vec<(Arc<dyn BufferType>, Vec<usize>)> {
        let mut groups: Vec<(Arc<dyn BufferType>, Vec<usize>)> = Vec::new();
        for (i, tensor) in self.tensors.iter().enumerate() {
            if tensor.same_as.is_some() || tensor.in_place {
                continue;
            }
            match groups
                .iter_mut()
                .find(|(memory, _)| same_buffer_type(memory, &tensor.memory))
            {
                Some((_, members)) => members.push(i),
                None => groups.push((Arc::clone(&tensor.memory), vec![i])),
            }
        }
        groups
    }

    /// The weights as they will be, but without memory: for plans.
    pub fn unallocated(&self) -> Result<Weights> {
        let mut weights = Weights::default();
        for tensor in &self.tensors {
            let described = tensor.described();
            let size = tensor.memory.alloc_size(&described)?;
            let buffer = samite_core::unallocated(&tensor.memory, size, Usage::Weights);
            let stored = tensor.store(buffer, 0)?;
            let weight = tensor.weight(stored);
            weights.tensors.insert(tensor.name.clone(), weight);
        }
        Ok(weights)
    }

    /// Loads what was planned from the file that it was planned for.
    pub fn load(
        mut self,
        file: &GgufFile,
        devices: &DeviceSet,
        threads: Option<usize>,
        progress: &(dyn Fn(u64, u64) + Sync),
        cancel: &CancelToken,
    ) -> Result<Weights> {
        let mut weights = Weights {
            bytes: self.bytes()?,
            ..Weights::default()
        };
        let stored = self.allocate(file, devices)?;

        let is_first = |&(i, _): &(usize, &PlannedTensor)| self.tensors[i].same_as.is_none();
        let firsts = || self.tensors.iter().enumerate().filter(is_first);
        let infos = |pick: fn(&PlannedTensor) -> bool| {
            let picked = firsts().filter(move |(_, tensor)| pick(tensor));
            picked.map(|(_, tensor)| &tensor.data).collect::<Vec<_>>()
        };
        let in_place = infos(|tensor| tensor.in_place);
        let moved = without_repeats(infos(|tensor| !tensor.in_place));
        // One piece of data can have two places: the embedding that is the output, on different devices.
        let mut places: HashMap<&str, Vec<&TensorRef>> = HashMap::new();
        for (i, tensor) in firsts().filter(|(_, tensor)| !tensor.in_place) {
            let places = places.entry(&tensor.data.name).or_default();
            places.push(stored[i].tensor());
        }
        let places_of = |info: &TensorInfo| places.get(&*info.name).map_or(&[][..], Vec::as_slice);

        let size = |infos: &[&TensorInfo]| infos.iter().map(|info| info.size as u64).sum::<u64>();
        let moved_bytes = size(&moved);
        let total = moved_bytes + size(&in_place);
        let cancelled = || cancel.is_cancelled();
        let default = LoadOptions::default();
        let report_moved = |done: u64, _: u64| progress(done, total);
        let report_in_place = |done: u64, _: u64| progress(moved_bytes + done, total);
        let options = LoadOptions {
            threads: threads.unwrap_or(default.threads).max(1),
            // No page of the mapping is touched for what lies elsewhere afterwards.
            in_place: false,
            progress: &report_moved,
            cancel: &cancelled,
        };
        let chunk_bytes = |info: &TensorInfo| chunk_bytes(info, places_of(info));
        file.load_chunks(moved, chunk_bytes, &options, |info, offset, bytes| {
            places_of(info)
                .iter()
                .try_for_each(|place| place.write(offset, bytes))
                .map_err(Error::from)
        })?;
        // Mapped data is paged in, so that the first token does not wait for the disk.
        let options = LoadOptions {
            in_place: true,
            progress: &report_in_place,
            ..options
        };
        file.load(in_place, &options, |_, _| Ok::<_, Error>(()))?;

        for (tensor, stored) in self.tensors.into_iter().zip(stored) {
            let weight = tensor.weight(stored);
            weights.tensors.insert(tensor.name, weight);
        }
        Ok(weights)
    }

    /// Memory for every tensor: imported, allocated together by kind, or shared with an earlier tensor.
    fn allocate(&mut self, file: &GgufFile, devices: &DeviceSet) -> Result<Vec<Arc<StoredTensor>>> {
        let mut stored: Vec<Option<Arc<StoredTensor>>> = vec![None; self.tensors.len()];
        let mut imports = Imports::default();
        for (tensor, stored) in self.tensors.iter_mut().zip(&mut stored) {
            if tensor.in_place && tensor.same_as.is_none() {
                *stored = imports.tensor(file, devices.get(tensor.device), tensor)?;
                // What cannot be used where it is mapped is copied.
                tensor.in_place = stored.is_some();
            }
        }
        let groups = self.groups();
        for (memory, members) in groups {
            let described: Vec<_> = members
                .iter()
                .map(|&i| self.tensors[i].described())
                .collect();
            let bytes = TensorGroup::planned_size(&memory, &described)?;
            if let Some(&first) = members.first() {
                let device = devices.get(self.tensors[first].device);
                device.check_free(bytes, "weights")?;
            }
            let group = TensorGroup::allocate_described(&memory, Usage::Weights, &described)?;
            for (i, tensor) in members.into_iter().zip(group.tensors) {
                stored[i] = Some(tensor);
            }
        }
        for (i, tensor) in self.tensors.iter().enumerate() {
            if let Some(first) = tensor.same_as.and_then(|first| stored[first].clone()) {
                let place = first.tensor();
                let buffer = Arc::clone(&place.buffer);
                let offset = place.slot.offset;
                stored[i] = Some(tensor.store(buffer, offset)?);
            }
        }
        let missing = || Error::invalid("a planned tensor has no memory");
        stored
            .into_iter()
            .map(|tensor| tensor.ok_or_else(missing))
            .collect()
    }
}

/// Mapped files as buffers of devices.
#[derive(Default)]
struct Imports {
    mapped: HashMap<usize, Arc<HostMemory>>,
    known: Vec<Import>,
}

/// A mapped file as a buffer; `None` if the device did not take it.
struct Import {
    memory: Arc<dyn BufferType>,
    file: usize,
    buffer: Option<Arc<dyn Buffer>>,
}

impl Imports {
    /// A tensor where it is mapped; `None` if it is not, or `device` cannot use it there.
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
        // What is mapped has offsets that fit.
        let offset = usize::try_from(tensor.data.offset).unwrap_or(usize::MAX);
        buffer
            .map(|buffer| tensor.store(buffer, offset))
            .transpose()
    }
}

/// How much of a tensor is read at a time that goes to `places`.
fn chunk_bytes(info: &TensorInfo, places: &[&TensorRef]) -> usize {
    let groups = places
        .iter()
        .map(|place| place.buffer.buffer_type().row_group());
    let Some(group) = groups.reduce(|a, b| Some(a?.max(b?))).flatten() else {
        return info.size;
    };
    let rows = info.shape[1..].iter().product::<usize>().max(1);
    let group_bytes = (info.size / rows).saturating_mul(group).max(1);
    (CHUNK_BYTES / group_bytes).max(1) * group_bytes
}

/// Each tensor once, though it may be written to several places.
fn without_repeats(mut infos: Vec<&TensorInfo>) -> Vec<&TensorInfo> {
    let mut seen = HashSet::new();
    infos.retain(|info| seen.insert(&*info.name));
    infos
}

/// The chosen device if it can use the weight; else the host, else any other.
fn willing_device(
    devices: &DeviceSet,
    spec: &TensorSpec,
    info: &TensorInfo,
    choice: Choice,
) -> Result<Choice> {
    let mut reasons = Vec::new();
    let others = (0..devices.len()).rev().filter(|&d| d != choice.device);
    for device in std::iter::once(choice.device).chain(others) {
        match can_use(devices.get(device), spec, info.dtype)? {
            Support::Yes if device == choice.device => return Ok(choice),
            Support::Yes => {
                let (wanted, got) = (
                    devices.get(choice.device).name(),
                    devices.get(device).name(),
                );
                tracing::debug!(
                    tensor = spec.name,
                    wanted,
                    got,
                    "the wanted device cannot use this weight"
                );
                return Ok(Choice {
                    device,
                    explicit: false,
                });
            }
            Support::No(reason) => {
                reasons.push(format!("{}: {reason}", devices.get(device).name()));
            }
        }
    }
    Err(Error::model(format!(
        "tensor \"{}\" of type {} can be used by no device: {}",
        info.name,
        info.dtype,
        reasons.join("; ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Role;
    use crate::testing::FakeDevice;
    use samite_core::{DeviceKind, Node, host_buffer_type};

    /// Memory for products with 8-bit weights.
    #[derive(Debug)]
    struct Packed;

    impl BufferType for Packed {
        fn name(&self) -> &str {
            "packed"
        }

        fn alignment(&self) -> usize {
            64
        }

        fn accepts(&self, node: Node<'_>) -> Support {
            let is_q8 = node
                .source_layout(0)
                .is_some_and(|l| l.dtype() == DType::Q8_0);
            let is_product = matches!(node.op(), samite_core::Op::MulMat { .. });
            Support::when(is_q8 && is_product, "only products with q8_0")
        }

        fn allocate(&self, size: usize, usage: Usage) -> samite_core::Result<Arc<dyn Buffer>> {
            host_buffer_type().allocate(size, usage)
        }
    }

    fn spec(usage: WeightUse) -> TensorSpec {
        TensorSpec {
            name: "w".to_owned(),
            shape: [64, 8, 1, 1],
            role: Role::Output,
            usage,
            required: true,
            otherwise: None,
        }
    }

    #[test]
    fn special_layouts_get_what_they_accept() {
        let extra: Vec<Arc<dyn BufferType>> = vec![Arc::new(Packed)];
        let device: Arc<dyn Device> =
            Arc::new(FakeDevice::with("cpu", DeviceKind::Cpu, extra, true));
        let name = |usage, dtype| {
            let (memory, packed) = memory_for(&device, &spec(usage), dtype, true).unwrap();
            (memory.name().to_owned(), packed)
        };
        assert_eq!(
            name(WeightUse::Product, DType::Q8_0),
            ("packed".to_owned(), true)
        );
        assert_eq!(
            name(WeightUse::Product, DType::F32),
            ("host".to_owned(), false)
        );
        assert_eq!(
            name(WeightUse::Rows, DType::Q8_0),
            ("host".to_owned(), false)
        );
        let spec = spec(WeightUse::Product);
        let (memory, packed) = memory_for(&device, &spec, DType::Q8_0, false).unwrap();
        assert_eq!((memory.name(), packed), ("host", false));
    }

    #[test]
    fn a_weight_goes_to_a_device_that_can_use_it() {
        let unwilling = |name| -> Arc<dyn Device> {
            Arc::new(FakeDevice::with(name, DeviceKind::Gpu, Vec::new(), false))
        };
        let info = TensorInfo {
            name: "w".into(),
            dtype: DType::F32,
            shape: [64, 8, 1, 1],
            n_dims: 2,
            offset: 0,
            size: 2048,
            file: 0,
        };
        let choice = Choice {
            device: 0,
            explicit: true,
        };
        let devices = DeviceSet::new(vec![
            unwilling("gpu"),
            FakeDevice::device("cpu", DeviceKind::Cpu),
        ])
        .unwrap();
        let found = willing_device(&devices, &spec(WeightUse::Product), &info, choice).unwrap();
        assert_eq!((found.device, found.explicit), (1, false));
        let devices = DeviceSet::new(vec![unwilling("gpu"), unwilling("cpu")]).unwrap();
        let error = willing_device(&devices, &spec(WeightUse::Product), &info, choice).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tensor \"w\" of type f32 can be used by no device: gpu: it is not willing; cpu: it is not willing"
        );
    }
}
