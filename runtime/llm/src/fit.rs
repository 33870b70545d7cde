//! Fits layers to the free memory of several devices before anything is loaded.
//!
//! The needs of a placement are not estimated: weights, caches and intermediate results are planned
//! exactly as they will be allocated, with [buffers without memory](samite_core::unallocated). As
//! many layers as possible go to the devices before the last one. They are first divided in
//! proportion to free memory, and then moved, one at a time, from devices on which they do not fit
//! to the device with the most room.

use crate::arch::{Architecture, Spec};
use crate::context::{ContextOptions, compute_by_device, compute_bytes};
use crate::error::Result;
use crate::graphs::GraphSource;
use crate::kv::KvPlan;
use crate::rules::{PlacementRule, fast_devices};
use crate::weights::WeightPlan;
use samite_gguf::GgufFile;
use samite_sched::DeviceSet;

/// Options for fitting the layers of a model.
#[derive(Clone, Debug, Default)]
pub struct FitOptions {
    /// Context that must fit as well.
    pub context: ContextOptions,
    /// Bytes of each device that stay free.
    pub margin: usize,
}

/// Free memory and needs of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceNeed {
    /// Name of the device.
    pub device: String,
    /// Bytes that were free, if the device reports them.
    pub free: Option<usize>,
    /// Bytes of weights.
    pub weights: usize,
    /// Bytes of the KV cache.
    pub kv: usize,
    /// Bytes of intermediate results.
    pub compute: usize,
    /// Number of layers, with the output as one more.
    pub layers: usize,
}

impl DeviceNeed {
    /// Returns the total number of bytes.
    pub fn bytes(&self) -> usize {
        self.weights
            .saturating_add(self.kv)
            .saturating_add(self.compute)
    }

    /// Returns the bytes that would remain besides a margin, or `None` if the needs do not fit.
    fn room(&self, margin: usize) -> Option<usize> {
        let Some(free) = self.free else {
            return Some(usize::MAX);
        };
        free.checked_sub(self.bytes().saturating_add(margin))
    }
}

/// Placement of the layers, and the needs that it results in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Device index of each layer, and of the output as the last element.
    pub layers: Vec<usize>,
    /// Needs by device.
    pub needs: Vec<DeviceNeed>,
}

/// Model that placements are tried for.
pub(crate) struct Fitter<'a> {
    pub file: &'a GgufFile,
    pub architecture: &'static Architecture,
    pub spec: &'a Spec,
    pub devices: &'a DeviceSet,
    pub rules: &'a [PlacementRule],
    pub repack: bool,
    pub options: &'a FitOptions,
}

impl Fitter<'_> {
    /// Returns the best placement of layers. Returns `None` if rules already place layers, or if
    /// there is no choice.
    pub fn fit(&self) -> Result<Option<Fit>> {
        let fast = fast_devices(self.devices);
        let free: Vec<Option<usize>> = self.devices.iter().map(|d| d.memory().free).collect();
        let is_said = self.rules.iter().any(PlacementRule::is_about_layers);
        if is_said || fast.is_empty() || fast.iter().all(|&device| free[device].is_none()) {
            return Ok(None);
        }
        let all = self.spec.n_layer() + 1;
        if let Some(fit) = self.divide(all, &fast, &free)? {
            return Ok(Some(fit));
        }
        // Search for the largest number of layers: `most` fit, `too_many` do not.
        let (mut most, mut too_many) = (0, all);
        let mut best = self.needs(vec![self.devices.last(); all], &free)?;
        while too_many - most > 1 {
            let count = most.midpoint(too_many);
            match self.divide(count, &fast, &free)? {
                Some(fit) => (most, best) = (count, fit),
                None => too_many = count,
            }
        }
        Ok(Some(best))
    }

    /// Divides the last `count` layers over the fast devices so that they fit. Returns `None` if
    /// they do not.
    fn divide(&self, count: usize, fast: &[usize], free: &[Option<usize>]) -> Result<Option<Fit>> {
        let all = self.spec.n_layer() + 1;
        let mut shares = proportional(count, fast, free);
        for _ in 0..=2 * all {
            let mut layers = vec![self.devices.last(); all - count];
            for (&device, &share) in fast.iter().zip(&shares) {
                layers.extend(std::iter::repeat_n(device, share));
            }
            let fit = self.needs(layers, free)?;
            let room = |at: usize| fit.needs[fast[at]].room(self.options.margin);
            let Some(full) = (0..fast.len()).find(|&at| room(at).is_none() && shares[at] > 0)
            else {
                let fits = (0..fast.len()).all(|at| shares[at] == 0 || room(at).is_some());
                return Ok(fits.then_some(fit));
            };
            // Move one layer to the device with the most room, if that is more than the layer
            // needs.
            let size = fit.needs[fast[full]].bytes() / shares[full];
            let other = (0..fast.len())
                .filter_map(|at| Some((room(at)?, at)))
                .filter(|&(room, _)| room > size)
                .max();
            let Some((_, other)) = other else {
                return Ok(None);
            };
            shares[full] -= 1;
            shares[other] += 1;
        }
        Ok(None)
    }

    /// Computes the needs of a placement.
    fn needs(&self, layers: Vec<usize>, free: &[Option<usize>]) -> Result<Fit> {
        let (spec, devices) = (self.spec, self.devices);
        let context = &ContextOptions {
            output: self.options.context.output.resolve(spec),
            ..self.options.context.clone()
        };
        let sizes = context.sizes(spec)?;
        let weights = WeightPlan::new(
            self.file,
            self.architecture,
            spec,
            devices,
            self.rules,
            Some(&layers),
            self.repack,
        )?;
        let weight_bytes = weights.bytes_by_device(devices.len())?;
        let source = GraphSource {
            spec,
            devices,
            weights: &weights.unallocated()?,
            layers: &[],
            kv: &weights.kv,
            adapters: &[],
            mixed: &[],
            flash: context.flash,
            n_ctx: sizes.n_cells,
            output: context.output,
        };
        let kv = KvPlan::willing(&source, &sizes, context.kv_types)?;
        let kv_bytes = kv.bytes_by_device(devices.len())?;
        let source = GraphSource {
            layers: &kv.unallocated()?,
            kv: &kv.choices,
            ..source
        };
        let compute = compute_bytes(&source, &context.scheduler(), &sizes)?;
        let compute = compute_by_device(devices, &compute);
        let needs = devices
            .iter()
            .enumerate()
            .map(|(number, device)| DeviceNeed {
                device: device.name().to_owned(),
                free: free[number],
                weights: weight_bytes[number],
                kv: kv_bytes[number],
                compute: compute[number],
                layers: layers.iter().filter(|&&device| device == number).count(),
            });
        Ok(Fit {
            needs: needs.collect(),
            layers,
        })
    }
}

/// Divides `count` layers in proportion to free memory. A device that does not report its memory
/// counts like the largest one.
fn proportional(count: usize, fast: &[usize], free: &[Option<usize>]) -> Vec<usize> {
    let known = fast.iter().filter_map(|&device| free[device]);
    let largest = known.max().unwrap_or(1).max(1);
    let weights: Vec<u128> = fast
        .iter()
        .map(|&device| free[device].unwrap_or(largest).max(1) as u128)
        .collect();
    let total: u128 = weights.iter().sum();
    let mut done = 0;
    let mut sum = 0;
    weights
        .into_iter()
        .map(|weight| {
            sum += weight;
            // At most `count`, which is a usize.
            let end = usize::try_from(sum * count as u128 / total).unwrap_or(count);
            let share = end - done;
            done = end;
            share
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::proportional;

    #[test]
    fn layers_are_divided_by_free_memory() {
        let free = [Some(30), Some(10), None];
        assert_eq!(proportional(8, &[0, 1], &free), [6, 2]);
        assert_eq!(proportional(7, &[0, 1, 2], &free), [3, 1, 3]);
        assert_eq!(proportional(0, &[0, 1], &free), [0, 0]);
        assert_eq!(proportional(5, &[0, 1], &[Some(0), Some(0)]), [2, 3]);
    }
}
