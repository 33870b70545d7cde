//! Decides which operations of a model's graph must run on a certain device.

use crate::arch::LayerCache;
use crate::rules::Choice;
use crate::weights::Weights;
use samite_core::{Graph, Op, StoredTensor};
use samite_sched::{Assignments, DeviceSet};
use std::sync::Arc;

/// Returns the layer whose cache contains `tensor`.
pub(crate) fn layer_of(layers: &[LayerCache], tensor: &Arc<StoredTensor>) -> Option<usize> {
    let mine = |layer: &LayerCache| layer.tensors().any(|own| Arc::ptr_eq(own, tensor));
    layers.iter().position(mine)
}

/// Assigns operations that must run on a certain device: those on weights that a rule placed there,
/// and attention on the device of its cache, which `kv` contains for each layer. Operations on
/// weights that a rule placed on the host may still be [offloaded](samite_sched::Options::offload).
pub(crate) fn assign(
    graph: &Graph,
    devices: &DeviceSet,
    weights: &Weights,
    layers: &[LayerCache],
    kv: &[Choice],
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
        let on_cache = matches!(
            node.op(),
            Op::FlashAttn { .. }
                | Op::MulMat { .. }
                | Op::Cast { .. }
                | Op::Cont
                | Op::SetRows
                | Op::GatedDeltaNet { .. }
                | Op::SsmScan { .. }
        );
        let stored = |source| graph.node(source).stored();
        let mut operands = node
            .tensor()
            .operands()
            .filter_map(|(_, source)| stored(source));
        // The device, and whether it has the weight instead of the cache.
        let found = operands.find_map(|tensor| match cached(tensor) {
            Some(choice) => (on_cache || choice.explicit).then_some((choice.device, false)),
            None => Some((weights.assigned(tensor.name())?, true)),
        });
        match found.filter(|&(device, _)| devices.get(device).supports(node).is_yes()) {
            Some((device, true)) => assignments.set_unless_offloaded(id, device),
            Some((device, false)) => assignments.set(id, device),
            None => {}
        }
    }
    assignments
}
