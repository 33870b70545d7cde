//! Plans the placement of weights, and checks the file against the architecture's requirements.

use super::{Weight, Weights};
use crate::arch::{Architecture, Spec, TensorSpec, WeightUse};
use crate::error::{Error, Result};
use crate::placement_fallback::PlacementFallback;
use crate::rules::{self, Choice, Placement, PlacementRule};
use crate::tensor_split;
use samite_core::{
    Buffer, BufferType, Cut, DType, Device, Layout, Role, StoredTensor, Support, TensorGroup,
    Usage, same_buffer_type,
};
use samite_gguf::{GgufFile, TensorInfo};
use samite_sched::DeviceSet;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Data of the file is used in place if it starts at a multiple of this, which is the default
/// alignment of GGUF files.
const IN_PLACE_ALIGNMENT: u64 = 32;

/// Placement of one tensor.
#[derive(Clone, Debug)]
pub struct PlannedTensor {
    /// Name in the graph; the name of [`data`](Self::data) differs if another tensor's data is
    /// used.
    pub name: String,
    /// Data in the file.
    pub data: TensorInfo,
    /// Index of the device in the model's set.
    pub device: usize,
    /// Memory of the tensor.
    pub memory: Arc<dyn BufferType>,
    /// True if the tensor is used in the mapped file, without a copy.
    pub in_place: bool,
    layout: Layout,
    role: Role,
    cut: Option<Cut>,
    explicit: bool,
    /// Earlier tensor with the same data in the same memory.
    pub(super) same_as: Option<usize>,
}

impl PlannedTensor {
    /// Creates the tensor at `offset` of its memory.
    pub(super) fn store(
        &self,
        buffer: Arc<dyn Buffer>,
        offset: usize,
    ) -> Result<Arc<StoredTensor>> {
        Ok(StoredTensor::described(&self.described(), buffer, offset)?)
    }

    pub(super) fn weight(&self, stored: Arc<StoredTensor>) -> Weight {
        Weight {
            stored,
            data: self.data.name.clone(),
            device: self.device,
            explicit: self.explicit,
        }
    }

    /// Returns the tensor's description for its memory.
    pub(super) fn described(&self) -> samite_core::TensorInfo<'_> {
        samite_core::TensorInfo {
            role: self.role,
            cut: self.cut,
            ..samite_core::TensorInfo::new(&self.name, self.layout, Usage::Weights)
        }
    }
}

/// Placement of all tensors, before anything is loaded.
#[derive(Clone, Debug)]
pub(crate) struct WeightPlan {
    pub tensors: Vec<PlannedTensor>,
    pub kv: Vec<Choice>,
    /// Tensors that are on another device than requested.
    pub displaced: Vec<PlacementFallback>,
}

/// A tensor that the architecture expects and the file has.
struct MatchedTensor<'a> {
    spec: TensorSpec,
    info: &'a TensorInfo,
}

/// Finds every expected tensor in the file and checks its shape.
fn find_tensors<'a>(
    file: &'a GgufFile,
    arch: &Architecture,
    spec: &Spec,
) -> Result<Vec<MatchedTensor<'a>>> {
    let in_file = |message: String| Error::model(format!("{}: {message}", file.path().display()));
    let mut found = Vec::new();
    for wanted in spec.tensors() {
        let data = file.tensor(&wanted.name).or_else(|| {
            let other = wanted.otherwise?;
            file.tensor(other)
        });
        let info = match data {
            Some(info) => info,
            None if wanted.required => file.require_tensor(&wanted.name)?,
            None => continue,
        };
        if info.shape != wanted.shape {
            return Err(in_file(format!(
                "tensor \"{}\" has shape {:?}, but by the hyper-parameters it must be {:?}",
                info.name,
                short(info.shape),
                short(wanted.shape)
            )));
        }
        found.push(MatchedTensor { spec: wanted, info });
    }
    let known: BTreeSet<&str> = found.iter().map(|f| &*f.info.name).collect();
    if let Some(info) = file
        .tensors()
        .iter()
        .find(|info| !known.contains(&*info.name) && !spec.is_spare(&info.name))
    {
        return Err(in_file(format!(
            "tensor {:?} is not known for architecture {}: without it, results would be wrong",
            info.name, arch.name
        )));
    }
    Ok(found)
}

/// Returns a shape without the ones at its end.
fn short(shape: [usize; 4]) -> Vec<usize> {
    let dims = shape
        .iter()
        .rposition(|&n| n != 1)
        .map_or(1, |last| last + 1);
    shape[..dims].to_vec()
}

/// Returns whether `device` supports the model's use of a weight.
fn can_use(device: &Arc<dyn Device>, spec: &TensorSpec, dtype: DType) -> Result<Support> {
    let (graph, node) = spec.sample(dtype)?;
    Ok(device.supports(graph.node(node)))
}

/// Returns the memory for a weight on `device`: the first repacked layout that accepts it if
/// `repack` is set, else the device's default memory. The flag is true for a repacked layout.
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
    /// Checks the tensors of `file` and places each of them.
    pub fn new(
        file: &GgufFile,
        arch: &Architecture,
        spec: &Spec,
        devices: &DeviceSet,
        rules: &[PlacementRule],
        base: Option<&[usize]>,
        repack: bool,
    ) -> Result<Self> {
        let found = find_tensors(file, arch, spec)?;
        let roles: Vec<_> = found
            .iter()
            .map(|f| (f.spec.name.as_str(), f.spec.role))
            .collect();
        let typed: Vec<_> = found.iter().map(|f| (&f.spec, f.info.dtype)).collect();
        let cuts = tensor_split::cuts(spec, &typed);
        let n_layer = spec.n_layer();
        let Placement { tensors, kv } = rules::resolve(rules, base, devices, n_layer, &roles)?;
        // A table that is only looked up does not benefit from another layout, and can stay in its
        // mapping.
        let in_products: BTreeSet<&str> = found
            .iter()
            .filter(|f| f.spec.usage != WeightUse::Rows)
            .map(|f| &*f.info.name)
            .collect();
        let mut plan = WeightPlan {
            tensors: Vec::with_capacity(found.len()),
            kv,
            displaced: Vec::new(),
        };
        for ((MatchedTensor { spec, info }, choice), cut) in
            found.into_iter().zip(tensors).zip(cuts)
        {
            let (choice, displaced) = willing_device(devices, &spec, info, choice)?;
            plan.displaced.extend(displaced);
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
                cut,
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

    /// Returns the bytes by name of the memory.
    pub fn bytes(&self) -> Result<BTreeMap<String, usize>> {
        let mut bytes = BTreeMap::new();
        for tensor in self
            .tensors
            .iter()
            .filter(|tensor| tensor.same_as.is_none())
        {
            let described = [tensor.described()];
            for (name, size) in TensorGroup::planned_by_memory(&tensor.memory, &described)? {
                *bytes.entry(name).or_insert(0) += size;
            }
        }
        Ok(bytes)
    }

    /// Returns the bytes of the buffers that will be allocated, by index of the device; mapped
    /// tensors need none.
    pub fn bytes_by_device(&self, n_devices: usize) -> Result<Vec<usize>> {
        let mut bytes = vec![0usize; n_devices];
        for Group { memory, members } in groups(&self.tensors) {
            let described: Vec<_> = members
                .iter()
                .map(|&(_, tensor)| tensor.described())
                .collect();
            if let Some((_, first)) = members.first() {
                let owner = &mut bytes[first.device];
                *owner = owner.saturating_add(TensorGroup::planned_size(&memory, &described)?);
            }
        }
        Ok(bytes)
    }

    /// Returns the weights without memory, for plans.
    pub fn unallocated(&self) -> Result<Weights> {
        let mut weights = Weights {
            bytes: self.bytes()?,
            ..Weights::default()
        };
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
}

/// Tensors with their own memory, of the same type of memory.
pub(super) struct Group<'a> {
    pub memory: Arc<dyn BufferType>,
    /// Tensors with their indices.
    pub members: Vec<(usize, &'a PlannedTensor)>,
}

/// Groups the tensors that are neither used in place nor the same as earlier ones, by type of
/// memory.
pub(super) fn groups<'a>(tensors: impl IntoIterator<Item = &'a PlannedTensor>) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for (i, tensor) in tensors.into_iter().enumerate() {
        if tensor.same_as.is_some() || tensor.in_place {
            continue;
        }
        match groups
            .iter_mut()
            .find(|group| same_buffer_type(&group.memory, &tensor.memory))
        {
            Some(group) => group.members.push((i, tensor)),
            None => groups.push(Group {
                memory: Arc::clone(&tensor.memory),
                members: vec![(i, tensor)],
            }),
        }
    }
    groups
}

/// Returns the chosen device if it supports the weight, else the host, else any other device, with
/// a description of the displacement.
fn willing_device(
    devices: &DeviceSet,
    spec: &TensorSpec,
    info: &TensorInfo,
    choice: Choice,
) -> Result<(Choice, Option<PlacementFallback>)> {
    // Refusals by device, starting with the requested one.
    let mut refusals: Vec<(&str, String)> = Vec::new();
    let others = (0..devices.len()).rev().filter(|&d| d != choice.device);
    for device in std::iter::once(choice.device).chain(others) {
        match can_use(devices.get(device), spec, info.dtype)? {
            Support::Yes => {
                let Some((wanted, reason)) = refusals.into_iter().next() else {
                    return Ok((choice, None));
                };
                let displaced = PlacementFallback {
                    what: format!("tensor '{}' of type {}", spec.name, info.dtype),
                    wanted: wanted.to_owned(),
                    reason,
                    device: devices.get(device).name().to_owned(),
                };
                let choice = Choice {
                    device,
                    explicit: false,
                };
                return Ok((choice, Some(displaced)));
            }
            Support::No(reason) => {
                refusals.push((devices.get(device).name(), reason.into_owned()));
            }
        }
    }
    let reasons = refusals.iter();
    let reasons = reasons.map(|(device, reason)| format!("{device}: {reason}"));
    Err(Error::model(format!(
        "tensor \"{}\" of type {} can be used by no device: {}",
        info.name,
        info.dtype,
        reasons.collect::<Vec<_>>().join("; ")
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
    fn special_layouts_get_only_accepted_weights() {
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
    fn refused_weights_move_to_a_device_that_accepts_them() {
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
        let (found, displaced) =
            willing_device(&devices, &spec(WeightUse::Product), &info, choice).unwrap();
        assert_eq!((found.device, found.explicit), (1, false));
        let displaced = displaced.unwrap();
        assert_eq!(displaced.what, "tensor 'w' of type f32");
        assert_eq!((&*displaced.wanted, &*displaced.device), ("gpu", "cpu"));
        assert_eq!(displaced.reason, "it is not willing");
        // The host takes precedence over another device.
        let devices = DeviceSet::new(vec![
            unwilling("gpu"),
            FakeDevice::device("other", DeviceKind::Gpu),
            FakeDevice::device("cpu", DeviceKind::Cpu),
        ])
        .unwrap();
        let (found, _) =
            willing_device(&devices, &spec(WeightUse::Product), &info, choice).unwrap();
        assert_eq!(found.device, 2);
        let devices = DeviceSet::new(vec![unwilling("gpu"), unwilling("cpu")]).unwrap();
        let error = willing_device(&devices, &spec(WeightUse::Product), &info, choice).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tensor \"w\" of type f32 can be used by no device: gpu: it is not willing; cpu: it is not willing"
        );
    }
}
