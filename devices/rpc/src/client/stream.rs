//! Converts graphs to messages.

use super::buffer::RpcBuffer;
use super::device::RpcDevice;
use samite_core::{
    Buffer, Device, Error, Op, PlacedGraph, Prepared, Result, Rows, RunControl, Stream, Support,
    TensorId, TensorRef,
};
use samite_wire::export::{describe, with_views};
use samite_wire::numbers::flag;
use samite_wire::rpc::graph::{GraphMessage, MAX_SOURCES};
use samite_wire::rpc::record::Record;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) struct RpcStream {
    device: Arc<RpcDevice>,
}

/// A graph as a message.
struct Message {
    device: Arc<RpcDevice>,
    /// Number that identifies the graph on the connection.
    uid: u64,
    /// Number of tensors.
    tensors: usize,
    payload: Vec<u8>,
    /// True if there is nothing to compute.
    is_empty: bool,
    /// Memory that the server uses.
    _buffers: Vec<Arc<dyn Buffer>>,
}

impl Prepared for Message {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

/// Returns a unique number for a message of this process. Servers do not cache graph 0.
fn next() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(1);
    LAST.fetch_add(1, Ordering::Relaxed)
}

/// Writes the message of a graph.
struct Writer<'a> {
    work: PlacedGraph<'a>,
    device: &'a RpcDevice,
    records: Vec<Record>,
    is_there: Vec<bool>,
    buffers: Vec<Arc<dyn Buffer>>,
}

impl Writer<'_> {
    /// Converts a tensor and its location to a leaf.
    fn leaf(&mut self, id: TensorId) -> Result<Record> {
        let tensor = self.work.graph.tensor(id);
        let place = self.work.place(id)?;
        let buffer = place.buffer.as_any().downcast_ref::<RpcBuffer>();
        let buffer = buffer.filter(|buffer| self.device.owns(buffer));
        let (Some(buffer), true) = (buffer, *place.layout() == tensor.layout) else {
            return Err(Error::invalid(format!(
                "{}: '{}' ({}) lies in memory of type '{}' as {}",
                self.device.name(),
                tensor.name,
                tensor.layout,
                place.buffer.buffer_type().name(),
                place.layout()
            )));
        };
        let mut record = buffer.record(place.slot)?;
        record.id = id.index() as u64 + 1;
        record.set_name(&tensor.name);
        if !self
            .buffers
            .iter()
            .any(|known| Arc::ptr_eq(known, &place.buffer))
        {
            self.buffers.push(Arc::clone(&place.buffer));
        }
        Ok(record)
    }

    /// Writes a tensor before the tensors that refer to it.
    fn refer(&mut self, id: TensorId) -> Result<u64> {
        if !self.is_there[id.index()] {
            let record = self.leaf(id)?;
            self.records.push(record);
            self.is_there[id.index()] = true;
        }
        Ok(id.index() as u64 + 1)
    }

    fn node(&mut self, id: TensorId, uses: i32, is_read: bool) -> Result<()> {
        let node = self.work.graph.node(id);
        let refused = |reason: samite_wire::UnsupportedConversion| {
            Error::unsupported(self.device.name(), node.op().to_string(), reason)
        };
        let release = self.device.endpoint.protocol.numbers;
        let described = describe(node).and_then(|tensor| release.lower(&tensor));
        let described = described.map_err(refused)?;
        let mut src = [0; MAX_SOURCES];
        for (index, source) in node.tensor().operands() {
            let to = src.get_mut(index);
            let to = to.ok_or_else(|| refused("it has too many operands".into()))?;
            *to = self.refer(source)?;
        }
        if matches!(node.op(), Op::Cast { .. }) {
            // Upstream's kernels read the layout of the result from this source.
            src[1] = id.index() as u64 + 1;
        }
        let mut record = Record {
            op: described.op,
            op_params: described.op_params,
            flags: described.flags | flag::COMPUTE,
            src,
            use_count: uses,
            ..self.leaf(id)?
        };
        if is_read {
            record.flags |= flag::OUTPUT;
        }
        if let Some(view) = node.tensor().view {
            record.view_src = self.refer(view.base)?;
            record.view_offs = view.offset as u64;
        }
        self.records.push(record);
        self.is_there[id.index()] = true;
        Ok(())
    }
}

impl RpcStream {
    pub fn new(device: Arc<RpcDevice>) -> Self {
        RpcStream { device }
    }
}

impl Stream for RpcStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        work.check()?;
        let graph = work.graph;
        for (node, support) in work.computed().zip({
            let ids: Vec<_> = work.computed().map(|node| node.id()).collect();
            self.device.supports_each(graph, &ids)
        }) {
            if let Support::No(reason) = support {
                let what = node.op().to_string();
                return Err(Error::unsupported(self.device.name(), what, reason));
            }
            // Tensors that are not sent must also have a location.
            work.place(node.id())?;
        }
        let mut uses = vec![0; graph.len()];
        for tensor in graph.tensors() {
            for (_, source) in tensor.operands() {
                uses[source.index()] += 1;
            }
        }
        let nodes = with_views(graph, work.nodes);
        let mut writer = Writer {
            work,
            device: &self.device,
            records: Vec::new(),
            is_there: vec![false; graph.len()],
            buffers: Vec::new(),
        };
        // Without outputs, every node is an output.
        let is_all_read = !graph.tensors().iter().any(|tensor| tensor.flags.output);
        for &id in &nodes {
            let flags = graph.tensor(id).flags;
            let is_read = is_all_read || flags.output || flags.copied;
            writer.node(id, uses[id.index()], is_read)?;
        }
        let ids: Vec<_> = nodes.iter().map(|id| id.index() as u64 + 1).collect();
        let (protocol, device, uid) = (self.device.endpoint.protocol, self.device.number, next());
        Ok(Box::new(Message {
            device: Arc::clone(&self.device),
            uid,
            tensors: writer.records.len(),
            payload: GraphMessage::write(protocol, device, uid, &ids, &writer.records),
            is_empty: ids.is_empty(),
            _buffers: writer.buffers,
        }))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        control.cancel.check()?;
        let message = prepared.as_any().downcast_mut::<Message>();
        let message = message.filter(|message| Arc::ptr_eq(&message.device, &self.device));
        let Some(message) = message else {
            return Err(Error::invalid(format!(
                "{} was given work that another device prepared",
                self.device.name()
            )));
        };
        if message.is_empty {
            return Ok(());
        }
        let device = self.device.number;
        self.device.endpoint.with(self.device.name(), |link| {
            link.compute(device, message.uid, message.tensors, &message.payload)
        })
    }

    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        to.write(offset, data)
    }

    fn read(&mut self, from: &TensorRef, offset: usize, out: &mut [u8]) -> Result<()> {
        from.read(offset, out)
    }

    fn write_rows(&mut self, to: &TensorRef, rows: Rows, data: &[u8]) -> Result<()> {
        to.write_rows(rows, data)
    }

    fn read_rows(&mut self, from: &TensorRef, rows: Rows, out: &mut [u8]) -> Result<()> {
        from.read_rows(rows, out)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.device
            .endpoint
            .confirm(self.device.name(), self.device.number)
    }
}
