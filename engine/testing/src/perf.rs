//! Performance measurements of a device's operations, with shapes of a model of 8 billion
//! parameters.

use crate::case::{Builder, Case, Limit};
use crate::recipe::{Recipe, Rng};
use crate::run::{Arena, bytes_layout, store_weights};
use samite_core::{
    CancelToken, DType, Device, Glu, Layout, PlacedGraph, Result, Rope, RopeMode, RunControl,
    Support, TensorGroup, TensorId, Usage, counted,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Widths of the model and of its feed-forward part, elements of a head, and numbers of heads.
const WIDTH: usize = 4096;
const INNER: usize = 14_336;
const HEAD: usize = 128;
const HEADS: [usize; 2] = [32, 8];
/// Number of tokens of a prompt that are computed together.
const PROMPT: usize = 512;

/// Total bytes of copies of the weights, more than caches hold. Decoding reads weights from memory
/// for each token, so runs alternate between the copies.
const COPIES_BYTES: usize = 512 << 20;

/// An operation with a shape of a real model.
#[derive(Clone, Debug)]
pub struct PerfCase {
    /// The operation. Its limit is not used.
    pub case: Case,
    /// Number of multiplications and additions.
    pub operations: f64,
    /// Bytes that must be read and written once.
    pub bytes: f64,
    /// True if weights are quantized, so that 8-bit numbers are multiplied.
    pub quantized: bool,
}

/// Measured time of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerfResult {
    /// Average seconds of one run.
    pub seconds: f64,
    /// Number of timed runs.
    pub runs: usize,
}

/// Returns all cases.
pub fn perf_cases() -> Vec<PerfCase> {
    use DType::{BF16, F16, F32, IQ4_XS, MXFP4, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    let mut cases = Vec::new();
    for dtype in [F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, IQ4_XS, MXFP4] {
        cases.push(product(dtype, [WIDTH, INNER], 1));
        cases.push(product(dtype, [WIDTH, WIDTH], PROMPT));
    }
    for dtype in [F16, Q4_0, Q4_K] {
        cases.push(experts(dtype, [2048, 768], [64, 8], 1));
    }
    for (kv, tokens) in [(WIDTH, 1), (PROMPT, PROMPT)] {
        for dtype in [F16, Q8_0] {
            cases.push(attention(dtype, kv, tokens));
        }
    }
    let rows = [WIDTH, PROMPT, 1, 1];
    let logits = [PROMPT, PROMPT, HEADS[0], 1];
    fn simple(name: &str, build: impl FnOnce(&mut Builder) -> Result<TensorId>) -> PerfCase {
        perf(name, 0.0, build)
    }
    cases.push(simple("f32 4096x512", |b| {
        let x = b.input(F32, rows, Recipe::UNIT)?;
        b.graph.rms_norm(x, 1e-5)
    }));
    cases.push(simple("f32 4096x512", |b| {
        let [x, y] = [0, 1].map(|_| b.input(F32, rows, Recipe::UNIT));
        b.graph.add(x?, y?)
    }));
    cases.push(simple("f32 4096x512, row", |b| {
        let x = b.input(F32, rows, Recipe::UNIT)?;
        let y = b.input(F32, [WIDTH, 1, 1, 1], Recipe::UNIT)?;
        b.graph.mul(x, y)
    }));
    cases.push(simple("f32 swiglu 14336x512", |b| {
        let [x, y] = [0, 1].map(|_| b.input(F32, [INNER, PROMPT, 1, 1], Recipe::UNIT));
        b.graph.glu_split(x?, y?, Glu::Swiglu)
    }));
    cases.push(simple("f32 128x32x512", |b| {
        let x = b.input(F32, [HEAD, HEADS[0], PROMPT, 1], Recipe::UNIT)?;
        let positions = b.input(
            DType::I32,
            [PROMPT, 1, 1, 1],
            Recipe::Positions { start: 0 },
        )?;
        let rope = Rope::new(HEAD, RopeMode::Normal, 500_000.0);
        b.graph.rope(x, positions, None, rope)
    }));
    cases.push(simple("f32 512x512x32, mask", |b| {
        let x = b.input(F32, logits, Recipe::UNIT)?;
        let mask = b.input(F16, [PROMPT, PROMPT, 1, 1], Recipe::Mask)?;
        b.graph.soft_max(x, Some(mask), None, 0.1, 0.0)
    }));
    cases.push(simple("f32 -> f16 4096x512", |b| {
        let x = b.input(F32, rows, Recipe::UNIT)?;
        let into = b.input(F16, rows, Recipe::Zeros)?;
        b.graph.cpy(x, into)
    }));
    cases.push(simple("f32 128x512x32, permuted", |b| {
        let x = b.input(F32, [HEAD, PROMPT, HEADS[0], 1], Recipe::UNIT)?;
        let x = b.graph.permute(x, [0, 2, 1, 3])?;
        b.graph.cont(x)
    }));
    for dtype in [F32, Q4_0, Q4_K] {
        let mut rows = simple(&format!("{dtype} 4096x32000, 512 rows"), |b| {
            let table = b.input(dtype, [WIDTH, 32_000, 1, 1], Recipe::UNIT)?;
            let numbers = b.input(DType::I32, [PROMPT, 1, 1, 1], Recipe::Ids { limit: 32_000 })?;
            b.graph.get_rows(table, numbers)
        });
        // Only these rows of the table.
        rows.bytes -= bytes_of(&rows.case, 0) * (1.0 - PROMPT as f64 / 32_000.0);
        cases.push(rows);
    }
    cases
}

/// Returns the bytes of an input.
fn bytes_of(case: &Case, input: usize) -> f64 {
    case.graph.tensor(case.inputs[input].tensor).layout.bytes() as f64
}

/// Returns a case that reads all its inputs and writes its result.
///
/// # Panics
/// If it is malformed, which is a bug in this file.
fn perf(
    name: &str,
    operations: f64,
    build: impl FnOnce(&mut Builder) -> Result<TensorId>,
) -> PerfCase {
    let mut builder = Builder::default();
    let output = match build(&mut builder) {
        Ok(output) => output,
        Err(error) => panic!("a case of the measurements is malformed: {error}"),
    };
    let node = builder.graph.tensor(output);
    let mut bytes = node.layout.bytes() as f64;
    // The target of a copy is not read.
    let written = node.written().map(|(_, source)| source).collect::<Vec<_>>();
    for input in &builder.inputs {
        if !written.contains(&input.tensor) {
            bytes += builder.graph.tensor(input.tensor).layout.bytes() as f64;
        }
    }
    let case = Case {
        name: name.to_owned(),
        op: node.op.name(),
        inputs: builder.inputs,
        output,
        limit: Limit::Exact,
        in_place: None,
        graph: builder.graph,
    };
    PerfCase {
        case,
        operations,
        bytes,
        quantized: false,
    }
}

fn product(dtype: DType, [k, m]: [usize; 2], n: usize) -> PerfCase {
    let name = format!("{dtype} {k}x{m}, {}", counted(n, "column"));
    let made = perf(&name, 2.0 * (k * m * n) as f64, |b| {
        let w = b.weights(dtype, [k, m, 1, 1], Recipe::UNIT)?;
        let x = b.input(DType::F32, [k, n, 1, 1], Recipe::UNIT)?;
        b.graph.mul_mat(w, x)
    });
    PerfCase {
        quantized: dtype.is_quantized(),
        ..made
    }
}

fn experts(dtype: DType, [k, m]: [usize; 2], [count, used]: [usize; 2], n: usize) -> PerfCase {
    let name = format!("{dtype} {k}x{m}, {used}/{count} experts");
    let mut made = perf(&name, 2.0 * (k * m * n * used) as f64, |b| {
        let w = b.weights(dtype, [k, m, count, 1], Recipe::UNIT)?;
        let x = b.input(DType::F32, [k, 1, n, 1], Recipe::UNIT)?;
        let ids = b.input(
            DType::I32,
            [used, n, 1, 1],
            Recipe::DistinctIds { limit: count },
        )?;
        b.graph.mul_mat_id(w, x, ids)
    });
    made.quantized = dtype.is_quantized();
    made.bytes -= bytes_of(&made.case, 0) * (1.0 - (used * n) as f64 / count as f64);
    made
}

fn attention(dtype: DType, kv: usize, tokens: usize) -> PerfCase {
    let name = format!("{dtype} {kv} keys, {}", counted(tokens, "token"));
    let operations = 4.0 * (HEAD * kv * tokens * HEADS[0]) as f64;
    perf(&name, operations, |b| {
        let q = b.input(DType::F32, [HEAD, tokens, HEADS[0], 1], Recipe::UNIT)?;
        let [k, v] = [0, 1].map(|_| b.input(dtype, [HEAD, kv, HEADS[1], 1], Recipe::UNIT));
        let mask = b.input(DType::F16, [kv, tokens, 1, 1], Recipe::Zeros)?;
        let scale = 1.0 / (HEAD as f32).sqrt();
        b.graph.flash_attn([q, k?, v?], Some(mask), None, scale)
    })
}

/// Returns the bytes of an input, with random data only in the first rows: faster to create, and as
/// fast to compute with.
fn bytes(recipe: Recipe, layout: &Layout) -> Result<Vec<u8>> {
    let [n0, n1, n2, n3] = layout.shape();
    let rows = n1 * n2 * n3;
    let distinct = Layout::contiguous(layout.dtype(), [n0, rows.min(64), 1, 1])?;
    let some = recipe.bytes(&distinct, &mut Rng::new(1))?;
    Ok(some.iter().copied().cycle().take(layout.bytes()).collect())
}

/// Times a case on a device for at least `least`, after a run that is not counted. Returns `Err`
/// with the reason if the device does not support the case. Weights lie in the first special memory
/// of the device that accepts them, like those of models.
///
/// # Errors
/// The device's error.
pub fn measure(
    device: &Arc<dyn Device>,
    perf: &PerfCase,
    least: Duration,
) -> Result<Result<PerfResult, String>> {
    let case = &perf.case;
    let layout = |index: usize| &case.graph.tensor(case.inputs[index].tensor).layout;
    let inputs = (0..case.inputs.len())
        .map(|index| bytes(case.inputs[index].recipe, layout(index)))
        .collect::<Result<Vec<_>>>()?;
    let weights: usize = (case.inputs.iter().enumerate())
        .filter(|(_, input)| input.weights)
        .map(|(index, _)| layout(index).bytes())
        .sum();
    // Products with little computation per weight are limited by memory.
    let reads = weights > 0 && perf.operations < 64.0 * perf.bytes;
    let copies = if reads {
        (COPIES_BYTES / weights).clamp(1, 16)
    } else {
        1
    };

    let mut stream = Arc::clone(device).open_stream()?;
    let mut all = Vec::new();
    for _ in 0..copies {
        let mut graph = case.graph.clone();
        for memory in device.extra_buffer_types() {
            if let Ok(stored) = store_weights(case, &inputs, &memory)? {
                graph = stored;
                break;
            }
        }
        for id in graph.ids().filter(|&id| graph.tensor(id).is_computed()) {
            if let Support::No(reason) = device.supports(graph.node(id)) {
                return Ok(Err(reason.into_owned()));
            }
        }
        let arena = Arena::new(device, case, &graph)?;
        for (input, bytes) in case.inputs.iter().zip(&inputs) {
            if graph.tensor(input.tensor).stored.is_none() {
                arena.place(input.tensor)?.write(0, bytes)?;
            }
        }
        let nodes: Vec<_> = graph.ids().collect();
        let scratch = TensorGroup::allocate(
            &device.buffer_type(),
            Usage::Compute,
            &[(
                "workspace",
                bytes_layout(device.workspace(&graph, &nodes)?)?,
            )],
        )?;
        let prepared = stream.prepare(PlacedGraph {
            graph: &graph,
            nodes: &nodes,
            places: &arena.places,
            workspace: scratch.tensors.first().map(|tensor| tensor.tensor()),
            compiled: None,
        })?;
        all.push((prepared, arena, scratch));
    }
    let cancel = CancelToken::new();
    let control = || RunControl {
        cancel: &cancel,
        observer: None,
    };
    for (prepared, _, _) in &mut all {
        stream.run(&mut **prepared, control())?;
    }
    stream.synchronize()?;
    let started = Instant::now();
    let mut runs = 0;
    loop {
        for (prepared, _, _) in &mut all {
            stream.run(&mut **prepared, control())?;
            runs += 1;
        }
        stream.synchronize()?;
        let elapsed = started.elapsed();
        if elapsed >= least {
            let seconds = elapsed.as_secs_f64() / f64::from(runs);
            return Ok(Ok(PerfResult {
                seconds,
                runs: runs as usize,
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_cpu::{CpuDevice, CpuOptions};

    #[test]
    fn operations_and_bytes_are_counted() {
        let all = perf_cases();
        let find = |op: &str, name: &str| {
            let found = all
                .iter()
                .find(|perf| perf.case.op == op && perf.case.name == name);
            found.unwrap_or_else(|| panic!("{op} {name}"))
        };
        let product = find("mul_mat", "q4_0 4096x14336, 1 column");
        assert_eq!(product.operations, 2.0 * 4096.0 * 14336.0);
        let weights = 4096.0 * 14336.0 * 18.0 / 32.0;
        assert_eq!(product.bytes, weights + 4.0 * (4096.0 + 14336.0));
        assert!(product.quantized);
        // Unused tables and experts are not read, and the target of a copy is only written.
        let rows = find("get_rows", "f32 4096x32000, 512 rows");
        assert!((rows.bytes - (2.0 * 4096.0 * 512.0 * 4.0 + 512.0 * 4.0)).abs() < 1.0);
        let copy = find("cpy", "f32 -> f16 4096x512");
        assert_eq!(copy.bytes, 6.0 * 4096.0 * 512.0);
    }

    #[test]
    fn a_device_is_timed() {
        let device: Arc<dyn Device> = CpuDevice::new(CpuOptions::default().with_threads(1));
        let least = Duration::from_millis(5);
        let small = product(DType::Q4_0, [64, 32], 1);
        let found = measure(&device, &small, least).unwrap().unwrap();
        assert!(found.runs > 1 && found.seconds > 0.0);
        assert!(found.seconds * found.runs as f64 >= least.as_secs_f64());
        let large = product(DType::Q4_0, [4096, 4096], 1);
        let slower = measure(&device, &large, least).unwrap().unwrap();
        assert!(slower.seconds > found.seconds, "{slower:?} {found:?}");
    }
}
