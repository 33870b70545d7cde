//! A model on two devices in lockstep.

use crate::common::*;
use samite_core::{Device, Op};
use samite_llm::arch::{Output, spec::Pooling};
use samite_llm::{Batch, Context, ContextOptions, Model};
use samite_sched::Watch;
use samite_sched::compare::{Pair, in_order};
use samite_testing::wrong_device;
use std::sync::Arc;

/// Larger than rounding errors with any types.
const LIMIT: f64 = 5e-4;

/// Returns options with mean pooling for models that do not return logits.
fn options(model: &Model) -> ContextOptions {
    ContextOptions {
        output: match model.spec().head.output {
            Some(_) => Output::Logits,
            None => Output::Embeddings(Pooling::Mean),
        },
        ..precise()
    }
}

/// Compares a prompt and a step on two devices. Returns the nodes that differ.
fn differing(
    file: &TestModel,
    sides: [Arc<dyn Device>; 2],
    mut see: impl FnMut(&Pair<'_>) -> Watch,
) -> (Vec<(String, String)>, usize) {
    let mut contexts = sides.map(|device| {
        let model = file.load(vec![in_order(&device)], "");
        context(&model, options(&model))
    });
    let (mut found, mut count) = (Vec::new(), 0);
    for (tokens, position) in [(tokens(7), 0), (vec![9], 7)] {
        let [a, b] = &mut contexts;
        let batch = Batch::sequence(&tokens, position, 0);
        let result = Context::compare([a, b], &batch, |pair| {
            count += 1;
            if !pair.difference.exceeds(LIMIT) {
                return Ok(Watch::Continue);
            }
            let tensor = pair.nodes[0].tensor();
            found.push((tensor.name.to_string(), tensor.op.name().to_owned()));
            Ok(see(pair))
        });
        match result {
            Err(error) if error.is_stopped() => break,
            result => result.unwrap(),
        }
    }
    (found, count)
}

#[test]
fn a_wrong_kernel_is_found_by_name_in_every_tiny_model() {
    for architecture in ARCHITECTURES.into_iter().chain(["qwen3moe", "bert"]) {
        let file = TestModel::tiny(architecture);
        // The names of the first node of each operation, and of all nodes, in the model's order.
        let mut nodes: Vec<(String, String)> = Vec::new();
        let right = [reference("a"), reference("b")];
        let model = file.load(vec![reference("a")], "");
        let plan = context(&model, options(&model)).plan(7).unwrap();
        for tensor in plan.graph().tensors().iter().filter(|t| t.is_computed()) {
            nodes.push((tensor.name.to_string(), tensor.op.name().to_owned()));
        }
        let (found, count) = differing(&file, right, |_| Watch::Continue);
        assert_eq!(found, [], "{architecture}");
        assert!(count > 50, "{architecture}: {count} nodes");
        let mut operations: Vec<_> = nodes.iter().map(|(_, operation)| operation).collect();
        operations.sort_unstable();
        operations.dedup();
        assert!(operations.len() >= 7, "{operations:?}");
        for operation in operations {
            let planted = operation.clone();
            let wrong = wrong_device(&reference("a"), move |node| node.op().name() == planted);
            let (found, _) = differing(&file, [wrong, cpu()], |pair| {
                assert_eq!(pair.devices.map(|device| device.name()), ["a", "cpu"]);
                Watch::Stop
            });
            let first = nodes.iter().find(|(_, name)| name == operation).unwrap();
            assert_eq!(
                found,
                std::slice::from_ref(first),
                "{architecture}: {operation}"
            );
        }
    }
}

#[test]
fn only_the_wrong_node_differs() {
    let file = TestModel::tiny("llama");
    for name in ["Kcur-1", "ffn_out-0", "cache_v_l2 (view)", "result_output"] {
        let wrong = wrong_device(&cpu(), move |node| {
            &*node.tensor().name == name && !matches!(node.op(), Op::Rope { .. })
        });
        let (found, _) = differing(&file, [wrong, reference("b")], |_| Watch::Continue);
        let names: Vec<_> = found.iter().map(|(name, _)| &**name).collect();
        // In the prompt and in the step.
        assert_eq!(names, [name, name]);
    }
}
