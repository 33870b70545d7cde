//! A device of a server.

use super::endpoint::Endpoint;
use super::memory::{Far, RemoteBuffer, RemoteMemory, command};
use super::stream::{RemoteEvent, RemoteStream};
use crate::proto::{self, command::Command as Kind, result::Result as Outcome};
use samite_core::{
    BufferType, Capabilities, Device, DeviceKind, Event, Graph, MemoryInfo, Node, Op, Result,
    Stream, Support, TensorId, same_buffer_type,
};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct RemoteDevice {
    pub far: Arc<Far>,
    description: String,
    /// Its own first.
    memories: Vec<Arc<dyn BufferType>>,
    /// How long a run may take, in milliseconds; 0 for ever.
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
        let far = Arc::new(Far::new(endpoint, number, name));
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
            deadline: deadline.map_or(0, |time| {
                u64::try_from(time.as_millis()).unwrap_or(0).max(1)
            }),
        }))
    }

    /// Whether a buffer is of this device.
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

    fn supports(&self, node: Node<'_>) -> Support {
        let answers = self.supports_each(node.graph(), &[node.id()]);
        let none = || Support::no("the server does not answer");
        answers.into_iter().next().unwrap_or_else(none)
    }

    fn supports_each(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support> {
        let nodes = nodes.iter().map(|&id| graph.node(id));
        let is_open = |node: &Node<'_>| !matches!(node.op(), Op::Leaf) && !node.op().is_view();
        let kind = proto::question::Kind::Supports;
        let open = nodes.clone().filter(is_open);
        let questions = open.map(|node| self.far.question(kind, 0, Some(node)));
        let answers = self.far.ask(questions.collect());
        let reason = answers.as_ref().err().map(ToString::to_string);
        let mut answers = answers.unwrap_or_default().into_iter();
        let support = |node| match is_open(&node) {
            false => Support::Yes,
            true => match (answers.next(), &reason) {
                (Some(answer), _) => Support::when(answer.yes, answer.reason),
                // Whoever uses the device learns why, too.
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
