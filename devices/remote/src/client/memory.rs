//! Memory of a server.

use super::endpoint::{Endpoint, NOBODY};
use crate::convert::{JsonSubgraph, layout_to, role_to, usage_to};
use crate::proto::{self, command::Command as Kind, result::Result as Outcome};
use crate::server::{LONGEST, MAX_RESULTS};
use prost::bytes::Bytes;
use samite_core::{
    Buffer, BufferType, Error, Graph, Location, MemoryId, Node, Result, Rows, Slot, Support,
    TensorId, TensorInfo, TensorRef, Usage,
};
use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// Weights of fewer bytes are sent without asking whether the server has them.
const MIN_CHUNK: usize = 4096;

/// Maximum number of cached answers.
const MAX_ANSWERS: usize = 1 << 14;

/// Wraps a command.
pub(super) fn command(command: Kind) -> proto::Command {
    proto::Command {
        command: Some(command),
    }
}

/// A device of a server, as seen by its memory types.
#[derive(Debug)]
pub(super) struct ServerDevice {
    pub endpoint: Arc<Endpoint>,
    /// Number of the device at the server.
    pub number: u32,
    /// Name of the device here.
    pub name: String,
    /// Cached answers of the server, by question.
    answers: Mutex<HashMap<Vec<u8>, proto::Answer>>,
    /// Memory types of the device.
    memories: OnceLock<Vec<Weak<RemoteMemory>>>,
}

impl ServerDevice {
    pub fn new(endpoint: Arc<Endpoint>, number: u32, name: String) -> Self {
        ServerDevice {
            endpoint,
            number,
            name,
            answers: Mutex::default(),
            memories: OnceLock::new(),
        }
    }

    /// Registers the memory types.
    pub fn has(&self, memories: &[Arc<RemoteMemory>]) {
        let _ = self
            .memories
            .set(memories.iter().map(Arc::downgrade).collect());
    }

    /// Sends commands and waits for their results.
    pub fn call(&self, commands: Vec<proto::Command>) -> Result<Vec<proto::Result>> {
        self.endpoint.call(&self.name, commands)
    }

    /// Sends commands without waiting.
    pub fn tell(&self, commands: Vec<proto::Command>) -> Result<()> {
        self.endpoint
            .send(&self.name, NOBODY, commands, false)
            .map(drop)
    }

    /// Returns answers of the server. Each question is sent once.
    pub fn ask(&self, questions: Vec<proto::SupportQuery>) -> Result<Vec<proto::Answer>> {
        use prost::Message;
        let keys: Vec<_> = questions.iter().map(Message::encode_to_vec).collect();
        let mut open = Vec::new();
        {
            let known = self.answers();
            for (key, question) in keys.iter().zip(questions) {
                let is_new = !known.contains_key(key) && open.iter().all(|(k, _)| *k != key);
                if is_new {
                    open.push((key, question));
                }
            }
        }
        for batch in open.chunks(256) {
            let commands = batch
                .iter()
                .map(|(_, question)| command(Kind::SupportQuery(question.clone())));
            let results = self.call(commands.collect())?;
            let mut known = self.answers();
            if known.len() > MAX_ANSWERS {
                known.clear();
            }
            for ((key, _), result) in batch.iter().zip(results) {
                if let Some(Outcome::Answer(answer)) = result.result {
                    known.insert((*key).clone(), answer);
                }
            }
        }
        let known = self.answers();
        let answer = |key: &Vec<u8>| {
            known.get(key).cloned().ok_or_else(|| {
                Error::device(&self.name, "the server leaves a question without an answer")
            })
        };
        keys.iter().map(answer).collect()
    }

    fn answers(&self) -> std::sync::MutexGuard<'_, HashMap<Vec<u8>, proto::Answer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a question about a node.
    pub fn question(
        &self,
        kind: proto::support_query::Kind,
        memory: u32,
        node: Option<Node<'_>>,
    ) -> proto::SupportQuery {
        let mut question = proto::SupportQuery {
            kind: kind.into(),
            device: self.number,
            memory,
            ..proto::SupportQuery::default()
        };
        if let Some(node) = node {
            // Tensors in other memory reach the server as copies, if at all.
            let part = JsonSubgraph::question(node, &|node| self.memory_of(node).is_some());
            question.memories = self.memories_of(node.graph(), &part);
            question.json = part.json().into();
        }
        question
    }

    /// Returns the device's preferences for nodes of a graph, and the graph that was sent. The
    /// answer is not cached, because each graph is queried once.
    pub fn wishes(
        &self,
        graph: &Graph,
        nodes: &[TensorId],
    ) -> Result<(Vec<TensorId>, proto::Answer)> {
        let part = JsonSubgraph::with_stored(graph, nodes, &|node| self.memory_of(node).is_some());
        let tensors = part.tensors.clone();
        let question = proto::SupportQuery {
            kind: proto::support_query::Kind::Graph.into(),
            device: self.number,
            memories: self.memories_of(graph, &part),
            json: part.json().into(),
            ..proto::SupportQuery::default()
        };
        let results = self.call(vec![command(Kind::SupportQuery(question))])?;
        match results.into_iter().next().and_then(|result| result.result) {
            Some(Outcome::Answer(answer)) => Ok((tensors, answer)),
            _ => Err(Error::device(
                &self.name,
                "the server leaves a question without an answer",
            )),
        }
    }

    /// Returns the memory types of the stored tensors of a part.
    fn memories_of(&self, graph: &Graph, part: &JsonSubgraph) -> Vec<u32> {
        let stored = part.stored.iter();
        stored
            .filter_map(|&id| self.memory_of(graph.node(id)))
            .collect()
    }

    /// Returns the number of the memory type of a stored tensor, if it belongs to this device.
    fn memory_of(&self, node: Node<'_>) -> Option<u32> {
        let memory = node.tensor().stored.as_ref()?.tensor().buffer.buffer_type();
        let mut mine = (0..).zip(self.memories.get()?);
        let is_it =
            |mine: &Weak<RemoteMemory>| std::ptr::addr_eq(mine.as_ptr(), Arc::as_ptr(memory));
        mine.find(|(_, mine)| is_it(mine)).map(|(number, _)| number)
    }
}

/// A memory type of a device.
#[derive(Debug)]
pub(super) struct RemoteMemory {
    /// Weak reference to itself, for its buffers.
    this: Weak<RemoteMemory>,
    pub far: Arc<ServerDevice>,
    /// Number in the device's list.
    pub number: u32,
    name: String,
    alignment: usize,
    max_size: usize,
    row_group: Option<usize>,
}

impl RemoteMemory {
    pub fn new(
        far: &Arc<ServerDevice>,
        number: u32,
        described: &proto::Memory,
    ) -> Option<Arc<Self>> {
        let alignment = usize::try_from(described.alignment).ok()?;
        let name = match number {
            0 => far.name.clone(),
            _ => format!("{}:{}", far.name, described.name),
        };
        let row_group = usize::try_from(described.row_group).ok()?;
        alignment.is_power_of_two().then(|| {
            Arc::new_cyclic(|this| RemoteMemory {
                this: Weak::clone(this),
                far: Arc::clone(far),
                number,
                name,
                alignment,
                max_size: usize::try_from(described.max_size).unwrap_or(usize::MAX),
                row_group: (row_group > 0).then_some(row_group),
            })
        })
    }

    fn size(&self, tensor: &TensorInfo<'_>) -> proto::SupportQuery {
        let kind = proto::support_query::Kind::Size;
        proto::SupportQuery {
            layout: Some(layout_to(&tensor.layout)),
            usage: usage_to(tensor.usage),
            role: role_to(tensor.role),
            ..self.far.question(kind, self.number, tensor.node)
        }
    }
}

impl BufferType for RemoteMemory {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn max_size(&self) -> usize {
        self.max_size
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        let sizes = self.alloc_sizes(std::slice::from_ref(tensor))?;
        Ok(sizes.first().copied().unwrap_or(0))
    }

    fn alloc_sizes(&self, tensors: &[TensorInfo<'_>]) -> Result<Vec<usize>> {
        let questions = tensors.iter().map(|tensor| self.size(tensor)).collect();
        let answers = self.far.ask(questions)?;
        let sizes = tensors.iter().zip(answers).map(|(tensor, answer)| {
            let size = usize::try_from(answer.size).unwrap_or(usize::MAX);
            match answer.yes {
                // Packed memory may take less.
                true => Ok(if self.number == 0 {
                    size.max(tensor.layout.bytes())
                } else {
                    size
                }),
                false => Err(Error::unsupported(
                    &self.name,
                    format!("tensor '{}'", tensor.name),
                    answer.reason,
                )),
            }
        });
        sizes.collect()
    }

    fn accepts(&self, node: Node<'_>) -> Support {
        if self.number == 0 {
            return Support::Yes;
        }
        let kind = proto::support_query::Kind::Accepts;
        let question = self.far.question(kind, self.number, Some(node));
        match self.far.ask(vec![question]).as_deref() {
            Ok([answer]) => Support::when(answer.yes, answer.reason.clone()),
            Ok(_) => Support::no("the server does not answer"),
            Err(error) => Support::no(error.to_string()),
        }
    }

    fn row_group(&self) -> Option<usize> {
        self.row_group
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        let memory = self.this.upgrade();
        let memory = memory.ok_or_else(|| Error::device(&self.name, "the device is gone"))?;
        let buffer = RemoteBuffer {
            buffer_type: Arc::clone(&memory) as Arc<dyn BufferType>,
            memory,
            number: self.far.endpoint.next(),
            size,
            usage,
            location: Location {
                memory: MemoryId::unique(),
                offset: 0,
            },
        };
        // If allocation fails, freeing the buffer has no effect.
        self.far.call(vec![command(Kind::Allocate(proto::Allocate {
            buffer: buffer.number,
            device: self.far.number,
            memory: self.number,
            size: size as u64,
            usage: usage_to(usage),
        }))])?;
        Ok(Arc::new(buffer))
    }
}

#[derive(Debug)]
pub(super) struct RemoteBuffer {
    buffer_type: Arc<dyn BufferType>,
    pub memory: Arc<RemoteMemory>,
    number: u64,
    size: usize,
    usage: Usage,
    location: Location,
}

impl RemoteBuffer {
    /// Returns the location of a tensor.
    pub fn place(&self, slot: Slot) -> proto::Place {
        proto::Place {
            buffer: self.number,
            offset: slot.offset as u64,
            layout: Some(layout_to(&slot.layout)),
        }
    }

    /// Returns the location of a tensor, after checking that the given bytes lie in the buffer.
    fn part(&self, slot: Slot, offset: usize, len: usize) -> Result<proto::Place> {
        let bytes = slot.layout.bytes();
        let is_in_tensor = offset.checked_add(len).is_some_and(|end| end <= bytes);
        // Packed tensors have other sizes.
        let end = match self.memory.number {
            0 => slot.offset.checked_add(bytes),
            _ => Some(slot.offset),
        };
        if !is_in_tensor || end.is_none_or(|end| end > self.size) {
            return Err(Error::invalid(format!(
                "bytes {offset}..+{len} of a tensor ({}) at {} do not lie in a buffer of {} bytes",
                slot.layout, slot.offset, self.size
            )));
        }
        Ok(self.place(slot))
    }

    /// Returns the commands of a write. [`RemoteStream`](super::stream::RemoteStream) also uses
    /// them.
    pub fn write_commands(
        &self,
        slot: Slot,
        offset: usize,
        data: &[u8],
    ) -> Result<Vec<proto::Command>> {
        let place = self.part(slot, offset, data.len())?;
        let pieces = data.chunks(self.piece(slot));
        let at = (0..).step_by(self.piece(slot)).map(|at| offset + at);
        let writes = at.zip(pieces).map(|(at, piece)| {
            command(Kind::Write(proto::Write {
                place: Some(place.clone()),
                offset: at as u64,
                data: Bytes::copy_from_slice(piece),
            }))
        });
        Ok(writes.collect())
    }

    /// Returns the bytes of data per message: whole groups of rows, so that no group is modified
    /// twice.
    fn piece(&self, slot: Slot) -> usize {
        let layout = &slot.layout;
        let rows = self.memory.row_group.unwrap_or(1);
        let unit = layout.row_bytes().saturating_mul(rows).max(1);
        if layout.is_contiguous() && unit <= LONGEST {
            LONGEST / unit * unit
        } else {
            LONGEST
        }
    }

    /// Writes weights. Sends only those that the server does not have.
    fn write_weights(&self, slot: Slot, offset: usize, data: &[u8]) -> Result<()> {
        let place = self.part(slot, offset, data.len())?;
        let far = &self.memory.far;
        let mut at = offset;
        for piece in data.chunks(self.piece(slot)) {
            let hash = blake3::hash(piece);
            let mut chunk = proto::Chunk {
                place: Some(place.clone()),
                offset: at as u64,
                hash: Bytes::copy_from_slice(hash.as_bytes()),
                size: piece.len() as u64,
                ..proto::Chunk::default()
            };
            at += piece.len();
            let mut state = self.chunk(&chunk)?;
            if state.state() == proto::chunk_state::State::Prove
                && let Ok(nonce) = <[u8; 32]>::try_from(&*state.nonce)
            {
                let proof = blake3::keyed_hash(&nonce, piece);
                chunk.proof = Bytes::copy_from_slice(proof.as_bytes());
                state = self.chunk(&chunk)?;
                chunk.proof.clear();
            }
            if state.state() != proto::chunk_state::State::Done {
                chunk.data = Bytes::copy_from_slice(piece);
                far.tell(vec![command(Kind::Chunk(chunk))])?;
            }
        }
        Ok(())
    }

    fn chunk(&self, chunk: &proto::Chunk) -> Result<proto::ChunkState> {
        let commands = vec![command(Kind::Chunk(chunk.clone()))];
        let results = self.memory.far.call(commands)?;
        match results.into_iter().next().and_then(|result| result.result) {
            Some(Outcome::Chunk(state)) => Ok(state),
            _ => Err(Error::device(
                &self.memory.far.name,
                "an answer of another kind",
            )),
        }
    }

    /// Returns reads that each fit into one request, with their ranges of the output.
    pub fn read_commands(
        &self,
        slot: Slot,
        offset: usize,
        len: usize,
    ) -> Result<Vec<(proto::Command, usize)>> {
        let place = self.part(slot, offset, len)?;
        let pieces = (0..len).step_by(MAX_RESULTS).map(|at| {
            let size = MAX_RESULTS.min(len - at);
            let read = proto::Read {
                place: Some(place.clone()),
                offset: (offset + at) as u64,
                size: size as u64,
            };
            (command(Kind::Read(read)), size)
        });
        Ok(pieces.collect())
    }
}

/// Copies the results of reads to `out`.
pub(super) fn read_into(name: &str, results: &[proto::Result], out: &mut [u8]) -> Result<()> {
    let mut rest = out;
    for result in results {
        let Some(Outcome::Bytes(bytes)) = &result.result else {
            continue;
        };
        let (to, behind) = std::mem::take(&mut rest)
            .split_at_mut_checked(bytes.len())
            .ok_or_else(|| Error::device(name, "the server sent more than was read"))?;
        to.copy_from_slice(bytes);
        rest = behind;
    }
    if rest.is_empty() {
        Ok(())
    } else {
        Err(Error::device(name, "the server sent less than was read"))
    }
}

impl Buffer for RemoteBuffer {
    fn buffer_type(&self) -> &Arc<dyn BufferType> {
        &self.buffer_type
    }

    fn size(&self) -> usize {
        self.size
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn location(&self) -> Location {
        self.location
    }

    fn init_tensor(&self, offset: usize, tensor: &TensorInfo<'_>) -> Result<()> {
        let layout = tensor.layout;
        let place = self.part(Slot { offset, layout }, 0, 0)?;
        self.memory.far.tell(vec![command(Kind::Init(proto::Init {
            place: Some(place),
            name: tensor.name.to_owned(),
            role: role_to(tensor.role),
        }))])
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        if self.usage == Usage::Weights && data.len() >= MIN_CHUNK {
            return self.write_weights(tensor, offset, data);
        }
        for write in self.write_commands(tensor, offset, data)? {
            self.memory.far.tell(vec![write])?;
        }
        Ok(())
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        let far = &self.memory.far;
        let mut rest = out;
        for (read, len) in self.read_commands(tensor, offset, rest.len())? {
            let (piece, behind) = std::mem::take(&mut rest).split_at_mut(len);
            read_into(&far.name, &far.call(vec![read])?, piece)?;
            rest = behind;
        }
        far.endpoint.failure(&far.name, NOBODY)
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        let place = self.part(tensor, offset, len)?;
        self.memory.far.tell(vec![command(Kind::Fill(proto::Fill {
            place: Some(place),
            offset: offset as u64,
            size: len as u64,
            value: value.into(),
        }))])
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.memory.far.tell(vec![command(Kind::Fill(proto::Fill {
            place: Some(proto::Place {
                buffer: self.number,
                ..proto::Place::default()
            }),
            value: value.into(),
            ..proto::Fill::default()
        }))])
    }

    fn copy_from(&self, to: Slot, from: &TensorRef) -> Result<bool> {
        match self.copy_command(to, from)? {
            Some(copy) => self.memory.far.tell(vec![copy]).map(|()| true),
            None => Ok(false),
        }
    }

    fn write_rows(&self, tensor: Slot, rows: Rows, data: &[u8]) -> Result<()> {
        let mut writes = Vec::new();
        rows.each(tensor.layout.bytes(), data.len(), |offset, piece| {
            writes.extend(self.write_commands(tensor, offset, &data[piece])?);
            Ok(())
        })?;
        for batch in writes.chunks(64) {
            self.memory.far.tell(batch.to_vec())?;
        }
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl RemoteBuffer {
    /// Returns the command that copies within the server, or `None` if the other tensor is
    /// elsewhere.
    pub fn copy_command(&self, to: Slot, from: &TensorRef) -> Result<Option<proto::Command>> {
        let source = from.buffer.as_any().downcast_ref::<RemoteBuffer>();
        let endpoint = &self.memory.far.endpoint;
        let Some(source) =
            source.filter(|source| Arc::ptr_eq(&source.memory.far.endpoint, endpoint))
        else {
            return Ok(None);
        };
        Ok(Some(command(Kind::Copy(proto::Copy {
            from: Some(source.part(from.slot, 0, from.slot.layout.bytes())?),
            to: Some(self.part(to, 0, to.layout.bytes())?),
        }))))
    }
}

impl Drop for RemoteBuffer {
    fn drop(&mut self) {
        // A lost server has freed everything.
        let _ = self.memory.far.tell(vec![command(Kind::Free(self.number))]);
    }
}
