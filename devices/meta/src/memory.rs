//! Memory of a divided device. Stored tensors are in the members' memory, divided by their [`Cut`];
//! inputs and outputs of its graphs are in host memory.

use crate::state::{AxisRuns, SplitState, divide, pieces};
use samite_core::{
    Buffer, BufferType, Cut, Device, Error, Graph, HostMemory, Layout, Location, MemoryId, Node,
    Result, Role, Slot, StoredTensor, Support, TensorId, TensorInfo, Usage, host_buffer_type,
    unallocated,
};
use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

/// The members that share tensors, and their shares.
#[derive(Clone, Debug)]
pub(crate) struct Members {
    pub devices: Vec<Arc<dyn Device>>,
    /// Relative shares, in whole units.
    pub ratios: Vec<f32>,
    /// Members that compute in this process. No memory is allocated for the others.
    pub here: Range<usize>,
}

impl Members {
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Returns the state of a stored tensor.
    pub fn state(&self, layout: &Layout, cut: Option<Cut>) -> SplitState {
        let Some(Cut { axis, units, turn }) = cut.filter(|_| self.len() > 1) else {
            return SplitState::Mirrored;
        };
        let extent = layout.shape().get(axis).copied().unwrap_or(0);
        let unit = units.iter().sum();
        if unit == 0 || !extent.is_multiple_of(unit) || !layout.is_contiguous() {
            return SplitState::Mirrored;
        }
        let shares = AxisRuns::in_order(&divide(extent / unit, &self.ratios, turn));
        let segments = units.map(|unit| shares.times(unit));
        let runs = segments.iter().flat_map(AxisRuns::iter).collect();
        let state = SplitState::split(axis, runs);
        match state.check(layout, self.len()) {
            Ok(()) => state,
            Err(_) => SplitState::Mirrored,
        }
    }

    /// Returns the layout of the shard of `member` of a tensor in this state, or `None` if it has
    /// none.
    pub fn local(
        &self,
        layout: &Layout,
        state: &SplitState,
        member: usize,
    ) -> Result<Option<Layout>> {
        match state {
            SplitState::Mirrored | SplitState::Partial => Ok(Some(*layout)),
            SplitState::Split { .. } => {
                let shape = state.local_shape(layout.shape(), member);
                let is_empty = shape.contains(&0);
                (!is_empty)
                    .then(|| Layout::contiguous(layout.dtype(), shape))
                    .transpose()
            }
        }
    }
}

/// Returns a graph whose last node is a product with a weight, if the tensor's role allows that.
fn sample(info: &TensorInfo<'_>, layout: &Layout) -> Result<Option<(Graph, TensorId)>> {
    let mut graph = Graph::new();
    let [n0, _, n2, n3] = layout.shape();
    let is_product = !matches!(info.role, Role::Embedding | Role::Vector);
    if !is_product || info.usage != Usage::Weights || n3 != 1 {
        return Ok(None);
    }
    let weight = graph.leaf(info.name, layout.dtype(), layout.shape())?;
    let x = graph.input("x", samite_core::DType::F32, [n0, 1, 1, 1])?;
    let node = match n2 {
        1 => graph.mul_mat(weight, x)?,
        _ => {
            let chosen = graph.input("chosen", samite_core::DType::I32, [n2.min(2), 1, 1, 1])?;
            graph.mul_mat_id(weight, x, chosen)?
        }
    };
    Ok(Some((graph, node)))
}

/// The members' shards of a tensor.
pub(crate) struct TensorShards {
    pub state: SplitState,
    /// Memory and layout of each member's shard.
    pub parts: Vec<Option<(Arc<dyn BufferType>, Layout)>>,
}

/// A memory type of a divided device: plain, or with each member's shard in its preferred form.
#[derive(Debug)]
pub(crate) struct MetaMemory {
    name: String,
    members: Arc<Members>,
    is_packed: bool,
    /// Weak reference to itself, for its buffers.
    this: std::sync::Weak<MetaMemory>,
}

/// Alignment of tensors.
const ALIGNMENT: usize = 64;

impl MetaMemory {
    pub fn new(name: String, members: &Arc<Members>, is_packed: bool) -> Arc<Self> {
        Arc::new_cyclic(|this| MetaMemory {
            name,
            members: Arc::clone(members),
            is_packed,
            this: this.clone(),
        })
    }

    /// Returns the members' shards of a stored tensor.
    pub fn parts(&self, info: &TensorInfo<'_>) -> Result<TensorShards> {
        let state = self.members.state(&info.layout, info.cut);
        let mut parts = Vec::new();
        for (member, device) in self.members.devices.iter().enumerate() {
            let local = self.members.local(&info.layout, &state, member)?;
            parts.push(match local {
                None => None,
                Some(layout) => Some((self.memory_of(device, info, &layout)?, layout)),
            });
        }
        Ok(TensorShards { state, parts })
    }

    /// Returns the memory type of a member for its shard of a tensor.
    fn memory_of(
        &self,
        device: &Arc<dyn Device>,
        info: &TensorInfo<'_>,
        layout: &Layout,
    ) -> Result<Arc<dyn BufferType>> {
        if self.is_packed
            && let Some((graph, node)) = sample(info, layout)?
        {
            let mut extra = device.extra_buffer_types().into_iter();
            if let Some(memory) = extra.find(|m| m.accepts(graph.node(node)).is_yes()) {
                return Ok(memory);
            }
        }
        Ok(device.buffer_type())
    }

    /// Returns the size in bytes of each member's shard.
    fn sizes(&self, info: &TensorInfo<'_>) -> Result<Vec<usize>> {
        let sizes = self.parts(info)?.parts.into_iter().map(|part| match part {
            None => Ok(0),
            Some((memory, layout)) => memory.alloc_size(&TensorInfo { layout, ..*info }),
        });
        sizes.collect()
    }

    /// Returns the members' shards of a stored tensor as separate tensors: the existing ones, or
    /// planned ones for a tensor that is only planned.
    pub fn locals(
        &self,
        stored: &StoredTensor,
    ) -> Result<(SplitState, Vec<Option<Arc<StoredTensor>>>)> {
        let place = stored.tensor();
        if let Some(buffer) = place.buffer.as_any().downcast_ref::<MetaBuffer>() {
            return buffer.locals(place.slot.offset, stored.name());
        }
        let info = stored.info();
        let TensorShards { state, parts } = self.parts(&info)?;
        let locals = parts.into_iter().map(|part| {
            let Some((memory, layout)) = part else {
                return Ok(None);
            };
            let info = TensorInfo { layout, ..info };
            let buffer = unallocated(&memory, memory.alloc_size(&info)?, info.usage);
            StoredTensor::described(&info, buffer, 0).map(Some)
        });
        let locals = locals.collect::<Result<_>>()?;
        Ok((state, locals))
    }
}

impl BufferType for MetaMemory {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        ALIGNMENT
    }

    fn alloc_size(&self, info: &TensorInfo<'_>) -> Result<usize> {
        if info.usage == Usage::Compute {
            return Ok(info.layout.bytes());
        }
        let sum = |sum: usize, size: usize| sum.checked_add(size);
        let total = self.sizes(info)?.into_iter().try_fold(0, sum);
        total.ok_or_else(|| Error::shape(format!("the size of '{}' overflows", info.name)))
    }

    fn member_sizes(&self, info: &TensorInfo<'_>) -> Result<Vec<(String, usize)>> {
        let names = self.members.devices.iter();
        let names = names.map(|device| device.name().to_owned());
        Ok(names.zip(self.sizes(info)?).collect())
    }

    fn accepts(&self, node: Node<'_>) -> Support {
        if !self.is_packed {
            return Support::Yes;
        }
        let mut extra = self
            .members
            .devices
            .iter()
            .flat_map(|device| device.extra_buffer_types());
        if extra.any(|memory| memory.accepts(node).is_yes()) {
            Support::Yes
        } else {
            Support::no("no member has a form of its own for it")
        }
    }

    fn row_group(&self) -> Option<usize> {
        None
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        let this = self.this.upgrade();
        let this = this.ok_or_else(|| Error::invalid("the device of this memory is gone"))?;
        Ok(Arc::new(MetaBuffer {
            host: match usage {
                Usage::Compute => Some(host_buffer_type().allocate(size, usage)?),
                Usage::Any | Usage::Weights => None,
            },
            memory: MemoryId::unique(),
            of_type: Arc::clone(&this) as _,
            buffer_type: this,
            size,
            usage,
            tensors: RwLock::default(),
        }))
    }
}

/// A stored tensor with the members' shards.
#[derive(Debug)]
struct Divided {
    layout: Layout,
    state: SplitState,
    parts: Vec<Option<Arc<StoredTensor>>>,
}

/// Memory of a divided device. Stored tensors are in the members' memory, allocated one by one by
/// [`init_tensor`](Buffer::init_tensor).
#[derive(Debug)]
pub(crate) struct MetaBuffer {
    buffer_type: Arc<MetaMemory>,
    of_type: Arc<dyn BufferType>,
    size: usize,
    usage: Usage,
    memory: MemoryId,
    /// Memory of tensors that are not stored.
    host: Option<Arc<dyn Buffer>>,
    /// Tensors, by offset.
    tensors: RwLock<BTreeMap<usize, Arc<Divided>>>,
}

impl Divided {
    /// Returns the shards of members of this process, with the members' indices.
    fn here(&self, members: &Members) -> impl Iterator<Item = (usize, &Arc<StoredTensor>)> {
        let numbered = self.parts.iter().enumerate();
        let here = numbered.skip(members.here.start).take(members.here.len());
        here.filter_map(|(number, part)| Some((number, part.as_ref()?)))
    }
}

impl MetaBuffer {
    /// Returns the tensor at or around `offset`, and the distance from its start.
    fn find(&self, offset: usize) -> Result<(Arc<Divided>, usize)> {
        let tensors = self.tensors.read().unwrap_or_else(PoisonError::into_inner);
        let found = tensors.range(..=offset).next_back();
        let (start, tensor) = found.ok_or_else(|| {
            Error::invalid(format!("no tensor lies at byte {offset} of a buffer"))
        })?;
        Ok((Arc::clone(tensor), offset - start))
    }

    fn locals(
        &self,
        offset: usize,
        name: &str,
    ) -> Result<(SplitState, Vec<Option<Arc<StoredTensor>>>)> {
        match self.find(offset)? {
            (tensor, 0) => Ok((tensor.state.clone(), tensor.parts.clone())),
            _ => Err(Error::invalid(format!(
                "'{name}' does not begin where a tensor does"
            ))),
        }
    }

    /// Visits the members' data for bytes `from..to` of a tensor: the shard, the position in it,
    /// and the range of the bytes. Members of other processes have no data; `stand_in` handles
    /// ranges that only they hold.
    fn each(
        &self,
        slot: Slot,
        offset: usize,
        len: usize,
        stand_in: impl Fn(usize) -> Result<()>,
        mut each: impl FnMut(&StoredTensor, usize, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let members = &self.buffer_type.members;
        let (tensor, shift) = self.find(slot.offset)?;
        let from = shift.checked_add(offset);
        let to = from.and_then(|from| from.checked_add(len));
        let (Some(from), Some(to)) = (from, to.filter(|&to| to <= tensor.layout.bytes())) else {
            return Err(Error::invalid(format!(
                "bytes {offset}..+{len} of a tensor of {} bytes",
                tensor.layout.bytes()
            )));
        };
        match &tensor.state {
            SplitState::Mirrored | SplitState::Partial => tensor
                .here(members)
                .try_for_each(|(_, part)| each(part, from, 0..len)),
            SplitState::Split { axis, runs } => {
                pieces(&tensor.layout, *axis, runs, from, to, |piece| {
                    if !members.here.contains(&piece.member) {
                        return stand_in(piece.member);
                    }
                    let part = tensor.parts.get(piece.member).and_then(Option::as_ref);
                    let part = part.ok_or_else(|| Error::invalid("a member has no part"))?;
                    let at = piece.global - from;
                    each(part, piece.local, at..at + piece.len)
                })
            }
        }
    }

    /// Writes a whole tensor at once, with each member's shard in one piece. Returns `false` if the
    /// request does not cover the whole tensor.
    fn write_whole(&self, slot: Slot, offset: usize, data: &[u8]) -> Result<bool> {
        let (tensor, shift) = self.find(slot.offset)?;
        let SplitState::Split { axis, runs } = &tensor.state else {
            return Ok(false);
        };
        if shift != 0 || offset != 0 || data.len() != tensor.layout.bytes() {
            return Ok(false);
        }
        for (member, part) in tensor.here(&self.buffer_type.members) {
            let mut bytes = Vec::new();
            let len = part.layout().bytes();
            bytes
                .try_reserve_exact(len)
                .map_err(|_| Error::OutOfMemory {
                    device: "host".into(),
                    what: "a part of a tensor".into(),
                    asked: len,
                    free: None,
                })?;
            pieces(&tensor.layout, *axis, runs, 0, data.len(), |piece| {
                if piece.member == member {
                    bytes.extend_from_slice(&data[piece.global..piece.global + piece.len]);
                }
                Ok(())
            })?;
            part.tensor().write(0, &bytes)?;
        }
        Ok(true)
    }
}

impl Buffer for MetaBuffer {
    fn buffer_type(&self) -> &Arc<dyn BufferType> {
        &self.of_type
    }

    fn size(&self) -> usize {
        self.size
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn location(&self) -> Location {
        match &self.host {
            Some(host) => host.location(),
            None => Location {
                memory: self.memory,
                offset: 0,
            },
        }
    }

    fn host(&self) -> Option<&Arc<HostMemory>> {
        self.host.as_ref().and_then(|host| host.host())
    }

    fn init_tensor(&self, offset: usize, info: &TensorInfo<'_>) -> Result<()> {
        if self.host.is_some() {
            return Ok(());
        }
        let mut tensors = self.tensors.write().unwrap_or_else(PoisonError::into_inner);
        // Initializing the same data again keeps the existing shards.
        if let Some(known) = tensors.get(&offset) {
            return if known.layout == info.layout {
                Ok(())
            } else {
                Err(Error::invalid(format!(
                    "'{}' would lie where another tensor does",
                    info.name
                )))
            };
        }
        let TensorShards { state, parts } = self.buffer_type.parts(info)?;
        let mut stored = Vec::new();
        let members = &self.buffer_type.members;
        for (number, (device, part)) in members.devices.iter().zip(parts).enumerate() {
            stored.push(match part {
                None => None,
                Some((memory, layout)) => {
                    let info = TensorInfo { layout, ..*info };
                    let size = memory.alloc_size(&info)?;
                    let buffer = if members.here.contains(&number) {
                        device.check_free(size, info.name)?;
                        memory.allocate(size, self.usage)?
                    } else {
                        unallocated(&memory, size, self.usage)
                    };
                    Some(StoredTensor::described(&info, buffer, 0)?)
                }
            });
        }
        tensors.insert(
            offset,
            Arc::new(Divided {
                layout: info.layout,
                state,
                parts: stored,
            }),
        );
        Ok(())
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        if let Some(host) = &self.host {
            return host.write(tensor, offset, data);
        }
        if self.write_whole(tensor, offset, data)? {
            return Ok(());
        }
        let skip = |_| Ok(());
        self.each(tensor, offset, data.len(), skip, |part, at, bytes| {
            part.tensor().write(at, &data[bytes])
        })
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        if let Some(host) = &self.host {
            return host.read(tensor, offset, out);
        }
        let mut filled = 0;
        let len = out.len();
        let refuse = |member| {
            Err(Error::invalid(format!(
                "what rank {member} has of a divided tensor cannot be read in another process"
            )))
        };
        self.each(tensor, offset, len, refuse, |part, at, bytes| {
            // Read replicated data from the first member.
            if bytes.start < filled {
                return Ok(());
            }
            filled = bytes.end;
            part.tensor().read(at, &mut out[bytes])
        })
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        if let Some(host) = &self.host {
            return host.fill(tensor, offset, len, value);
        }
        let skip = |_| Ok(());
        self.each(tensor, offset, len, skip, |part, at, bytes| {
            let place = part.tensor();
            place.buffer.fill(place.slot, at, bytes.len(), value)
        })
    }

    fn clear(&self, value: u8) -> Result<()> {
        if let Some(host) = &self.host {
            return host.clear(value);
        }
        let tensors = self.tensors.read().unwrap_or_else(PoisonError::into_inner);
        let members = &self.buffer_type.members;
        let mut parts = tensors.values().flat_map(|tensor| tensor.here(members));
        parts.try_for_each(|(_, part)| part.tensor().buffer.clear(value))
    }

    fn copy_from(&self, to: Slot, from: &samite_core::TensorRef) -> Result<bool> {
        match &self.host {
            Some(host) => host.copy_from(to, from),
            None => Ok(false),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A member's memory for intermediate results, under the member's name.
#[derive(Debug)]
pub(crate) struct MemberMemory {
    pub name: String,
    pub inner: Arc<dyn BufferType>,
    /// True for a member of this process. Others get no memory.
    pub is_here: bool,
}

impl BufferType for MemberMemory {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        self.inner.alignment()
    }

    fn max_size(&self) -> usize {
        self.inner.max_size()
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        self.inner.alloc_size(tensor)
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
        if self.is_here {
            self.inner.allocate(size, usage)
        } else {
            Ok(unallocated(&self.inner, size, usage))
        }
    }
}
