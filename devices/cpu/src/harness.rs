//! Test harness: runs a graph on a device, with all tensors in host memory.

use crate::{CpuDevice, CpuOptions};
use samite_core::memory::HOST_ALIGNMENT;
use samite_core::{
    CancelToken, DType, Device, Graph, Prepared, Result, RunControl, Slot, Stream, TensorId,
    TensorRef, Usage, align_up, host_buffer_type, shape,
};
use std::sync::Arc;

/// A graph with memory for all its tensors, prepared on one device.
pub(crate) struct Bench {
    stream: Box<dyn Stream>,
    prepared: Box<dyn Prepared>,
    places: Vec<Option<TensorRef>>,
}

impl Bench {
    pub fn new(graph: &Graph, device: &Arc<CpuDevice>) -> Result<Self> {
        let nodes: Vec<_> = graph.ids().collect();
        let mut offsets = vec![0; graph.len()];
        let mut size = 0;
        for &id in nodes.iter().filter(|&&id| graph.tensor(id).view.is_none()) {
            offsets[id.index()] = size;
            size = align_up(size + graph.tensor(id).layout.bytes(), HOST_ALIGNMENT).unwrap();
        }
        let workspace = device.workspace(graph, &nodes)?;
        let buffer = host_buffer_type().allocate(size + workspace, Usage::Compute)?;
        let place = |offset, layout| TensorRef {
            buffer: Arc::clone(&buffer),
            slot: Slot { offset, layout },
        };
        let places: Vec<_> = nodes
            .iter()
            .map(|&id| {
                let tensor = graph.tensor(id);
                if let Some(stored) = &tensor.stored {
                    return Some(stored.tensor().clone());
                }
                let offset = match tensor.view {
                    Some(view) => offsets[view.base.index()] + view.offset,
                    None => offsets[id.index()],
                };
                Some(place(offset, tensor.layout))
            })
            .collect();
        let bytes = samite_core::Layout::contiguous(DType::I8, [workspace, 1, 1, 1])?;
        let workspace = place(size, bytes);
        let mut stream = Arc::clone(device).open_stream()?;
        let prepared = stream.prepare(samite_core::PlacedGraph {
            graph,
            nodes: &nodes,
            places: &places,
            workspace: Some(&workspace),
            compiled: None,
        })?;
        Ok(Bench {
            stream,
            prepared,
            places,
        })
    }

    pub fn write(&self, id: TensorId, data: &[impl bytemuck::NoUninit]) {
        let place = self.places[id.index()].as_ref().unwrap();
        place.write(0, bytemuck::cast_slice(data)).unwrap();
    }

    pub fn read<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self, id: TensorId) -> Vec<T> {
        let place = self.places[id.index()].as_ref().unwrap();
        let mut out = vec![T::zeroed(); place.layout().bytes() / size_of::<T>()];
        place.read(0, bytemuck::cast_slice_mut(&mut out)).unwrap();
        out
    }

    pub fn set_threads(&mut self, threads: Option<usize>) {
        self.stream.set_threads(threads);
    }

    pub fn run(&mut self) -> Result<()> {
        self.run_with(RunControl {
            cancel: &CancelToken::new(),
            observer: None,
        })
    }

    pub fn run_with(&mut self, control: RunControl<'_>) -> Result<()> {
        self.stream.run(self.prepared.as_mut(), control)
    }
}

/// Returns a device with a number of threads and the best instruction set.
pub(crate) fn device(threads: usize) -> Arc<CpuDevice> {
    CpuDevice::new(CpuOptions::default().with_threads(threads))
}

/// Returns an F32 input.
pub(crate) fn input(graph: &mut Graph, extents: &[usize]) -> TensorId {
    let shape = shape(extents).unwrap();
    graph.input("x", DType::F32, shape).unwrap()
}

/// Returns an I32 input.
pub(crate) fn integers(graph: &mut Graph, extents: &[usize]) -> TensorId {
    let shape = shape(extents).unwrap();
    graph.input("numbers", DType::I32, shape).unwrap()
}

/// Runs a graph with F32 inputs in one thread and returns its last node.
pub(crate) fn evaluate(graph: &Graph, inputs: &[(TensorId, &[f32])]) -> Vec<f32> {
    let mut bench = Bench::new(graph, &device(1)).unwrap();
    for (id, data) in inputs {
        bench.write(*id, data);
    }
    bench.run().unwrap();
    bench.read(TensorId::from_index(graph.len() - 1))
}

/// Returns reproducible numbers from -1 to 1.
pub(crate) fn numbers(seed: u32, count: usize) -> Vec<f32> {
    (0..count as u32)
        .map(|i| {
            let hash = (i ^ seed.wrapping_mul(0x85eb_ca6b)).wrapping_mul(0x9e37_79b9);
            let hash = (hash ^ (hash >> 15)).wrapping_mul(0x2c1b_3c6d) >> 8;
            hash as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Returns reproducible rows of weights: `count` elements from -1 to 1, or random blocks of about
/// that magnitude.
pub(crate) fn weights(dtype: DType, seed: u32, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; dtype.row_bytes(count).unwrap()];
    if samite_quant::can_encode(dtype) {
        samite_quant::encode_row(dtype, &numbers(seed, count), &mut bytes).unwrap();
    } else {
        let mut state = u64::from(seed) + 1;
        let next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            state ^ state >> 32
        };
        samite_quant::random_row(dtype, 0.5, next, &mut bytes).unwrap();
    }
    bytes
}
