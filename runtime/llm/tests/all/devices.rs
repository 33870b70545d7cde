//! Logits are the same on every device and on any split over devices.

use crate::common::*;
use samite_core::{
    DType, Device, DeviceWrapper, Graph, Node, Op, StoredTensor, Support, TensorId, WrappedDevice,
};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_gguf::{GgufFile, LoadMode};
use samite_llm::{
    Batch, Context, ContextOptions, Error, Model, ModelOptions, ModelPlan, PlacementRule,
    SyntheticModel,
};
use samite_reference::{FaultPlan, ReferenceDevice, ReferenceOptions};
use samite_sched::{Fallback, Reason};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn the_cpu_agrees_with_the_reference() {
    for architecture in ARCHITECTURES {
        let file = TestModel::tiny(architecture);
        let run = |device| {
            let model = file.load(vec![device], "");
            decode(&mut context(&model, precise()), &tokens(20), 0, 0)
        };
        let error = nmse(&run(cpu()), &run(reference("ref")));
        assert!(error < 1e-6, "{architecture}: {error}");
    }
}

#[test]
fn layer_splits_do_not_change_results() {
    for architecture in ARCHITECTURES {
        let file = TestModel::tiny(architecture);
        let run = |devices, rules: &str| {
            let model = file.load(devices, rules);
            let mut context = context(&model, precise());
            let mut logits = decode(&mut context, &tokens(9), 0, 0);
            logits.extend(decode(&mut context, &tokens(3), 9, 0));
            logits
        };
        let whole = run(vec![reference("a")], "");
        let layers = SyntheticModel::tiny(architecture).n_layer;
        for at in 0..layers {
            let rules = format!("layers={at}-:b;output:b");
            let split = run(vec![reference("a"), reference("b")], &rules);
            assert!(nmse(&split, &whole) <= 1e-10, "{architecture}, {rules}");
            for second in at..layers {
                let rules = format!("layers={at}-:b; layers={second}-:c; output:a; embedding:b");
                let split = run(vec![reference("a"), reference("b"), reference("c")], &rules);
                assert!(nmse(&split, &whole) <= 1e-10, "{architecture}, {rules}");
            }
            let rules = format!("layers={at}:cpu");
            let mixed = run(vec![reference("a"), cpu()], &rules);
            assert!(nmse(&mixed, &whole) < 1e-6, "{architecture}, {rules}");
        }
        let mixed = run(vec![reference("a"), cpu()], "kv=1:cpu;*ffn_up*:cpu");
        assert!(nmse(&mixed, &whole) < 1e-6, "{architecture}");
    }
}

/// A layer ends with a sum, and only the sum has to be copied, not its operands.
#[test]
fn one_hidden_state_crosses_each_layer_boundary() {
    for architecture in ARCHITECTURES {
        let file = TestModel::tiny(architecture);
        let layers = SyntheticModel::tiny(architecture).n_layer;
        for at in 1..layers {
            for last in [reference("b"), cpu()] {
                // The host first, and the other device first.
                for first_layers in ["a", last.name()] {
                    let rest = if first_layers == "a" {
                        last.name()
                    } else {
                        "a"
                    };
                    let rules =
                        format!("layers=0-:{first_layers};layers={at}-:{rest};output:{rest}");
                    let model = file.load(vec![reference("a"), Arc::clone(&last)], &rules);
                    let plan = context(&model, precise()).plan(3).unwrap();
                    let graph = plan.graph();
                    let json = plan.to_json();
                    let splits = json["splits"].as_array().unwrap().iter();
                    let copies = splits.flat_map(|split| split["copies"].as_array().unwrap());
                    let copied: Vec<_> = copies
                        .map(|copy| copy["from"].as_u64().unwrap() as usize)
                        .map(|from| graph.tensor(TensorId::from_index(from)))
                        .filter(|tensor| tensor.is_computed() && *tensor.name != *"inp_embd")
                        .map(|tensor| tensor.name.to_string())
                        .collect();
                    assert_eq!(
                        copied,
                        [format!("l_out-{}", at - 1)],
                        "{architecture}, {rules}: {plan}"
                    );
                }
            }
        }
    }
}

#[test]
fn placement_follows_the_rules() {
    let file = TestModel::tiny("llama");
    let model = file.load(vec![reference("a"), reference("b")], "layers=1-:b");
    let context = context(&model, precise());
    let plan = context.plan(1).unwrap();
    let device = |name: &str| {
        let id = plan
            .graph()
            .ids()
            .find(|&id| &*plan.graph().tensor(id).name == name);
        let id = id.unwrap_or_else(|| panic!("no {name} in the graph"));
        plan.placement().devices[id.index()]
            .map(|device| plan.devices().get(device).name().to_owned())
    };
    assert_eq!(device("Qcur-0").as_deref(), Some("a"));
    assert_eq!(device("fattn-0").as_deref(), Some("a"));
    assert_eq!(device("cache_k_l1 (view)").as_deref(), Some("b"));
    assert_eq!(device("ffn_swiglu-2").as_deref(), Some("b"));
    assert_eq!(device("result_output").as_deref(), Some("a"));
    let memory = context.memory();
    assert_eq!(memory.len(), 2);
    assert!(
        memory
            .iter()
            .all(|row| row.weights > 0 && row.kv > 0 && row.compute > 0)
    );
    let spec = model.spec();
    let kept = spec.layers[0].memory();
    let [keys, values] = [kept.keys, kept.values].map(|kept| {
        let [heads, size] = kept.unwrap();
        heads * size
    });
    let kv: usize = memory.iter().map(|row| row.kv).sum();
    assert_eq!(kv, spec.n_layer() * (keys + values) * 64 * 4);
}

#[test]
fn unfused_attention_matches_flash_attention() {
    for architecture in ARCHITECTURES {
        let file = TestModel::tiny(architecture);
        let model = file.load(vec![reference("ref")], "");
        let run = |flash| {
            let options = ContextOptions { flash, ..precise() };
            decode(&mut context(&model, options), &tokens(20), 0, 0)
        };
        let error = nmse(&run(false), &run(true));
        assert!(error < 1e-9, "{architecture}: {error}");
    }
}

#[test]
fn smaller_cache_and_weight_types_are_accurate() {
    let file = TestModel::tiny("qwen3");
    let model = file.load(vec![cpu()], "");
    let run = |kv_types| {
        let options = ContextOptions {
            kv_types,
            ..precise()
        };
        decode(&mut context(&model, options), &tokens(20), 0, 0)
    };
    let exact = run([DType::F32; 2]);
    assert!(nmse(&run([DType::F16; 2]), &exact) < 1e-4);
    assert!(nmse(&run([DType::Q8_0; 2]), &exact) < 1e-2);

    let quantized = TestModel::write(&SyntheticModel {
        dtype: DType::Q8_0,
        ..SyntheticModel::tiny("qwen3")
    });
    let model = quantized.load(vec![cpu()], "");
    let logits = decode(&mut context(&model, precise()), &tokens(20), 0, 0);
    assert!(nmse(&logits, &exact) < 1e-2);
}

#[test]
fn a_tied_output_matches_the_embedding_on_any_device() {
    let file = TestModel::write(&SyntheticModel {
        tied: true,
        ..SyntheticModel::tiny("llama")
    });
    let run = |devices, rules: &str| {
        let model = file.load(devices, rules);
        decode(&mut context(&model, precise()), &tokens(5), 0, 0)
    };
    let whole = run(vec![reference("a")], "");
    let split = run(vec![reference("a"), reference("b")], "embedding:b;output:a");
    assert!(nmse(&split, &whole) <= 1e-10);
}

#[test]
fn context_creation_reports_insufficient_memory() {
    let device = samite_reference::ReferenceDevice::new(samite_reference::ReferenceOptions {
        memory_limit: Some(1 << 20),
        ..Default::default()
    });
    let file = TestModel::tiny("llama");
    let model = samite_llm::Model::load(&file.path, &ModelOptions::new(vec![device])).unwrap();
    let options = ContextOptions {
        n_ctx: Some(1 << 16),
        ..precise()
    };
    let error = samite_llm::Context::new(model, options).unwrap_err();
    let Error::Core(samite_core::Error::OutOfMemory { .. }) = &error else {
        panic!("{error}");
    };
}

fn asynchronous(name: &str) -> Arc<dyn Device> {
    ReferenceDevice::new(ReferenceOptions {
        asynchronous: true,
        events: true,
        copies: true,
        compiles: true,
        ..ReferenceOptions::named(name)
    })
}

#[test]
fn a_failed_batch_returns_its_error_even_without_logits() {
    let faults = FaultPlan::new();
    let device = ReferenceDevice::new(ReferenceOptions {
        asynchronous: true,
        faults: Some(Arc::clone(&faults)),
        ..ReferenceOptions::named("a")
    });
    let model = TestModel::tiny("llama").load(vec![device, reference("host")], "");
    let without_logits = |first: i32| {
        let mut batch = Batch::new();
        for position in first..first + 3 {
            batch.add(7, position, &[0], false);
        }
        batch
    };
    let mut context = context(&model, precise());
    context.decode(&without_logits(0)).unwrap();
    faults.reset();
    context.decode(&without_logits(3)).unwrap();
    let calls = faults.calls();
    assert!(calls > 5, "{calls}");
    let expected = decode(&mut context, &tokens(2), 6, 0);
    for call in 0..calls {
        context.kv_cache_mut().remove(0, 3..).unwrap();
        faults.reset();
        faults.fail_at(call);
        let error = context.decode(&without_logits(3)).unwrap_err().to_string();
        assert!(
            error.contains("injected"),
            "call {call} of {calls}: {error}"
        );
        context.decode(&without_logits(3)).unwrap();
        assert_eq!(
            decode(&mut context, &tokens(2), 6, 0),
            expected,
            "call {call}"
        );
    }
}

#[test]
fn growing_caches_cause_no_compilation() {
    for architecture in ARCHITECTURES {
        let file = TestModel::tiny(architecture);
        let model = file.load(vec![asynchronous("a"), asynchronous("b")], "layers=1-:b");
        let mut context = context(&model, precise());
        decode(&mut context, &tokens(20), 0, 0);
        decode(&mut context, &tokens(1), 20, 0);
        let before = context.scheduler().counters();
        for position in 21..60 {
            decode(&mut context, &tokens(1), position, 0);
        }
        let after = context.scheduler().counters();
        assert_eq!(after.plans - before.plans, 1, "{architecture}: at 32");
        assert_eq!(after.compiled, before.compiled, "{architecture}");
    }
}

#[test]
fn overlapping_prefill_micro_batches_share_a_plan() {
    let file = TestModel::tiny("llama");
    let run = |copies| {
        let model = file.load(vec![asynchronous("a"), asynchronous("b")], "layers=1-:b");
        let options = ContextOptions {
            copies,
            n_ubatch: 16,
            n_batch: 64,
            n_ctx: Some(128),
            ..precise()
        };
        let mut context = context(&model, options);
        let before = context.scheduler().counters().plans;
        let logits = decode(&mut context, &tokens(64), 0, 0);
        (logits, context.scheduler().counters().plans - before)
    };
    let ((expected, alone), (logits, overlapping)) = (run(1), run(4));
    assert!(nmse(&logits, &expected) < 1e-10);
    assert_eq!(overlapping, 1, "four micro-batches of one shape");
    assert!(alone > 1);
}

/// Returns whether an operation is rejected.
type Refusal = fn(Node<'_>) -> bool;

/// A device that rejects some operations.
struct Picky {
    inner: Arc<dyn Device>,
    refuses: Refusal,
}

impl DeviceWrapper for Picky {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    fn supports(&self, node: Node<'_>) -> Support {
        if (self.refuses)(node) {
            Support::no("it is picky")
        } else {
            self.inner.supports(node)
        }
    }

    fn supports_each(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support> {
        let nodes = nodes.iter();
        nodes.map(|&id| self.supports(graph.node(id))).collect()
    }
}

fn picky(refuses: Refusal) -> Vec<Arc<dyn Device>> {
    let inner = reference("Picky");
    let first: Arc<dyn Device> = Arc::new(WrappedDevice(Picky { inner, refuses }));
    vec![first, reference("last")]
}

#[test]
fn refused_weights_are_reported_or_fail_the_load() {
    let file = TestModel::tiny("llama");
    let gguf = GgufFile::open(&file.path, LoadMode::Read).unwrap();
    let whole = decode(
        &mut context(&file.load(vec![reference("a")], ""), precise()),
        &tokens(9),
        0,
        0,
    );
    let refuses: Refusal = |node| node.op().name() == "mul_mat";
    // By the order of devices, by a rule about layers, and by one about names; the case of the
    // device's name does not matter.
    for (rules, displaced) in [("", 22), ("layers=1:PICKY", 22), ("*ffn_up*:picky", 22)] {
        let mut options = ModelOptions {
            rules: PlacementRule::parse_all(rules).unwrap(),
            fit: None,
            ..ModelOptions::new(picky(refuses))
        };
        let plan = ModelPlan::new(&gguf, &options).unwrap();
        assert_eq!(plan.displaced().len(), displaced, "{rules}");
        let first = &plan.displaced()[0];
        assert!(first.what.starts_with("tensor '"), "{first:?}");
        assert_eq!(first.reason, "it is picky");
        assert_eq!((&*first.wanted, &*first.device), ("Picky", "last"));
        let model = Model::load(&file.path, &options).unwrap();
        let logits = decode(&mut context(&model, precise()), &tokens(9), 0, 0);
        assert_eq!(nmse(&logits, &whole), 0.0, "{rules}");

        options.fallback = Fallback::Deny;
        let error = ModelPlan::new(&gguf, &options).unwrap_err().to_string();
        let wanted = format!(
            "{} belongs on Picky, which refuses it: it is picky; so do {} more",
            first.what,
            displaced - 1
        );
        assert!(error.starts_with(&wanted), "{error}");
    }
    // Tensors that the rules place elsewhere are not displaced.
    let options = ModelOptions {
        rules: PlacementRule::parse_all("layers=0-:last;output:last").unwrap(),
        fallback: Fallback::Deny,
        ..ModelOptions::new(picky(refuses))
    };
    assert_eq!(ModelPlan::new(&gguf, &options).unwrap().displaced(), []);
}

/// Returns whether a node multiplies something else than weights.
fn is_product_of_keys(node: Node<'_>) -> bool {
    let weights = |stored: &Arc<StoredTensor>| stored.name().contains("weight");
    let first = node.tensor().sources.first().copied().flatten();
    let stored = first.and_then(|first| node.graph().node(first).stored());
    node.op().name() == "mul_mat" && !stored.is_some_and(weights)
}

#[test]
fn refused_flash_attention_becomes_several_operations_on_the_same_device() {
    let file = TestModel::tiny("llama");
    let run = |devices, options| {
        let mut context = context(&file.load(devices, ""), options);
        let plan = context.plan(1).unwrap();
        let devices: Vec<_> = plan.splits().iter().map(|split| split.device).collect();
        (decode(&mut context, &tokens(9), 0, 0), devices)
    };
    for v_type in [DType::F32, DType::F16, DType::Q8_0] {
        let options = |flash| ContextOptions {
            flash,
            kv_types: [v_type; 2],
            ..precise()
        };
        let refuses: Refusal = |node| node.op().name() == "flash_attn_ext";
        let denied = ContextOptions {
            fallback: Fallback::Deny,
            ..options(true)
        };
        let (logits, devices) = run(picky(refuses), denied);
        assert_eq!(
            devices,
            [1, 0],
            "{v_type}: first the embedding, then all layers"
        );
        let (expected, _) = run(vec![reference("a")], options(false));
        assert_eq!(nmse(&logits, &expected), 0.0, "{v_type}");
        let (flash, _) = run(vec![reference("a")], options(true));
        assert!(nmse(&logits, &flash) < 1e-6, "{v_type}");
    }
}

#[test]
fn caches_are_placed_on_devices_that_support_the_layer() {
    let file = TestModel::tiny("llama");
    let whole = |flash| {
        let options = ContextOptions { flash, ..precise() };
        let model = file.load(vec![reference("a")], "");
        decode(&mut context(&model, options), &tokens(9), 0, 0)
    };
    let refusals: [(Refusal, bool, &str); 3] = [
        (|node| node.op().name() == "set_rows", true, "set_rows"),
        (
            |node| node.op().name() == "flash_attn_ext" || is_product_of_keys(node),
            true,
            "flash_attn_ext",
        ),
        (is_product_of_keys, false, "mul_mat"),
    ];
    for (refuses, flash, operation) in refusals {
        let options = ContextOptions { flash, ..precise() };
        let model = file.load(picky(refuses), "");
        let mut context = context(&model, options.clone());
        let kv: Vec<_> = context.memory().iter().map(|row| row.kv > 0).collect();
        assert_eq!(kv, [false, true], "{operation}");
        let logits = decode(&mut context, &tokens(9), 0, 0);
        assert_eq!(nmse(&logits, &whole(flash)), 0.0, "{operation}");
        let denied = ContextOptions {
            fallback: Fallback::Deny,
            ..options
        };
        let error = Context::new(model, denied).unwrap_err().to_string();
        let wanted = format!(
            "the KV cache of layer 0 belongs on Picky, which refuses it: {operation}: it is picky; so do 2 more"
        );
        assert!(error.starts_with(&wanted), "{error}");
    }
}

/// A micro-batch is on the first layers while the previous one is on the last ones.
#[test]
fn pipeline_copies_overlap_prefill_micro_batches() {
    // Computation is a small part of the time, regardless of the machine's load.
    let file = TestModel::write(&SyntheticModel {
        n_layer: 2,
        n_head: 1,
        n_head_kv: 1,
        n_ff: 32,
        ..SyntheticModel::tiny("llama")
    });
    let slow = |name: &str| -> Arc<dyn Device> {
        ReferenceDevice::new(ReferenceOptions {
            name: name.to_owned(),
            asynchronous: true,
            events: true,
            copies: true,
            // Keys and values: twenty milliseconds in each layer.
            delays: vec![("set_rows".to_owned(), Duration::from_millis(10))],
            ..ReferenceOptions::default()
        })
    };
    let prompt = |copies: usize, n_tokens: usize| {
        let model = file.load(vec![slow("a"), slow("b"), cpu()], "layers=1-:b;output:b");
        let mut context = context(
            &model,
            ContextOptions {
                copies,
                n_ctx: Some(256),
                n_ubatch: 32,
                ..precise()
            },
        );
        let mut batch = Batch::new();
        for (i, &token) in tokens(n_tokens).iter().enumerate() {
            batch.add(token, i as i32, &[0], i + 1 == n_tokens);
        }
        // Once to create the plan, once to measure.
        context.decode(&batch).unwrap();
        context.clear().unwrap();
        context.scheduler_mut().start_trace();
        context.decode(&batch).unwrap();
        let trace = context.scheduler_mut().finish_trace().unwrap();
        let logits = context.logits(n_tokens - 1).unwrap().to_vec();
        (trace.take_events(), logits)
    };
    // The time in which both devices store keys and values, in microseconds.
    let both_work = |events: &[serde_json::Value]| {
        let tracks: Vec<_> = events.iter().filter(|event| event["ph"] == "M").collect();
        let spans = |device: &str| -> Vec<(f64, f64)> {
            let is_track = |event: &&&serde_json::Value| event["args"]["name"] == device;
            let track = &tracks.iter().find(is_track).unwrap()["tid"];
            let nodes = events.iter().filter(|event| {
                event["ph"] == "X" && event["tid"] == *track && event["name"] == "set_rows"
            });
            let number = |value: &serde_json::Value| value.as_f64().unwrap();
            nodes
                .map(|event| {
                    let start = number(&event["ts"]);
                    (start, start + number(&event["dur"]))
                })
                .collect()
        };
        let (a, b) = (spans("a"), spans("b"));
        assert_eq!((a.len(), b.len()), (16, 16));
        let pairs = a.iter().flat_map(|a| b.iter().map(move |b| (a, b)));
        pairs
            .map(|(a, b)| (a.1.min(b.1) - a.0.max(b.0)).max(0.0))
            .sum::<f64>()
    };
    let (alone_events, alone_logits) = prompt(1, 256);
    // Times of events are rounded to microseconds.
    assert!(both_work(&alone_events) < 1000.0);
    // Each device stores for 160 ms. A busy machine can only delay one of them: try again.
    let overlaps = (0..20).any(|_| {
        let (events, logits) = prompt(4, 256);
        assert_eq!(logits, alone_logits);
        both_work(&events) > 60_000.0
    });
    assert!(overlaps, "the devices never store at the same time");
    // The last micro-batch is smaller, and the results are the same.
    assert_eq!(prompt(4, 93).1, prompt(1, 93).1);
}

/// A GPU that takes over products of many tokens.
struct Eager(Arc<dyn Device>);

impl DeviceWrapper for Eager {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.0
    }

    fn wants_offload(&self, node: Node<'_>) -> bool {
        let shape = node.layout().shape();
        let tokens = match node.op() {
            Op::MulMatId { .. } => shape[2],
            _ => shape[1],
        };
        tokens >= 32
    }
}

#[test]
fn prefill_is_offloaded_but_decode_is_not() {
    for (architecture, dtype) in [
        ("llama", DType::Q4_0),
        ("qwen2", DType::Q8_0),
        ("qwen3moe", DType::F16),
    ] {
        let mut shape = SyntheticModel {
            dtype,
            ..SyntheticModel::tiny(architecture)
        };
        // Whole blocks of every type.
        (shape.n_embd, shape.n_ff) = (128, 128);
        if architecture == "qwen2" {
            shape.head_dim = shape.n_embd / shape.n_head;
        }
        let file = TestModel::write(&shape);
        let run = |offload: bool| {
            let eager = WrappedDevice::device(Eager(reference("gpu")));
            let model = file.load(vec![eager, cpu()], "layers=0-:cpu;output:cpu");
            let options = ContextOptions {
                offload,
                n_ctx: Some(128),
                ..precise()
            };
            let mut context = context(&model, options);
            // Without a second copy of the weights: all of them are packed, if possible.
            let memory = context.memory();
            let weights = |name: &str| {
                let rows = memory.iter().filter(|row| row.memory.contains(name));
                rows.map(|row| row.weights).sum::<usize>()
            };
            assert!(weights("packed") > weights("host"), "{memory:?}");
            assert_eq!(weights("gpu"), 0);
            let offloaded = |context: &Context, n_tokens: usize| {
                let plan = context.plan(n_tokens).unwrap();
                let reasons = plan.placement().reasons.iter().flatten();
                let count = reasons.filter(|reason| matches!(reason, Reason::Offloaded { .. }));
                (count.count(), plan.bytes_copied())
            };
            let planned = context.plan(100).unwrap().memory_by_type();
            let allocated = context.scheduler().buffer_sizes();
            for ((name, planned), (_, allocated)) in planned.iter().zip(&allocated) {
                assert!(planned <= allocated, "{architecture}: {name}");
            }
            let logits = decode(&mut context, &tokens(100), 0, 0);
            assert_eq!(context.scheduler().buffer_sizes(), allocated);
            let prompt = offloaded(&context, 100);
            // Only the used experts of packed matrices are copied as well.
            let plan = context.plan(100).unwrap();
            let partial = plan.copies().iter().filter(|copy| copy.experts.is_some());
            let reasons = plan.placement().reasons.iter().zip(plan.graph().tensors());
            let products = reasons.filter(|(reason, tensor)| {
                matches!(reason, Some(Reason::Offloaded { .. }))
                    && matches!(tensor.op, Op::MulMatId { .. })
            });
            let products = products.count();
            assert_eq!(partial.count(), products, "{architecture}");
            assert_eq!(products > 0, offload && architecture == "qwen3moe");
            let step = offloaded(&context, 1);
            (prompt, step, logits)
        };
        let (prompt, step, logits) = run(true);
        // Seven products in each layer, and those of logits; one more with experts.
        assert!(prompt.0 >= 7 * shape.n_layer, "{architecture}: {prompt:?}");
        assert_eq!(step.0, 0, "{architecture}");
        // The bytes of the plan are those of the weights as stored in files, and of the copies in
        // both directions.
        let matrix = dtype.block_bytes() * shape.n_embd * shape.n_ff / dtype.block_len();
        assert!(prompt.1 > 3 * shape.n_layer * matrix);
        let (none, _, same) = run(false);
        assert_eq!(none.0, 0, "{architecture}");
        let error = nmse(&logits, &same);
        assert!(error < 1e-3, "{architecture}: {error}");
    }
}

#[test]
fn results_are_identical_per_device_type_and_close_across_types() {
    // Types of each family, and the maximum error of their logits. With quantized weights, columns
    // are rounded to integers.
    for (dtype, most) in [
        (DType::F32, 1e-10),
        (DType::F16, 1e-5),
        (DType::Q8_0, 1e-3),
        (DType::Q4_0, 3e-3),
        (DType::Q5_1, 3e-3),
        (DType::Q4_K, 3e-3),
        (DType::Q6_K, 3e-3),
    ] {
        let mut shape = SyntheticModel {
            dtype,
            ..SyntheticModel::tiny("llama")
        };
        (shape.n_embd, shape.n_ff) = (256, 256);
        shape.head_dim = 256 / shape.n_head;
        let file = TestModel::write(&shape);
        let run = |device: Arc<dyn Device>, repack| {
            let options = ModelOptions {
                repack,
                ..ModelOptions::new(vec![device])
            };
            let model = Model::load(&file.path, &options).unwrap();
            let mut context = context(&model, precise());
            let mut logits = decode(&mut context, &tokens(40), 0, 0);
            for position in 40..44 {
                logits.extend(decode(&mut context, &tokens(1), position, 0));
            }
            logits
        };
        let threads = |threads| -> Arc<dyn Device> {
            CpuDevice::new(CpuOptions::default().with_threads(threads))
        };
        let exact = run(reference("reference"), true);
        let [packed, unpacked] = [true, false].map(|repack| {
            let one = run(threads(1), repack);
            for count in [1, 2, 3] {
                let same = run(threads(count), repack) == one;
                assert!(same, "{dtype}, repack {repack}, {count} threads");
            }
            let error = nmse(&one, &exact);
            assert!(error < most, "{dtype}, repack {repack}: {error}");
            one
        });
        let error = nmse(&packed, &unpacked);
        assert!(error < most, "{dtype}: {error}");
    }
}
