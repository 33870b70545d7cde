//! A device of a server.

use super::endpoint::Endpoint;
use super::memory::{RemoteBuffer, RemoteMemory, ServerDevice, command};
use super::stream::{RemoteEvent, RemoteStream};
use crate::proto::{self, command::Command as Kind, result::Result as Outcome};
use samite_core::{
    BufferType, Capabilities, Device, DeviceKind, Error, Event, Graph, KeepAlive, MemoryInfo, Node,
    Op, Result, Selection, Stream, Support, TensorId, same_buffer_type,
};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct RemoteDevice {
    pub far: Arc<ServerDevice>,
    description: String,
    /// Memory types, the device's own first.
    memories: Vec<Arc<dyn BufferType>>,
    selection: Selection,
    /// Time limit of a run in milliseconds; 0 for none.
    pub deadline: u64,
}

impl RemoteDevice {
    pub fn new(
        endpoint: Arc<Endpoint>,
        number: u32,
        name: String,
        described: proto::Device,
        deadline: Option<Duration>,
    ) -> std::result::Result<Arc<Self>, String> {
        let description = format!("{} at {}", described.description, endpoint.place());
        let far = Arc::new(ServerDevice::new(endpoint, number, name));
        let memories = (0..).zip(&described.memories);
        let memories = memories.map(|(number, memory)| RemoteMemory::new(&far, number, memory));
        let memories = memories.collect::<Option<Vec<_>>>();
        let memories = memories.filter(|memories| !memories.is_empty());
        let memories = memories.ok_or("its memories make no sense")?;
        far.has(&memories);
        Ok(Arc::new(RemoteDevice {
            far,
            description,
            memories: memories.into_iter().map(|memory| memory as _).collect(),
            // Selecting on the device saves network transfers.
            selection: if described.selects {
                Selection::Wanted
            } else {
                Selection::Inexact
            },
            deadline: deadline.map_or(0, |time| {
                u64::try_from(time.as_millis()).unwrap_or(0).max(1)
            }),
        }))
    }

    /// Returns whether a buffer belongs to this device.
    pub fn owns(&self, buffer: &RemoteBuffer) -> bool {
        Arc::ptr_eq(&buffer.memory.far, &self.far)
    }
}

impl Device for RemoteDevice {
    fn name(&self) -> &str {
        &self.far.name
    }

    fn description(&self) -> String {
        self.description.clone()
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Gpu
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            asynchronous: true,
            events: true,
            ..Capabilities::default()
        }
    }

    fn memory(&self) -> MemoryInfo {
        let results = self
            .far
            .call(vec![command(Kind::MemoryOf(self.far.number))]);
        let result = results.ok().and_then(|results| results.into_iter().next());
        match result.and_then(|result| result.result) {
            Some(Outcome::Memory(memory)) => {
                let number = |bytes: Option<u64>| usize::try_from(bytes?).ok();
                MemoryInfo {
                    free: number(memory.free),
                    total: number(memory.total),
                }
            }
            _ => MemoryInfo::default(),
        }
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        Arc::clone(&self.memories[0])
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        self.memories[1..].to_vec()
    }

    fn selection(&self) -> Selection {
        self.selection
    }

    fn supports(&self, node: Node<'_>) -> Support {
        let answers = self.supports_each(node.graph(), &[node.id()]);
        let none = || Support::no("the server does not answer");
        answers.into_iter().next().unwrap_or_else(none)
    }

    fn supports_each(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support> {
        let nodes = nodes.iter().map(|&id| graph.node(id));
        let is_open = |node: &Node<'_>| !matches!(node.op(), Op::Leaf) && !node.op().is_view();
        let kind = proto::support_query::Kind::Supports;
        let open = nodes.clone().filter(is_open);
        let questions = open.map(|node| self.far.question(kind, 0, Some(node)));
        let answers = self.far.ask(questions.collect());
        // A lost device rejects no node. Any use of its memory and any run fails with an error that
        // says it is lost.
        if let Err(Error::DeviceLost { .. }) = answers {
            return nodes.map(|_| Support::Yes).collect();
        }
        let reason = answers.as_ref().err().map(ToString::to_string);
        let mut answers = answers.unwrap_or_default().into_iter();
        let support = |node| match is_open(&node) {
            false => Support::Yes,
            true => match (answers.next(), &reason) {
                (Some(answer), _) => Support::when(answer.yes, answer.reason),
                // Include the reason for the user of the device.
                (None, reason) => Support::no(reason.clone().unwrap_or_default()),
            },
        };
        nodes.map(support).collect()
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        let mut mine = self.memories.iter();
        mine.any(|mine| same_buffer_type(mine, buffer_type))
    }

    fn can_copy(&self, from: &Arc<dyn BufferType>, to: &Arc<dyn BufferType>) -> bool {
        self.supports_buffer_type(from) && self.supports_buffer_type(to)
    }

    fn workspace(&self, graph: &Graph, nodes: &[TensorId]) -> Result<usize> {
        if !nodes.iter().any(|&id| graph.tensor(id).is_computed()) {
            return Ok(0);
        }
        let (_, answer) = self.far.wishes(graph, nodes)?;
        // An older server answers something else and allocates scratch memory itself. A graph that
        // the device does not support fails in `prepare`.
        let size = if answer.yes { answer.size } else { 0 };
        usize::try_from(size).map_err(|_| Error::shape("the size of the workspace overflows"))
    }

    fn optimize(&self, graph: &Graph, nodes: &mut [TensorId]) -> Vec<KeepAlive> {
        if !nodes.iter().any(|&id| graph.tensor(id).is_computed()) {
            return Vec::new();
        }
        let (tensors, answer) = match self.far.wishes(graph, nodes) {
            Ok(wishes) => wishes,
            Err(error) => {
                tracing::debug!(%error, "the wishes of {} are not known", self.name());
                return Vec::new();
            }
        };
        let tensor = |position: u32| tensors.get(position as usize).copied();
        let order: Option<Vec<_>> = answer.order.into_iter().map(tensor).collect();
        if let Some(order) = order.filter(|order| !order.is_empty())
            && let Some(ordered) = in_order(graph, nodes, &order)
        {
            nodes.copy_from_slice(&ordered);
        }
        let keep = |keep: proto::KeepAlive| {
            Some(KeepAlive {
                tensor: tensor(keep.tensor)?,
                until: tensor(keep.until)?,
            })
        };
        answer.keeps.into_iter().filter_map(keep).collect()
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        Ok(Box::new(RemoteStream::new(self)))
    }

    fn create_event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(RemoteEvent::new(&self.far)))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Reorders `nodes` like `wished`, with each computed node after the views that it reads. Returns
/// `None` if that is not a valid order of these nodes.
fn in_order(graph: &Graph, nodes: &[TensorId], wished: &[TensorId]) -> Option<Vec<TensorId>> {
    let mut is_open = vec![false; graph.len()];
    for id in nodes {
        is_open[id.index()] = true;
    }
    let mut ordered = Vec::with_capacity(nodes.len());
    let mut take = |id: TensorId, ordered: &mut Vec<_>| {
        if std::mem::take(&mut is_open[id.index()]) {
            ordered.push(id);
        }
    };
    for &id in wished.iter().filter(|&&id| graph.tensor(id).is_computed()) {
        for (_, source) in graph.tensor(id).operands() {
            let mut views = Vec::new();
            let mut view = source;
            while graph.tensor(view).op.is_view() {
                views.push(view);
                match graph.tensor(view).sources.first() {
                    Some(&Some(next)) => view = next,
                    _ => break,
                }
            }
            views
                .into_iter()
                .rev()
                .for_each(|view| take(view, &mut ordered));
        }
        take(id, &mut ordered);
    }
    // Views that no node reads need no work.
    for &id in nodes.iter().filter(|&&id| !graph.tensor(id).is_computed()) {
        take(id, &mut ordered);
    }
    (ordered.len() == nodes.len()).then_some(ordered)
}
