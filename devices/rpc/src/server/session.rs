//! A client's session: its requests, buffers and graphs.

use super::Server;
use super::places::{Buffers, SupportQuery, layout};
use super::work::{Lane, SegmentedGraph, prepare, run};
use crate::channel::allowance;
use samite_core::environment::{Instant, Seat, Stage};
use samite_core::{CancelToken, Charge, Device, Ledger, Rows, TensorInfo, TensorRef, Usage};
use samite_wire::UnsupportedConversion;
use samite_wire::import::{Importer, supported};
use samite_wire::numbers::{Release, op};
use samite_wire::rpc::cache::GraphCache;
use samite_wire::rpc::frame::{Command, HEADER};
use samite_wire::rpc::graph::{GraphMessage, MAX_SOURCES};
use samite_wire::rpc::message::{ASKS_SUPPORT, Greeting, Request, TensorPieces};
use samite_wire::rpc::record::Record;
use samite_wire::rpc::version::Protocol;
use std::fmt;
use std::io;
use std::sync::Arc;

/// Maximum bytes of data to transfer at once.
pub(super) const PIECE: usize = 1 << 20;

/// Maximum bytes of a message that is read as a whole.
const LONGEST: u64 = 64 << 20;

/// The reason why a session ended before the client disconnected.
#[derive(Debug)]
pub enum End {
    /// The connection is broken or too slow.
    Lost(io::Error),
    /// The client sent an invalid request.
    Refused(UnsupportedConversion),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        End::Lost(error)
    }
}

impl From<UnsupportedConversion> for End {
    fn from(reason: UnsupportedConversion) -> Self {
        End::Refused(reason)
    }
}

impl From<samite_core::Error> for End {
    fn from(error: samite_core::Error) -> Self {
        End::Refused(error.to_string().into())
    }
}

impl From<String> for End {
    fn from(reason: String) -> Self {
        End::Refused(reason.into())
    }
}

/// Sends replies.
pub type ReplySink<'a> = &'a mut dyn FnMut(&[u8]) -> io::Result<()>;

/// Meaning of the next bytes from a client.
enum Next {
    /// A header.
    Header,
    /// A message of `len` bytes that is read as a whole.
    Message {
        command: Command,
        len: u64,
        wanted: usize,
        /// Charge for the message itself, if it is long.
        charge: Option<Charge>,
    },
    /// Data that is written to rows of a tensor as it arrives. `done` bytes are written.
    Data {
        command: Command,
        place: TensorRef,
        rows: Rows,
        done: usize,
    },
}

/// A session: a state machine that consumes bytes as they arrive and executes requests. It has no
/// connection and blocks only on devices.
pub struct RpcSession {
    server: Arc<Server>,
    next: Next,
    /// Deadline for the greeting or the current message.
    deadline: Option<Instant>,
    /// Cancels running graphs.
    cancel: CancelToken,
    protocol: &'static Protocol,
    is_greeted: bool,
    ledger: Arc<Ledger>,
    buffers: Buffers,
    lanes: Vec<Lane>,
    fallbacks: Vec<Lane>,
    /// Graphs of each device that the client may compute again.
    cached: Vec<GraphCache<SegmentedGraph>>,
    /// Received bytes, and replies to send.
    bytes: Vec<u8>,
    seat: Seat,
}

impl fmt::Debug for RpcSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RpcSession({} buffers)", self.buffers.len())
    }
}

impl RpcSession {
    pub(super) fn new(server: &Arc<Server>, seat: Seat, cancel: CancelToken) -> Self {
        let options = &server.options;
        let now = options.environment.clock.now();
        let protocol = options.protocol;
        let devices = server.devices.iter();
        RpcSession {
            server: Arc::clone(server),
            next: Next::Header,
            deadline: now.checked_add(options.greeting),
            cancel,
            protocol,
            is_greeted: false,
            ledger: server.memory.part(server.options.memory_per_client),
            buffers: Buffers::default(),
            lanes: devices.clone().map(Lane::new).collect(),
            fallbacks: server.options.fallbacks.iter().map(Lane::new).collect(),
            cached: devices.map(|_| GraphCache::new(protocol)).collect(),
            bytes: Vec::new(),
            seat,
        }
    }

    /// Returns the deadline for the greeting or the current message, or `None` between messages.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    pub(super) fn is_greeted(&self) -> bool {
        self.is_greeted
    }

    pub(super) fn is_between_messages(&self) -> bool {
        matches!(self.next, Next::Header) && self.bytes.is_empty()
    }

    /// Executes the requests that the next `bytes` of the client complete.
    ///
    /// # Errors
    /// Returns the reason why the session ends.
    pub fn take(&mut self, mut bytes: &[u8], replies: ReplySink<'_>) -> Result<(), End> {
        while !bytes.is_empty() {
            let wanted = match &self.next {
                Next::Header => HEADER,
                Next::Message { wanted, .. } => *wanted,
                Next::Data { .. } => {
                    bytes = self.write(bytes)?;
                    continue;
                }
            };
            if self.deadline.is_none() {
                self.expect(0);
            }
            let piece = (wanted - self.bytes.len()).min(bytes.len());
            let refused = |_| UnsupportedConversion::from("there is no memory for the message");
            self.bytes.try_reserve(piece).map_err(refused)?;
            let (now, later) = bytes.split_at(piece);
            self.bytes.extend(now);
            bytes = later;
            if self.bytes.len() == wanted {
                self.complete(replies)?;
            }
        }
        Ok(())
    }

    /// Expects `len` more bytes and sets the deadline for them.
    fn expect(&mut self, len: u64) {
        let options = &self.server.options;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let time = allowance(options.patience, len);
        self.deadline = options.environment.clock.now().checked_add(time);
    }

    /// Continues with the next message.
    fn end_message(&mut self) {
        self.next = Next::Header;
        self.deadline = None;
        self.bytes.clear();
        if self.bytes.capacity() > PIECE {
            self.bytes = Vec::new();
        }
    }

    /// Handles a complete header, message or head of a write.
    fn complete(&mut self, replies: ReplySink<'_>) -> Result<(), End> {
        let next = std::mem::replace(&mut self.next, Next::Header);
        let Next::Message {
            command,
            len,
            charge,
            ..
        } = next
        else {
            self.begin()?;
            // Some messages consist of only a header.
            return match self.next {
                Next::Message { wanted: 0, .. } => self.complete(replies),
                _ => Ok(()),
            };
        };
        let result = match command {
            Command::GraphCompute => self.compute(charge),
            Command::SetTensor | Command::SetTensor2d => self.begin_write(command, len),
            _ => self.answer(command, replies),
        };
        result.map_err(|end| match end {
            End::Refused(reason) => End::Refused(format!("{command:?}: {reason}").into()),
            lost => lost,
        })?;
        if !matches!(self.next, Next::Data { .. }) {
            self.end_message();
        }
        Ok(())
    }

    /// Handles a complete header.
    fn begin(&mut self) -> Result<(), End> {
        let Some((&command, len)) = self.bytes.split_first() else {
            return Ok(());
        };
        let len = u64::from_le_bytes(std::array::from_fn(|i| len[i]));
        self.bytes.clear();
        let command = Command::from_number(command)
            .ok_or_else(|| format!("command {command} is not known"))?;
        if self.is_greeted == (command == Command::Hello) {
            return Err(format!("{command:?} is not the greeting, or a second one").into());
        }
        command.check(self.protocol, len)?;
        self.expect(len);
        let mut charge = None;
        let wanted = match command {
            Command::SetTensor => Request::SET_TENSOR as u64,
            Command::SetTensor2d => Request::SET_TENSOR_2D as u64,
            Command::GraphCompute => {
                charge = self.ledger.take(usize::try_from(len).unwrap_or(usize::MAX));
                if charge.is_none() {
                    return Err(format!(
                        "{command:?}: a message of {len} bytes is more than this client may take"
                    )
                    .into());
                }
                len
            }
            _ => len,
        };
        let wanted = usize::try_from(wanted).ok().filter(|_| wanted <= LONGEST);
        let wanted =
            wanted.ok_or_else(|| format!("{command:?}: messages have at most {LONGEST} bytes"))?;
        self.next = Next::Message {
            command,
            len,
            wanted,
            charge,
        };
        Ok(())
    }

    /// Sends a reply.
    fn reply(&mut self, payload: &[u8], replies: ReplySink<'_>) -> Result<(), End> {
        let mut message = Vec::with_capacity(8 + payload.len());
        message.extend((payload.len() as u64).to_le_bytes());
        message.extend(payload);
        Ok(replies(&message)?)
    }

    fn device(&self, number: u32) -> Result<&Arc<dyn Device>, End> {
        let there = self.server.devices.len();
        let found = self.server.devices.get(number as usize);
        found.ok_or_else(|| format!("device {number} of {there}").into())
    }

    /// Returns the location of a tensor to read or write.
    fn place(&self, record: &Record) -> Result<TensorRef, End> {
        Ok(self
            .buffers
            .place(record, layout(record, self.protocol.numbers)?)?)
    }

    /// Returns the maximum bytes of a buffer.
    fn max_size(&self, device: &dyn Device) -> u64 {
        let limits = &self.server.options;
        let quota = limits.memory_per_client.unwrap_or(usize::MAX);
        let quota = quota.min(limits.memory.unwrap_or(usize::MAX));
        let most = device.buffer_type().max_size().min(quota) as u64;
        most.min(Buffers::DISTANCE - 1)
    }

    fn answer(&mut self, command: Command, replies: ReplySink<'_>) -> Result<(), End> {
        match Request::read(command, &self.bytes, self.protocol)? {
            Request::Hello => {
                self.is_greeted = true;
                self.seat.set_stage(Stage::Idle);
                let greeting = Greeting {
                    version: self.protocol.version,
                    answers_support: true,
                };
                self.reply(&greeting.payload(self.protocol), replies)
            }
            Request::DeviceCount => {
                let count = self.server.devices.len() as u32;
                self.reply(&count.to_le_bytes(), replies)
            }
            Request::GetAlignment { device } => {
                let alignment = self.device(device)?.buffer_type().alignment() as u64;
                self.reply(&alignment.to_le_bytes(), replies)
            }
            Request::GetMaxSize { device } => {
                let most = self.max_size(&**self.device(device)?);
                self.reply(&most.to_le_bytes(), replies)
            }
            Request::GetDeviceMemory { device } => {
                let memory = self.device(device)?.memory();
                let total = memory.total.or(self.server.options.memory).unwrap_or(0);
                let free = memory.free.unwrap_or(total).min(self.ledger.left());
                let mut reply = (free as u64).to_le_bytes().to_vec();
                reply.extend((total as u64).to_le_bytes());
                self.reply(&reply, replies)
            }
            Request::AllocBuffer { device, size } => {
                let device = Arc::clone(self.device(device)?);
                let number = self.allocate(&*device, size);
                let mut reply = number.to_le_bytes().to_vec();
                reply.extend(if number == 0 { 0 } else { size }.to_le_bytes());
                self.reply(&reply, replies)
            }
            Request::BufferGetBase { buffer } => {
                let held = self.buffers.get(buffer)?;
                let base = if held.buffer.size() == 0 {
                    0
                } else {
                    held.base
                };
                self.reply(&base.to_le_bytes(), replies)
            }
            Request::FreeBuffer { buffer } => {
                // Upstream's programs run graphs again after they freed buffers of other graphs.
                for cached in &mut self.cached {
                    cached.drop_if(|work| work.buffers.contains(&buffer));
                }
                self.buffers.remove(buffer)?;
                if self.buffers.len() == 0 {
                    self.seat.set_stage(Stage::Idle);
                }
                Ok(())
            }
            Request::BufferClear { buffer, value } => {
                Ok(self.buffers.get(buffer)?.buffer.clear(value)?)
            }
            Request::MemsetTensor {
                tensor,
                offset,
                size,
                value,
            } => {
                let place = self.place(&tensor)?;
                let (offset, size) = range(&place, offset, size)?;
                Ok(place.buffer.fill(place.slot, offset, size, value)?)
            }
            // No data is cached, because a client must not learn what another one has sent.
            Request::SetTensorHash { .. } => self.reply(&[0], replies),
            Request::GetTensor {
                tensor,
                offset,
                size,
            } => {
                let place = self.place(&tensor)?;
                let (offset, size) = range(&place, offset, size)?;
                self.send_rows(&place, row(offset, size), replies)
            }
            Request::GetTensor2d { tensor, pieces } => {
                let place = self.place(&tensor)?;
                let rows = rows(&place, pieces)?;
                self.send_rows(&place, rows, replies)
            }
            Request::CopyTensor { from, to } => {
                let (from, to) = (self.place(&from)?, self.place(&to)?);
                let fits = from.layout() == to.layout();
                if fits {
                    to.copy_from(&from)?;
                }
                self.reply(&[u8::from(fits)], replies)
            }
            Request::InitTensor { tensor } => {
                let place = self.place(&tensor)?;
                let name = tensor.name();
                let info = TensorInfo::new(&name, *place.layout(), place.buffer.usage());
                Ok(place.buffer.init_tensor(place.slot.offset, &info)?)
            }
            Request::GetAllocSize {
                device,
                tensor,
                sources,
            } => {
                let lent = Arc::clone(self.device(device & !ASKS_SUPPORT)?);
                let answer = match device & ASKS_SUPPORT {
                    0 => alloc_size(&*lent, self.protocol.numbers, &tensor, &sources)?,
                    _ => u64::from(self.can_compute(&*lent, &tensor, &sources)),
                };
                self.reply(&answer.to_le_bytes(), replies)
            }
            Request::GraphRecompute { device, uid } => {
                self.device(device)?;
                let number = device as usize;
                let work = self.cached[number].get(uid);
                let work = work.ok_or_else(|| format!("graph {uid:#x} is not cached"))?;
                let lane = &mut self.lanes[number];
                run(work, lane, &mut self.fallbacks, &self.cancel).map_err(failed_run)
            }
            // To connect, servers would listen at a port and connect to an address that the client
            // chooses. Upstream's clients copy through the host instead.
            Request::CommInit { .. } => self.reply(&[0], replies),
            Request::CommAllReduce { device, .. } => {
                Err(format!("device {device} is connected with no other").into())
            }
            Request::CommFree { device } => self.device(device).map(drop),
            Request::SetTensor { .. } | Request::SetTensor2d { .. } => {
                Err("a write is no other request".to_owned().into())
            }
        }
    }

    /// Allocates memory. Returns 0 if none is available.
    fn allocate(&mut self, device: &dyn Device, size: u64) -> u64 {
        let fits = size <= self.max_size(device);
        let is_one_too_many = self.buffers.len() >= self.server.options.buffers;
        let Some(size) = usize::try_from(size)
            .ok()
            .filter(|_| fits && !is_one_too_many)
        else {
            return 0;
        };
        let Some(charge) = self.ledger.take(size) else {
            return 0;
        };
        let buffer = device
            .check_free(size, "a client's buffer")
            .and_then(|()| device.buffer_type().allocate(size, Usage::Any));
        match buffer {
            Ok(buffer) => {
                self.seat.set_stage(Stage::Busy);
                self.buffers.add(buffer, charge)
            }
            Err(error) => {
                tracing::warn!("a client gets no memory: {error}");
                0
            }
        }
    }

    fn can_compute(
        &self,
        device: &dyn Device,
        tensor: &Record,
        sources: &[Record; MAX_SOURCES],
    ) -> bool {
        let memory = device.buffer_type();
        let fallbacks = self.fallbacks.iter().map(|lane| &*lane.device);
        let fallbacks = fallbacks.filter(|other| other.supports_buffer_type(&memory));
        [device].into_iter().chain(fallbacks).any(|other| {
            let mut importer = Importer::new(SupportQuery {
                device,
                release: self.protocol.numbers,
                sources,
                tensor,
            });
            let node = importer.node(SupportQuery::NODE);
            node.is_ok() && supported(other, &importer.finish()).is_yes()
        })
    }

    /// Computes the received graph. Its message stays charged until its work is bound.
    fn compute(&mut self, charge: Option<Charge>) -> Result<(), End> {
        let most = self.server.options.tensors;
        let graph = GraphMessage::read(&self.bytes, self.protocol, most)?;
        self.device(graph.device)?;
        let number = graph.device as usize;
        let (uid, tensors) = (graph.uid, graph.tensors.len());
        if uid != 0 {
            self.cached[number].make_room(uid, tensors);
        }
        let mut work = self.prepare(&graph);
        if work.is_err() {
            // Cached graphs may take the memory that it needs.
            for cached in &mut self.cached {
                cached.drop_if(|_| true);
            }
            work = self.prepare(&graph);
        }
        let mut work = work?;
        drop(charge);
        let work = match uid {
            0 => &mut work,
            _ => self.cached[number].insert(uid, tensors, work),
        };
        let lane = &mut self.lanes[number];
        run(work, lane, &mut self.fallbacks, &self.cancel).map_err(failed_run)
    }

    fn prepare(&mut self, graph: &GraphMessage) -> Result<SegmentedGraph, UnsupportedConversion> {
        let lane = &mut self.lanes[graph.device as usize];
        let (numbers, buffers) = (self.protocol.numbers, &self.buffers);
        let fallbacks = &mut self.fallbacks;
        prepare(graph, numbers, buffers, &self.ledger, lane, fallbacks)
    }

    /// Handles the head of a write. The data follows it.
    fn begin_write(&mut self, command: Command, len: u64) -> Result<(), End> {
        let (place, rows) = match Request::read(command, &self.bytes, self.protocol)? {
            Request::SetTensor { tensor, offset, .. } => {
                let place = self.place(&tensor)?;
                let (at, len) = range(&place, offset, len - Request::SET_TENSOR as u64)?;
                (place, row(at, len))
            }
            Request::SetTensor2d { tensor, pieces } => {
                let place = self.place(&tensor)?;
                let rows = rows(&place, pieces)?;
                let len = len - Request::SET_TENSOR_2D as u64;
                if len != pieces.len * pieces.count {
                    return Err(format!("{len} bytes for {pieces:?}").into());
                }
                (place, rows)
            }
            _ => return Err("a write is something else".to_owned().into()),
        };
        if rows.len > 0 {
            self.next = Next::Data {
                command,
                place,
                rows,
                done: 0,
            };
        }
        Ok(())
    }

    /// Writes the available data of a write. Returns the remaining bytes.
    fn write<'b>(&mut self, mut bytes: &'b [u8]) -> Result<&'b [u8], End> {
        let Next::Data {
            command,
            place,
            rows,
            done,
        } = &mut self.next
        else {
            return Ok(bytes);
        };
        while !bytes.is_empty() && *done < rows.len * rows.count {
            let part = next_rows(rows, *done, bytes.len());
            let (now, later) = bytes.split_at(part.len * part.count);
            let written = match part.count {
                1 => place.buffer.write(place.slot, part.offset, now),
                _ => place.buffer.write_rows(place.slot, part, now),
            };
            written.map_err(|error| format!("{command:?}: {error}"))?;
            *done += now.len();
            bytes = later;
        }
        if *done == rows.len * rows.count {
            self.end_message();
        }
        Ok(bytes)
    }

    /// Sends rows of a tensor, piece by piece.
    fn send_rows(
        &mut self,
        place: &TensorRef,
        rows: Rows,
        replies: ReplySink<'_>,
    ) -> Result<(), End> {
        let len = rows.len * rows.count;
        let (mut header, mut done) = (8, 0);
        self.bytes.clear();
        self.bytes.extend((len as u64).to_le_bytes());
        while done < len {
            let part = next_rows(&rows, done, PIECE);
            let piece = part.len * part.count;
            self.bytes.resize(header + piece, 0);
            let out = &mut self.bytes[header..];
            match part.count {
                1 => place.buffer.read(place.slot, part.offset, out)?,
                _ => place.buffer.read_rows(place.slot, part, out)?,
            }
            replies(&self.bytes)?;
            header = 0;
            done += piece;
        }
        if len == 0 {
            replies(&self.bytes)?;
        }
        Ok(())
    }
}

/// Converts a failure of a graph to the end of its session.
fn failed_run(error: samite_core::Error) -> End {
    if matches!(error, samite_core::Error::Cancelled) {
        let text = "the client left while its graph ran";
        return End::Lost(io::Error::new(io::ErrorKind::ConnectionAborted, text));
    }
    error.into()
}

/// Returns a single row.
fn row(offset: usize, len: usize) -> Rows {
    Rows {
        offset,
        len,
        count: 1,
        stride: len,
        host_stride: len,
    }
}

/// Returns the rows of a request. They must lie in the tensor and must not overlap, so they have at
/// most the bytes of the tensor.
fn rows(place: &TensorRef, pieces: TensorPieces) -> Result<Rows, UnsupportedConversion> {
    let TensorPieces {
        offset,
        len,
        count,
        stride,
    } = pieces;
    let refused = || UnsupportedConversion::from(format!("{pieces:?} overlap or are empty"));
    if len == 0 || count == 0 || (count > 1 && stride < len) {
        return Err(refused());
    }
    let span = (count - 1).checked_mul(stride);
    let span = span.and_then(|distance| distance.checked_add(len));
    let (offset, _) = range(place, offset, span.ok_or_else(refused)?)?;
    // No more than the span, except for the stride of a single row.
    let [len, count] = [len, count].map(|number| number as usize);
    Ok(Rows {
        count,
        stride: if count > 1 { stride as usize } else { len },
        ..row(offset, len)
    })
}

/// Returns the next rows, or the rest or a part of one, after `done` bytes of `rows`. They have at
/// most `available` bytes.
fn next_rows(rows: &Rows, done: usize, available: usize) -> Rows {
    let (number, column) = (done / rows.len, done % rows.len);
    let offset = rows.offset + number * rows.stride + column;
    if column > 0 || available < rows.len {
        return row(offset, available.min(rows.len - column));
    }
    Rows {
        offset,
        count: (available / rows.len).min(rows.count - number),
        ..*rows
    }
}

/// Checks a range of a tensor's bytes.
fn range(
    place: &TensorRef,
    offset: u64,
    size: u64,
) -> Result<(usize, usize), UnsupportedConversion> {
    let bytes = place.layout().bytes() as u64;
    let end = offset.checked_add(size);
    match (usize::try_from(offset), usize::try_from(size)) {
        (Ok(offset), Ok(size)) if end.is_some_and(|end| end <= bytes) => Ok((offset, size)),
        _ => Err(format!("bytes {offset}..+{size} of a tensor of {bytes} bytes").into()),
    }
}

/// Returns the memory size of a tensor, as the result of its operation if that is known.
fn alloc_size(
    device: &dyn Device,
    release: &'static Release,
    tensor: &Record,
    sources: &[Record; MAX_SOURCES],
) -> Result<u64, End> {
    let (layout, name) = (layout(tensor, release)?, tensor.name());
    let memory = device.buffer_type();
    let mut importer = Importer::new(SupportQuery {
        device,
        release,
        sources,
        tensor,
    });
    let number = release.op_of(tensor.op);
    let is_node = number != op::NONE && !op::is_view(number);
    let node = is_node.then(|| importer.node(SupportQuery::NODE));
    let imported = importer.finish();
    let node = match node {
        Some(Ok(id)) => Some(imported.graph.node(id)),
        _ => None,
    };
    let info = TensorInfo {
        node: node.filter(|node| *node.layout() == layout),
        ..TensorInfo::new(&name, layout, Usage::Any)
    };
    Ok(memory.alloc_size(&info)? as u64)
}
