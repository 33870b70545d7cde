//! Decides which operations of a model's graph must run on a certain device.

use crate::arch::LayerCache;
use crate::rules::Choice;
use crate::weights::Weights;
use samite_core::{Graph, Op, StoredTensor};
use samite_sched::{Assignments, DeviceSet};
use std::sync::Arc;

/// The layer whose cache `tensor` is.
pub(crate) fn layer_of(layers: &[LayerCache], tensor: &Arc<StoredTensor>) -> Option<usize> {
    let mine = |layer: &LayerCache| [&layer.k, &layer.v].iter().any(|t| Arc::ptr_eq(t, tensor));
    layers.iter().position(mine)
}

/// Operations that must run on a certain device: those on weights that a rule put there, and attention where its
/// cache is, which is what `kv` says for each layer. With `offload`, what a rule put on the host is left to the scheduler where a faster device wants it: that
/// decides whether it is taken over, see [`Options::offload`](samite_sched::Options::offload).
pub(crate) fn assign(
    graph: &Graph,
    devices: &DeviceSet,
    weights: &Weights,
    layers: &[LayerCache],
    kv: &[Choice],
    offload: bool,
) -> Assignments {
    let mut assignments = Assignments::new();
    if devices.len() == 1 {
        return assignments;
    }
    let cached = |tensor: &Arc<StoredTensor>| {
        let il = layer_of(layers, tensor)?;
        kv.get(il).copied()
    };
    for id in graph.ids() {
        let node = graph.node(id);
        if !node.tensor().is_computed() {
            continue;
        }
        let on_cache = matches!(node.op(), Op::FlashAttn { .. } | Op::SetRows);
        let stored = |source| graph.node(source).stored();
        let mut operands = node
            .tensor()
            .operands()
            .filter_map(|(_, source)| stored(source));
        let device = operands.find_map(|tensor| match cached(tensor) {
            Some(choice) => (on_cache || choice.explicit).then_some(choice.device),
            None => {
                let is_wanted = |device: &usize| {
                    let mut faster = devices.iter().take(*device);
                    offload && *device == devices.last() && faster.any(|d| d.wants_offload(node))
                };
                weights.assigned(tensor.name()).filter(|d| !is_wanted(d))
            }
        });
        if let Some(device) = device.filter(|&d| devices.get(d).supports(node).is_yes()) {
            assignments.set(id, device);
        }
    }
    assignments
}
