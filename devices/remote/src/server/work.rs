//! Memory and graphs of a session, and execution of its commands.

use super::siblings::Siblings;
use super::store::{ChunkLookup, LONGEST, Store};
use crate::convert::{failure, graph_of, layout_of, over_quota, role_of, usage_of};
use crate::proto::{self, command::Command as Kind};
use prost::bytes::Bytes;
use samite_core::{
    Buffer, BufferType, CancelToken, Charge, DType, Device, Error, Graph, Layout, Ledger, Prepared,
    Result, RunControl, Slot, StoredTensor, Stream, Support, TensorId, TensorInfo, TensorRef,
    Usage, check_repeated, unallocated,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum bytes of results of one request.
pub(crate) const MAX_RESULTS: usize = 4 << 20;

/// Maximum bytes of a graph in JSON.
const MAX_JSON: usize = 8 << 20;

/// Memory cost of parsing a byte of JSON.
const JSON_COST: usize = 16;

/// Limits of one session.
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionLimits {
    pub buffers: usize,
    pub graphs: usize,
    pub tensors: usize,
}

/// A buffer of the client.
struct ClientBuffer {
    buffer: Arc<dyn Buffer>,
    /// Announced tensors, by offset.
    tensors: Mutex<BTreeMap<usize, Arc<StoredTensor>>>,
    _charge: Charge,
}

/// A prepared graph.
struct SessionGraph {
    device: usize,
    prepared: Box<dyn Prepared>,
    /// Memory that the graph uses.
    _memory: Vec<Arc<ClientBuffer>>,
    _workspace: Option<Arc<Workspace>>,
}

/// Scratch memory of a device, which graphs share in turn.
struct Workspace {
    place: TensorRef,
    _charge: Charge,
}

/// A shared device.
pub(super) struct SharedDevice {
    pub device: Arc<dyn Device>,
    /// Its own memory type, and those for weights.
    pub memories: Vec<Arc<dyn BufferType>>,
}

impl SharedDevice {
    pub fn new(device: &Arc<dyn Device>) -> Self {
        let mut memories = vec![device.buffer_type()];
        memories.extend(device.extra_buffer_types());
        SharedDevice {
            device: Arc::clone(device),
            memories,
        }
    }
}

/// Resources of one session.
pub(super) struct SessionResources {
    devices: Arc<[SharedDevice]>,
    streams: Vec<Option<Box<dyn Stream>>>,
    workspaces: Vec<Option<Arc<Workspace>>>,
    buffers: BTreeMap<u64, Arc<ClientBuffer>>,
    graphs: BTreeMap<u64, SessionGraph>,
    ledger: Arc<Ledger>,
    limits: SessionLimits,
    store: Option<Arc<Store>>,
    siblings: Siblings,
    nonce: [u8; 32],
    /// Dropped after everything else.
    pub alive: Arc<()>,
}

/// The reason why a command failed.
pub(super) type BoxedFailure = Box<proto::Failure>;

fn refuse(error: Error) -> BoxedFailure {
    Box::new(failure(&error))
}

fn invalid(text: impl Into<String>) -> BoxedFailure {
    refuse(Error::invalid(text))
}

fn quota(text: String) -> BoxedFailure {
    Box::new(over_quota(text))
}

/// Stops runs.
pub(super) trait Stopper {
    /// Called before a run with the token that cancels it.
    fn begin(&self, cancel: &CancelToken, deadline: u64);
    /// Called after the run.
    fn end(&self);
}

impl SessionResources {
    pub fn new(
        devices: Arc<[SharedDevice]>,
        ledger: Arc<Ledger>,
        limits: SessionLimits,
        store: Option<Arc<Store>>,
        siblings: Siblings,
        nonce: [u8; 32],
    ) -> Self {
        SessionResources {
            streams: devices.iter().map(|_| None).collect(),
            workspaces: devices.iter().map(|_| None).collect(),
            devices,
            buffers: BTreeMap::new(),
            graphs: BTreeMap::new(),
            ledger,
            limits,
            store,
            siblings,
            nonce,
            alive: Arc::new(()),
        }
    }

    /// Executes the commands of a request until one fails.
    pub fn run(
        &mut self,
        commands: Vec<proto::Command>,
        stopper: &dyn Stopper,
    ) -> (Vec<proto::Result>, Option<BoxedFailure>) {
        let (mut results, mut left) = (Vec::new(), MAX_RESULTS);
        for command in commands {
            let Some(command) = command.command else {
                let text = "a command that this server does not know: it is older than the client";
                return (results, Some(invalid(text)));
            };
            match self.one(command, stopper, &mut left) {
                Ok(result) => results.extend(result.map(|result| proto::Result {
                    result: Some(result),
                })),
                Err(failure) => return (results, Some(failure)),
            }
        }
        (results, None)
    }

    fn one(
        &mut self,
        command: Kind,
        stopper: &dyn Stopper,
        left: &mut usize,
    ) -> std::result::Result<Option<proto::result::Result>, BoxedFailure> {
        use proto::result::Result as Outcome;
        match command {
            Kind::Allocate(request) => self.allocate(&request)?,
            // Also frees a buffer whose allocation failed.
            Kind::Free(buffer) => drop(self.buffers.remove(&buffer)),
            Kind::Fill(request) => self.fill(&request).map_err(refuse)?,
            Kind::Init(request) => self.init(&request).map_err(refuse)?,
            Kind::Write(request) => {
                let place = self.place(request.place.as_ref()).map_err(refuse)?;
                let offset = size(request.offset).map_err(refuse)?;
                place.write(offset, &request.data).map_err(refuse)?;
            }
            Kind::Read(request) => {
                let place = self.place(request.place.as_ref()).map_err(refuse)?;
                let offset = size(request.offset).map_err(refuse)?;
                let len = size(request.size).map_err(refuse)?;
                place.check_range(offset, len).map_err(refuse)?;
                *left = left
                    .checked_sub(len)
                    .ok_or_else(|| quota(format!("a request reads at most {MAX_RESULTS} bytes")))?;
                let mut bytes = vec![0; len];
                place.read(offset, &mut bytes).map_err(refuse)?;
                return Ok(Some(Outcome::Bytes(bytes.into())));
            }
            Kind::Copy(request) => {
                let from = self.place(request.from.as_ref()).map_err(refuse)?;
                let to = self.place(request.to.as_ref()).map_err(refuse)?;
                to.copy_from(&from).map_err(refuse)?;
            }
            Kind::Chunk(request) => return Ok(Some(Outcome::Chunk(self.chunk(request)?))),
            Kind::Prepare(request) => self.prepare(&request)?,
            Kind::Forget(graph) => drop(self.graphs.remove(&graph)),
            Kind::Run(request) => self.compute(&request, stopper).map_err(refuse)?,
            Kind::SupportQuery(request) => {
                let answer = match self.answer(&request) {
                    Ok(answer) => answer,
                    // The memory or the node does not exist.
                    Err(error) => proto::Answer {
                        reason: error.to_string(),
                        ..proto::Answer::default()
                    },
                };
                return Ok(Some(Outcome::Answer(answer)));
            }
            Kind::MemoryOf(device) => {
                let memory = self.lent(device).map_err(refuse)?.device.memory();
                // A session that needs this memory gets it.
                let more = self.siblings.bytes();
                let left = Some(self.ledger.left()).filter(|left| *left < usize::MAX);
                let left = left.map(|left| left.saturating_add(more));
                let free = memory.free.map(|free| free.saturating_add(more));
                let free = match (free, left) {
                    (Some(free), Some(left)) => Some(free.min(left)),
                    (free, left) => free.or(left),
                };
                return Ok(Some(Outcome::Memory(proto::MemoryInfo {
                    free: free.map(|bytes| bytes as u64),
                    total: memory.total.map(|bytes| bytes as u64),
                })));
            }
        }
        Ok(None)
    }

    fn lent(&self, device: u32) -> Result<&SharedDevice> {
        self.devices
            .get(device as usize)
            .ok_or_else(|| Error::invalid(format!("there is no device {device} here")))
    }

    fn allocate(&mut self, request: &proto::Allocate) -> std::result::Result<(), BoxedFailure> {
        let lent = self.lent(request.device).map_err(refuse)?;
        let memory = lent.memories.get(request.memory as usize).ok_or_else(|| {
            invalid(format!(
                "there is no memory {} of this device",
                request.memory
            ))
        })?;
        let bytes = size(request.size).map_err(refuse)?;
        if self.buffers.contains_key(&request.buffer) {
            return Err(invalid(format!(
                "there is a buffer {} already",
                request.buffer
            )));
        }
        if self.buffers.len() >= self.limits.buffers {
            let most = self.limits.buffers;
            return Err(quota(format!("a session has at most {most} buffers")));
        }
        if bytes > memory.max_size() {
            return Err(invalid(format!(
                "a buffer of {bytes} bytes: {} has at most {}",
                memory.name(),
                memory.max_size()
            )));
        }
        let held = loop {
            let held = self.charge(bytes).and_then(|charge| {
                let free = lent.device.check_free(bytes, "a client's buffer");
                let buffer = free.and_then(|()| memory.allocate(bytes, usage_of(request.usage)));
                Ok(ClientBuffer {
                    buffer: buffer.map_err(refuse)?,
                    tensors: Mutex::default(),
                    _charge: charge,
                })
            });
            match held {
                Err(failure)
                    if failure.code() == proto::failure::Code::OutOfMemory
                        && self.siblings.end_one() => {}
                held => break held?,
            }
        };
        self.buffers.insert(request.buffer, Arc::new(held));
        Ok(())
    }

    fn charge(&self, bytes: usize) -> std::result::Result<Charge, BoxedFailure> {
        self.ledger.take(bytes).ok_or_else(|| {
            refuse(Error::OutOfMemory {
                device: "the server's quota of memory".into(),
                what: "a client".into(),
                asked: bytes,
                free: Some(self.ledger.left()),
            })
        })
    }

    /// Returns the location of a tensor. All of its bytes must lie in its buffer.
    fn place_in(&self, place: &proto::Place) -> Result<(TensorRef, Arc<ClientBuffer>)> {
        let held = self.buffers.get(&place.buffer).ok_or_else(|| {
            Error::invalid(format!(
                "there is no buffer {} of this session",
                place.buffer
            ))
        })?;
        let layout = place.layout.as_ref();
        let layout = layout_of(layout.ok_or_else(|| Error::invalid("a place has no layout"))?)?;
        let offset = size(place.offset)?;
        let end = offset.checked_add(layout.bytes());
        if end.is_none_or(|end| end > held.buffer.size()) && !is_packed(held) {
            return Err(Error::invalid(format!(
                "a tensor ({layout}) at byte {offset} does not lie in its buffer of {} bytes",
                held.buffer.size()
            )));
        }
        let tensor = TensorRef {
            buffer: Arc::clone(&held.buffer),
            slot: Slot { offset, layout },
        };
        if is_packed(held) {
            check_room(&tensor, &TensorInfo::new("", layout, held.buffer.usage()))?;
        }
        Ok((tensor, Arc::clone(held)))
    }

    fn place(&self, place: Option<&proto::Place>) -> Result<TensorRef> {
        let place = place.ok_or_else(|| Error::invalid("a command has no place"))?;
        let (tensor, held) = self.place_in(place)?;
        check_repeated("", tensor.layout(), held.buffer.size())?;
        Ok(tensor)
    }

    fn fill(&self, request: &proto::Fill) -> Result<()> {
        let value = u8::try_from(request.value)
            .map_err(|_| Error::invalid(format!("{} is no byte", request.value)))?;
        match &request.place {
            Some(place) if place.layout.is_none() => {
                let held = self.buffers.get(&place.buffer);
                let held = held.ok_or_else(|| Error::invalid("there is no such buffer"))?;
                held.buffer.clear(value)
            }
            place => {
                let place = self.place(place.as_ref())?;
                let (offset, len) = (size(request.offset)?, size(request.size)?);
                place.check_range(offset, len)?;
                place.buffer.fill(place.slot, offset, len, value)
            }
        }
    }

    fn init(&self, request: &proto::Init) -> Result<()> {
        let place = request.place.as_ref();
        let place = place.ok_or_else(|| Error::invalid("a tensor has no place"))?;
        let (tensor, held) = self.place_in(place)?;
        let mut tensors = held.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        if tensors.len() >= self.limits.tensors {
            return Err(Error::invalid(format!(
                "a buffer has at most {} tensors",
                self.limits.tensors
            )));
        }
        check_alignment(&tensor)?;
        let Slot { offset, layout } = tensor.slot;
        check_repeated(&request.name, &layout, tensor.buffer.size())?;
        let role = role_of(&request.role);
        let info = TensorInfo {
            role,
            ..TensorInfo::new(&request.name, layout, tensor.buffer.usage())
        };
        let stored = StoredTensor::described(&info, tensor.buffer, offset)?;
        tensors.insert(offset, stored);
        Ok(())
    }

    /// Writes a chunk of weights that the store has, or that comes with the command.
    fn chunk(&self, request: proto::Chunk) -> std::result::Result<proto::ChunkState, BoxedFailure> {
        use proto::chunk_state::State;
        let place = self.place(request.place.as_ref()).map_err(refuse)?;
        let (offset, len) = (
            size(request.offset).map_err(refuse)?,
            size(request.size).map_err(refuse)?,
        );
        place.check_range(offset, len).map_err(refuse)?;
        if len > LONGEST {
            return Err(quota(format!("a piece has at most {LONGEST} bytes")));
        }
        let hash = <[u8; 32]>::try_from(&*request.hash);
        let hash = blake3::Hash::from(hash.map_err(|_| invalid("a hash has 32 bytes"))?);
        let state = |state: State, nonce: &[u8]| {
            Ok(proto::ChunkState {
                state: state.into(),
                nonce: Bytes::copy_from_slice(nonce),
            })
        };
        if !request.data.is_empty() {
            if request.data.len() != len || blake3::hash(&request.data) != hash {
                return Err(invalid(
                    "a piece of weights does not have the hash that it came with",
                ));
            }
            place.write(offset, &request.data).map_err(refuse)?;
            if let Some(store) = &self.store {
                store.keep(&hash, &request.data, &self.siblings.owner);
            }
            return state(State::Done, &[]);
        }
        let Some(store) = &self.store else {
            return state(State::Missing, &[]);
        };
        match store.find(&hash, len, &self.siblings.owner) {
            ChunkLookup::Nothing => state(State::Missing, &[]),
            ChunkLookup::Own(bytes) => {
                place.write(offset, &bytes).map_err(refuse)?;
                state(State::Done, &[])
            }
            ChunkLookup::Foreign(bytes) => {
                let expected = blake3::keyed_hash(&self.nonce, &bytes);
                let proof = <[u8; 32]>::try_from(&*request.proof);
                // Comparing hashes takes constant time.
                if proof.is_ok_and(|proof| expected == blake3::Hash::from(proof)) {
                    place.write(offset, &bytes).map_err(refuse)?;
                    store.keep(&hash, &bytes, &self.siblings.owner);
                    return state(State::Done, &[]);
                }
                if request.proof.is_empty() {
                    state(State::Prove, &self.nonce)
                } else {
                    state(State::Missing, &[])
                }
            }
        }
    }

    fn stream(&mut self, device: usize) -> Result<&mut dyn Stream> {
        let slot = self
            .streams
            .get_mut(device)
            .ok_or_else(|| Error::invalid("there is no such device"))?;
        let stream = match slot.take() {
            Some(stream) => stream,
            None => Arc::clone(&self.devices[device].device).open_stream()?,
        };
        Ok(&mut **slot.insert(stream))
    }

    /// Parses and validates a graph, and binds it to its device.
    fn prepare(&mut self, request: &proto::Prepare) -> std::result::Result<(), BoxedFailure> {
        self.lent(request.device).map_err(refuse)?;
        if self.graphs.contains_key(&request.graph) {
            return Err(invalid(format!(
                "there is a graph {} already",
                request.graph
            )));
        }
        if self.graphs.len() >= self.limits.graphs {
            let most = self.limits.graphs;
            return Err(quota(format!("a session has at most {most} graphs")));
        }
        if request.json.len() > MAX_JSON {
            return Err(quota(format!("a graph has at most {MAX_JSON} bytes")));
        }
        // Charged while the JSON is parsed.
        let _charge = self.charge(request.json.len().saturating_mul(JSON_COST))?;
        let work = self.bind(request).map_err(refuse)?;
        self.graphs.insert(request.graph, work);
        Ok(())
    }

    fn bind(&mut self, request: &proto::Prepare) -> Result<SessionGraph> {
        let number = request.device as usize;
        let device = Arc::clone(&self.devices[number].device);
        let mut memory: Vec<Arc<ClientBuffer>> = Vec::new();
        let place_of = |position: usize| {
            let place = request.places.get(position);
            self.place_in(place.ok_or_else(|| {
                Error::invalid(format!("tensor {position} of a graph has no place"))
            })?)
        };
        let graph = graph_of(
            &request.json,
            self.limits.tensors,
            |position, name, layout| {
                let (tensor, held) = place_of(position)?;
                let tensors = held.tensors.lock().unwrap_or_else(PoisonError::into_inner);
                match tensors.get(&tensor.slot.offset) {
                    Some(known) if known.layout() == layout => Ok(Arc::clone(known)),
                    _ => {
                        check_alignment(&tensor)?;
                        StoredTensor::new(name, tensor.buffer, tensor.slot.offset, *layout)
                    }
                }
            },
        )?;
        let mut places: Vec<Option<TensorRef>> = Vec::with_capacity(graph.len());
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            let place: Option<TensorRef> = match tensor.view {
                // The viewed tensor comes before the view.
                Some(view) => {
                    let base = places[view.base.index()].clone();
                    base.map(|base| TensorRef {
                        slot: Slot {
                            offset: base.slot.offset.saturating_add(view.offset),
                            layout: tensor.layout,
                        },
                        ..base
                    })
                }
                None if tensor.layout.is_empty() => Some(TensorRef {
                    buffer: device.buffer_type().allocate(0, Usage::Compute)?,
                    slot: Slot {
                        offset: 0,
                        layout: tensor.layout,
                    },
                }),
                None => {
                    let (place, held) = place_of(id.index())?;
                    self.check_place(&device, &graph, id, &place)?;
                    if !memory.iter().any(|known| Arc::ptr_eq(known, &held)) {
                        memory.push(held);
                    }
                    Some(place)
                }
            };
            let size = place.as_ref().map_or(0, |place| place.buffer.size());
            check_repeated(&tensor.name, &tensor.layout, size)?;
            places.push(place);
        }
        let nodes = nodes_of(&graph);
        for &id in &nodes {
            if graph.tensor(id).is_computed()
                && let Support::No(reason) = device.supports(graph.node(id))
            {
                let what = graph.tensor(id).op.to_string();
                return Err(Error::unsupported(device.name(), what, reason));
            }
        }
        let bytes = device.workspace(&graph, &nodes)?;
        let own = match &request.workspace {
            Some(place) => {
                let (place, held) = self.place_in(place)?;
                if !device.supports_buffer_type(place.buffer.buffer_type()) {
                    return Err(Error::invalid(format!(
                        "scratch memory in '{}', which {} cannot use",
                        place.buffer.buffer_type().name(),
                        device.name()
                    )));
                }
                // Devices report the scratch size for planned weights, and packed ones can need
                // more. Then the server allocates the scratch memory.
                let is_enough = place.layout().bytes() >= bytes;
                is_enough.then(|| {
                    memory.push(held);
                    place
                })
            }
            None => None,
        };
        let workspace = match own {
            Some(_) => None,
            None => self.workspace(number, bytes)?,
        };
        let work = samite_core::PlacedGraph {
            graph: &graph,
            nodes: &nodes,
            places: &places,
            workspace: own
                .as_ref()
                .or(workspace.as_ref().map(|workspace| &workspace.place)),
            compiled: None,
        };
        work.check()?;
        Ok(SessionGraph {
            device: number,
            prepared: self.stream(number)?.prepare(work)?,
            _memory: memory,
            _workspace: workspace,
        })
    }

    /// Checks that a tensor has the memory that it needs, of a type that the device can use.
    fn check_place(
        &self,
        device: &Arc<dyn Device>,
        graph: &Graph,
        id: TensorId,
        place: &TensorRef,
    ) -> Result<()> {
        let tensor = graph.tensor(id);
        if *place.layout() != tensor.layout {
            return Err(Error::invalid(format!(
                "'{}' ({}) lies somewhere as {}",
                tensor.name,
                tensor.layout,
                place.layout()
            )));
        }
        let memory = place.buffer.buffer_type();
        if !device.supports_buffer_type(memory) {
            return Err(Error::invalid(format!(
                "'{}' lies in memory of type '{}', which {} cannot use",
                tensor.name,
                memory.name(),
                device.name()
            )));
        }
        if tensor.is_computed() {
            check_room(
                place,
                &TensorInfo::from_node(graph.node(id), place.buffer.usage()),
            )
        } else {
            Ok(())
        }
    }

    /// Returns scratch memory of `bytes`: that of an earlier graph if it is large enough.
    fn workspace(&mut self, device: usize, bytes: usize) -> Result<Option<Arc<Workspace>>> {
        if bytes == 0 {
            return Ok(None);
        }
        if let Some(known) = &self.workspaces[device]
            && known.place.layout().bytes() >= bytes
        {
            return Ok(Some(Arc::clone(known)));
        }
        let charge = self.charge(bytes);
        let charge = charge.map_err(|failure| crate::convert::error("server", *failure))?;
        let memory = &self.devices[device].memories[0];
        let layout = Layout::contiguous(DType::I8, [bytes, 1, 1, 1])?;
        let place = TensorRef {
            buffer: memory.allocate(bytes, Usage::Compute)?,
            slot: Slot { offset: 0, layout },
        };
        let workspace = Arc::new(Workspace {
            place,
            _charge: charge,
        });
        self.workspaces[device] = Some(Arc::clone(&workspace));
        Ok(Some(workspace))
    }

    fn compute(&mut self, request: &proto::Run, stopper: &dyn Stopper) -> Result<()> {
        let Some(mut work) = self.graphs.remove(&request.graph) else {
            let text = format!("there is no graph {} of this session", request.graph);
            return Err(Error::invalid(text));
        };
        let cancel = CancelToken::new();
        stopper.begin(&cancel, request.deadline);
        let result = self.stream(work.device).and_then(|stream| {
            let control = RunControl {
                cancel: &cancel,
                observer: None,
            };
            let result = stream.run(&mut *work.prepared, control);
            // Synchronize even after a failure, so that no work remains in flight.
            stream.synchronize().and(result)
        });
        stopper.end();
        self.graphs.insert(request.graph, work);
        result
    }

    /// Answers a question about a node or a tensor.
    fn answer(&self, request: &proto::SupportQuery) -> Result<proto::Answer> {
        use proto::support_query::Kind;
        let lent = self.lent(request.device)?;
        let memory_of = |number: u32| {
            let memory = lent.memories.get(number as usize);
            memory.ok_or_else(|| Error::invalid(format!("there is no memory {number}")))
        };
        let (most_json, most_tensors) = match request.kind() {
            Kind::Graph => (MAX_JSON, self.limits.tensors),
            _ => (MAX_JSON >> 8, 64),
        };
        if request.json.len() > most_json {
            return Err(Error::invalid("a question is too long"));
        }
        // Charged while the JSON is parsed.
        let charge = self.charge(request.json.len().saturating_mul(JSON_COST));
        let _charge = charge.map_err(|failure| crate::convert::error("server", *failure))?;
        let mut memories = request.memories.iter();
        let graph = if request.json.is_empty() {
            Graph::new()
        } else {
            graph_of(&request.json, most_tensors, |_, name, layout| {
                let memory = memory_of(*memories.next().unwrap_or(&0))?;
                let buffer = unallocated(memory, memory.max_size(), Usage::Weights);
                StoredTensor::new(name, buffer, 0, *layout)
            })?
        };
        let node = graph.ids().last().map(|id| graph.node(id));
        let wanted = || node.ok_or_else(|| Error::invalid("a question has no node"));
        let answer = |support: Support| proto::Answer {
            yes: support.is_yes(),
            reason: match support {
                Support::Yes => String::new(),
                Support::No(reason) => reason.into_owned(),
            },
            ..proto::Answer::default()
        };
        Ok(match request.kind() {
            Kind::Supports => answer(lent.device.supports(wanted()?)),
            Kind::Accepts => answer(memory_of(request.memory)?.accepts(wanted()?)),
            Kind::Size => {
                let layout = request.layout.as_ref();
                let layout = layout.ok_or_else(|| Error::invalid("a tensor has no layout"))?;
                let info = TensorInfo {
                    role: role_of(&request.role),
                    node,
                    ..TensorInfo::new("", layout_of(layout)?, usage_of(request.usage))
                };
                proto::Answer {
                    yes: true,
                    size: memory_of(request.memory)?.alloc_size(&info)? as u64,
                    ..proto::Answer::default()
                }
            }
            Kind::Graph => {
                let before = nodes_of(&graph);
                let mut nodes = before.clone();
                let keeps = lent.device.optimize(&graph, &mut nodes);
                let position = |id: TensorId| id.index() as u32;
                let keeps = keeps.into_iter().map(|keep| proto::KeepAlive {
                    tensor: position(keep.tensor),
                    until: position(keep.until),
                });
                proto::Answer {
                    yes: true,
                    size: lent.device.workspace(&graph, &nodes)? as u64,
                    keeps: keeps.collect(),
                    order: if nodes == before {
                        Vec::new()
                    } else {
                        nodes.into_iter().map(position).collect()
                    },
                    ..proto::Answer::default()
                }
            }
        })
    }
}

/// Returns the tensors of a graph to pass to the device: all but leaves.
fn nodes_of(graph: &Graph) -> Vec<TensorId> {
    let is_node = |id: &TensorId| {
        let tensor = graph.tensor(*id);
        !tensor.sources.is_empty() || tensor.is_computed()
    };
    graph.ids().filter(is_node).collect()
}

/// Returns whether memory changes the form of tensors, and so their size.
fn is_packed(held: &ClientBuffer) -> bool {
    held.buffer.usage() == Usage::Weights && !held.buffer.buffer_type().is_host()
}

/// Checks that a tensor is aligned for its memory.
fn check_alignment(place: &TensorRef) -> Result<()> {
    let (offset, alignment) = (place.slot.offset, place.buffer.buffer_type().alignment());
    if offset.is_multiple_of(alignment) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a tensor at byte {offset} of its buffer: tensors lie at multiples of {alignment} there"
    )))
}

/// Checks that a tensor has all the memory that it needs there.
fn check_room(place: &TensorRef, info: &TensorInfo<'_>) -> Result<()> {
    let wanted = place.buffer.buffer_type().alloc_size(info)?;
    let end = place.slot.offset.checked_add(wanted);
    if wanted > 0 && end.is_none_or(|end| end > place.buffer.size()) {
        return Err(Error::invalid(format!(
            "a tensor ({}) at byte {} has not the {wanted} bytes that it wants in its buffer of {} bytes",
            info.layout,
            place.slot.offset,
            place.buffer.size()
        )));
    }
    Ok(())
}

fn size(number: u64) -> Result<usize> {
    usize::try_from(number).map_err(|_| Error::invalid(format!("{number} is too large")))
}
