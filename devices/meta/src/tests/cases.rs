//! Random nodes of every kind, with random states of their sources.

use super::bench::{Case, Rng, floats};
use crate::state::{AxisRun, AxisRuns, SplitState};
use samite_core::{
    DType, Glu, Graph, Layout, Op, OpKind, Precision, Rope, RopeMode, Shape, SortOrder, TensorId,
    Unary,
};

/// Returns a random state that a tensor of this layout can have.
pub fn state(rng: &Rng, layout: &Layout, members: usize) -> SplitState {
    match rng.below(8) {
        0 | 1 => SplitState::Mirrored,
        2 if layout.dtype() == DType::F32 => SplitState::Partial,
        _ => {
            let axis = rng.below(4);
            let block = match axis {
                0 => layout.dtype().block_len(),
                _ => 1,
            };
            SplitState::split(
                axis,
                runs(rng, layout.shape()[axis] / block, members).times(block),
            )
        }
    }
}

/// Returns random runs: often one per member, sometimes none, sometimes several.
pub fn runs(rng: &Rng, total: usize, members: usize) -> AxisRuns {
    let mut left = total;
    let mut list = Vec::new();
    let in_order = rng.below(3) > 0;
    for member in 0.. {
        if left == 0 {
            break;
        }
        let last = in_order && member + 1 >= members;
        let len = if last { left } else { rng.below(left + 1) };
        let member = if in_order {
            member.min(members - 1)
        } else {
            rng.below(members)
        };
        list.push(AxisRun { member, len });
        left -= len;
    }
    list.into_iter().collect()
}

impl Case {
    /// Adds an input of random numbers.
    fn f32(&mut self, rng: &Rng, shape: Shape) -> TensorId {
        let id = self.graph.input("x", DType::F32, shape).unwrap();
        let n: usize = shape.iter().product();
        let bytes = (0..n).flat_map(|_| rng.number().to_le_bytes()).collect();
        self.inputs.push((id, bytes));
        id
    }

    /// Adds an input of positive numbers.
    fn positive(&mut self, rng: &Rng, shape: Shape) -> TensorId {
        let id = self.f32(rng, shape);
        let values: Vec<f32> = floats(&self.inputs.last().unwrap().1);
        let bytes = values.iter().flat_map(|v| (v.abs() + 0.5).to_le_bytes());
        self.inputs.last_mut().unwrap().1 = bytes.collect();
        id
    }

    /// Adds a half-precision mask: 0, 1, 2 or minus infinity.
    fn mask(&mut self, rng: &Rng, shape: Shape) -> TensorId {
        let id = self.graph.input("mask", DType::F16, shape).unwrap();
        let n: usize = shape.iter().product();
        let bytes = (0..n).flat_map(|i| {
            let value: u16 = match i % shape[0] {
                0 => 0,
                _ => rng.pick(&[0, 0x3c00, 0x4000, 0xfc00]),
            };
            value.to_le_bytes()
        });
        self.inputs.push((id, bytes.collect()));
        id
    }

    /// Adds distinct indices below `below`, or arbitrary ones if `below` is too small.
    fn indices(&mut self, rng: &Rng, shape: Shape, below: usize, dtype: DType) -> TensorId {
        let id = self.graph.input("ids", dtype, shape).unwrap();
        let n: usize = shape.iter().product();
        let first = rng.below(below);
        let bytes = (0..n).flat_map(|i| {
            let value = ((first + i) % below) as i64;
            match dtype {
                DType::I64 => value.to_le_bytes().to_vec(),
                _ => (value as i32).to_le_bytes().to_vec(),
            }
        });
        self.inputs.push((id, bytes.collect()));
        id
    }

    /// Adds blocks of 8-bit numbers.
    fn q8_0(&mut self, rng: &Rng, shape: Shape) -> TensorId {
        let id = self.graph.input("w", DType::Q8_0, shape).unwrap();
        let blocks = shape.iter().product::<usize>() / 32;
        let mut bytes = Vec::new();
        for _ in 0..blocks {
            bytes.extend(0x2c00u16.to_le_bytes());
            bytes.extend((0..32).map(|_| rng.below(255) as u8));
        }
        self.inputs.push((id, bytes));
        id
    }

    /// Adds weights: f32, or quantized with rows of whole blocks.
    fn weights(&mut self, rng: &Rng, k: &mut usize, [m, a, b]: [usize; 3]) -> TensorId {
        match rng.below(4) {
            0 => {
                *k = 32 * (1 + rng.below(4));
                self.q8_0(rng, [*k, m, a, b])
            }
            _ => self.f32(rng, [*k, m, a, b]),
        }
    }
}

fn extent(rng: &Rng) -> usize {
    1 + rng.below(5)
}

fn shape(rng: &Rng) -> Shape {
    std::array::from_fn(|_| extent(rng))
}

/// Returns a source whose dimensions are sometimes permuted.
fn turned(case: &mut Case, rng: &Rng, id: TensorId) -> TensorId {
    match rng.below(4) {
        0 => case.graph.permute(id, [1, 0, 2, 3]).unwrap(),
        1 => case.graph.permute(id, [0, 2, 1, 3]).unwrap(),
        _ => id,
    }
}

/// Returns another shape with as many elements.
fn other_shape(rng: &Rng, from: Shape) -> Shape {
    let mut factors = Vec::new();
    for mut n in from {
        for p in [2, 3, 5] {
            while n % p == 0 {
                factors.push(p);
                n /= p;
            }
        }
    }
    let mut to = [1; 4];
    let mut axis = 0;
    for factor in factors {
        // Mostly in order, so that units occur.
        axis = (axis + usize::from(rng.below(3) == 0)).min(3);
        to[axis] *= factor;
    }
    to
}

/// Returns a random node of a kind.
pub fn random(rng: &Rng, kind: OpKind, members: usize) -> Case {
    let mut case = Case::default();
    let c = &mut case;
    let push = |c: &mut Case, op: Op, sources: &[TensorId]| {
        let sources: Vec<_> = sources.iter().map(|&id| Some(id)).collect();
        c.graph.push(op, &sources).unwrap()
    };
    let n = shape(rng);
    let result = match kind {
        OpKind::Leaf => {
            let x = c.f32(rng, n);
            push(c, Op::Dup, &[x])
        }
        OpKind::Arange => {
            let op = Op::Arange {
                start: 1.0,
                stop: 7.5,
                step: 2.0,
            };
            push(c, op, &[])
        }
        OpKind::Dup
        | OpKind::Cont
        | OpKind::Sqr
        | OpKind::Scale
        | OpKind::Clamp
        | OpKind::Unary => {
            let x = c.f32(rng, n);
            let x = turned(c, rng, x);
            let op = match kind {
                OpKind::Dup => Op::Dup,
                OpKind::Cont => Op::Cont,
                OpKind::Sqr => Op::Sqr,
                OpKind::Clamp => Op::Clamp {
                    min: -1.0,
                    max: 2.0,
                },
                OpKind::Scale => Op::Scale {
                    scale: 1.5,
                    bias: rng.pick(&[0.0, 2.0]),
                },
                _ => Op::Unary(rng.pick(&[Unary::Neg, Unary::Silu, Unary::Relu, Unary::Abs])),
            };
            push(c, op, &[x])
        }
        OpKind::Fill => {
            let x = c.f32(rng, n);
            push(c, Op::Fill { value: 3.0 }, &[x])
        }
        OpKind::Sqrt | OpKind::Log => {
            let x = c.positive(rng, n);
            let op = if kind == OpKind::Log {
                Op::Log
            } else {
                Op::Sqrt
            };
            push(c, op, &[x])
        }
        OpKind::Cast => {
            let dtype = rng.pick(&[DType::F16, DType::F32, DType::Q8_0]);
            let mut n = n;
            if dtype == DType::Q8_0 {
                n[0] = 32 * (1 + rng.below(4));
            }
            let x = c.f32(rng, n);
            push(c, Op::Cast { dtype }, &[x])
        }
        OpKind::Add | OpKind::Sub | OpKind::Mul | OpKind::Div => {
            let mut whole = n;
            let mut part = n;
            for d in 0..4 {
                match rng.below(4) {
                    0 => part[d] = 1,
                    1 if rng.below(2) == 0 => whole[d] = part[d] * 2,
                    _ => {}
                }
            }
            let a = c.f32(rng, whole);
            let (op, b) = match kind {
                OpKind::Add => (Op::Add, c.f32(rng, part)),
                OpKind::Sub => (Op::Sub, c.f32(rng, part)),
                OpKind::Mul => (Op::Mul, c.f32(rng, part)),
                _ => (Op::Div, c.positive(rng, part)),
            };
            push(c, op, &[a, b])
        }
        OpKind::AddId => {
            let [width, used, tokens, experts] = n;
            let x = c.f32(rng, [width, used, tokens, 1]);
            let b = c.f32(rng, [width, experts, 1, 1]);
            let ids = c.indices(rng, [used, tokens, 1, 1], experts, DType::I32);
            push(c, Op::AddId, &[x, b, ids])
        }
        OpKind::Glu => match rng.below(2) {
            0 => {
                let x = c.f32(rng, [2 * n[0], n[1], n[2], n[3]]);
                let op = Op::Glu {
                    kind: Glu::Swiglu,
                    swapped: rng.below(2) == 0,
                };
                push(c, op, &[x])
            }
            _ => {
                let [x, y] = [c.f32(rng, n), c.f32(rng, n)];
                let op = Op::Glu {
                    kind: Glu::Geglu,
                    swapped: false,
                };
                push(c, op, &[x, y])
            }
        },
        OpKind::DiagMaskInf | OpKind::DiagMaskZero => {
            let x = c.f32(rng, n);
            let past = rng.below(3);
            let op = match kind {
                OpKind::DiagMaskInf => Op::DiagMaskInf { past },
                _ => Op::DiagMaskZero { past },
            };
            push(c, op, &[x])
        }
        OpKind::Norm
        | OpKind::RmsNorm
        | OpKind::L2Norm
        | OpKind::CumSum
        | OpKind::Sum
        | OpKind::SumRows
        | OpKind::Mean
        | OpKind::ArgSort
        | OpKind::TopK => {
            let x = c.f32(rng, n);
            let x = match kind {
                // No equal elements, because their order is unspecified.
                OpKind::ArgSort | OpKind::TopK => {
                    let values = (0..n.iter().product()).map(|i: usize| (i * 7 % 641) as f32);
                    c.inputs[0].1 = values.flat_map(f32::to_le_bytes).collect();
                    x
                }
                _ => x,
            };
            let op = match kind {
                OpKind::Norm => Op::Norm { eps: 1e-5 },
                OpKind::RmsNorm => Op::RmsNorm { eps: 1e-5 },
                OpKind::L2Norm => Op::L2Norm { eps: 1e-5 },
                OpKind::CumSum => Op::CumSum,
                OpKind::Sum => Op::Sum,
                OpKind::SumRows => Op::SumRows,
                OpKind::Mean => Op::Mean,
                OpKind::ArgSort => Op::ArgSort {
                    order: SortOrder::Descending,
                },
                _ => Op::TopK { k: n[0] },
            };
            push(c, op, &[x])
        }
        OpKind::ArgMax => {
            let x = c.f32(rng, [n[0], n[1], 1, 1]);
            push(c, Op::ArgMax, &[x])
        }
        OpKind::GetRows => {
            let mut width = n[0];
            let table = c.weights(rng, &mut width, [n[1], n[2], n[3]]);
            let ids = c.indices(rng, [extent(rng), n[2], n[3], 1], n[1], DType::I32);
            push(c, Op::GetRows, &[table, ids])
        }
        OpKind::SetRows => {
            let cells = n[1] + rng.below(4);
            let rows = c.f32(rng, n);
            let dtype = rng.pick(&[DType::I32, DType::I64]);
            let batches = [rng.pick(&[1, n[2]]), rng.pick(&[1, n[3]])];
            let numbers = c.indices(rng, [n[1], 1, 1, 1], cells, dtype);
            let numbers = match batches {
                [1, 1] => numbers,
                [a, b] => {
                    // The same indices in each batch.
                    let one = c.inputs.pop().unwrap().1;
                    let numbers = c.graph.input("ids", dtype, [n[1], a, b, 1]).unwrap();
                    c.inputs.push((numbers, one.repeat(a * b)));
                    numbers
                }
            };
            let into = c.f32(rng, [n[0], cells, n[2], n[3]]);
            push(c, Op::SetRows, &[rows, numbers, into])
        }
        OpKind::Repeat => {
            let x = c.f32(rng, n);
            let shape = n.map(|extent| extent * (1 + rng.below(2)));
            push(c, Op::Repeat { shape }, &[x])
        }
        OpKind::RepeatBack => {
            let whole = n.map(|extent| extent * (1 + rng.below(2)));
            let shape = n.map(|extent| if rng.below(3) == 0 { 1 } else { extent });
            let x = c.f32(rng, whole);
            push(c, Op::RepeatBack { shape }, &[x])
        }
        OpKind::Concat => {
            let dim = rng.below(4);
            let mut other = n;
            other[dim] = extent(rng);
            let [x, y] = [c.f32(rng, n), c.f32(rng, other)];
            push(c, Op::Concat { dim }, &[x, y])
        }
        OpKind::Pad => {
            let x = c.f32(rng, n);
            let sides: [Shape; 2] = [[(); 4]; 2].map(|side| side.map(|()| rng.below(4) / 2));
            let [before, after] = sides;
            push(c, Op::Pad { before, after }, &[x])
        }
        OpKind::Reshape => {
            let x = c.f32(rng, n);
            let shape = other_shape(rng, n);
            let x = push(c, Op::Reshape { shape }, &[x]);
            push(
                c,
                Op::Scale {
                    scale: 2.0,
                    bias: 0.0,
                },
                &[x],
            )
        }
        OpKind::Permute | OpKind::Transpose => {
            let x = c.f32(rng, n);
            let op = match kind {
                OpKind::Transpose => Op::Transpose,
                _ => Op::Permute {
                    axes: rng.pick(&[[0, 2, 1, 3], [3, 1, 0, 2], [1, 2, 3, 0]]),
                },
            };
            let x = push(c, op, &[x]);
            push(c, Op::Cont, &[x])
        }
        OpKind::View => {
            let x = c.f32(rng, n);
            let view = view(c, rng, x);
            push(c, Op::Cont, &[view])
        }
        OpKind::Cpy => {
            let x = c.f32(rng, n);
            let shape = if rng.below(2) == 0 {
                n
            } else {
                other_shape(rng, n)
            };
            let into = c.f32(rng, shape);
            push(c, Op::Cpy, &[x, into])
        }
        OpKind::MulMat => {
            let [mut k, m, a, b] = n;
            let w = c.weights(rng, &mut k, [m, a, b]);
            let x = c.f32(
                rng,
                [
                    k,
                    extent(rng),
                    a * (1 + rng.below(2)),
                    b * (1 + rng.below(2)),
                ],
            );
            let precision = Precision::Default;
            push(c, Op::MulMat { precision }, &[w, x])
        }
        OpKind::MulMatId => {
            let [mut k, m, experts, tokens] = n;
            let used = extent(rng);
            let w = c.weights(rng, &mut k, [m, experts, 1]);
            let each = rng.pick(&[1, used]);
            let x = c.f32(rng, [k, each, tokens, 1]);
            let ids = c.indices(rng, [used, tokens, 1, 1], experts, DType::I32);
            let precision = Precision::Default;
            push(c, Op::MulMatId { precision }, &[w, x, ids])
        }
        OpKind::OutProd => {
            let [m, k, a, b] = n;
            let x = c.f32(rng, n);
            let y = c.f32(
                rng,
                [
                    extent(rng),
                    k,
                    a * (1 + rng.below(2)),
                    b * (1 + rng.below(2)),
                ],
            );
            let _ = m;
            push(c, Op::OutProd, &[x, y])
        }
        OpKind::SoftMax => {
            let x = c.f32(rng, n);
            let mask = (rng.below(3) > 0).then(|| {
                let rows = n[1] + rng.below(2);
                let shape = [n[0], rows, rng.pick(&[1, n[2]]), rng.pick(&[1, n[3]])];
                c.mask(rng, shape)
            });
            let sinks = (rng.below(3) == 0).then(|| c.f32(rng, [n[2], 1, 1, 1]));
            let max_bias = match mask {
                Some(_) => rng.pick(&[0.0, 8.0]),
                None => 0.0,
            };
            let op = Op::SoftMax {
                scale: 0.5,
                max_bias,
            };
            c.graph.push(op, &[Some(x), mask, sinks]).unwrap()
        }
        OpKind::Rope | OpKind::RopeBack => {
            let dims = 2 * (1 + rng.below(3));
            let x = c.f32(rng, [dims + rng.below(3), n[1], n[2], n[3]]);
            let sections = [1, 1, 0, 0];
            let modes = [
                RopeMode::Normal,
                RopeMode::Neox,
                RopeMode::Multi { sections },
            ];
            let rope = Rope::new(dims, rng.pick(&modes), 100.0);
            let positions = c.indices(rng, [rope.axes() * n[2], 1, 1, 1], 17, DType::I32);
            let op = match kind {
                OpKind::Rope => Op::Rope(rope),
                _ => Op::RopeBack(rope),
            };
            push(c, op, &[x, positions])
        }
        OpKind::FlashAttn => {
            let [tokens, kv_heads, batch, kv] = n;
            let group = 1 + rng.below(3);
            let (d, heads) = (4, kv_heads * group);
            let q = c.f32(rng, [d, tokens, heads, batch]);
            let k = c.f32(rng, [d, kv, kv_heads, batch]);
            let v = c.f32(rng, [3, kv, kv_heads, batch]);
            let mask = (rng.below(3) > 0).then(|| {
                let rows = tokens + rng.below(2);
                let shape = [kv, rows, rng.pick(&[1, heads]), rng.pick(&[1, batch])];
                c.mask(rng, shape)
            });
            let sinks = (rng.below(3) == 0).then(|| c.f32(rng, [heads, 1, 1, 1]));
            let op = Op::FlashAttn {
                scale: 0.5,
                max_bias: if mask.is_some() {
                    rng.pick(&[0.0, 8.0])
                } else {
                    0.0
                },
                softcap: 0.0,
                precision: Precision::F32,
            };
            c.graph
                .push(op, &[Some(q), Some(k), Some(v), mask, sinks])
                .unwrap()
        }
        OpKind::FlashAttnBack => {
            let [tokens, heads, batch, kv] = n;
            let g = c.f32(rng, [3, heads, tokens, batch]);
            let q = c.f32(rng, [4, tokens, heads, batch]);
            let k = c.f32(rng, [4, kv, heads, batch]);
            let v = c.f32(rng, [3, kv, heads, batch]);
            push(c, Op::FlashAttnBack { scale: 0.5 }, &[g, q, k, v])
        }
        OpKind::SsmConv => {
            let [length, channels, sequences, _] = n;
            let x = c.f32(rng, [length + 2, channels, sequences, 1]);
            let weights = c.f32(rng, [3, channels, 1, 1]);
            push(c, Op::SsmConv, &[x, weights])
        }
        OpKind::SsmScan => {
            let [size, heads, tokens, sequences] = n;
            let matrices = c.f32(rng, [3, size, heads, sequences + 1]);
            let x = c.f32(rng, n);
            let steps = c.f32(rng, [heads, tokens, sequences, 1]);
            let rates = c.f32(rng, [1, heads, 1, 1]);
            let [b, y] = [(); 2].map(|()| c.f32(rng, [3, heads, tokens, sequences]));
            let rows = c.indices(rng, [sequences, 1, 1, 1], sequences + 1, DType::I32);
            let op = Op::SsmScan { snapshots: 1 };
            push(c, op, &[matrices, x, steps, rates, b, y, rows])
        }
        OpKind::GatedDeltaNet => {
            let [size, heads, tokens, sequences] = n;
            let [q, k, v] = [(); 3].map(|()| c.f32(rng, n));
            let [decays, betas] = [(); 2].map(|()| c.f32(rng, [1, heads, tokens, sequences]));
            let matrices = c.f32(rng, [size, size, heads, sequences]);
            let op = Op::GatedDeltaNet { snapshots: 1 };
            push(c, op, &[q, k, v, decays, betas, matrices])
        }
        OpKind::SiluBack | OpKind::RmsNormBack | OpKind::SoftMaxBack => {
            let [g, x] = [c.f32(rng, n), c.f32(rng, n)];
            let op = match kind {
                OpKind::SiluBack => Op::SiluBack,
                OpKind::RmsNormBack => Op::RmsNormBack { eps: 1e-5 },
                _ => Op::SoftMaxBack { scale: 0.5 },
            };
            push(c, op, &[g, x])
        }
        OpKind::GetRowsBack => {
            let rows = extent(rng);
            let g = c.f32(rng, [n[0], n[1], 1, 1]);
            let ids = c.indices(rng, [n[1], 1, 1, 1], rows, DType::I32);
            push(c, Op::GetRowsBack { rows }, &[g, ids])
        }
        OpKind::CrossEntropyLoss => {
            let [x, y] = [c.f32(rng, n), c.positive(rng, n)];
            push(c, Op::CrossEntropyLoss, &[x, y])
        }
        OpKind::CrossEntropyLossBack => {
            let g = c.f32(rng, [1; 4]);
            let [x, y] = [c.f32(rng, n), c.positive(rng, n)];
            push(c, Op::CrossEntropyLossBack, &[g, x, y])
        }
        OpKind::OptStepAdamW => {
            let [w, g, m] = [c.f32(rng, n), c.f32(rng, n), c.f32(rng, n)];
            let v = c.positive(rng, n);
            let p = c.positive(rng, [7, 1, 1, 1]);
            push(c, Op::OptStepAdamW, &[w, g, m, v, p])
        }
        OpKind::OptStepSgd => {
            let [w, g] = [c.f32(rng, n), c.f32(rng, n)];
            let p = c.positive(rng, [2, 1, 1, 1]);
            push(c, Op::OptStepSgd, &[w, g, p])
        }
        kind => panic!("no case for {kind:?}"),
    };
    case.graph.set_output(result);
    let targets: Vec<TensorId> = written(&case.graph);
    for (id, _) in &case.inputs {
        let layout = case.graph.tensor(*id).layout;
        let mut state = state(rng, &layout, members);
        // A stored tensor cannot be partial.
        while targets.contains(id) && state == SplitState::Partial {
            state = self::state(rng, &layout, members);
        }
        case.states.insert(*id, state);
    }
    if kind == OpKind::Glu && case.inputs.len() == 1 && rng.below(3) == 0 {
        // Both halves divided alike, or the second one in reverse.
        let id = case.inputs[0].0;
        let half = runs(rng, case.graph.tensor(id).layout.shape()[0] / 2, members);
        let mut other: Vec<AxisRun> = half.iter().collect();
        if rng.below(2) == 0 {
            other.reverse();
        }
        let both = half.followed_by(&other.into_iter().collect());
        case.states.insert(id, SplitState::split(0, both));
    }
    if let Op::Concat { dim } = case.graph.tensor(result).op
        && rng.below(3) == 0
    {
        for (id, _) in &case.inputs {
            let extent = case.graph.tensor(*id).layout.shape()[dim];
            let divided = SplitState::split(dim, runs(rng, extent, members));
            case.states.insert(*id, divided);
        }
    }
    if matches!(kind, OpKind::OptStepAdamW | OpKind::OptStepSgd) && rng.below(8) > 0 {
        // Tensors that belong together are divided alike.
        let weights = case.states[&case.inputs[0].0].clone();
        for id in targets {
            case.states.insert(id, weights.clone());
        }
    }
    case
}

/// Returns the leaves that nodes write to.
fn written(graph: &Graph) -> Vec<TensorId> {
    let written = graph.tensors().iter().flat_map(|tensor| tensor.written());
    written.map(|(_, id)| graph.memory_of(id)).collect()
}

/// Returns a random view: a window, a window of units, or heads of a cache.
fn view(c: &mut Case, rng: &Rng, x: TensorId) -> TensorId {
    let layout = c.graph.tensor(x).layout;
    let (n, s) = (layout.shape(), layout.strides());
    match rng.below(3) {
        0 => {
            let start: Shape = n.map(|extent| rng.below(extent));
            let shape: Shape = std::array::from_fn(|d| 1 + rng.below(n[d] - start[d]));
            let offset = (0..4).map(|d| start[d] * s[d]).sum();
            c.graph.view(x, shape, [s[1], s[2], s[3]], offset).unwrap()
        }
        1 => {
            // Rows as heads: [size, rows, heads].
            let size = (1..=n[0]).rev().find(|size| n[0] % size == 0 && *size <= 2);
            let size = size.unwrap_or(1);
            let rows = 1 + rng.below(n[1]);
            let shape = [size, rows, n[0] / size, 1];
            let all = s[1] * n[1];
            c.graph.view(x, shape, [s[1], size * 4, all], 0).unwrap()
        }
        _ => {
            // Elements of the second dimension as a separate plane, with extent 1.
            let at = rng.below(n[1]);
            let shape = [n[0], n[2], n[3], 1];
            let all = s[3] * n[3];
            c.graph
                .view(x, shape, [s[2], s[3], all], at * s[1])
                .unwrap()
        }
    }
}

/// Returns a decoder layer with a cache and a mixture of experts. Every leaf has a random state.
pub fn layer(rng: &Rng, members: usize) -> Case {
    let mut case = Case {
        // Rounding errors grow through several products.
        limit: 1e-10,
        ..Case::default()
    };
    let c = &mut case;
    let (width, size, heads, kv_heads, ff, tokens, cells) = (8, 4, 4, 2, 12, 3, 6);
    let (experts, used) = (3, 2);
    let matrix = |c: &mut Case, from, to| c.f32(rng, [from, to, 1, 1]);
    let x = c.f32(rng, [width, tokens, 1, 1]);
    let scale = c.positive(rng, [width, 1, 1, 1]);
    let [q, k, v] = [heads, kv_heads, kv_heads].map(|n| matrix(c, width, n * size));
    let bias = c.f32(rng, [size * kv_heads, 1, 1, 1]);
    let o = matrix(c, heads * size, width);
    let router = matrix(c, width, experts);
    let [gate, up] = [(); 2].map(|()| c.f32(rng, [width, ff, experts, 1]));
    let down = c.f32(rng, [ff, width, experts, 1]);
    let head_scale = c.positive(rng, [size, 1, 1, 1]);
    let caches = [(); 2].map(|()| c.f32(rng, [kv_heads * size, cells, 1, 1]));
    let positions = c.indices(rng, [tokens, 1, 1, 1], 9, DType::I32);
    let numbers = c.indices(rng, [tokens, 1, 1, 1], cells, DType::I64);
    let mask = c.mask(rng, [cells, tokens, 1, 1]);
    let flash = rng.below(2) == 0;

    let g = &mut c.graph;
    let normed = g.rms_norm(x, 1e-5).unwrap();
    let normed = g.mul(normed, scale).unwrap();
    let queries = g.mul_mat(q, normed).unwrap();
    let queries = g.reshape(queries, [size, heads, tokens, 1]).unwrap();
    let queries = g.rms_norm(queries, 1e-5).unwrap();
    let queries = g.mul(queries, head_scale).unwrap();
    let rope = Rope::new(size, RopeMode::Neox, 100.0);
    let queries = g.rope(queries, positions, None, rope).unwrap();
    let mut views = Vec::new();
    for (matrix, cache) in [k, v].into_iter().zip(caches) {
        let rows = g.mul_mat(matrix, normed).unwrap();
        let rows = g.add(rows, bias).unwrap();
        g.set_rows(rows, numbers, cache).unwrap();
        let (row, head) = (4 * size * kv_heads, 4 * size);
        let view = g.view(
            cache,
            [size, cells, kv_heads, 1],
            [row, head, row * cells],
            0,
        );
        views.push(view.unwrap());
    }
    let queries = g.permute(queries, [0, 2, 1, 3]).unwrap();
    let attended = if flash {
        let qkv = [queries, views[0], views[1]];
        g.flash_attn(qkv, Some(mask), None, 0.5).unwrap()
    } else {
        let logits = g.mul_mat(views[0], queries).unwrap();
        let weights = g.soft_max(logits, Some(mask), None, 0.5, 0.0).unwrap();
        let values = g.transpose(views[1]).unwrap();
        let values = g.cont(values).unwrap();
        let attended = g.mul_mat(values, weights).unwrap();
        let merged = g.permute(attended, [0, 2, 1, 3]).unwrap();
        g.cont(merged).unwrap()
    };
    let flat = g.reshape(attended, [heads * size, tokens, 1, 1]).unwrap();
    let projected = g.mul_mat(o, flat).unwrap();
    let middle = g.add(projected, x).unwrap();
    let normed = g.rms_norm(middle, 1e-5).unwrap();
    let logits = g.mul_mat(router, normed).unwrap();
    let probabilities = g.soft_max(logits, None, None, 1.0, 0.0).unwrap();
    let sorted = g.argsort(probabilities, SortOrder::Descending).unwrap();
    let [_, s1, s2, s3] = g.tensor(sorted).layout.strides();
    let chosen = g
        .view(sorted, [used, tokens, 1, 1], [s1, s2, s3], 0)
        .unwrap();
    let single = g.reshape(probabilities, [1, experts, tokens, 1]).unwrap();
    let weights = g.get_rows(single, chosen).unwrap();
    let x = g.reshape(normed, [width, 1, tokens, 1]).unwrap();
    let [gate, up] = [gate, up].map(|w| g.mul_mat_id(w, x, chosen).unwrap());
    let product = g.glu_split(gate, up, Glu::Swiglu).unwrap();
    let down = g.mul_mat_id(down, product, chosen).unwrap();
    let weighted = g.mul(down, weights).unwrap();
    let [_, one, each, all] = g.tensor(weighted).layout.strides();
    let [a, b] = [0, 1].map(|i| {
        g.view(weighted, [width, tokens, 1, 1], [each, all, all], i * one)
            .unwrap()
    });
    let sum = g.add(a, b).unwrap();
    let result = g.add(sum, middle).unwrap();
    g.set_output(result);
    for (id, _) in &case.inputs {
        let layout = case.graph.tensor(*id).layout;
        let state = match caches.contains(id) {
            // Split by heads, or mirrored: both allow writes of rows.
            true => match rng.below(2) {
                0 => SplitState::Mirrored,
                _ => SplitState::split(0, runs(rng, kv_heads, members).times(size)),
            },
            false => state(rng, &layout, members),
        };
        case.states.insert(*id, state);
    }
    case
}
