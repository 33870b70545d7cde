//! Devices, weights and graphs for the tests.
#![allow(dead_code, reason = "not every test file uses everything")]

use samite_core::{
    Buffer, BufferType, DType, Device, DeviceKind, DeviceWrapper, Graph, KeepAlive, Layout, Op,
    Result, StoredTensor, TensorGroup, TensorId, TensorInfo, Unary, Usage, WrappedDevice,
    same_buffer_type,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_sched::Scheduler;
use std::sync::Arc;

pub fn device(name: &str, change: impl FnOnce(&mut ReferenceOptions)) -> Arc<dyn Device> {
    let mut options = ReferenceOptions {
        name: name.into(),
        ..Default::default()
    };
    change(&mut options);
    ReferenceDevice::new(options)
}

pub fn fast() -> Arc<dyn Device> {
    device("fast", |_| {})
}

pub fn host() -> Arc<dyn Device> {
    device("host", |options| options.kind = DeviceKind::Cpu)
}

/// Reordering function of a [`Special`] device for the nodes of a split.
pub type Optimize = Box<dyn Fn(&Graph, &mut [TensorId]) -> Vec<KeepAlive> + Send + Sync>;

/// A device with features that the reference lacks: requests about order and memory, or its own
/// host memory.
pub struct Special {
    device: Arc<dyn Device>,
    optimize: Option<Optimize>,
    host_memory: Option<Arc<dyn BufferType>>,
}

impl Special {
    pub fn optimizing(
        device: Arc<dyn Device>,
        optimize: impl Fn(&Graph, &mut [TensorId]) -> Vec<KeepAlive> + Send + Sync + 'static,
    ) -> Arc<dyn Device> {
        WrappedDevice::device(Special {
            device,
            optimize: Some(Box::new(optimize)),
            host_memory: None,
        })
    }

    pub fn with_host_memory(
        device: Arc<dyn Device>,
        host_memory: Arc<dyn BufferType>,
    ) -> Arc<dyn Device> {
        WrappedDevice::device(Special {
            device,
            optimize: None,
            host_memory: Some(host_memory),
        })
    }
}

impl DeviceWrapper for Special {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.device
    }
    fn host_buffer_type(&self) -> Option<Arc<dyn BufferType>> {
        self.host_memory.clone()
    }
    fn optimize(&self, graph: &Graph, nodes: &mut [TensorId]) -> Vec<KeepAlive> {
        let optimize = self.optimize.as_ref();
        optimize.map_or_else(Vec::new, |optimize| optimize(graph, nodes))
    }
}

/// Bytes that the result of an operation needs besides its elements.
type More = fn(&Op) -> usize;

/// Memory type in which results of some operations need extra room.
#[derive(Debug)]
struct Roomy(Arc<dyn BufferType>, More);

impl BufferType for Roomy {
    fn name(&self) -> &str {
        "roomy"
    }
    fn alignment(&self) -> usize {
        self.0.alignment()
    }
    fn max_size(&self) -> usize {
        self.0.max_size()
    }
    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        let more = tensor.node.map_or(0, |node| self.1(node.op()));
        Ok(tensor.layout.bytes() + more)
    }
    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        self.0.allocate(size, usage)
    }
}

struct RoomyDevice(Arc<dyn Device>, Arc<dyn BufferType>);

impl DeviceWrapper for RoomyDevice {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.0
    }
    fn buffer_type(&self) -> Arc<dyn BufferType> {
        Arc::clone(&self.1)
    }
    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        same_buffer_type(&self.1, buffer_type) || self.0.supports_buffer_type(buffer_type)
    }
}

/// Returns `device` with its own memory type, in which results need `more` extra bytes.
pub fn roomy(device: Arc<dyn Device>, more: More) -> Arc<dyn Device> {
    let memory = Arc::new(Roomy(device.buffer_type(), more));
    WrappedDevice::device(RoomyDevice(device, memory))
}

pub fn f32s(n: &[usize]) -> Layout {
    Layout::contiguous(DType::F32, samite_core::shape(n).unwrap()).unwrap()
}

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn weights(device: &Arc<dyn Device>, name: &str, layout: Layout) -> Arc<StoredTensor> {
    let group =
        TensorGroup::allocate(&device.buffer_type(), Usage::Weights, &[(name, layout)]).unwrap();
    let values: Vec<f32> = (0..layout.elements())
        .map(|i| ((i * 7 + name.len()) % 11) as f32 / 16.0 - 0.3)
        .collect();
    group.tensors[0].tensor().write(0, &bytes(&values)).unwrap();
    Arc::clone(&group.tensors[0])
}

pub fn read(scheduler: &mut Scheduler, id: TensorId, n: usize) -> Result<Vec<f32>> {
    let mut out = vec![0; n * 4];
    scheduler.read(id, 0, &mut out)?;
    Ok(out
        .as_chunks()
        .0
        .iter()
        .map(|v| f32::from_le_bytes(*v))
        .collect())
}

/// Returns a chain of layers, each with a weight on the device given for it.
pub fn layers(owners: &[&Arc<dyn Device>]) -> (Graph, TensorId, TensorId) {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 2, 1, 1]).unwrap();
    let mut hidden = x;
    for (i, owner) in owners.iter().enumerate() {
        let w = graph
            .stored(&weights(owner, &format!("w{i}"), f32s(&[8, 8])))
            .unwrap();
        let normed = graph.rms_norm(hidden, 1e-5).unwrap();
        let product = graph.mul_mat(w, normed).unwrap();
        let active = graph.unary(product, Unary::Silu).unwrap();
        hidden = graph.add(active, hidden).unwrap();
        graph.set_name(hidden, format!("layer-{i}"));
    }
    graph.set_output(hidden);
    (graph, x, hidden)
}
