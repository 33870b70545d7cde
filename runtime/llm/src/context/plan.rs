//! A context without memory: says what the real one would need, and how its graphs would run.

use super::memory::{MemoryReport, MemoryUse};
use super::options::{ContextOptions, Sizes};
use crate::adapter;
use crate::arch::LayerCache;
use crate::error::{Error, Result};
use crate::graphs::GraphSource;
use crate::kv::KvPlan;
use crate::model::Model;
use samite_sched::{DeviceSet, Options, Plan};
use std::sync::Arc;

/// A context of which everything is known but nothing is there: no weights, no cache, no memory for results. What it says is what a
/// [`Context`](crate::Context) with these options takes and does.
#[derive(Debug)]
pub struct ContextPlan {
    model: Arc<Model>,
    options: ContextOptions,
    sizes: Sizes,
    kv: KvPlan,
    layers: Vec<LayerCache>,
}

impl ContextPlan {
    /// A context of `model`, which may be [without its weights](Model::without_weights).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for options that make no sense.
    pub fn new(model: Arc<Model>, options: ContextOptions) -> Result<Self> {
        let sizes = check(&model, &options)?;
        let kv = model.plan_kv(&sizes, &options)?;
        Ok(ContextPlan {
            layers: kv.unallocated()?,
            kv,
            sizes,
            options,
            model,
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The number of cells.
    pub fn n_ctx(&self) -> usize {
        self.sizes.n_cells
    }

    /// The plan for a micro-batch of `n_tokens` at the end of a full cache.
    ///
    /// # Errors
    /// If it cannot be placed.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan> {
        let shape = self.sizes.at_the_end(n_tokens);
        self.source().plan(&self.options.scheduler(), shape)
    }

    /// What memory would be used for, by kind of memory.
    ///
    /// # Errors
    /// If a graph cannot be placed, or something cannot lie in its memory.
    pub fn memory(&self) -> Result<Vec<MemoryUse>> {
        let mut report = MemoryReport::default();
        report.add(self.model.weights().bytes(), MemoryReport::WEIGHTS);
        for scaled in &self.options.adapters {
            report.add(scaled.adapter.bytes(), MemoryReport::WEIGHTS);
        }
        report.add(self.kv.bytes()?, MemoryReport::KV);
        let memories = self.model.devices().memories().iter();
        let compute = compute_bytes(&self.source(), &self.options.scheduler(), &self.sizes)?;
        report.add(
            memories.map(|memory| memory.name().to_owned()).zip(compute),
            MemoryReport::COMPUTE,
        );
        Ok(report.finish())
    }

    /// Returns the devices that do not have enough free memory. Weights count if the model is
    /// [without them](Model::without_weights). Devices that do not report their memory are left
    /// out.
    ///
    /// # Errors
    /// If a graph cannot be placed, or something cannot lie in its memory.
    pub fn shortages(&self) -> Result<Vec<Shortage>> {
        let options = self.options.scheduler();
        let mut needs = context_bytes(&self.source(), &options, &self.sizes, &self.kv)?;
        for (need, weights) in needs.iter_mut().zip(self.model.unloaded()) {
            *need = need.saturating_add(*weights);
        }
        let devices = self.model.devices().iter().zip(needs);
        let shortages = devices.filter_map(|(device, needed)| {
            let free = device.memory().free.filter(|&free| free < needed)?;
            let device = device.name().to_owned();
            Some(Shortage {
                device,
                needed,
                free,
            })
        });
        Ok(shortages.collect())
    }

    fn source(&self) -> GraphSource<'_> {
        self.model.graph_source(
            &self.layers,
            &self.kv.choices,
            &self.options,
            &[],
            &self.sizes,
        )
    }
}

/// A device with too little free memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The device's name.
    pub device: String,
    /// Bytes that are needed.
    pub needed: usize,
    /// Bytes that are free.
    pub free: usize,
}

/// Returns the bytes of a context's caches and intermediate results, by device.
pub(super) fn context_bytes(
    source: &GraphSource<'_>,
    options: &Options,
    sizes: &Sizes,
    kv: &KvPlan,
) -> Result<Vec<usize>> {
    let compute = compute_bytes(source, options, sizes)?;
    let mut bytes = compute_by_device(source.devices, &compute);
    let caches = kv.bytes_by_device(bytes.len())?;
    for (bytes, cache) in bytes.iter_mut().zip(caches) {
        *bytes = bytes.saturating_add(cache);
    }
    Ok(bytes)
}

/// Bytes for intermediate results by number of the memory: every chunk becomes as large as the largest of the graphs that memory is
/// reserved for needs it.
pub(crate) fn compute_bytes(
    source: &GraphSource<'_>,
    options: &Options,
    sizes: &Sizes,
) -> Result<Vec<usize>> {
    let mut memories: Vec<Vec<usize>> = Vec::new();
    for shape in sizes.reserved() {
        let plan = source.plan(options, shape)?;
        for (memory, chunks) in plan.memory().chunks.iter().enumerate() {
            memories.resize(memories.len().max(memory + 1), Vec::new());
            let known = &mut memories[memory];
            known.resize(known.len().max(chunks.len()), 0);
            for (known, &bytes) in known.iter_mut().zip(chunks) {
                *known = bytes.max(*known);
            }
        }
    }
    Ok(memories.iter().map(|chunks| chunks.iter().sum()).collect())
}

/// Returns the bytes of [`compute_bytes`] by device: each memory counts for its first device.
pub(crate) fn compute_by_device(devices: &DeviceSet, compute: &[usize]) -> Vec<usize> {
    let bytes = (0..devices.len()).map(|number| {
        let memory = devices.memory_of(number);
        let is_owner = (0..number).all(|other| devices.memory_of(other) != memory);
        let own = compute.get(memory).filter(|_| is_owner);
        let members = devices.members_of(number).iter();
        own.into_iter()
            .chain(members.filter_map(|&memory| compute.get(memory)))
            .sum()
    });
    bytes.collect()
}

/// Checks that `model` can have a context with these options, and completes them.
pub(super) fn check(model: &Arc<Model>, options: &ContextOptions) -> Result<Sizes> {
    let spec = model.spec();
    options.check_output(spec)?;
    let sizes = options.sizes(spec)?;
    adapter::check(model, &options.adapters)?;
    let v_type = options.kv_types[1];
    if !options.flash && v_type.is_quantized() {
        return Err(Error::invalid(format!(
            "V cache of type {v_type} needs flash attention: enable it, or choose f16"
        )));
    }
    if sizes.n_cells > spec.n_ctx_train {
        tracing::warn!(
            n_ctx = sizes.n_cells,
            n_ctx_train = spec.n_ctx_train,
            "the context is longer than the model was trained for"
        );
    }
    Ok(sizes)
}
