//! A context without memory: predicts the needs and the graphs of the real one.

use super::memory::{MemoryReport, MemoryUse};
use super::options::{ContextOptions, Sizes};
use crate::adapter;
use crate::arch::LayerCache;
use crate::error::Result;
use crate::graphs::GraphSource;
use crate::kv::KvPlan;
use crate::model::Model;
use samite_core::Device;
use samite_sched::memory_plan::ReservedBytes;
use samite_sched::{DeviceSet, Options, Plan};
use std::sync::Arc;

/// A context that is completely planned but has no memory: no weights, no cache, no results. It
/// reports what a [`Context`](crate::Context) with the same options allocates and does.
#[derive(Debug)]
pub struct ContextPlan {
    model: Arc<Model>,
    options: ContextOptions,
    sizes: Sizes,
    kv: KvPlan,
    layers: Vec<LayerCache>,
}

impl ContextPlan {
    /// Plans a context of `model`, which may be [without its weights](Model::without_weights).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the options are
    /// invalid.
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

    /// Returns the model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Returns the number of cells.
    pub fn n_ctx(&self) -> usize {
        self.sizes.n_cells
    }

    /// Returns the plan for a micro-batch of `n_tokens` at the end of a full cache.
    ///
    /// # Errors
    /// Returns an error if the graph cannot be placed.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan> {
        let shape = self.sizes.at_the_end(n_tokens);
        self.source().plan(&self.options.scheduler(), shape)
    }

    /// Returns the memory usage of the real context, by kind of memory.
    ///
    /// # Errors
    /// Returns an error if a graph cannot be placed, or if a tensor cannot be in its memory.
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
    /// [without them](Model::without_weights). `beside` is what else needs memory on the same
    /// devices. Devices that do not report their memory are omitted.
    ///
    /// # Errors
    /// Returns an error if a graph cannot be placed, or if a tensor cannot be in its memory.
    pub fn shortages(&self, beside: &[MemoryUse]) -> Result<Vec<Shortage>> {
        let options = self.options.scheduler();
        let mut needs = context_bytes(&self.source(), &options, &self.sizes, &self.kv)?;
        for (need, weights) in needs.iter_mut().zip(self.model.unloaded()) {
            *need = need.saturating_add(*weights);
        }
        for row in beside {
            let has_memory = |device: &&Arc<dyn Device>| {
                let own = [device.buffer_type()];
                let mut memories = own.into_iter().chain(device.extra_buffer_types());
                memories.any(|memory| memory.name() == row.memory)
            };
            let mut needs = self.model.devices().iter().zip(&mut needs);
            if let Some((_, need)) = needs.find(|(device, _)| has_memory(device)) {
                *need = need.saturating_add(row.weights + row.kv + row.compute);
            }
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
    /// Name of the device.
    pub device: String,
    /// Number of bytes that are needed.
    pub needed: usize,
    /// Number of free bytes.
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

/// Returns the bytes of intermediate results, by index of the memory.
pub(crate) fn compute_bytes(
    source: &GraphSource<'_>,
    options: &Options,
    sizes: &Sizes,
) -> Result<Vec<usize>> {
    let mut reserved = ReservedBytes::default();
    for shape in sizes.reserved() {
        reserved.add(source.plan(options, shape)?.memory());
    }
    Ok(reserved.by_memory())
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

/// Checks that `model` supports a context with these options, and completes them.
pub(super) fn check(model: &Arc<Model>, options: &ContextOptions) -> Result<Sizes> {
    let spec = model.spec();
    options.check_output(spec)?;
    let sizes = options.sizes(spec)?;
    adapter::check(model, &options.adapters)?;
    if sizes.n_cells > spec.n_ctx_train {
        tracing::warn!(
            n_ctx = sizes.n_cells,
            n_ctx_train = spec.n_ctx_train,
            "the context is longer than the model was trained for"
        );
    }
    Ok(sizes)
}
