//! Runs a small computation with known results before any other work, because drivers have bugs.
//!
//! The test tries subgroup reductions first. If they are wrong, reductions use workgroup memory; if
//! those are wrong as well, the device is rejected. Cooperative matrices are used only if their
//! products are right.

use crate::device::WgpuDevice;
use crate::gpu::Gpu;
use crate::options::WgpuOptions;
use crate::stream::WgpuStream;
use samite_core::{
    CancelToken, DType, Device, Error, Graph, Op, PlacedGraph, Precision, Result, RunControl,
    Stream, TensorGroup, TensorId, TensorRef, Usage,
};
use samite_disk_cache::CacheFile;
use std::sync::Arc;

/// Optional features whose results are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelfTestResult {
    /// True if subgroup reductions are right.
    pub subgroups: bool,
    /// True if products with cooperative matrices are right.
    pub matrices: bool,
    /// True if attention with cooperative matrices is right.
    pub attention: bool,
}

impl SelfTestResult {
    fn text(self) -> String {
        let SelfTestResult {
            subgroups,
            matrices,
            attention,
        } = self;
        format!("subgroups: {subgroups}, matrices: {matrices}, attention: {attention}")
    }

    fn all() -> impl Iterator<Item = Self> {
        let both = [true, false];
        let pairs = move |subgroups| both.into_iter().map(move |matrices| (subgroups, matrices));
        let pairs = both.into_iter().flat_map(pairs);
        pairs.flat_map(move |(subgroups, matrices)| {
            both.into_iter().map(move |attention| SelfTestResult {
                subgroups,
                matrices,
                attention,
            })
        })
    }
}

/// Returns the verdict on an adapter: the cached one for the adapter and its driver, or a new one.
///
/// # Errors
/// Returns an error if the adapter computes wrong results or fails.
pub fn verdict(device: &WgpuDevice) -> Result<SelfTestResult> {
    let gpu = device.gpu();
    // Faults that a test injects are no property of the adapter.
    let kept = gpu.kept("test");
    let known = kept.as_ref().and_then(CacheFile::text);
    if let Some(verdict) = SelfTestResult::all().find(|verdict| known == Some(verdict.text())) {
        return Ok(warned(gpu, verdict));
    }
    let subgroups = gpu.has_subgroups && is_right(device, true)?;
    if !subgroups && !is_right(device, false)? {
        let message = "its driver computes wrong: sums, norms and products of the test at opening differ from what they must be";
        return Err(Error::device(gpu.name(), message));
    }
    // A feature whose kernel the driver cannot compile is not used either.
    let is_right = |tried: Result<bool>| {
        if let Err(error) = &tried {
            tracing::warn!("{}: {error}", gpu.name());
        }
        gpu.open()?;
        Result::Ok(tried.unwrap_or(false))
    };
    let matrices = subgroups && gpu.may_use_matrices() && is_right(are_matrices_right(device))?;
    let attention = matrices && is_right(is_attention_right(device))?;
    let verdict = SelfTestResult {
        subgroups,
        matrices,
        attention,
    };
    if let Some(kept) = kept {
        kept.write(verdict.text().as_bytes());
    }
    Ok(warned(gpu, verdict))
}

/// Warns of each feature that the adapter has but computes wrong.
fn warned(gpu: &Gpu, verdict: SelfTestResult) -> SelfTestResult {
    for (has, is_right, what) in [
        (
            gpu.has_subgroups,
            verdict.subgroups,
            "operations over subgroups",
        ),
        (gpu.has_matrices, verdict.matrices, "cooperative matrices"),
        (
            verdict.matrices,
            verdict.attention,
            "cooperative matrices in attention",
        ),
    ] {
        if has && !is_right {
            tracing::warn!(
                "{}: {what} compute wrong in the test at opening, and are not used",
                gpu.name()
            );
        }
    }
    verdict
}

/// Row length: more than one pass of a workgroup, and a prime number.
const LENGTH: usize = 1051;
const ROWS: usize = 3;
const EPS: f32 = 1e-5;

/// Returns element `i` of operand `number`: small, irregular numbers.
fn element(number: usize, i: usize) -> f32 {
    ((i * 37 + number * 11) % 101) as f32 / 101.0 - 0.3
}

/// Returns whether a norm, a softmax, row sums and a product are right.
fn is_right(device: &WgpuDevice, subgroups: bool) -> Result<bool> {
    let options = WgpuOptions {
        without_subgroups: !subgroups,
        ..WgpuOptions::default()
    };
    let mut graph = Graph::new();
    let shape = [LENGTH, ROWS, 1, 1];
    let x = graph.input("x", DType::F32, shape)?;
    let w = graph.input("w", DType::F32, shape)?;
    let results = [
        graph.rms_norm(x, EPS)?,
        graph.soft_max(x, None, None, 1.0, 0.0)?,
        graph.sum_rows(x)?,
        graph.mul_mat(w, x)?,
    ];
    let values = [0, 1]
        .map(|number| -> Vec<f32> { (0..LENGTH * ROWS).map(|i| element(number, i)).collect() });
    let inputs = [(x, 0), (w, 1)].map(|(id, number)| (id, bytemuck::cast_slice(&values[number])));
    let found = compute(device.with(options), &graph, &inputs, &results)?;
    Ok(found
        .iter()
        .zip(&expected(&values))
        .all(|(found, expected)| are_close(found, expected)))
}

fn are_close(found: &[f32], expected: &[f64]) -> bool {
    found.len() == expected.len()
        && found.iter().zip(expected).all(|(found, expected)| {
            (f64::from(*found) - expected).abs() <= 1e-4 * (1.0 + expected.abs())
        })
}

/// Halves as bits, and their values.
const HALVES: [(u16, f64); 6] = [
    (0xbc00, -1.0),
    (0xb800, -0.5),
    (0, 0.0),
    (0x3800, 0.5),
    (0x3c00, 1.0),
    (0x4000, 2.0),
];

/// Returns whether a product with cooperative matrices is right. The operands are exact in halves
/// and exceed one tile in rows, columns and length.
fn are_matrices_right(device: &WgpuDevice) -> Result<bool> {
    let (length, rows, columns) = (352, 200, 150);
    let mut graph = Graph::new();
    let w = graph.input("w", DType::F16, [length, rows, 1, 1])?;
    let x = graph.input("x", DType::F32, [length, columns, 1, 1])?;
    let y = graph.mul_mat(w, x)?;
    let number = |i: usize, factor: usize| i * factor % 1009;
    let weights: Vec<_> = (0..length * rows)
        .map(|i| HALVES[number(i, 37) % HALVES.len()])
        .collect();
    let halves: Vec<u16> = weights.iter().map(|(bits, _)| *bits).collect();
    let values: Vec<f32> = (0..length * columns)
        .map(|i| (number(i, 53) % 33) as f32 / 8.0 - 2.0)
        .collect();
    let inputs = [
        (w, bytemuck::cast_slice(&halves)),
        (x, bytemuck::cast_slice(&values)),
    ];
    let found = compute(device.with(WgpuOptions::default()), &graph, &inputs, &[y])?;
    let dot = |w: &[(u16, f64)], x: &[f32]| -> f64 {
        w.iter().zip(x).map(|((_, w), x)| w * f64::from(*x)).sum()
    };
    let expected: Vec<f64> = values
        .chunks(length)
        .flat_map(|x| weights.chunks(length).map(move |w| dot(w, x)))
        .collect();
    Ok(found.iter().all(|found| are_close(found, &expected)))
}

/// Returns whether attention with cooperative matrices is right. Queries and keys are exact in
/// halves and exceed one tile. Each query sees keys up to its own index plus some more.
fn is_attention_right(device: &WgpuDevice) -> Result<bool> {
    let (size, heads, tokens, keys) = (64, 2, 70, 90);
    let mut graph = Graph::new();
    let q = graph.input("q", DType::F32, [size, tokens, heads, 1])?;
    let [k, v] = ["k", "v"].map(|name| graph.input(name, DType::F16, [size, keys, 1, 1]));
    let (k, v) = (k?, v?);
    let mask = graph.input("mask", DType::F16, [keys, tokens, 1, 1])?;
    let op = Op::FlashAttn {
        scale: 0.125,
        max_bias: 0.0,
        softcap: 0.0,
        precision: Precision::F32,
    };
    let y = graph.push(op, &[Some(q), Some(k), Some(v), Some(mask)])?;
    let number = |i: usize, factor: usize| i * factor % 1009;
    let queries: Vec<f32> = (0..size * tokens * heads)
        .map(|i| (number(i, 53) % 33) as f32 / 8.0 - 2.0)
        .collect();
    let of_keys = |factor: usize| -> Vec<(u16, f64)> {
        let numbers = (0..size * keys).map(|i| HALVES[number(i, factor) % HALVES.len()]);
        numbers.collect()
    };
    let [key_rows, value_rows] = [of_keys(37), of_keys(71)];
    let bits = |rows: &[(u16, f64)]| -> Vec<u16> { rows.iter().map(|(bits, _)| *bits).collect() };
    let is_seen = |token: usize, key: usize| key <= token + 15;
    let masked = (0..tokens * keys).map(|i| {
        if is_seen(i / keys, i % keys) {
            0u16
        } else {
            0xfc00
        }
    });
    let masked: Vec<u16> = masked.collect();
    let (key_bits, value_bits) = (bits(&key_rows), bits(&value_rows));
    let inputs: [(TensorId, &[u8]); 4] = [
        (q, bytemuck::cast_slice(&queries)),
        (k, bytemuck::cast_slice(&key_bits)),
        (v, bytemuck::cast_slice(&value_bits)),
        (mask, bytemuck::cast_slice(&masked)),
    ];
    let found = compute(device.with(WgpuOptions::default()), &graph, &inputs, &[y])?;
    let mut expected = vec![0.0; size * heads * tokens];
    for head in 0..heads {
        for token in 0..tokens {
            let query = &queries[(head * tokens + token) * size..][..size];
            let seen = (0..keys).filter(|&key| is_seen(token, key));
            let weights: Vec<(usize, f64)> = seen
                .map(|key| {
                    let products = query.iter().zip(&key_rows[key * size..]);
                    let logit: f64 = products.map(|(q, (_, k))| f64::from(*q) * k).sum();
                    (key, (logit * 0.125).exp())
                })
                .collect();
            let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
            let result = &mut expected[(token * heads + head) * size..][..size];
            for (i, result) in result.iter_mut().enumerate() {
                let parts = weights.iter();
                let sum: f64 = parts.map(|(key, w)| w * value_rows[key * size + i].1).sum();
                *result = sum / total;
            }
        }
    }
    // Attention weights have the precision of halves.
    let is_close = |(found, expected): (&f32, &f64)| (f64::from(*found) - expected).abs() <= 4e-3;
    Ok(found
        .iter()
        .all(|found| found.iter().zip(&expected).all(is_close)))
}

/// Computes `results`, which must all be floats, for `inputs`.
fn compute(
    device: WgpuDevice,
    graph: &Graph,
    inputs: &[(TensorId, &[u8])],
    results: &[TensorId],
) -> Result<Vec<Vec<f32>>> {
    let device = Arc::new(device);
    let place = |id: TensorId| -> Result<Option<TensorRef>> {
        let wanted = [("", graph.tensor(id).layout)];
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &wanted)?;
        Ok(Some(group.tensors[0].tensor().clone()))
    };
    let places = graph.ids().map(place).collect::<Result<Vec<_>>>()?;
    let mut stream = WgpuStream::open(device)?;
    let work = PlacedGraph {
        graph,
        nodes: results,
        places: &places,
        workspace: None,
        compiled: None,
    };
    let mut prepared = stream.prepare(work)?;
    let place = |id: TensorId| {
        let place = places.get(id.index()).and_then(Option::as_ref);
        place.ok_or_else(|| Error::invalid("a tensor has no place"))
    };
    for (id, bytes) in inputs {
        stream.write(place(*id)?, 0, bytes)?;
    }
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: None,
    };
    stream.run(&mut *prepared, control)?;
    let read = |&id: &TensorId| -> Result<Vec<f32>> {
        let mut found = vec![0f32; graph.tensor(id).layout.shape().iter().product()];
        stream.read(place(id)?, 0, bytemuck::cast_slice_mut(&mut found))?;
        Ok(found)
    };
    results.iter().map(read).collect()
}

/// Returns the expected results, in the order of [`is_right`].
fn expected([x, w]: &[Vec<f32>; 2]) -> [Vec<f64>; 4] {
    let rows = |values: &[f32]| -> Vec<Vec<f64>> {
        let rows = values.chunks(LENGTH);
        rows.map(|row| row.iter().map(|&x| x.into()).collect())
            .collect()
    };
    let (x, w) = (rows(x), rows(w));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let norm = x.iter().flat_map(|row| {
        let scale = (dot(row, row) / row.len() as f64 + f64::from(EPS)).sqrt();
        row.iter().map(move |x| x / scale)
    });
    let soft_max = x.iter().flat_map(|row| {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        row.iter().map(move |x| x.exp() / sum)
    });
    let sums = x.iter().map(|row| row.iter().sum());
    let products = x.iter().flat_map(|x| w.iter().map(|w| dot(w, x)));
    [
        norm.collect(),
        soft_max.collect(),
        sums.collect(),
        products.collect(),
    ]
}
