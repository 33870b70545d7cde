//! A device of a server.

use super::buffer::{RpcBuffer, RpcBufferType, question};
use super::endpoint::Endpoint;
use super::stream::RpcStream;
use samite_core::{
    BufferType, DType, Device, DeviceKind, Graph, MemoryInfo, Node, Op, Result, Stream, Support,
    TensorId, same_buffer_type,
};
use samite_wire::gaps;
use samite_wire::rpc::message::{ASKS_SUPPORT, Request};
use samite_wire::rpc::version::Protocol;
use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of cached answers.
const MAX_ANSWERS: usize = 4096;

#[derive(Debug)]
pub(super) struct RpcDevice {
    name: String,
    pub endpoint: Arc<Endpoint>,
    pub number: u32,
    memory: Arc<RpcBufferType>,
    buffer_type: Arc<dyn BufferType>,
    /// Cached answers of the server about nodes, by question.
    answers: Mutex<HashMap<Vec<u8>, bool>>,
}

impl RpcDevice {
    pub fn open(endpoint: Arc<Endpoint>, number: u32, name: String) -> Result<Arc<Self>> {
        let memory = RpcBufferType::open(Arc::clone(&endpoint), number, &name)?;
        Ok(Arc::new(RpcDevice {
            name,
            endpoint,
            number,
            buffer_type: Arc::clone(&memory) as Arc<dyn BufferType>,
            memory,
            answers: Mutex::default(),
        }))
    }

    /// Returns the answer if it is known without asking, otherwise the question.
    fn known(&self, node: Node<'_>) -> std::result::Result<Support, Box<Request>> {
        if matches!(node.op(), Op::Leaf) || node.op().is_view() {
            return Ok(Support::Yes);
        }
        let flags = ASKS_SUPPORT | self.number;
        match question(node, flags, self.endpoint.protocol.numbers) {
            None => Ok(Support::no("ggml's RPC protocol has no form for it")),
            // An operation that upstream's server does not support would end the server.
            Some(_) if !self.endpoint.answers_support => Ok(is_safe(node)),
            Some(question) => Err(Box::new(question)),
        }
    }
}

/// Returns whether upstream's server computes a node on any device. It does not check support
/// before it computes.
fn is_safe(node: Node<'_>) -> Support {
    let is_product = matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. });
    let columns = node.source_layout(1).map(|layout| layout.dtype());
    if is_product && columns != Some(DType::F32) {
        return Support::no("not every server multiplies with columns that are not F32");
    }
    gaps::check(node)
}

fn answer(yes: bool) -> Support {
    Support::when(yes, "the server cannot compute it")
}

/// Returns the relevant part of a question as a key.
fn key(question: &Request, protocol: &Protocol) -> Vec<u8> {
    let mut key = question.payload(protocol);
    key.truncate(
        key.iter()
            .rposition(|&byte| byte != 0)
            .map_or(0, |at| at + 1),
    );
    key
}

impl Device for RpcDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        format!("device {} at {}", self.number, self.endpoint.address())
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Gpu
    }

    fn memory(&self) -> MemoryInfo {
        let request = Request::GetDeviceMemory {
            device: self.number,
        };
        let reply = self
            .endpoint
            .with(&self.name, |link| link.ask::<16>(&request));
        let Ok(reply) = reply else {
            return MemoryInfo::default();
        };
        let number = |at: usize| {
            let bytes = std::array::from_fn(|i| reply[at + i]);
            usize::try_from(u64::from_le_bytes(bytes)).ok()
        };
        match number(8) {
            // The server does not know.
            Some(0) => MemoryInfo::default(),
            total => MemoryInfo {
                free: number(0),
                total,
            },
        }
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        Arc::clone(&self.buffer_type)
    }

    fn supports(&self, node: Node<'_>) -> Support {
        let answers = self.supports_each(node.graph(), &[node.id()]);
        let none = || Support::no("the server does not answer");
        answers.into_iter().next().unwrap_or_else(none)
    }

    fn supports_each(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support> {
        let mut known = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut open, mut questions) = (Vec::new(), Vec::new());
        let mut supports: Vec<_> = nodes
            .iter()
            .enumerate()
            .map(|(index, &id)| match self.known(graph.node(id)) {
                Ok(support) => support,
                Err(question) => {
                    let key = key(&question, self.endpoint.protocol);
                    match known.get(&key) {
                        Some(&yes) => answer(yes),
                        None => {
                            open.push((index, key));
                            questions.push(*question);
                            Support::no("the server does not answer")
                        }
                    }
                }
            })
            .collect();
        // A lost server supports nothing; the user of the device gets the reason.
        let replies = self.endpoint.ask_all(&self.name, &questions);
        if known.len() + open.len() > MAX_ANSWERS {
            known.clear();
        }
        for ((index, key), reply) in open.into_iter().zip(replies.unwrap_or_default()) {
            let yes = u64::from_le_bytes(reply) == 1;
            supports[index] = answer(yes);
            known.insert(key, yes);
        }
        supports
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        same_buffer_type(buffer_type, &self.buffer_type)
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        Ok(Box::new(RpcStream::new(self)))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl RpcDevice {
    /// Returns whether a buffer belongs to this device.
    pub fn owns(&self, buffer: &RpcBuffer) -> bool {
        Arc::ptr_eq(&buffer.memory, &self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_that_crash_the_upstream_server_are_unsupported() {
        let mut g = Graph::new();
        let mut of = |dtype| g.input("x", dtype, [64, 4, 1, 1]).unwrap();
        let (f32s, f16s) = (of(DType::F32), of(DType::F16));
        let fine = g.mul_mat(f16s, f32s).unwrap();
        let bad = g.mul_mat(f16s, f16s).unwrap();
        let mixed = g.add(f32s, f16s).unwrap();
        let [fine, bad, mixed] = [fine, bad, mixed].map(|id| is_safe(g.node(id)).is_yes());
        assert_eq!([fine, bad, mixed], [true, false, false]);
    }
}
