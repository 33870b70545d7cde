//! Buffer types and buffers.
//!
//! A [`BufferType`] is a kind of memory with an alignment, limits and a form of its own for tensors; a [`Buffer`] is a piece of it. What a
//! tensor's bytes look like inside a buffer is decided by the buffer type: `write` and `read` always take and give
//! the tensor's bytes as its [`Layout`] describes them (the *standard layout*), and a packed type converts.

use crate::error::Result;
use crate::graph::Node;
use crate::layout::Layout;
use crate::memory::{HostMemory, Location};
use crate::rows::Rows;
use crate::support::Support;
use crate::tensor_ref::TensorRef;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

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

/// The role of a weight in its model, for devices that give tensors a form of their own: packed, or split among several devices.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Role {
    /// Unknown, or not a weight.
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

/// How a stored tensor may be divided among devices: in whole units along an axis. Tensors that belong together, such as the first and the last product
/// of a block, have as many units each, and so are divided alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cut {
    /// The axis.
    pub axis: usize,
    /// Elements along the axis that stay together.
    pub unit: usize,
    /// Which device begins to get what is left over: the layer's number, so that not always the same one has more.
    pub turn: usize,
}

/// A tensor as a buffer type sees it, before it has a place.
#[derive(Clone, Copy, Debug)]
pub struct TensorInfo<'a> {
    /// Name for people; may be empty.
    pub name: &'a str,
    /// Type, shape and strides.
    pub layout: Layout,
    /// What its buffer is for.
    pub usage: Usage,
    /// Its role in the model.
    pub role: Role,
    /// How it may be divided; `None` for a tensor of which each device needs all.
    pub cut: Option<Cut>,
    /// The node whose result it is, for devices whose kernels need more room behind some results; none for a tensor that is written.
    pub node: Option<Node<'a>>,
}

impl<'a> TensorInfo<'a> {
    /// A tensor with an unknown role.
    pub fn new(name: &'a str, layout: Layout, usage: Usage) -> Self {
        TensorInfo {
            name,
            layout,
            usage,
            role: Role::Unknown,
            cut: None,
            node: None,
        }
    }

    /// A tensor of a graph.
    pub fn of(tensor: Node<'a>, usage: Usage) -> Self {
        TensorInfo {
            node: tensor.tensor().is_computed().then_some(tensor),
            ..TensorInfo::new(&tensor.tensor().name, *tensor.layout(), usage)
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
    /// [`Error::Unsupported`](crate::Error::Unsupported) if such a tensor cannot lie in this memory.
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

    /// Bytes that a tensor takes, by the names of the memories that it is divided over. Empty for memory that is one piece, which
    /// [`alloc_size`](BufferType::alloc_size) says all about.
    ///
    /// # Errors
    /// As [`alloc_size`](BufferType::alloc_size).
    fn member_sizes(&self, _tensor: &TensorInfo<'_>) -> Result<Vec<(String, usize)>> {
        Ok(Vec::new())
    }

    /// Whether this is plain host memory in the standard layout, so that [`Buffer::host`] is there and every
    /// device that works on host memory can use it.
    fn is_host(&self) -> bool {
        false
    }

    /// Whether a weight of this layout, used as source 0 of `node`, may lie here. Types that pack accept only
    /// what their device has kernels for.
    fn accepts(&self, _node: Node<'_>) -> Support {
        Support::Yes
    }

    /// How many rows are interleaved, a power of two. Whole groups of so many rows, counted from the first row of a matrix, can be
    /// written without reading what is there. `None` if only writing whole tensors is cheap.
    fn row_group(&self) -> Option<usize> {
        Some(1)
    }

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
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

/// A piece of memory of some buffer type.
///
/// All methods may be called from any thread at any time; a buffer keeps conflicting accesses apart. They are
/// *not* ordered with the work of streams. A caller that needs an order synchronizes first, or uses the stream's methods.
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
    /// [`Error::Unsupported`](crate::Error::Unsupported) if such a tensor cannot lie here.
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
    /// If the range does not exist or the device fails; [`Error::Unsupported`](crate::Error::Unsupported) where weights are converted in one direction only.
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

    /// Copies a whole tensor of equal layout from another buffer, if that is possible without passing through the host.
    /// `Ok(false)` if it is not.
    ///
    /// # Errors
    /// If the device fails.
    fn copy_from(&self, _to: Slot, _from: &TensorRef) -> Result<bool> {
        Ok(false)
    }

    /// Writes strided pieces.
    ///
    /// # Errors
    /// As [`write`](Buffer::write).
    fn write_rows(&self, tensor: Slot, rows: Rows, data: &[u8]) -> Result<()> {
        rows.each(tensor.layout.bytes(), data.len(), |offset, piece| {
            self.write(tensor, offset, &data[piece])
        })
    }

    /// Reads strided pieces.
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

/// `offset` rounded up to a multiple of `alignment`, a power of two; `None` if that overflows.
pub fn align_up(offset: usize, alignment: usize) -> Option<usize> {
    offset.checked_next_multiple_of(alignment)
}
