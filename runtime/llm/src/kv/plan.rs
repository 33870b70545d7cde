//! Plans of the KV cache's memory.

use crate::arch::{LayerCache, Spec};
use crate::context::Sizes;
use crate::error::{Error, Result};
use crate::graphs::GraphSource;
use crate::kv::states::States;
use crate::placement_fallback::PlacementFallback;
use crate::rules::Choice;
use crate::tensor_split;
use crate::weights::Weights;
use samite_core::{
    BufferType, Cut, DType, Layout, StoredTensor, TensorGroup, TensorInfo, Usage, same_buffer_type,
};
use samite_sched::DeviceSet;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory needs of a KV cache, before anything is allocated.
#[derive(Debug)]
pub(crate) struct KvPlan {
    groups: Vec<KvGroup>,
    /// By layer: true if its keys and values use the cells of layers with a window.
    windowed: Vec<bool>,
    /// Device by layer.
    pub choices: Vec<Choice>,
    /// By layer: true if the device refuses flash attention, but supports it as several operations.
    no_flash: Vec<bool>,
    /// Layers without flash attention.
    pub unfused: Vec<PlacementFallback>,
    /// Caches that are on another device than requested.
    pub displaced: Vec<PlacementFallback>,
}

/// Tensors of a KV cache in memory of one type.
#[derive(Debug)]
struct KvGroup {
    memory: Arc<dyn BufferType>,
    /// Index of the first device that uses the memory.
    device: usize,
    tensors: Vec<(String, Layout, Option<Cut>)>,
}

impl KvGroup {
    fn described(&self) -> Vec<TensorInfo<'_>> {
        self.tensors
            .iter()
            .map(|(name, layout, cut)| TensorInfo {
                cut: *cut,
                ..TensorInfo::new(name, *layout, Usage::Any)
            })
            .collect()
    }
}

impl KvPlan {
    /// Plans the cache of each layer on its device in `choices`.
    pub fn new(
        spec: &Spec,
        weights: &Weights,
        devices: &DeviceSet,
        choices: &[Choice],
        sizes: &Sizes,
        types: [DType; 2],
    ) -> Result<Self> {
        let n_sequences = sizes.n_seq;
        let windowed: Vec<bool> = spec
            .layers
            .iter()
            .map(|layer| sizes.n_window > 0 && layer.has_window())
            .collect();
        let mut groups: Vec<KvGroup> = Vec::new();
        for (il, (choice, layer)) in choices.iter().zip(&spec.layers).enumerate() {
            let memory = layer.memory();
            let n_cells = if windowed[il] {
                sizes.n_window
            } else {
                sizes.n_cells
            };
            let cuts = tensor_split::cuts_of_cache(layer, weights);
            let per_token = [("K", memory.keys), ("V", memory.values)];
            let mut kept = Vec::new();
            for (((name, heads), dtype), cut) in per_token.into_iter().zip(types).zip(cuts) {
                if let Some([count, size]) = heads {
                    check_type(name, dtype, size)?;
                    kept.push((
                        if name == "K" { "k" } else { "v" },
                        dtype,
                        count * size,
                        n_cells,
                        cut,
                    ));
                }
            }
            for (name, elements) in [("r", memory.conv), ("s", memory.state)] {
                if let Some(elements) = elements {
                    let rows = States::rows_for(n_sequences);
                    kept.push((name, DType::F32, elements, rows, None));
                }
            }
            if kept.is_empty() {
                continue;
            }
            let memory = devices.get(choice.device).buffer_type();
            let known = groups
                .iter()
                .position(|group| same_buffer_type(&group.memory, &memory));
            let at = known.unwrap_or_else(|| {
                groups.push(KvGroup {
                    memory,
                    device: choice.device,
                    tensors: Vec::new(),
                });
                groups.len() - 1
            });
            for (name, dtype, width, rows, cut) in kept {
                let layout = Layout::contiguous(dtype, [width, rows, 1, 1])?;
                let tensors = &mut groups[at].tensors;
                tensors.push((format!("cache_{name}_l{il}"), layout, cut));
            }
        }
        Ok(KvPlan {
            groups,
            windowed,
            choices: choices.to_vec(),
            no_flash: vec![false; choices.len()],
            unfused: Vec::new(),
            displaced: Vec::new(),
        })
    }

    /// Plans the caches of the model of `source` like [`new`](KvPlan::new). If a device does not
    /// support a layer's flash attention, several operations replace it. If the device does not
    /// support these either, or another operation on the cache, the cache goes to the host.
    pub fn willing(source: &GraphSource<'_>, sizes: &Sizes, types: [DType; 2]) -> Result<Self> {
        let (spec, devices) = (source.spec, source.devices);
        let mut choices = source.kv.to_vec();
        let name = |device| devices.get(device).name().to_owned();
        let fallback = |what, wanted, reason, device| PlacementFallback {
            what,
            wanted: name(wanted),
            reason,
            device: name(device),
        };
        let mut wanted = KvPlan::new(spec, source.weights, devices, &choices, sizes, types)?;
        let refused_of = |plan: &KvPlan| {
            let layers = plan.unallocated()?;
            let source = GraphSource {
                layers: &layers,
                ..*source
            };
            source.refused_caches(sizes.at_the_end(1))
        };
        let mut refused = refused_of(&wanted)?;
        if source.flash && !refused.is_empty() {
            for &il in refused.keys() {
                wanted.no_flash[il] = true;
            }
            let still = refused_of(&wanted)?;
            for &il in still.keys() {
                wanted.no_flash[il] = false;
            }
            let unfused = refused.extract_if(.., |il, _| !still.contains_key(il));
            let what = |il| format!("attention of layer {il}");
            wanted.unfused = unfused
                .map(|(il, (device, reason))| fallback(what(il), device, reason, device))
                .collect();
        }
        let mut displaced = Vec::new();
        for (il, (device, reason)) in refused {
            let what = format!("the KV cache of layer {il}");
            displaced.push(fallback(what, device, reason, devices.last()));
            choices[il] = Choice {
                device: devices.last(),
                explicit: false,
            };
        }
        if displaced.is_empty() {
            return Ok(wanted);
        }
        let mut plan = KvPlan::new(spec, source.weights, devices, &choices, sizes, types)?;
        plan.no_flash = wanted.no_flash;
        plan.unfused = wanted.unfused;
        plan.displaced = displaced;
        Ok(plan)
    }

    /// Returns the bytes by name of the memory.
    pub fn bytes(&self) -> Result<Vec<(String, usize)>> {
        let mut bytes = Vec::new();
        for group in &self.groups {
            let described = group.described();
            bytes.extend(TensorGroup::planned_by_memory(&group.memory, &described)?);
        }
        Ok(bytes)
    }

    /// Returns the bytes by index of the device.
    pub fn bytes_by_device(&self, n_devices: usize) -> Result<Vec<usize>> {
        let mut bytes = vec![0usize; n_devices];
        for group in &self.groups {
            let described = group.described();
            let size = TensorGroup::planned_size(&group.memory, &described)?;
            bytes[group.device] = bytes[group.device].saturating_add(size);
        }
        Ok(bytes)
    }

    /// Returns the caches of the layers without memory, for planning graphs.
    pub fn unallocated(&self) -> Result<Vec<LayerCache>> {
        let mut tensors = Vec::new();
        for group in &self.groups {
            for info in group.described() {
                let size = group.memory.alloc_size(&info)?;
                let buffer = samite_core::unallocated(&group.memory, size, Usage::Any);
                tensors.push(StoredTensor::described(&info, buffer, 0)?);
            }
        }
        Ok(self.layers(tensors))
    }

    /// Allocates the memory, each group's on its device. `n_cells` is for the message if there is
    /// too little.
    pub fn allocate(&self, devices: &DeviceSet, n_cells: usize) -> Result<Vec<TensorGroup>> {
        let what = format!("the KV cache of {n_cells} cells (a smaller context needs less)");
        let allocate = |group: &KvGroup| {
            let described = group.described();
            let bytes = TensorGroup::planned_size(&group.memory, &described)?;
            devices.get(group.device).check_free(bytes, &what)?;
            let memory = &group.memory;
            Ok(TensorGroup::allocate_described(
                memory,
                Usage::Any,
                &described,
            )?)
        };
        self.groups.iter().map(allocate).collect()
    }

    /// Finds the keys and values of each layer by their names.
    pub fn layers(&self, tensors: impl IntoIterator<Item = Arc<StoredTensor>>) -> Vec<LayerCache> {
        let by_name: BTreeMap<String, Arc<StoredTensor>> = tensors
            .into_iter()
            .map(|tensor| (tensor.name().to_owned(), tensor))
            .collect();
        let find = |name: String| by_name.get(&name).cloned();
        let layer = |(il, &windowed)| LayerCache {
            k: find(format!("cache_k_l{il}")),
            v: find(format!("cache_v_l{il}")),
            conv: find(format!("cache_r_l{il}")),
            state: find(format!("cache_s_l{il}")),
            windowed,
            no_flash: self.no_flash[il],
        };
        self.windowed.iter().enumerate().map(layer).collect()
    }
}

/// Every head must consist of whole blocks, because attention reads single heads.
fn check_type(which: &str, dtype: DType, head: usize) -> Result<()> {
    if dtype.is_integer() || dtype == DType::F64 {
        return Err(Error::invalid(format!(
            "{which} cache of type {dtype}: choose f32, f16, bf16 or a quantized type"
        )));
    }
    if !head.is_multiple_of(dtype.block_len()) {
        return Err(Error::invalid(format!(
            "{which} cache of type {dtype}: heads of {head} elements are not whole blocks of {}; choose f16",
            dtype.block_len()
        )));
    }
    Ok(())
}
