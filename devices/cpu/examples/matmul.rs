//! Measures matrix products of 4096 x 4096 weights:
//! `cargo run --release -p samite-cpu --example matmul [threads [columns,... [type|memory ...]]]`.
//!
//! Prints the median of several runs as bytes of weights per second and as operations per second,
//! and the share of the machine's first limit: memory bandwidth or arithmetic (8-bit products for
//! quantized types, else F32, which 16-bit types may exceed). Repeats it for weights in packed
//! memory (`cpu-packed`), if the type has a packed layout.

use samite_core::{
    BufferType, CancelToken, DType, Device, Error, Graph, Layout, PlacedGraph, Result, RunControl,
    Slot, TensorGroup, TensorRef, Usage, host_buffer_type,
};
use samite_cpu::{CpuDevice, CpuOptions, Peaks, allowed_threads, measure_peaks};
use std::sync::Arc;
use std::time::{Duration, Instant};

const K: usize = 4096;
const ROWS: usize = 4096;

/// Bytes of weights. Copies are used in turn, so that they come from memory, not from a cache.
const BYTES: usize = 512 << 20;

fn place(layout: Layout, usage: Usage) -> Result<TensorRef> {
    let buffer = host_buffer_type().allocate(layout.bytes().max(64), usage)?;
    let slot = Slot { offset: 0, layout };
    Ok(TensorRef { buffer, slot })
}

/// The median time of a product with weights in `memory`; `None` if that does not take them.
fn measure(
    device: &Arc<CpuDevice>,
    memory: &Arc<dyn BufferType>,
    dtype: DType,
    columns: usize,
) -> Result<Option<Duration>> {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [K, columns, 1, 1])?;
    let noise = |i: usize| ((i * 7919) % 1013) as f32 / 506.5 - 1.0;
    let row: Vec<f32> = (0..K).map(noise).collect();
    let mut row_bytes = vec![0; dtype.row_bytes(K)?];
    if samite_quant::can_encode(dtype) {
        samite_quant::encode_row(dtype, &row, &mut row_bytes)?;
    } else {
        let mut count = 0;
        let next = || {
            count += 1u64;
            count.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        };
        samite_quant::random_row(dtype, 0.5, next, &mut row_bytes)?;
    }
    let mut places = vec![Some(place(graph.tensor(x).layout, Usage::Compute)?)];
    if let Some(place) = &places[0] {
        let numbers: Vec<f32> = (0..K * columns).map(|i| noise(i * 31)).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        place.write(0, &bytes)?;
    }
    let rows = row_bytes.repeat(ROWS);
    // With many columns, memory matters less and each copy takes longer.
    let copies = BYTES.div_ceil(rows.len()).div_ceil(columns.div_ceil(16));
    for _ in 0..copies {
        let layout = Layout::contiguous(dtype, [K, ROWS, 1, 1])?;
        let sample = {
            let mut graph = Graph::new();
            let weights = graph.leaf("weights", dtype, layout.shape())?;
            let x = graph.input("x", DType::F32, [K, columns, 1, 1])?;
            let product = graph.mul_mat(weights, x)?;
            memory.accepts(graph.node(product))
        };
        if !sample.is_yes() {
            return Ok(None);
        }
        let stored = TensorGroup::allocate(memory, Usage::Weights, &[("weights", layout)])?;
        let [stored] = stored.tensors.as_slice() else {
            return Ok(None);
        };
        stored.tensor().write(0, &rows)?;
        let weights = graph.stored(stored)?;
        let product = graph.mul_mat(weights, x)?;
        places.push(Some(stored.tensor().clone()));
        places.push(Some(place(graph.tensor(product).layout, Usage::Compute)?));
    }
    let nodes: Vec<_> = graph.ids().collect();
    let bytes = device.workspace(&graph, &nodes)?;
    let workspace = place(
        Layout::contiguous(DType::I8, [bytes, 1, 1, 1])?,
        Usage::Compute,
    )?;
    let mut stream = Arc::clone(device).open_stream()?;
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
    for _ in 0..7 {
        let start = Instant::now();
        stream.run(prepared.as_mut(), control)?;
        times.push(start.elapsed() / copies as u32);
    }
    times.sort();
    Ok(Some(times[times.len() / 2]))
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments
        .next()
        .map_or(Ok(allowed_threads()), |threads| threads.parse())
        .map_err(|_| Error::invalid("the first argument is the number of threads"))?;
    let columns = arguments.next().unwrap_or("1,4,8,64,256".into());
    let columns = columns
        .split(',')
        .map(|number| number.parse().ok().filter(|&n| n > 0))
        .collect::<Option<Vec<usize>>>()
        .ok_or_else(|| Error::invalid("the second argument has numbers of columns, as in 1,64"))?;
    let named: Vec<_> = arguments.collect();
    let device = CpuDevice::new(CpuOptions::default().with_threads(threads));
    println!("{} {device:?}", device.description());
    let peaks = measure_peaks(threads);
    println!("{peaks:?}");
    let mut memories = vec![host_buffer_type()];
    memories.extend(device.extra_buffer_types());
    let is_named = |what: &str| named.iter().any(|name| name.eq_ignore_ascii_case(what));
    let mut types: Vec<_> = DType::all()
        .filter(|dtype| samite_quant::can_decode(*dtype) && *dtype != DType::F64)
        .collect();
    if types.iter().any(|dtype| is_named(dtype.name())) {
        types.retain(|dtype| is_named(dtype.name()));
    }
    if memories.iter().any(|memory| is_named(memory.name())) {
        memories.retain(|memory| is_named(memory.name()));
    }
    for dtype in types {
        for memory in &memories {
            report(&device, memory, dtype, &columns, &peaks)?;
        }
    }
    Ok(())
}

fn report(
    device: &Arc<CpuDevice>,
    memory: &Arc<dyn BufferType>,
    dtype: DType,
    columns: &[usize],
    peaks: &Peaks,
) -> Result<()> {
    let mut line = format!("{dtype:8} {:10}", memory.name());
    for &columns in columns {
        let Some(time) = measure(device, memory, dtype, columns)? else {
            return Ok(());
        };
        let seconds = time.as_secs_f64();
        let bytes = (dtype.row_bytes(K)? * ROWS) as f64 / seconds;
        let operations = (2 * K * ROWS * columns) as f64 / seconds;
        let (name, most) = match peaks.i8_operations {
            Some(most) if dtype.is_quantized() => ("8-bit", most),
            _ => ("f32", peaks.f32_operations),
        };
        let shares = [
            ("reading", bytes / peaks.read_bytes),
            (name, operations / most),
        ];
        let (limit, share) = if shares[0].1 > shares[1].1 {
            shares[0]
        } else {
            shares[1]
        };
        line += &format!(
            "  n={columns:<3} {:8.3} ms {:5.1} GB/s {:6.1} Gop/s {:3.0} % of {limit}",
            seconds * 1e3,
            bytes / 1e9,
            operations / 1e9,
            share * 100.0
        );
    }
    println!("{line}");
    Ok(())
}
