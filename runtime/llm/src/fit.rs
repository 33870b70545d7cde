//! Fits layers to the free memory of several devices before anything is loaded.
//!
//! What a placement needs is not estimated: weights, caches and intermediate results are planned exactly as they will be allocated, on
//! [buffers without memory](samite_core::unallocated). As many layers as possible go to the devices before the last one, divided in proportion to
//! their free memory and then moved, layer by layer, from devices on which they do not fit to those with the most room.

use crate::arch::{Architecture, Spec};
use crate::context::{ContextOptions, compute_by_device, compute_bytes};
use crate::error::Result;
use crate::graphs::GraphSource;
use crate::kv::KvPlan;
use crate::rules::{PlacementRule, fast_devices};
use crate::weights::WeightPlan;
use samite_gguf::GgufFile;
use samite_sched::DeviceSet;

/// What the layers of a model are fitted for.
#[derive(Clone, Debug, Default)]
pub struct FitOptions {
    /// The context that must fit, too.
    pub context: ContextOptions,
    /// Bytes of each device that stay free.
    pub margin: usize,
}

/// What one device has and needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceNeed {
    /// The device's name.
    pub device: String,
    /// Bytes that were free, where the device knows.
    pub free: Option<usize>,
    /// Bytes of weights.
    pub weights: usize,
    /// Bytes of the KV cache.
    pub kv: usize,
    /// Bytes of intermediate results.
    pub compute: usize,
    /// How many layers it has, the output counting as one more.
    pub layers: usize,
}

impl DeviceNeed {
    /// Bytes of everything.
    pub fn bytes(&self) -> usize {
        self.weights
            .saturating_add(self.kv)
            .saturating_add(self.compute)
    }

    /// Bytes that would be left, with a margin; `None` if it does not fit.
    fn room(&self, margin: usize) -> Option<usize> {
        let Some(free) = self.free else {
            return Some(usize::MAX);
        };
        free.checked_sub(self.bytes().saturating_add(margin))
    }
}

/// Where the layers went, and why that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// By layer, and last for the output: the number of the device.
    pub layers: Vec<usize>,
    /// By device.
    pub needs: Vec<DeviceNeed>,
}

/// A model of which placements are tried.
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
    /// The best placement of layers, unless the user has said where they go, or there is nothing to choose.
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
        // The most layers that fit: `most` do, `too_many` do not.
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

    /// Divides the last `count` layers over the fast devices so that they fit; `None` if they do not.
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
            // One layer goes to the device with the most room, if that is more than the layer needs.
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

    /// What a placement of layers needs.
    fn needs(&self, layers: Vec<usize>, free: &[Option<usize>]) -> Result<Fit> {
        let (spec, devices) = (self.spec, self.devices);
        let context = &ContextOptions {
            output: self.options.context.output.of(spec),
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

/// Divides `count` layers in proportion to free memory; a device that does not know what it has counts like the largest.
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
            // Never more than `count`, which is a usize.
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
