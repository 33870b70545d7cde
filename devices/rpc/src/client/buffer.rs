//! Memory of a server.

use super::endpoint::{Endpoint, PIECE};
use samite_core::{
    Buffer, BufferType, Error, Location, MemoryId, Result, Rows, Slot, TensorInfo, TensorRef, Usage,
};
use samite_wire::export::{bare, describe};
use samite_wire::numbers::Release;
use samite_wire::rpc::frame::Command;
use samite_wire::rpc::graph::MAX_SOURCES;
use samite_wire::rpc::message::{Request, TensorPieces};
use samite_wire::rpc::record::Record;
use std::any::Any;
use std::sync::{Arc, Weak};

/// Rows of quantized types whose length is not a multiple of this may take more memory on
/// upstream's devices.
const PADDED: usize = 512;

#[derive(Debug)]
pub(super) struct RpcBufferType {
    /// Weak reference to itself, for its buffers.
    this: Weak<RpcBufferType>,
    pub endpoint: Arc<Endpoint>,
    name: String,
    /// Number of the device at the server.
    number: u32,
    alignment: usize,
    max_size: usize,
}

impl RpcBufferType {
    pub fn open(endpoint: Arc<Endpoint>, number: u32, name: &str) -> Result<Arc<Self>> {
        let alignment = endpoint.number(name, &Request::GetAlignment { device: number })?;
        let max_size = endpoint.number(name, &Request::GetMaxSize { device: number })?;
        let alignment = usize::try_from(alignment).ok();
        let alignment = alignment.filter(|alignment| alignment.is_power_of_two());
        let alignment = alignment
            .ok_or_else(|| Error::device(name, "the server's alignment is no power of two"))?;
        Ok(Arc::new_cyclic(|this| RpcBufferType {
            this: Weak::clone(this),
            endpoint,
            name: name.to_owned(),
            number,
            alignment,
            max_size: usize::try_from(max_size).unwrap_or(usize::MAX),
        }))
    }

    /// Converts a tensor to a message.
    pub fn record(&self, tensor: &TensorInfo<'_>) -> Result<Record> {
        let refused = |reason: samite_wire::UnsupportedConversion| {
            Error::unsupported(&self.name, format!("tensor '{}'", tensor.name), reason)
        };
        bare(&tensor.layout)
            .and_then(|tensor| Record::from_description(&tensor, self.endpoint.protocol.numbers))
            .map_err(refused)
    }

    /// Returns the question about a tensor's memory size, unless the size is known.
    fn question(&self, tensor: &TensorInfo<'_>) -> Result<Option<Request>> {
        let record = self.record(tensor)?;
        let layout = &tensor.layout;
        let is_padded = layout.dtype().is_quantized() && !layout.shape()[0].is_multiple_of(PADDED);
        if tensor.node.is_none() && !is_padded {
            return Ok(None);
        }
        Ok(match tensor.node {
            Some(node) => question(node, self.number, self.endpoint.protocol.numbers),
            None => Some(Request::GetAllocSize {
                device: self.number,
                tensor: record,
                sources: Box::new([Record::NONE; MAX_SOURCES]),
            }),
        })
    }
}

/// Returns the question about a node to device `number`, or `None` if messages cannot express the
/// node.
pub(super) fn question(
    node: samite_core::Node<'_>,
    number: u32,
    release: &Release,
) -> Option<Request> {
    let mut tensor = Record::from_description(&describe(node).ok()?, release).ok()?;
    tensor.id = MAX_SOURCES as u64 + 1;
    let mut sources = Box::new([Record::NONE; MAX_SOURCES]);
    for (index, id) in node.tensor().operands() {
        let source = sources.get_mut(index)?;
        let described = bare(&node.graph().tensor(id).layout).ok()?;
        *source = Record::from_description(&described, release).ok()?;
        source.id = index as u64 + 1;
        tensor.src[index] = source.id;
        if node.op().aliased_source() == Some(index) {
            tensor.view_src = source.id;
        }
    }
    Some(Request::GetAllocSize {
        device: number,
        tensor,
        sources,
    })
}

impl BufferType for RpcBufferType {
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
        let mut sizes: Vec<_> = tensors.iter().map(|t| t.layout.bytes()).collect();
        let (mut asked, mut questions) = (Vec::new(), Vec::new());
        for (index, tensor) in tensors.iter().enumerate() {
            if let Some(question) = self.question(tensor)? {
                asked.push(index);
                questions.push(question);
            }
        }
        let replies = self.endpoint.ask_all(&self.name, &questions)?;
        for (index, reply) in asked.into_iter().zip(replies) {
            let size = usize::try_from(u64::from_le_bytes(reply)).unwrap_or(usize::MAX);
            sizes[index] = sizes[index].max(size);
        }
        Ok(sizes)
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        let buffer_type = self.this.upgrade();
        let buffer_type =
            buffer_type.ok_or_else(|| Error::device(&self.name, "the device is gone"))?;
        // An empty buffer has no address.
        let request = Request::AllocBuffer {
            device: self.number,
            size: size.max(1) as u64,
        };
        let reply = self
            .endpoint
            .with(&self.name, |link| link.ask::<16>(&request))?;
        let handle = u64::from_le_bytes(std::array::from_fn(|i| reply[i]));
        if handle == 0 {
            return Err(Error::OutOfMemory {
                device: self.name.as_str().into(),
                what: "a buffer".into(),
                asked: size,
                free: None,
            });
        }
        let mut buffer = RpcBuffer {
            buffer_type: Arc::clone(&buffer_type) as Arc<dyn BufferType>,
            memory: buffer_type,
            handle,
            base: 0,
            size,
            usage,
            location: Location {
                memory: MemoryId::unique(),
                offset: 0,
            },
        };
        let request = Request::BufferGetBase { buffer: handle };
        buffer.base = self.endpoint.number(&self.name, &request)?;
        buffer.clear(0)?;
        Ok(Arc::new(buffer))
    }
}

#[derive(Debug)]
pub(super) struct RpcBuffer {
    buffer_type: Arc<dyn BufferType>,
    pub memory: Arc<RpcBufferType>,
    handle: u64,
    base: u64,
    size: usize,
    usage: Usage,
    location: Location,
}

impl RpcBuffer {
    /// Converts a tensor and its location to a message.
    pub fn record(&self, slot: Slot) -> Result<Record> {
        let info = TensorInfo::new("", slot.layout, self.usage);
        let mut record = self.memory.record(&info)?;
        record.buffer = self.handle;
        record.data = self.base.saturating_add(slot.offset as u64);
        Ok(record)
    }

    /// Converts a tensor with a range of used bytes, which must lie in the buffer.
    fn part(&self, slot: Slot, offset: usize, len: usize) -> Result<Record> {
        let end = slot.offset.checked_add(offset);
        let end = end.and_then(|end| end.checked_add(len));
        if end.is_none_or(|end| end > self.size) {
            return Err(Error::invalid(format!(
                "bytes {offset}..+{len} of a tensor at {} do not lie in a buffer of {} bytes",
                slot.offset, self.size
            )));
        }
        self.record(slot)
    }

    /// Returns whether messages can hold several of these rows.
    fn has_pieces(&self, rows: &Rows) -> bool {
        self.endpoint().protocol.has(Command::GetTensor2d)
            && rows.count > 1
            && rows.len <= PIECE
            && rows.len <= rows.stride
    }

    /// Calls `f` for each message that `rows` take, with the tensor, its pieces, and their starts
    /// in `host` bytes.
    fn each_message(
        &self,
        tensor: Slot,
        rows: Rows,
        host: usize,
        mut f: impl FnMut(Record, TensorPieces, &[usize]) -> Result<()>,
    ) -> Result<()> {
        let mut send = |offset: usize, starts: &mut Vec<usize>| {
            let span = starts.len().saturating_sub(1) * rows.stride + rows.len;
            let pieces = TensorPieces {
                offset: offset as u64,
                len: rows.len as u64,
                count: starts.len() as u64,
                stride: rows.stride as u64,
            };
            f(self.part(tensor, offset, span)?, pieces, starts)?;
            starts.clear();
            Ok(())
        };
        let most = PIECE / rows.len.max(1);
        let (mut first, mut starts) = (0, Vec::new());
        rows.each(tensor.layout.bytes(), host, |offset, piece| {
            if starts.is_empty() {
                first = offset;
            }
            starts.push(piece.start);
            match starts.len() {
                count if count == most => send(first, &mut starts),
                _ => Ok(()),
            }
        })?;
        match starts.len() {
            0 => Ok(()),
            _ => send(first, &mut starts),
        }
    }

    fn endpoint(&self) -> &Endpoint {
        &self.memory.endpoint
    }

    fn name(&self) -> &str {
        &self.memory.name
    }
}

impl Buffer for RpcBuffer {
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
        if !layout.dtype().is_quantized() || layout.shape()[0].is_multiple_of(PADDED) {
            return Ok(());
        }
        let tensor = self.part(Slot { offset, layout }, 0, layout.bytes())?;
        let request = Request::InitTensor { tensor };
        self.endpoint()
            .with(self.name(), |link| link.tell(&request))
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        let tensor = self.part(tensor, offset, data.len())?;
        self.endpoint()
            .with(self.name(), |link| link.write(tensor, offset as u64, data))
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        let request = Request::GetTensor {
            tensor: self.part(tensor, offset, out.len())?,
            offset: offset as u64,
            size: out.len() as u64,
        };
        if out.is_empty() {
            return Ok(());
        }
        self.endpoint().with(self.name(), |link| {
            link.tell(&request)?;
            link.receive(out)
        })
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        let request = Request::MemsetTensor {
            tensor: self.part(tensor, offset, len)?,
            offset: offset as u64,
            size: len as u64,
            value,
        };
        match len {
            0 => Ok(()),
            _ => self
                .endpoint()
                .with(self.name(), |link| link.tell(&request)),
        }
    }

    fn clear(&self, value: u8) -> Result<()> {
        let buffer = self.handle;
        self.endpoint().with(self.name(), |link| {
            link.tell(&Request::BufferClear { buffer, value })
        })
    }

    fn copy_from(&self, to: Slot, from: &TensorRef) -> Result<bool> {
        let Some(source) = from.buffer.as_any().downcast_ref::<RpcBuffer>() else {
            return Ok(false);
        };
        if !Arc::ptr_eq(&source.memory.endpoint, &self.memory.endpoint) || to.layout.is_empty() {
            return Ok(to.layout.is_empty());
        }
        let bytes = to.layout.bytes();
        let request = Request::CopyTensor {
            from: source.part(from.slot, 0, bytes)?,
            to: self.part(to, 0, bytes)?,
        };
        let reply = self
            .endpoint()
            .with(self.name(), |link| link.ask(&request))?;
        Ok(reply == [1])
    }

    fn write_rows(&self, tensor: Slot, rows: Rows, data: &[u8]) -> Result<()> {
        let bytes = tensor.layout.bytes();
        if !self.has_pieces(&rows) {
            return rows.each(bytes, data.len(), |offset, piece| {
                self.write(tensor, offset, &data[piece])
            });
        }
        let mut packed = Vec::new();
        self.each_message(tensor, rows, data.len(), |record, pieces, starts| {
            packed.clear();
            for &start in starts {
                packed.extend_from_slice(&data[start..start + rows.len]);
            }
            self.endpoint().with(self.name(), |link| {
                link.write_pieces(record, pieces, &packed)
            })
        })
    }

    fn read_rows(&self, tensor: Slot, rows: Rows, out: &mut [u8]) -> Result<()> {
        let bytes = tensor.layout.bytes();
        if !self.has_pieces(&rows) {
            return rows.each(bytes, out.len(), |offset, piece| {
                self.read(tensor, offset, &mut out[piece])
            });
        }
        let mut packed = Vec::new();
        self.each_message(tensor, rows, out.len(), |tensor, pieces, starts| {
            packed.resize(starts.len() * rows.len, 0);
            self.endpoint().with(self.name(), |link| {
                link.tell(&Request::GetTensor2d { tensor, pieces })?;
                link.receive(&mut packed)
            })?;
            for (&start, row) in starts.iter().zip(packed.chunks_exact(rows.len)) {
                out[start..start + rows.len].copy_from_slice(row);
            }
            Ok(())
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for RpcBuffer {
    fn drop(&mut self) {
        let buffer = self.handle;
        // A lost server has freed everything.
        let _ = self.endpoint().with(self.name(), |link| link.free(buffer));
    }
}
