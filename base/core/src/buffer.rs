//! Buffer types, buffers, and tensors that live in them.
//!
//! A [`BufferType`] is a kind of memory with an alignment, limits and a layout; a [`Buffer`] is a piece of it. What a
//! tensor's bytes look like inside of a buffer is the buffer type's business: `write` and `read` always speak
//! the standard layout of the tensor's [`DType`](crate::DType), and a packed type converts.

use crate::error::{Error, Result};
use crate::graph::Node;
use crate::layout::Layout;
use crate::memory::{HOST_ALIGNMENT, HostMemory, Location};
use crate::support::Support;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// What a buffer is for. The scheduler lets weights decide where operations run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Usage {
    /// Nothing special: caches, for example.
    #[default]
    Any,
    /// Weights of a model: written once, large, slow to move.
    Weights,
    /// Intermediate results, owned by the scheduler.
    Compute,
}

/// What a weight does in its model, for devices that give tensors a form of their own: packed, or split among several members.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Role {
    /// Nothing is known, or it is no weight.
    #[default]
    Unknown,
    /// A table whose rows are looked up.
    Embedding,
    /// The first product of a block, whose rows are independent: queries, keys, values, gate, up.
    Expand,
    /// The last product of a block, whose results are summed over what the first ones made: attention's output, down.
    Reduce,
    /// The product that makes logits.
    Head,
    /// A vector that scales or shifts elements.
    Vector,
}

/// A tensor as a buffer type sees it, before it has a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Name for people; may be empty.
    pub name: &'a str,
    /// Type, shape and strides.
    pub layout: Layout,
    /// What its buffer is for.
    pub usage: Usage,
    /// What it does in its model.
    pub role: Role,
}

impl<'a> TensorInfo<'a> {
    /// A tensor of which no role is known.
    pub fn new(name: &'a str, layout: Layout, usage: Usage) -> Self {
        TensorInfo {
            name,
            layout,
            usage,
            role: Role::Unknown,
        }
    }
}

/// A kind of memory.
pub trait BufferType: Send + Sync + fmt::Debug {
    /// Name for people, such as `host` or `cuda0`.
    fn name(&self) -> &str;

    /// Every tensor starts at a multiple of this. A power of two.
    fn alignment(&self) -> usize;

    /// Largest possible buffer in bytes.
    fn max_size(&self) -> usize {
        isize::MAX as usize
    }

    /// Bytes that a tensor takes, padding and packing included; at least `layout.bytes()` unless the type packs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if such a tensor cannot lie in this memory.
    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        Ok(tensor.layout.bytes())
    }

    /// [`alloc_size`](BufferType::alloc_size) for several tensors, in their order.
    ///
    /// # Errors
    /// As [`alloc_size`](BufferType::alloc_size).
    fn alloc_sizes(&self, tensors: &[TensorInfo<'_>]) -> Result<Vec<usize>> {
        tensors
            .iter()
            .map(|tensor| self.alloc_size(tensor))
            .collect()
    }

    /// Whether this is plain host memory in the standard layout, so that [`Buffer::host`] is there and every
    /// device that works on host memory can use it.
    fn is_host(&self) -> bool {
        false
    }

    /// Whether a weight of this layout, used as source 0 of `node`, may live here. Types for special layouts accept only
    /// what their device has kernels for.
    fn accepts(&self, _node: Node<'_>) -> Support {
        Support::Yes
    }

    /// How many rows lie interwoven, a power of two: writing whole groups of them, counted from the first row of a matrix,
    /// needs nothing that is there already. `None` if only writing whole tensors is cheap.
    fn row_group(&self) -> Option<usize> {
        Some(1)
    }

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>>;
}

/// Whether two handles are of one and the same buffer type.
pub fn same_buffer_type(a: &Arc<dyn BufferType>, b: &Arc<dyn BufferType>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// Where in a buffer a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Byte offset of the first element.
    pub offset: usize,
    /// Type, shape and strides.
    pub layout: Layout,
}

/// Rows at even distances, for two-dimensional writes and reads: `count` pieces of `len` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Byte offset of the first piece in the tensor.
    pub offset: usize,
    /// Bytes of each piece.
    pub len: usize,
    /// Number of pieces.
    pub count: usize,
    /// Distance of pieces in the tensor, in bytes.
    pub stride: usize,
    /// Distance of pieces in host memory, in bytes.
    pub host_stride: usize,
}

/// A piece of memory of some buffer type.
///
/// All methods may be called from any thread at any time; a buffer keeps conflicting accesses apart. They are
/// *not* ordered with the work of streams: who needs that synchronizes, or uses the stream's methods.
pub trait Buffer: Send + Sync + fmt::Debug {
    /// The kind of memory.
    fn buffer_type(&self) -> &Arc<dyn BufferType>;

    /// Size in bytes.
    fn size(&self) -> usize;

    /// What it is for.
    fn usage(&self) -> Usage;

    /// Which bytes it is made of: [that of the host memory](HostMemory::location) for a buffer over some, the buffer it looks into for
    /// one that looks into another; otherwise a [memory of its own](crate::MemoryId::unique), always the same.
    fn location(&self) -> Location;

    /// The memory itself, if it is host memory in the standard layout.
    fn host(&self) -> Option<&Arc<HostMemory>> {
        None
    }

    /// Whether the contents may change.
    fn is_writable(&self) -> bool {
        true
    }

    /// Called once for each tensor that is placed in the buffer, at byte `offset`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if such a tensor cannot lie here.
    fn init_tensor(&self, _offset: usize, _tensor: &TensorInfo<'_>) -> Result<()> {
        Ok(())
    }

    /// Writes `data` at byte `offset` of the tensor.
    ///
    /// # Errors
    /// If the range does not exist, the buffer is read-only, or the device fails.
    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()>;

    /// Reads from byte `offset` of the tensor.
    ///
    /// # Errors
    /// If the range does not exist or the device fails; [`Error::Unsupported`] where weights are converted in one direction only.
    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()>;

    /// Sets `len` bytes at byte `offset` of the tensor.
    ///
    /// # Errors
    /// If the range does not exist, the buffer is read-only, or the device fails.
    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()>;

    /// Sets every byte of the buffer.
    ///
    /// # Errors
    /// If the buffer is read-only or the device fails.
    fn clear(&self, value: u8) -> Result<()>;

    /// Copies a whole tensor of equal layout from another buffer, if that can be done without a detour over the host:
    /// `Ok(false)` if not.
    ///
    /// # Errors
    /// If the device fails.
    fn copy_from(&self, _to: Slot, _from: &TensorRef) -> Result<bool> {
        Ok(false)
    }

    /// Writes pieces at even distances.
    ///
    /// # Errors
    /// As [`write`](Buffer::write).
    fn write_rows(&self, tensor: Slot, rows: Rows, data: &[u8]) -> Result<()> {
        rows.each(tensor.layout.bytes(), data.len(), |offset, piece| {
            self.write(tensor, offset, &data[piece])
        })
    }

    /// Reads pieces at even distances.
    ///
    /// # Errors
    /// As [`read`](Buffer::read).
    fn read_rows(&self, tensor: Slot, rows: Rows, out: &mut [u8]) -> Result<()> {
        rows.each(tensor.layout.bytes(), out.len(), |offset, piece| {
            self.read(tensor, offset, &mut out[piece])
        })
    }

    /// For a device to recognise its own buffers.
    fn as_any(&self) -> &dyn Any;
}

impl Rows {
    /// Calls `f` with each piece's byte offset in a tensor of `tensor` bytes and its range in `host` bytes.
    ///
    /// # Errors
    /// If a piece is not inside of either, before anything is done; and the first error of `f`.
    pub fn each(
        &self,
        tensor: usize,
        host: usize,
        mut f: impl FnMut(usize, std::ops::Range<usize>) -> Result<()>,
    ) -> Result<()> {
        if !self.check(tensor, host)? {
            return Ok(());
        }
        for row in 0..self.count {
            f(self.tensor_offset(row)?, self.host_piece(row, host)?)?;
        }
        Ok(())
    }

    /// Whether there is anything to do, once every piece is known to be inside of both sides.
    fn check(&self, tensor: usize, host: usize) -> Result<bool> {
        if self.len == 0 || self.count == 0 {
            return Ok(false);
        }
        let last = self.count - 1;
        self.host_piece(last, host)?;
        let end = self.tensor_offset(last)?.checked_add(self.len);
        if end.is_none_or(|end| end > tensor) {
            return Err(Error::invalid(format!(
                "row {last} of {self:?} is outside of a tensor of {tensor} bytes"
            )));
        }
        Ok(true)
    }

    fn tensor_offset(&self, row: usize) -> Result<usize> {
        row.checked_mul(self.stride)
            .and_then(|distance| distance.checked_add(self.offset))
            .ok_or_else(|| Error::invalid(format!("row {row} of {self:?} overflows")))
    }

    fn host_piece(&self, row: usize, available: usize) -> Result<std::ops::Range<usize>> {
        let start = row.checked_mul(self.host_stride);
        match start.and_then(|start| Some(start..start.checked_add(self.len)?)) {
            Some(range) if range.end <= available => Ok(range),
            _ => Err(Error::invalid(format!(
                "row {row} of {self:?} is outside of the {available} bytes given"
            ))),
        }
    }
}

/// A tensor in a buffer.
#[derive(Clone, Debug)]
pub struct TensorRef {
    /// The memory.
    pub buffer: Arc<dyn Buffer>,
    /// Where in it, and what.
    pub slot: Slot,
}

impl TensorRef {
    fn check(&self, offset: usize, len: usize) -> Result<()> {
        let bytes = self.slot.layout.bytes();
        if offset.checked_add(len).is_none_or(|end| end > bytes) {
            return Err(Error::invalid(format!(
                "bytes {offset}..+{len} of a tensor of {bytes} bytes ({})",
                self.slot.layout
            )));
        }
        Ok(())
    }

    /// Type, shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.slot.layout
    }

    /// Where its first element lies.
    pub fn location(&self) -> Location {
        let Location { memory, offset } = self.buffer.location();
        Location {
            memory,
            offset: offset.saturating_add(self.slot.offset),
        }
    }

    /// Whether the bytes from the first to the last element have some in common with those of `other`, in whatever buffers both lie.
    pub fn overlaps(&self, other: &TensorRef) -> bool {
        let (mine, theirs) = (self.location(), other.location());
        let end = |start: Location, layout: &Layout| start.offset.saturating_add(layout.bytes());
        mine.memory == theirs.memory
            && mine.offset < end(theirs, other.layout())
            && theirs.offset < end(mine, self.layout())
    }

    /// Whether some element may share bytes with one of `other`; exact for tensors with the same strides.
    pub fn may_share_elements(&self, other: &TensorRef) -> bool {
        let (mine, theirs) = (self.location(), other.location());
        mine.memory == theirs.memory
            && self
                .layout()
                .may_meet(mine.offset, other.layout(), theirs.offset)
    }

    /// Writes `data` at byte `offset` of the tensor.
    ///
    /// # Errors
    /// If the range is not inside of the tensor, the buffer is read-only, or the device fails.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check(offset, data.len())?;
        self.buffer.write(self.slot, offset, data)
    }

    /// Reads from byte `offset` of the tensor.
    ///
    /// # Errors
    /// If the range is not inside of the tensor or the device fails.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check(offset, out.len())?;
        self.buffer.read(self.slot, offset, out)
    }

    /// Writes pieces at even distances.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a piece is not inside of the tensor or of `data`; otherwise as
    /// [`write`](TensorRef::write).
    pub fn write_rows(&self, rows: Rows, data: &[u8]) -> Result<()> {
        if rows.check(self.slot.layout.bytes(), data.len())? {
            self.buffer.write_rows(self.slot, rows, data)?;
        }
        Ok(())
    }

    /// Reads pieces at even distances.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a piece is not inside of the tensor or of `out`; otherwise as
    /// [`read`](TensorRef::read).
    pub fn read_rows(&self, rows: Rows, out: &mut [u8]) -> Result<()> {
        if rows.check(self.slot.layout.bytes(), out.len())? {
            self.buffer.read_rows(self.slot, rows, out)?;
        }
        Ok(())
    }

    /// Copies from a tensor of equal layout, through the host if there is no shorter way.
    ///
    /// # Errors
    /// [`Error::Shape`] if the layouts differ; otherwise as [`read`](TensorRef::read) and [`write`](TensorRef::write).
    pub fn copy_from(&self, from: &TensorRef) -> Result<()> {
        self.copy_with(from, &mut Bounce::default())
    }

    /// [`copy_from`](TensorRef::copy_from) with memory for the detour over the host that can be used again.
    ///
    /// # Errors
    /// As [`copy_from`](TensorRef::copy_from).
    pub fn copy_with(&self, from: &TensorRef, bounce: &mut Bounce) -> Result<()> {
        if self.slot.layout != from.slot.layout {
            return Err(Error::shape(format!(
                "copy of {} to {}: the layouts differ",
                from.slot.layout, self.slot.layout
            )));
        }
        if self.buffer.copy_from(self.slot, from)? {
            return Ok(());
        }
        let len = self.slot.layout.bytes();
        match (from.buffer.host(), self.buffer.host()) {
            // Both gates at once: holding one and then waiting for the other could be a deadlock.
            (Some(source), Some(target)) => {
                source.copy_to(from.slot.offset, target, self.slot.offset, len)
            }
            // Nobody ever writes to read-only memory, so its gate may be held while another one is waited for.
            (Some(source), None) if !source.is_writable() => {
                source.with_bytes(from.slot.offset, len, |bytes| {
                    self.buffer.write(self.slot, 0, bytes)
                })?
            }
            _ => {
                let piece = self.bounce_piece();
                bounce.reserve(piece.min(len))?;
                let mut at = 0;
                while at < len {
                    let bytes = &mut bounce.bytes[..piece.min(len - at)];
                    from.buffer.read(from.slot, at, bytes)?;
                    self.buffer.write(self.slot, at, bytes)?;
                    at += bytes.len();
                }
                Ok(())
            }
        }
    }

    /// Makes `bounce` large enough for a copy from `from`, so that making the copy allocates nothing.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn reserve_bounce(&self, from: &TensorRef, bounce: &mut Bounce) -> Result<()> {
        let direct = match (from.buffer.host(), self.buffer.host()) {
            (Some(source), target) => target.is_some() || !source.is_writable(),
            (None, _) => false,
        };
        if direct {
            return Ok(());
        }
        bounce.reserve(self.bounce_piece().min(self.slot.layout.bytes()))
    }

    /// Bytes of one piece of a copy over the host: whole groups of rows, where the memory takes pieces.
    fn bounce_piece(&self) -> usize {
        let layout = &self.slot.layout;
        let group = self.buffer.buffer_type().row_group();
        let [_, rows, ..] = layout.shape();
        match group {
            // Groups are counted from the first row of each matrix.
            Some(group)
                if layout.is_contiguous()
                    && (layout.rows() == rows || rows.is_multiple_of(group)) =>
            {
                let unit = layout.row_bytes().saturating_mul(group).max(1);
                unit.saturating_mul((Bounce::PIECE / unit).max(1))
            }
            _ => usize::MAX,
        }
    }
}

/// Memory of the host for copies between memories that no device copies between. It grows to what the largest copy needs, some MiB where
/// the target takes pieces.
#[derive(Debug, Default)]
pub struct Bounce {
    bytes: Vec<u8>,
}

impl Bounce {
    /// Bytes that a copy takes at a time, if it can be cut.
    const PIECE: usize = 4 << 20;

    /// Makes it at least `len` bytes large.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn reserve(&mut self, len: usize) -> Result<()> {
        let more = len.saturating_sub(self.bytes.len());
        self.bytes
            .try_reserve_exact(more)
            .map_err(|_| Error::OutOfMemory {
                device: "host".into(),
                what: "copies between devices".into(),
                asked: len,
                free: None,
            })?;
        self.bytes.resize(len.max(self.bytes.len()), 0);
        Ok(())
    }

    /// The first `len` bytes, which were [reserved](Bounce::reserve).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], where they were not and there are not as many.
    pub fn bytes(&mut self, len: usize) -> Result<&mut [u8]> {
        self.reserve(len)?;
        Ok(&mut self.bytes[..len])
    }
}

/// A named tensor that lives in a buffer: a weight, a cache. Graphs refer to it as a leaf.
#[derive(Debug)]
pub struct StoredTensor {
    name: Arc<str>,
    role: Role,
    tensor: TensorRef,
}

impl StoredTensor {
    /// Declares that `layout` lies at `offset` of `buffer`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it does not fit; and what the buffer says to it. (Tensors in a mapped file have the
    /// file's alignment, not the buffer type's; devices refuse what they cannot use.)
    pub fn new(
        name: impl Into<Arc<str>>,
        buffer: Arc<dyn Buffer>,
        offset: usize,
        layout: Layout,
    ) -> Result<Arc<Self>> {
        Self::with_role(name, buffer, offset, layout, Role::Unknown)
    }

    /// [`new`](StoredTensor::new) for a weight whose role is known.
    ///
    /// # Errors
    /// As [`new`](StoredTensor::new).
    pub fn with_role(
        name: impl Into<Arc<str>>,
        buffer: Arc<dyn Buffer>,
        offset: usize,
        layout: Layout,
        role: Role,
    ) -> Result<Arc<Self>> {
        let name = name.into();
        let info = TensorInfo {
            name: &name,
            layout,
            usage: buffer.usage(),
            role,
        };
        let size = buffer.buffer_type().alloc_size(&info)?;
        if offset
            .checked_add(size)
            .is_none_or(|end| end > buffer.size())
        {
            return Err(Error::invalid(format!(
                "tensor '{name}': {size} bytes at {offset} do not fit into a buffer of {} bytes",
                buffer.size()
            )));
        }
        buffer.init_tensor(offset, &info)?;
        let slot = Slot { offset, layout };
        Ok(Arc::new(StoredTensor {
            name,
            role,
            tensor: TensorRef { buffer, slot },
        }))
    }

    /// What it does in its model.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Name for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Type, shape and strides.
    pub fn layout(&self) -> &Layout {
        self.tensor.layout()
    }

    /// The memory.
    pub fn tensor(&self) -> &TensorRef {
        &self.tensor
    }
}

/// Tensors allocated together, in as few buffers of one type as its size limit allows.
#[derive(Debug, Default)]
pub struct TensorGroup {
    /// The tensors, in the order in which they were asked for.
    pub tensors: Vec<Arc<StoredTensor>>,
    /// Their buffers.
    pub buffers: Vec<Arc<dyn Buffer>>,
}

impl TensorGroup {
    /// Allocates memory for named layouts.
    ///
    /// # Errors
    /// As [`allocate_described`](TensorGroup::allocate_described).
    pub fn allocate(
        buffer_type: &Arc<dyn BufferType>,
        usage: Usage,
        tensors: &[(&str, Layout)],
    ) -> Result<Self> {
        let described = |&(name, layout): &(_, Layout)| TensorInfo::new(name, layout, usage);
        let described: Vec<_> = tensors.iter().map(described).collect();
        Self::allocate_described(buffer_type, usage, &described)
    }

    /// Allocates memory for tensors.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Unsupported`] if a tensor is larger than the largest possible buffer.
    pub fn allocate_described(
        buffer_type: &Arc<dyn BufferType>,
        usage: Usage,
        tensors: &[TensorInfo<'_>],
    ) -> Result<Self> {
        let mut group = TensorGroup::default();
        let mut rest = tensors;
        for Piece { offsets, size } in pieces(buffer_type, tensors)? {
            let buffer = buffer_type.allocate(size, usage)?;
            let members;
            (members, rest) = rest.split_at(offsets.len());
            for (tensor, offset) in members.iter().zip(offsets) {
                group.tensors.push(StoredTensor::with_role(
                    tensor.name,
                    Arc::clone(&buffer),
                    offset,
                    tensor.layout,
                    tensor.role,
                )?);
            }
            group.buffers.push(buffer);
        }
        Ok(group)
    }

    /// Bytes of the buffers that [`allocate_described`](TensorGroup::allocate_described) would allocate.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a tensor is larger than the largest possible buffer.
    pub fn planned_size(
        buffer_type: &Arc<dyn BufferType>,
        tensors: &[TensorInfo<'_>],
    ) -> Result<usize> {
        let pieces = pieces(buffer_type, tensors)?;
        let total = pieces
            .iter()
            .try_fold(0usize, |sum, piece| sum.checked_add(piece.size));
        total.ok_or_else(|| Error::invalid("the sizes of all tensors together overflow"))
    }

    /// Bytes of all buffers.
    pub fn size(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.size()).sum()
    }

    /// Sets every byte of all buffers.
    ///
    /// # Errors
    /// If a device fails.
    pub fn clear(&self, value: u8) -> Result<()> {
        self.buffers
            .iter()
            .try_for_each(|buffer| buffer.clear(value))
    }
}

/// One buffer of a group: where consecutive tensors lie in it.
struct Piece {
    offsets: Vec<usize>,
    size: usize,
}

/// Divides tensors over as few buffers as the type's size limit allows.
fn pieces(buffer_type: &Arc<dyn BufferType>, tensors: &[TensorInfo<'_>]) -> Result<Vec<Piece>> {
    let sizes = buffer_type.alloc_sizes(tensors)?;
    let (alignment, max_size) = (buffer_type.alignment(), buffer_type.max_size());
    let mut pieces: Vec<Piece> = Vec::new();
    for (tensor, size) in tensors.iter().zip(sizes) {
        if size > max_size {
            return Err(Error::unsupported(
                buffer_type.name(),
                format!("tensor '{}' of {size} bytes", tensor.name),
                format!("a buffer has at most {max_size} bytes"),
            ));
        }
        let behind = pieces.last().and_then(|piece| {
            let at = align_up(piece.size, alignment)?;
            Some((at, at.checked_add(size).filter(|&end| end <= max_size)?))
        });
        match (behind, pieces.last_mut()) {
            (Some((at, end)), Some(piece)) => {
                piece.offsets.push(at);
                piece.size = end;
            }
            _ => pieces.push(Piece {
                offsets: vec![0],
                size,
            }),
        }
    }
    Ok(pieces)
}

/// `offset` rounded up to a multiple of `alignment`, a power of two; `None` if that overflows.
pub fn align_up(offset: usize, alignment: usize) -> Option<usize> {
    offset.checked_next_multiple_of(alignment)
}

/// Plain host memory: the buffer type of every device that computes on the host.
///
/// There is one for the whole process, so that devices share it without copies.
pub fn host_buffer_type() -> Arc<dyn BufferType> {
    static HOST: OnceLock<Arc<dyn BufferType>> = OnceLock::new();
    Arc::clone(HOST.get_or_init(|| Arc::new(HostBufferType)))
}

#[derive(Debug)]
struct HostBufferType;

impl BufferType for HostBufferType {
    fn name(&self) -> &str {
        "host"
    }

    fn alignment(&self) -> usize {
        HOST_ALIGNMENT
    }

    fn is_host(&self) -> bool {
        true
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        Ok(host_buffer(
            HostMemory::allocate(size, "host", "a buffer")?,
            usage,
        ))
    }
}

/// A buffer over host memory that exists already, such as a mapped file.
pub fn host_buffer(memory: Arc<HostMemory>, usage: Usage) -> Arc<dyn Buffer> {
    Arc::new(HostBuffer {
        buffer_type: host_buffer_type(),
        memory,
        usage,
    })
}

#[derive(Debug)]
struct HostBuffer {
    buffer_type: Arc<dyn BufferType>,
    memory: Arc<HostMemory>,
    usage: Usage,
}

/// The place of byte `offset` of a tensor in its buffer.
fn place(tensor: Slot, offset: usize) -> Result<usize> {
    tensor
        .offset
        .checked_add(offset)
        .ok_or_else(|| Error::invalid("the offset overflows"))
}

impl Buffer for HostBuffer {
    fn buffer_type(&self) -> &Arc<dyn BufferType> {
        &self.buffer_type
    }

    fn size(&self) -> usize {
        self.memory.len()
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn location(&self) -> Location {
        self.memory.location()
    }

    fn host(&self) -> Option<&Arc<HostMemory>> {
        Some(&self.memory)
    }

    fn is_writable(&self) -> bool {
        self.memory.is_writable()
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        self.memory.write(place(tensor, offset)?, data)
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        self.memory.read(place(tensor, offset)?, out)
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        self.memory.fill(place(tensor, offset)?, len, value)
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.memory.fill(0, self.memory.len(), value)
    }

    fn copy_from(&self, to: Slot, from: &TensorRef) -> Result<bool> {
        let len = to.layout.bytes();
        match from.buffer.host() {
            Some(memory) => memory.copy_to(from.slot.offset, &self.memory, to.offset, len)?,
            // Reading straight into host memory would hold its gate while another device works; go through a copy.
            None => return Ok(false),
        }
        Ok(true)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[derive(Debug)]
    struct Small;

    impl BufferType for Small {
        fn name(&self) -> &str {
            "small"
        }
        fn alignment(&self) -> usize {
            32
        }
        fn max_size(&self) -> usize {
            100
        }
        fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
            assert!(size <= 100);
            host_buffer_type().allocate(size, usage)
        }
    }

    fn f32s(n: usize) -> Layout {
        Layout::contiguous(DType::F32, [n, 1, 1, 1]).unwrap()
    }

    #[test]
    fn groups_respect_alignment_and_size_limits() {
        let small: Arc<dyn BufferType> = Arc::new(Small);
        let layouts = [
            ("a", f32s(5)),
            ("b", f32s(10)),
            ("c", f32s(20)),
            ("d", f32s(25)),
        ];
        let group = TensorGroup::allocate(&small, Usage::Weights, &layouts).unwrap();
        let offsets: Vec<_> = group
            .tensors
            .iter()
            .map(|t| t.tensor().slot.offset)
            .collect();
        assert_eq!(offsets, [0, 32, 0, 0]);
        assert_eq!(
            group.buffers.iter().map(|b| b.size()).collect::<Vec<_>>(),
            [72, 80, 100]
        );
        let error =
            TensorGroup::allocate(&small, Usage::Weights, &[("big", f32s(26))]).unwrap_err();
        assert!(error.to_string().contains("'big'"), "{error}");
    }

    #[test]
    fn rows_are_written_and_read_at_their_strides() {
        let buffer = host_buffer_type().allocate(64, Usage::Any).unwrap();
        let slot = Slot {
            offset: 0,
            layout: f32s(16),
        };
        let rows = Rows {
            offset: 4,
            len: 2,
            count: 3,
            stride: 8,
            host_stride: 3,
        };
        buffer
            .write_rows(slot, rows, &[1, 2, 9, 3, 4, 9, 5, 6])
            .unwrap();
        let mut all = [0; 24];
        buffer.read(slot, 0, &mut all).unwrap();
        assert_eq!(
            all[4..22],
            [1, 2, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0, 5, 6]
        );
        let mut back = [0; 8];
        buffer.read_rows(slot, rows, &mut back).unwrap();
        assert_eq!(back, [1, 2, 0, 3, 4, 0, 5, 6]);
        assert!(buffer.write_rows(slot, rows, &[0; 7]).is_err());
        assert!(
            buffer
                .write_rows(
                    slot,
                    Rows {
                        stride: usize::MAX,
                        ..rows
                    },
                    &[0; 8]
                )
                .is_err()
        );
    }

    #[test]
    fn rows_stay_inside_of_their_tensor() {
        let buffer = host_buffer_type().allocate(64, Usage::Any).unwrap();
        let [a, _b] = [0, 32].map(|offset| TensorRef {
            buffer: Arc::clone(&buffer),
            slot: Slot {
                offset,
                layout: f32s(8),
            },
        });
        let rows = Rows {
            offset: 0,
            len: 4,
            count: 3,
            stride: 16,
            host_stride: 4,
        };
        let error = a.write_rows(rows, &[1; 12]).unwrap_err().to_string();
        assert!(error.contains("outside of a tensor of 32 bytes"), "{error}");
        assert!(a.read_rows(rows, &mut [0; 12]).is_err());
        let two = Rows { count: 2, ..rows };
        a.write_rows(two, &[1; 8]).unwrap();
        let mut out = [0; 8];
        a.read_rows(two, &mut out).unwrap();
        assert_eq!(out, [1; 8]);
        // Nothing to do is done at once.
        let none = Rows {
            len: 0,
            count: usize::MAX,
            ..rows
        };
        a.write_rows(none, &[]).unwrap();
    }

    /// Host memory that does not know how to copy by itself.
    #[derive(Debug)]
    struct Plain(Arc<dyn Buffer>);

    impl Buffer for Plain {
        fn buffer_type(&self) -> &Arc<dyn BufferType> {
            self.0.buffer_type()
        }
        fn size(&self) -> usize {
            self.0.size()
        }
        fn usage(&self) -> Usage {
            self.0.usage()
        }
        fn location(&self) -> Location {
            self.0.location()
        }
        fn host(&self) -> Option<&Arc<HostMemory>> {
            self.0.host()
        }
        fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
            self.0.write(tensor, offset, data)
        }
        fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
            self.0.read(tensor, offset, out)
        }
        fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
            self.0.fill(tensor, offset, len, value)
        }
        fn clear(&self, value: u8) -> Result<()> {
            self.0.clear(value)
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn copies_within_one_memory_do_not_wait_for_themselves() {
        let buffer: Arc<dyn Buffer> =
            Arc::new(Plain(host_buffer_type().allocate(64, Usage::Any).unwrap()));
        let [a, b] = [0, 32].map(|offset| TensorRef {
            buffer: Arc::clone(&buffer),
            slot: Slot {
                offset,
                layout: f32s(8),
            },
        });
        a.write(0, &[5; 32]).unwrap();
        b.copy_from(&a).unwrap();
        let mut out = [0; 32];
        b.read(0, &mut out).unwrap();
        assert_eq!(out, [5; 32]);
    }

    #[test]
    fn tensors_are_checked_against_their_buffer() {
        let buffer = host_buffer_type().allocate(64, Usage::Any).unwrap();
        assert!(StoredTensor::new("x", Arc::clone(&buffer), 8, f32s(15)).is_err());
        let x = StoredTensor::new("x", Arc::clone(&buffer), 0, f32s(4)).unwrap();
        assert!(
            x.tensor()
                .write(13, &[0; 4])
                .unwrap_err()
                .to_string()
                .contains("16 bytes")
        );
        let y = StoredTensor::new("y", buffer, 32, f32s(4)).unwrap();
        x.tensor().write(0, &[7; 16]).unwrap();
        y.tensor().copy_from(x.tensor()).unwrap();
        let mut out = [0; 16];
        y.tensor().read(0, &mut out).unwrap();
        assert_eq!(out, [7; 16]);
    }
}
