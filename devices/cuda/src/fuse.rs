//! Fuses nodes into launches.
//!
//! - An RMS norm and the multiplication by its weights are one launch, with the addition before it
//!   if there is one.
//! - Consecutive products of packed weights with the same columns share their quantization.
//!
//! Launches depend on layouts and on facts about memory: which weights are packed, and which
//! tensors overlap.

use crate::device::{CudaDevice, WeightMemory};
use crate::ops::{self, OperandFacts};
use crate::plan::{GROUP, LaunchOperand, LaunchOperands, MAX_GROUPS, OperandSource, PlannedLaunch};
use samite_core::{Error, Graph, Node, Op, Readers, Result, TensorId};

/// A launch, and the node to which it is attributed.
pub struct NodeLaunch {
    pub node: TensorId,
    pub launch: PlannedLaunch,
}

/// Row length from which a norm uses the most threads that a group can have.
const LONG_ROW: usize = 2048;

/// Returns the launches of `nodes`.
///
/// # Errors
/// [`Error::Unsupported`] if the device does not support one of the nodes.
pub fn launch_list(
    device: &CudaDevice,
    graph: &Graph,
    nodes: &[TensorId],
    memory: WeightMemory<'_>,
) -> Result<Vec<NodeLaunch>> {
    let nodes = nodes.iter().map(|&id| graph.node(id));
    let nodes: Vec<_> = nodes.filter(|node| node.tensor().is_computed()).collect();
    let fusion = LaunchFusion {
        nodes: &nodes,
        readers: Readers::new(graph),
        memory,
    };
    let mut list = Vec::new();
    // The operand of the last quantization, as long as the workspace holds its result.
    let mut quantized: Option<LaunchOperand> = None;
    let mut at = 0;
    while let Some(&node) = nodes.get(at) {
        if let Some((launch, count)) = fusion.scaled_norm(at) {
            forget_written(&mut quantized, &nodes[at..at + count], memory);
            let node = nodes[at + count - 1].id();
            list.push(NodeLaunch { node, launch });
            at += count;
            continue;
        }
        let facts = OperandFacts {
            packed: device.is_packed(node, memory),
        };
        let launches = ops::launches_of(node, &device.gpu().card(), facts)
            .map_err(|reason| Error::unsupported(device.gpu().name(), node.op().name(), reason))?;
        for launch in launches {
            if ops::is_quantization(&launch) {
                let columns = launch.operands[1].in_node(node);
                if quantized.is_some_and(|known| known.is_same(&columns)) {
                    continue;
                }
                quantized = Some(columns);
            } else if launch.uses_workspace() && !ops::is_quantized_product(&launch) {
                quantized = None;
            }
            list.push(NodeLaunch {
                node: node.id(),
                launch,
            });
        }
        forget_written(&mut quantized, &nodes[at..=at], memory);
        at += 1;
    }
    Ok(list)
}

/// Forgets quantized columns that one of `nodes` may have overwritten.
fn forget_written(
    quantized: &mut Option<LaunchOperand>,
    nodes: &[Node<'_>],
    memory: WeightMemory<'_>,
) {
    let Some(OperandSource::Tensor(columns)) = quantized.map(|operand| operand.which) else {
        return;
    };
    let is_overwritten = |node: &Node<'_>| {
        let written = node.tensor().written().map(|(_, id)| id).chain([node.id()]);
        let mut written = written.map(|id| are_apart(memory, id, columns, false));
        written.any(|is_apart| !is_apart)
    };
    if nodes.iter().any(is_overwritten) {
        *quantized = None;
    }
}

/// Returns whether two tensors do not overlap. If `same` is set, they may also lie in exactly the
/// same place. Without places, they count as apart.
fn are_apart(memory: WeightMemory<'_>, a: TensorId, b: TensorId, same: bool) -> bool {
    let WeightMemory::Places(places) = memory else {
        return a != b || same;
    };
    let place = |id: TensorId| places.get(id.index()).and_then(Option::as_ref);
    match [place(a), place(b)] {
        [Some(a), Some(b)] => {
            !a.overlaps(b) || same && a.location() == b.location() && a.layout() == b.layout()
        }
        _ => false,
    }
}

struct LaunchFusion<'a> {
    nodes: &'a [Node<'a>],
    readers: Readers,
    memory: WeightMemory<'a>,
}

impl LaunchFusion<'_> {
    /// Fuses a norm and its weights, and the addition before them, starting at node `at`. Returns
    /// the launch and the number of nodes.
    fn scaled_norm(&self, at: usize) -> Option<(PlannedLaunch, usize)> {
        let sum = self.nodes[at];
        let is_sum = matches!(sum.op(), Op::Add);
        let first = at + usize::from(is_sum);
        let (norm, scaled) = (*self.nodes.get(first)?, *self.nodes.get(first + 1)?);
        let (Op::RmsNorm { eps }, Op::Mul) = (norm.op(), scaled.op()) else {
            return None;
        };
        let (x, factors) = (norm.source(0)?, scaled.source(1)?);
        let apart = |a: Node<'_>, b: Node<'_>, same| are_apart(self.memory, a.id(), b.id(), same);
        let fits = scaled.source(0)?.id() == norm.id()
            && self.readers.only(norm.id(), 1)
            && norm.tensor().view.is_none()
            && factors.layout().rows() == 1
            && factors.layout().shape()[0] == x.layout().shape()[0]
            && !scaled.layout().is_empty()
            && apart(scaled, factors, false)
            && apart(scaled, x, true);
        if !fits {
            return None;
        }
        let mut operands = vec![
            scaled.result().in_node(scaled),
            norm.operand(0).ok()?.in_node(norm),
            scaled.operand(1).ok()?.in_node(scaled),
            LaunchOperand::missing(),
            LaunchOperand::missing(),
        ];
        if is_sum {
            let terms = [sum.source(0)?, sum.source(1)?];
            let shape = sum.layout().shape();
            let fits = x.id() == sum.id()
                && terms.iter().all(|term| term.layout().shape() == shape)
                && terms.iter().all(|&term| apart(scaled, term, true))
                && apart(sum, factors, false)
                && apart(scaled, sum, false);
            if !fits {
                return None;
            }
            operands[1] = sum.operand(0).ok()?.in_node(sum);
            operands[3] = sum.operand(1).ok()?.in_node(sum);
            operands[4] = sum.result().in_node(sum);
        }
        ops::floats(&operands).ok()?;
        let groups = operands[0].rows().min(MAX_GROUPS);
        let threads = norm_threads(operands[0].shape[0]);
        let launch = PlannedLaunch::new("norm", "scaled_norm", operands, groups).ok()?;
        let launch = launch.floats([*eps]).threads(threads);
        Some((launch, first + 2 - at))
    }
}

/// Returns the threads of a group that norms rows of `length` elements.
pub fn norm_threads(length: usize) -> u32 {
    if length < LONG_ROW { GROUP } else { 1024 }
}
