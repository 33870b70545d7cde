//! Export of graph nodes as ggml tensors.

use crate::numbers::{flag, op};
use crate::params::encode;
use crate::{Description, UnsupportedConversion};
use samite_core::{Graph, Layout, Node, Op, TensorId};
use std::collections::BTreeMap;

/// Returns the computed and non-empty ones of `nodes`, with the views that they read, as in ggml's
/// graphs. Plugins use views to see which results are read, and which nodes they can fuse. For the
/// latter, a view must come right after the node that it views. A view of an older tensor comes
/// before its first reader.
pub fn with_views(graph: &Graph, nodes: &[TensorId]) -> Vec<TensorId> {
    let is_empty = |id: TensorId| graph.tensor(id).layout.is_empty();
    let is_view = |id: TensorId| graph.tensor(id).op.is_view() && !is_empty(id);
    let looks_at = |id: TensorId| graph.tensor(id).operands().next().map(|(_, source)| source);
    let computed: Vec<TensorId> = nodes
        .iter()
        .copied()
        .filter(|&id| graph.tensor(id).is_computed() && !is_empty(id))
        .collect();
    let mut is_node = vec![false; graph.len()];
    for id in &computed {
        is_node[id.index()] = true;
    }
    let mut is_known = vec![false; graph.len()];
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    for &id in &computed {
        for (_, source) in graph.tensor(id).operands() {
            let mut views = Vec::new();
            let mut root = source;
            while is_view(root)
                && let Some(next) = looks_at(root)
            {
                if !std::mem::replace(&mut is_known[root.index()], true) {
                    views.push(root);
                }
                root = next;
            }
            let list: &mut Vec<_> = if is_node[root.index()] {
                after.entry(root).or_default()
            } else {
                before.entry(id).or_default()
            };
            list.append(&mut views);
        }
    }
    let sorted = |views: Option<Vec<TensorId>>| {
        let mut views = views.unwrap_or_default();
        views.sort_unstable(); // a viewed tensor comes before its views
        views
    };
    let mut all = Vec::with_capacity(nodes.len());
    for id in computed {
        all.extend(sorted(before.remove(&id)));
        all.push(id);
        all.extend(sorted(after.remove(&id)));
    }
    all
}

/// Returns a leaf with this layout.
///
/// # Errors
/// If an extent does not fit into 63 bits.
pub fn bare(layout: &Layout) -> Result<Description, UnsupportedConversion> {
    let mut tensor = Description {
        dtype: layout.dtype().id(),
        nb: layout.strides(),
        ..Description::default()
    };
    for (to, from) in tensor.ne.iter_mut().zip(layout.shape()) {
        *to = i64::try_from(from).map_err(|_| format!("extent {from} is too large"))?;
    }
    Ok(tensor)
}

/// Returns a node with its operation and output flag.
///
/// # Errors
/// If ggml does not have the operation or a number does not fit.
pub fn describe(node: Node<'_>) -> Result<Description, UnsupportedConversion> {
    let mut tensor = bare(node.layout())?;
    let encoded = encode(node.op())?;
    tensor.op = encoded.op;
    tensor.op_params = encoded.params;
    if let Op::Conv3d { channels, .. } = *node.op() {
        // The numbers of images and outputs, which the shapes also contain.
        for (word, source) in [(10, 1), (11, 0)] {
            let all = node.source_layout(source).map_or(0, |x| x.shape()[3]);
            tensor.op_params[word] = i32::try_from(all / channels.max(1))
                .map_err(|_| format!("{all} images do not fit into 32 bits"))?;
        }
    }
    tensor.is_view = node.tensor().view.is_some();
    if node.tensor().flags.output {
        tensor.flags |= flag::OUTPUT;
    }
    debug_assert!(tensor.op < op::COUNT);
    Ok(tensor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_core::{DType, Window};

    /// Checks the parameter words, because ggml's kernel uses these, not the shapes.
    #[test]
    fn convolution_parameters_include_the_image_count() {
        let mut g = Graph::new();
        let kernel = g.input("kernel", DType::F32, [3, 2, 2, 6]).unwrap();
        let images = g.input("images", DType::F32, [9, 8, 7, 4]).unwrap();
        let op = Op::Conv3d {
            window: Window::default(),
            channels: 2,
        };
        let id = g.push(op, &[Some(kernel), Some(images)]).unwrap();
        let words = describe(g.node(id)).unwrap().op_params;
        assert_eq!(words[9..12], [2, 2, 3]); // channels, images, outputs
    }
}
