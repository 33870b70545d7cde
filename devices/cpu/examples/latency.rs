//! Measures the cost of small nodes: one step of a model of 5 layers of width 64 with about 20
//! nodes each, in one thread:
//! `cargo run --release -p samite-cpu --example latency`.

use samite_core::{
    CancelToken, DType, Device, Graph, Layout, PlacedGraph, Result, Rope, RopeMode, RunControl,
    Slot, TensorId, TensorRef, Usage, align_up, host_buffer_type,
};
use samite_cpu::{CpuDevice, CpuOptions};
use std::sync::Arc;
use std::time::Instant;

const WIDTH: usize = 64;
const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const HEAD: usize = WIDTH / HEADS;
const HIDDEN: usize = 172;
const CONTEXT: usize = 256;

fn weights(graph: &mut Graph, columns: usize, rows: usize) -> Result<TensorId> {
    graph.leaf("weights", DType::F32, [columns, rows, 1, 1])
}

fn norm(graph: &mut Graph, x: TensorId) -> Result<TensorId> {
    let scale = weights(graph, WIDTH, 1)?;
    let normed = graph.rms_norm(x, 1e-5)?;
    graph.mul(normed, scale)
}

fn project(graph: &mut Graph, x: TensorId, columns: usize, rows: usize) -> Result<TensorId> {
    let weights = weights(graph, columns, rows)?;
    graph.mul_mat(weights, x)
}

fn layer(
    graph: &mut Graph,
    x: TensorId,
    position: TensorId,
    place: TensorId,
    mask: TensorId,
) -> Result<TensorId> {
    let rope = Rope::new(HEAD, RopeMode::Normal, 10_000.0);
    let normed = norm(graph, x)?;
    let q = project(graph, normed, WIDTH, WIDTH)?;
    let q = graph.reshape(q, [HEAD, HEADS, 1, 1])?;
    let q = graph.rope(q, position, None, rope)?;
    let q = graph.permute(q, [0, 2, 1, 3])?;
    let k = project(graph, normed, WIDTH, HEAD * KV_HEADS)?;
    let k = graph.reshape(k, [HEAD, KV_HEADS, 1, 1])?;
    let k = graph.rope(k, position, None, rope)?;
    let k = graph.reshape(k, [HEAD * KV_HEADS, 1, 1, 1])?;
    let v = project(graph, normed, WIDTH, HEAD * KV_HEADS)?;
    let cache = |graph: &mut Graph, row| -> Result<TensorId> {
        let cache = graph.leaf("cache", DType::F16, [HEAD * KV_HEADS, CONTEXT, 1, 1])?;
        let cache = graph.set_rows(row, place, cache)?;
        let row = HEAD * KV_HEADS * 2;
        let shape = [HEAD, CONTEXT, KV_HEADS, 1];
        graph.view(cache, shape, [row, HEAD * 2, row * CONTEXT], 0)
    };
    let (k, v) = (cache(graph, k)?, cache(graph, v)?);
    let attention = graph.flash_attn([q, k, v], Some(mask), None, 0.35)?;
    let attention = graph.reshape(attention, [WIDTH, 1, 1, 1])?;
    let attention = project(graph, attention, WIDTH, WIDTH)?;
    let x = graph.add(attention, x)?;
    let normed = norm(graph, x)?;
    let gate = project(graph, normed, WIDTH, HIDDEN)?;
    let up = project(graph, normed, WIDTH, HIDDEN)?;
    let hidden = graph.glu_split(gate, up, samite_core::Glu::Swiglu)?;
    let down = project(graph, hidden, HIDDEN, WIDTH)?;
    graph.add(down, x)
}

fn main() -> Result<()> {
    let mut graph = Graph::new();
    let token = graph.input("token", DType::I32, [1, 1, 1, 1])?;
    let position = graph.input("position", DType::I32, [1, 1, 1, 1])?;
    let place = graph.input("place", DType::I64, [1, 1, 1, 1])?;
    let mask = graph.input("mask", DType::F16, [CONTEXT, 1, 1, 1])?;
    let embedding = weights(&mut graph, WIDTH, 512)?;
    let mut x = graph.get_rows(embedding, token)?;
    for _ in 0..5 {
        x = layer(&mut graph, x, position, place, mask)?;
    }
    let normed = norm(&mut graph, x)?;
    project(&mut graph, normed, WIDTH, 512)?;

    let device = CpuDevice::new(CpuOptions::default().with_threads(1));
    let nodes: Vec<_> = graph.ids().collect();
    let computed = nodes
        .iter()
        .filter(|&&id| graph.tensor(id).is_computed())
        .count();
    let mut size = 0;
    let mut offsets = Vec::new();
    for tensor in graph.tensors() {
        offsets.push(size);
        size = align_up(size + tensor.layout.bytes(), 64).unwrap_or(size);
    }
    let workspace = device.workspace(&graph, &nodes)?;
    let buffer = host_buffer_type().allocate(size + workspace, Usage::Compute)?;
    let at = |offset, layout| TensorRef {
        buffer: Arc::clone(&buffer),
        slot: Slot { offset, layout },
    };
    let places: Vec<_> = graph
        .tensors()
        .iter()
        .zip(&offsets)
        .map(|(tensor, &offset)| {
            let offset = tensor
                .view
                .map_or(offset, |view| offsets[view.base.index()] + view.offset);
            Some(at(offset, tensor.layout))
        })
        .collect();
    let workspace = at(size, Layout::contiguous(DType::I8, [workspace, 1, 1, 1])?);
    let mut stream = Arc::clone(&device).open_stream()?;
    let mut prepared = stream.prepare(PlacedGraph {
        graph: &graph,
        nodes: &nodes,
        places: &places,
        workspace: Some(&workspace),
        compiled: None,
    })?;
    let cancel = CancelToken::new();
    let control = RunControl {
        cancel: &cancel,
        observer: None,
    };
    let mut times = Vec::new();
    for _ in 0..2000 {
        let start = Instant::now();
        stream.run(prepared.as_mut(), control)?;
        times.push(start.elapsed());
    }
    times.sort();
    let median = times[times.len() / 2];
    println!(
        "{computed} nodes in {:.1} us, {:.2} us each: {:.0} steps/s",
        median.as_secs_f64() * 1e6,
        median.as_secs_f64() * 1e6 / computed as f64,
        1.0 / median.as_secs_f64()
    );
    Ok(())
}
