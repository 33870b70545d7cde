//! Compares gradients with central finite differences, on the reference device in float64 and on
//! the CPU.

use half::f16;
use samite_core::{
    CancelToken, DType, Device, Glu, Graph, Op, Rope, RopeMode, Shape, TensorId, Unary,
};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_sched::{Options, Scheduler};
use samite_train::{Constants, Forward, Gradients, Loss, ModelConfig, Parts};
use std::collections::BTreeMap;
use std::sync::Arc;

fn exact() -> Vec<Arc<dyn Device>> {
    vec![ReferenceDevice::new(ReferenceOptions {
        float64: true,
        ..ReferenceOptions::default()
    })]
}

/// Returns the CPU, and a device for the conversion of its results to float64.
fn cpu() -> Vec<Arc<dyn Device>> {
    let rest = ReferenceDevice::new(ReferenceOptions {
        host_memory: true,
        ..ReferenceOptions::named("rest")
    });
    vec![CpuDevice::new(CpuOptions::default().with_threads(2)), rest]
}

/// Returns reproducible, distinct numbers from `min` to `max`.
fn numbers(seed: u64, count: usize, [min, max]: [f32; 2]) -> Vec<f32> {
    let mut rng = samite_text::Rng::new(seed);
    let mut next = || min + (max - min) * rng.uniform() as f32;
    (0..count).map(|_| next()).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A graph under test: F32 inputs to differentiate by, and integer inputs.
#[derive(Clone, Default)]
struct Subject {
    graph: Graph,
    floats: Vec<(TensorId, Vec<f32>)>,
    integers: Vec<(TensorId, Vec<u8>)>,
}

impl Subject {
    fn input(&mut self, shape: Shape) -> TensorId {
        self.input_in(shape, [-1.0, 1.0])
    }

    fn input_in(&mut self, shape: Shape, range: [f32; 2]) -> TensorId {
        let id = self.graph.input("x", DType::F32, shape).unwrap();
        let seed = self.floats.len() as u64 + 1;
        let values = numbers(seed, shape.iter().product(), range);
        self.floats.push((id, values));
        id
    }

    fn integers(&mut self, values: &[i32]) -> TensorId {
        let shape = [values.len(), 1, 1, 1];
        let id = self.graph.input("ids", DType::I32, shape).unwrap();
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.integers.push((id, bytes));
        id
    }

    fn constant(&mut self, dtype: DType, shape: Shape, data: Vec<u8>) -> TensorId {
        let id = self.graph.input("constant", dtype, shape).unwrap();
        self.integers.push((id, data));
        id
    }

    /// Adds a causal mask: the last of `tokens` attends to all of `keys`, the one before to all but
    /// the last, and so on.
    fn causal_mask(&mut self, keys: usize, tokens: usize) -> TensorId {
        let mask = (0..keys * tokens).map(|i| i % keys + tokens <= i / keys + keys);
        let value = |seen| if seen { f16::ZERO } else { f16::NEG_INFINITY };
        let data = mask.flat_map(|seen| value(seen).to_le_bytes()).collect();
        self.constant(DType::F16, [keys, tokens, 1, 1], data)
    }

    /// Returns the sum of all elements of `y`, each with its own weight, so that gradients differ.
    fn loss(&mut self, y: TensorId) -> TensorId {
        let shape = self.graph.tensor(y).layout.shape();
        let id = self.graph.input("weights", DType::F32, shape).unwrap();
        let values = numbers(99, shape.iter().product(), [0.5, 1.5]);
        self.integers.push((id, bytes(&values)));
        let y = self.graph.cont(y).unwrap();
        let product = self.graph.mul(y, id).unwrap();
        self.graph.sum(product).unwrap()
    }

    fn run(&self, devices: Vec<Arc<dyn Device>>) -> Running<'_> {
        let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
        scheduler.load(&self.graph).unwrap();
        let mut running = Running {
            subject: self,
            scheduler,
        };
        running.again(None);
        running
    }
}

struct Running<'a> {
    subject: &'a Subject,
    scheduler: Scheduler,
}

impl Running<'_> {
    /// Runs again, with one element of one input changed.
    fn again(&mut self, changed: Option<(usize, usize, f32)>) {
        for (number, (id, values)) in self.subject.floats.iter().enumerate() {
            let mut values = values.clone();
            if let Some((input, element, value)) = changed
                && input == number
            {
                values[element] = value;
            }
            self.scheduler.write(*id, 0, &bytes(&values)).unwrap();
        }
        for (id, data) in &self.subject.integers {
            self.scheduler.write(*id, 0, data).unwrap();
        }
        self.scheduler.run(&CancelToken::new()).unwrap();
    }

    fn read(&mut self, id: TensorId) -> Vec<f64> {
        let layout = self.subject.graph.tensor(id).layout;
        let mut data = vec![0; layout.bytes()];
        self.scheduler.read(id, 0, &mut data).unwrap();
        let values = data.as_chunks().0;
        values.iter().map(|v| f64::from_le_bytes(*v)).collect()
    }
}

/// Converts a result to float64.
fn wide(graph: &mut Graph, id: TensorId) -> TensorId {
    let id = graph.cont(id).unwrap();
    let id = graph.cast(id, DType::F64).unwrap();
    graph.set_output(id);
    id
}

/// Compares the gradients of everything in `build` with finite differences.
#[track_caller]
fn check(what: &str, build: impl FnOnce(&mut Subject) -> TensorId) {
    check_kept(what, |subject| (build(subject), Vec::new()));
}

/// Works like [`check`], but keeps only some tensors for the backward pass, which `build` returns
/// as well.
#[track_caller]
fn check_kept(what: &str, build: impl FnOnce(&mut Subject) -> (TensorId, Vec<TensorId>)) {
    let mut subject = Subject::default();
    let (y, kept) = build(&mut subject);
    let loss = subject.loss(y);
    // Finite differences only need the loss: without the backward pass, they take a third of the
    // time.
    let mut forward = subject.clone();
    let loss_alone = wide(&mut forward.graph, loss);
    let inputs: Vec<_> = subject.floats.iter().map(|(id, _)| *id).collect();
    let graph = &mut subject.graph;
    let gradients = Gradients::append_recomputing(graph, loss, 1.0, &inputs, &kept).unwrap();
    let gradients: Vec<_> = inputs
        .iter()
        .map(|&id| wide(graph, gradients.get(id).expect(what)))
        .collect();

    let mut running = subject.run(exact());
    let analytic: Vec<_> = gradients.iter().map(|&id| running.read(id)).collect();
    let mut running = forward.run(exact());
    for (input, (_, values)) in forward.floats.iter().enumerate() {
        for (element, &value) in values.iter().enumerate() {
            let (low, high) = (value - 1e-4, value + 1e-4);
            let mut at = |value| {
                running.again(Some((input, element, value)));
                running.read(loss_alone)[0]
            };
            let slope = (at(high) - at(low)) / (f64::from(high) - f64::from(low));
            let gradient = analytic[input][element];
            assert!(
                (slope - gradient).abs() <= 2e-5 * (1.0 + slope.abs()),
                "{what}: input {input}, element {element}: {gradient}, but the slope is {slope}"
            );
        }
    }
    // The CPU in float32 agrees.
    let mut running = subject.run(cpu());
    for (expected, id) in analytic.iter().zip(&gradients) {
        let got = running.read(*id);
        let error: f64 = got.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
        let size: f64 = expected.iter().map(|x| x * x).sum();
        assert!(
            error <= 1e-9 * size.max(1e-9),
            "{what}: {got:?} {expected:?}"
        );
    }
}

/// Checks an operation with one operand of some shape.
fn check_one(what: &str, range: [f32; 2], op: Op) {
    check(what, |s| {
        let x = s.input_in([6, 3, 2, 1], range);
        s.graph.push(op, &[Some(x)]).unwrap()
    });
}

#[test]
fn unary_functions() {
    let all = [-2.0, 2.0];
    check_one(
        "scale",
        all,
        Op::Scale {
            scale: 3.0,
            bias: 1.0,
        },
    );
    check_one("sqr", all, Op::Sqr);
    check_one("sqrt", [0.5, 2.0], Op::Sqrt);
    check_one("log", [0.5, 2.0], Op::Log);
    check_one(
        "clamp",
        all,
        Op::Clamp {
            min: -1.0,
            max: 1.5,
        },
    );
    for function in [
        Unary::Abs,
        Unary::Neg,
        Unary::Tanh,
        Unary::Elu,
        Unary::Relu,
        Unary::Sigmoid,
        Unary::Gelu,
        Unary::GeluQuick,
        Unary::GeluErf,
        Unary::Silu,
        Unary::Exp,
        Unary::ExpM1,
        Unary::SoftPlus,
    ] {
        check_one(function.name(), all, Op::Unary(function));
    }
}

#[test]
fn binary_functions() {
    for op in [Op::Add, Op::Sub, Op::Mul, Op::Div] {
        for shape in [[6, 3, 2, 1], [6, 1, 1, 1], [2, 1, 2, 1], [1, 1, 1, 1]] {
            check(op.name(), |s| {
                let a = s.input([6, 3, 2, 1]);
                let b = s.input_in(shape, [0.5, 2.0]);
                s.graph.push(op, &[Some(a), Some(b)]).unwrap()
            });
        }
    }
}

#[test]
fn gated_units() {
    for kind in [
        Glu::Reglu,
        Glu::Geglu,
        Glu::Swiglu,
        Glu::GegluErf,
        Glu::GegluQuick,
        Glu::SwigluOai {
            alpha: 1.7,
            limit: 0.5,
        },
        Glu::SwigluClamp { limit: 0.5 },
    ] {
        check(kind.name(), |s| {
            let (x, gate) = (s.input([5, 3, 1, 1]), s.input([5, 3, 1, 1]));
            s.graph.glu_split(x, gate, kind).unwrap()
        });
        for swapped in [false, true] {
            check(kind.name(), |s| {
                let x = s.input([8, 3, 1, 1]);
                s.graph.push(Op::Glu { kind, swapped }, &[Some(x)]).unwrap()
            });
        }
    }
}

#[test]
fn sums_and_norms() {
    let all = [-2.0, 2.0];
    for op in [
        Op::Sum,
        Op::SumRows,
        Op::Mean,
        Op::CumSum,
        Op::Norm { eps: 1e-3 },
        Op::RmsNorm { eps: 1e-3 },
        Op::L2Norm { eps: 1e-3 },
        Op::DiagMaskZero { past: 1 },
        Op::RepeatBack {
            shape: [3, 1, 2, 1],
        },
        Op::Repeat {
            shape: [12, 3, 4, 2],
        },
        Op::SoftMax {
            scale: 0.7,
            max_bias: 0.0,
        },
    ] {
        check_one(op.name(), all, op);
    }
    check("masked soft_max", |s| {
        let x = s.input([5, 5, 2, 1]);
        let masked = s.graph.diag_mask_inf(x, 0).unwrap();
        s.graph.soft_max(masked, None, None, 1.0, 0.0).unwrap()
    });
}

#[test]
fn products() {
    for ([a2, a3], [b2, b3]) in [
        ([1, 1], [1, 1]),
        ([2, 1], [2, 1]),
        ([2, 1], [4, 3]),
        ([1, 2], [3, 4]),
    ] {
        check("mul_mat", |s| {
            let (w, x) = (s.input([5, 3, a2, a3]), s.input([5, 4, b2, b3]));
            s.graph.mul_mat(w, x).unwrap()
        });
        check("out_prod", |s| {
            let (a, b) = (s.input([5, 3, a2, a3]), s.input([4, 3, b2, b3]));
            s.graph.out_prod(a, b).unwrap()
        });
    }
    check("mul_mat of permuted operands", |s| {
        let (w, x) = (s.input([5, 2, 3, 1]), s.input([5, 4, 4, 1]));
        let w = s.graph.permute(w, [0, 2, 1, 3]).unwrap();
        let x = s.graph.permute(x, [0, 2, 1, 3]).unwrap();
        s.graph.mul_mat(w, x).unwrap()
    });
    check("a tensor used twice", |s| {
        let x = s.input([4, 4, 1, 1]);
        let y = s.graph.mul_mat(x, x).unwrap();
        s.graph.mul(y, x).unwrap()
    });
}

#[test]
fn attention() {
    for (tokens, keys, heads, kv_heads, batch) in
        [(3, 5, 4, 2, 2), (1, 3, 1, 1, 1), (33, 35, 2, 2, 1)]
    {
        for masked in [false, true] {
            check("flash_attn_ext", |s| {
                let q = s.input([3, tokens, heads, batch]);
                let k = s.input([3, keys, kv_heads, batch]);
                let v = s.input([2, keys, kv_heads, batch]);
                let mask = masked.then(|| s.causal_mask(keys, tokens));
                s.graph.flash_attn([q, k, v], mask, None, 0.6).unwrap()
            });
        }
    }
    check("one tensor as queries, keys and values", |s| {
        let x = s.input([4, 3, 5, 1]);
        let turned = s.graph.permute(x, [0, 2, 1, 3]).unwrap();
        s.graph.flash_attn([turned; 3], None, None, 0.5).unwrap()
    });
}

#[test]
fn shapes_and_rows() {
    check("view", |s| {
        let x = s.input([6, 4, 2, 1]);
        s.graph.view(x, [3, 2, 2, 1], [24, 96, 192], 32).unwrap()
    });
    check("two views", |s| {
        let x = s.input([6, 4, 1, 1]);
        let (a, b) = (
            s.graph.rows(x, 0, 3).unwrap(),
            s.graph.rows(x, 1, 3).unwrap(),
        );
        s.graph.mul(a, b).unwrap()
    });
    check("permute, reshape, transpose", |s| {
        let x = s.input([6, 4, 2, 1]);
        let x = s.graph.permute(x, [2, 0, 1, 3]).unwrap();
        let x = s.graph.cont(x).unwrap();
        let x = s.graph.reshape(x, [8, 6, 1, 1]).unwrap();
        s.graph.transpose(x).unwrap()
    });
    check("cpy", |s| {
        let x = s.input([6, 4, 1, 1]);
        let into = s.graph.leaf("into", DType::F32, [24, 1, 1, 1]).unwrap();
        s.graph.cpy(x, into).unwrap()
    });
    for dim in 0..3 {
        check("concat", |s| {
            let (a, b) = (s.input([4, 3, 2, 1]), s.input([4, 3, 2, 1]));
            s.graph.concat(a, b, dim).unwrap()
        });
    }
    check("pad", |s| {
        let x = s.input([4, 3, 1, 1]);
        s.graph.pad(x, [1, 0, 2, 0], [0, 2, 0, 1]).unwrap()
    });
    check("get_rows", |s| {
        let (x, rows) = (s.input([4, 5, 1, 1]), s.integers(&[3, 0, 3, 4]));
        s.graph.get_rows(x, rows).unwrap()
    });
    check("set_rows", |s| {
        let (x, into) = (s.input([4, 2, 1, 1]), s.input([4, 5, 1, 1]));
        let (rows, copy) = (s.integers(&[3, 0]), s.graph.dup(into).unwrap());
        s.graph.set_rows(x, rows, copy).unwrap()
    });
    let sections = [1, 1, 0, 0];
    for (mode, offset) in [
        (RopeMode::Normal, 2),
        (RopeMode::Neox, 2),
        (RopeMode::Interleaved { sections }, 2),
        (RopeMode::Vision { sections }, 0),
    ] {
        check("rope", |s| {
            let rope = Rope {
                offset,
                ..Rope::new(4, mode, 100.0)
            };
            let all = [0, 3, 7, 2, 1, 5, 4, 4, 4, 9, 8, 7];
            let positions = s.integers(&all[..3 * rope.axes()]);
            let x = s.input([8, 2, 3, 1]);
            s.graph.rope(x, positions, None, rope).unwrap()
        });
    }
}

#[test]
fn cross_entropy() {
    check("cross_entropy_loss", |s| {
        let logits = s.input([4, 3, 1, 1]);
        // Constant rows that sum to 1.
        let labels = s.graph.fill(logits, 0.25).unwrap();
        s.graph.cross_entropy_loss(logits, labels).unwrap()
    });
}

#[test]
fn losses() {
    for loss in [Loss::Mean, Loss::Sum, Loss::MeanSquaredError] {
        check(&format!("{loss:?}"), |s| {
            let x = s.input([4, 3, 1, 1]);
            // Labels may also depend on weights.
            let labels = loss.has_labels().then(|| s.input([4, 3, 1, 1]));
            loss.append(&mut s.graph, x, labels).unwrap()
        });
    }
}

/// A two-layer Llama model, over two texts at a time, differentiated by each of its weights.
#[test]
fn whole_model() {
    check_model("llama", false, false);
}

#[test]
fn whole_model_with_recomputed_layers() {
    check_model("llama, computed again", false, true);
}

/// With an adapter that changes a matrix of each kind, biases, and an untied output matrix.
#[test]
fn whole_model_with_an_adapter() {
    check_model("llama with an adapter", true, false);
    check_model("llama with an adapter, computed again", true, true);
}

fn check_model(what: &str, adapted: bool, again: bool) {
    let config = ModelConfig {
        vocabulary: 7,
        layers: 2,
        width: 8,
        heads: 4,
        kv_heads: 2,
        feed_forward: 6,
        context: 4,
        window: None,
        rope_base: 100.0,
        norm_eps: 1e-5,
    };
    let count = 2 * config.context;
    check_kept(what, |s| {
        let mut weights = BTreeMap::new();
        for parameter in config.parameters() {
            let id = s.input(parameter.shape);
            weights.insert(parameter.name, id);
        }
        let more: &[(&str, Shape)] = &[
            ("blk.0.attn_q.weight.lora_a", [8, 2, 1, 1]),
            ("blk.0.attn_q.weight.lora_b", [2, 8, 1, 1]),
            ("blk.0.attn_v.bias", [4, 1, 1, 1]),
            ("blk.1.ffn_down.weight.lora_a", [6, 3, 1, 1]),
            ("blk.1.ffn_down.weight.lora_b", [3, 8, 1, 1]),
            ("blk.1.ffn_down.bias", [8, 1, 1, 1]),
            ("output.weight", [8, 7, 1, 1]),
            ("output.weight.lora_a", [8, 2, 1, 1]),
            ("output.weight.lora_b", [2, 7, 1, 1]),
        ];
        for &(name, shape) in more.iter().filter(|_| adapted) {
            let id = s.input(shape);
            weights.insert(name.to_owned(), id);
        }
        let n = config.context;
        let constants = Constants {
            positions: s.integers(&[0, 1, 2, 3]),
            mask: s.causal_mask(n, n),
            ones: s.constant(DType::F32, [1, count, 1, 1], bytes(&vec![1.0; count])),
        };
        let parts = Parts {
            spec: &config.spec().unwrap(),
            context: config.context,
            batch: 2,
            weights: &weights,
            adapter_factor: 1.5,
            constants,
        };
        let forward = Forward::append(&mut s.graph, parts).unwrap();
        let tokens = [3i32, 0, 6, 3, 1, 2, 2, 5]
            .iter()
            .flat_map(|t| t.to_le_bytes());
        s.integers.push((forward.tokens, tokens.collect()));
        let next = [0, 6, 3, 1, 2, 2, 5, 4].iter().enumerate();
        let targets = next.flat_map(|(i, t)| (7 * i as i64 + t).to_le_bytes());
        s.integers.push((forward.targets, targets.collect()));
        let kept = if again { forward.layers } else { Vec::new() };
        (forward.loss, kept)
    });
}

/// Quantized weights are not trained, but gradients flow through them to earlier nodes.
#[test]
fn products_with_quantized_weights() {
    for dtype in [DType::Q8_0, DType::Q4_0, DType::F16] {
        check(dtype.name(), |s| {
            let w = s.graph.input("w", dtype, [64, 5, 1, 1]).unwrap();
            let mut data = vec![0; 5 * dtype.row_bytes(64).unwrap()];
            samite_quant::encode_row(dtype, &numbers(7, 5 * 64, [-1.0, 1.0]), &mut data).unwrap();
            s.integers.push((w, data));
            let x = s.input([64, 3, 1, 1]);
            s.graph.mul_mat(w, x).unwrap()
        });
    }
}

#[test]
fn writing_nodes_are_not_recomputed() {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let start = graph.sqr(x).unwrap();
    let zeros = graph.fill(x, 0.0).unwrap();
    let copy = graph.cpy(start, zeros).unwrap();
    let loss = graph.sum(copy).unwrap();
    let error = Gradients::append_recomputing(&mut graph, loss, 1.0, &[x], &[start, copy]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("cannot be computed once more"), "{error}");
}

#[test]
fn unsupported_gradients_are_named() {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 4, 1, 1]).unwrap();
    let y = graph.unary(x, Unary::HardSwish).unwrap();
    graph.set_name(y, "gate");
    let loss = graph.sum(y).unwrap();
    let error = Gradients::append(&mut graph, loss, 1.0, &[x]).unwrap_err();
    assert!(error.to_string().contains("hardswish ('gate'"), "{error}");
    let error = Gradients::append(&mut graph, y, 1.0, &[x]).unwrap_err();
    assert!(error.to_string().contains("one f32 element"), "{error}");
    let sinks = graph.input("sinks", DType::F32, [1, 1, 1, 1]).unwrap();
    let y = graph.flash_attn([x; 3], None, Some(sinks), 1.0).unwrap();
    let loss = graph.sum(y).unwrap();
    let error = Gradients::append(&mut graph, loss, 1.0, &[x]).unwrap_err();
    assert!(error.to_string().contains("with sinks"), "{error}");
    // No gradient flows through a step function.
    let steps = graph.unary(x, Unary::Step).unwrap();
    let loss = graph.sum(steps).unwrap();
    let gradients = Gradients::append(&mut graph, loss, 1.0, &[x]).unwrap();
    assert!(gradients.get(x).is_none());
}
