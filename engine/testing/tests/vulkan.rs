//! Upstream's Vulkan plugin reorders nodes and requires some buffers to be kept.

#![cfg(unix)]
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::{Backend, DType, Graph, KeepAlive, Op, SortOrder};
use samite_ggml::{GgmlBackend, GgmlOptions};

#[test]
fn the_upstream_vulkan_plugin_reorders_and_preserves_tensors() {
    let Some(folder) = std::env::var_os("SAMITE_TEST_GGML_VULKAN") else {
        samite_testing::skipped(
            "SAMITE_TEST_GGML_VULKAN does not name a folder with libggml-vulkan.so",
        );
        return;
    };
    let mut options = GgmlOptions::default();
    options.paths = vec![folder.into()];
    let backend = GgmlBackend::find(&options);
    let device = backend.devices().iter();
    let device = device.clone().find(|d| d.name() == "ggml:Vulkan0").unwrap();

    // Independent work comes before work that waits.
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [64, 1, 1, 1]).unwrap();
    let y = graph.input("y", DType::F32, [64, 1, 1, 1]).unwrap();
    let a = graph.sqr(x).unwrap();
    let b = graph.scale(a, 2.0).unwrap();
    let c = graph.sqr(y).unwrap();
    let d = graph.add(b, c).unwrap();
    let mut nodes = [a, b, c, d];
    assert_eq!(device.optimize(&graph, &mut nodes), []);
    assert_eq!(nodes, [a, c, b, d]);

    // The MoE router is one kernel, which reads buffers that the intermediate nodes no longer need.
    let mut graph = Graph::new();
    let logits = graph.input("logits", DType::F32, [32, 4, 1, 1]).unwrap();
    let soft_max = Op::SoftMax {
        scale: 1.0,
        max_bias: 0.0,
    };
    let probabilities = graph.push(soft_max, &[Some(logits)]).unwrap();
    let rows = Op::Reshape {
        shape: [1, 32, 4, 1],
    };
    let rows = graph.push(rows, &[Some(probabilities)]).unwrap();
    let sort = Op::ArgSort {
        order: SortOrder::Descending,
    };
    let sorted = graph.push(sort, &[Some(probabilities)]).unwrap();
    let chosen = graph
        .view(sorted, [4, 4, 1, 1], [128, 512, 512], 0)
        .unwrap();
    let weights = graph
        .push(Op::GetRows, &[Some(rows), Some(chosen)])
        .unwrap();
    let before = [probabilities, sorted, weights];
    let mut nodes = before;
    let kept = device.optimize(&graph, &mut nodes);
    assert_eq!(nodes, before);
    let logits_are_kept = KeepAlive {
        tensor: logits,
        until: weights,
    };
    assert!(kept.contains(&logits_are_kept), "{kept:?}");
}
