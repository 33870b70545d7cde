//! Buffer types and buffers.
//!
//! A [`BufferType`] is a kind of memory with an alignment, limits and a storage form for tensors. A
//! [`Buffer`] is a piece of it. The buffer type decides how a tensor's bytes are stored. `write`
//! and `read` always use the *standard layout*, as the tensor's [`Layout`] describes it; a packed
//! type converts.

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

/// Purpose of a buffer. The scheduler lets weights decide where operations run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Usage {
    /// Other data, such as caches.
    #[default]
    Any,
    /// Weights of a model: written once, large and slow to move.
    Weights,
    /// Intermediate results, which the scheduler owns.
    Compute,
}

/// Role of a weight in its model, for devices that store tensors in a form of their own: packed, or
/// split among several devices.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Role {
    /// Unknown, or not a weight.
    #[default]
    Unknown,
    /// A lookup table of rows.
    Embedding,
    /// The first product of a block, whose rows are independent: Q, K, V, gate, up.
    Expand,
    /// The last product of a block, which sums over the results of the first products: attention
    /// output, down.
    Reduce,
    /// The product that computes the logits.
    Head,
    /// A vector that scales or shifts elements.
    Vector,
}

/// Units in which a stored tensor may be split among devices along an axis. Tensors that belong
/// together, such as the first and the last product of a block, have the same number of units and
/// so are split alike.
///
/// A tensor may consist of segments along the axis, such as the queries, keys and values of a fused
/// matrix. Each segment has the same number of units and is split by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cut {
    /// The axis.
    pub axis: usize,
    /// Number of elements along the axis that stay together, for each segment; 0 for segments that
    /// the tensor does not have.
    pub units: [usize; 3],
    /// Number that selects the first device to get left-over units. It is the layer's number, so
    /// that the left-overs rotate among the devices.
    pub turn: usize,
}

impl Cut {
    /// Creates a split of a tensor with one segment.
    pub fn new(axis: usize, unit: usize, turn: usize) -> Self {
        Cut {
            axis,
            units: [unit, 0, 0],
            turn,
        }
    }
}

/// A tensor as a buffer type sees it, before it has memory.
#[derive(Clone, Copy, Debug)]
pub struct TensorInfo<'a> {
    /// Name to show to users. May be empty.
    pub name: &'a str,
    /// Type, shape and strides.
    pub layout: Layout,
    /// Purpose of its buffer.
    pub usage: Usage,
    /// Its role in the model.
    pub role: Role,
    /// Unit and axis of a split, or `None` for a tensor that each device needs whole.
    pub cut: Option<Cut>,
    /// The node that computes it, for devices whose kernels need extra room after some results.
    /// `None` for a tensor that is written.
    pub node: Option<Node<'a>>,
}

impl<'a> TensorInfo<'a> {
    /// Describes a tensor with an unknown role.
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

    /// Describes a tensor of a graph.
    pub fn from_node(tensor: Node<'a>, usage: Usage) -> Self {
        TensorInfo {
            node: tensor.tensor().is_computed().then_some(tensor),
            ..TensorInfo::new(&tensor.tensor().name, *tensor.layout(), usage)
        }
    }
}

/// A kind of memory.
pub trait BufferType: Send + Sync + fmt::Debug {
    /// Returns the name to show to users, such as `host` or `cuda0`.
    fn name(&self) -> &str;

    /// Returns the alignment of every tensor's first byte. A power of two.
    fn alignment(&self) -> usize;

    /// Returns the maximum buffer size in bytes.
    fn max_size(&self) -> usize {
        isize::MAX as usize
    }

    /// Returns the bytes that a tensor takes, including padding and packing. At least
    /// `layout.bytes()` unless the type packs.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if this memory cannot hold such a tensor.
    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        Ok(tensor.layout.bytes())
    }

    /// Calls [`alloc_size`](BufferType::alloc_size) for several tensors, in order.
    ///
    /// # Errors
    /// As [`alloc_size`](BufferType::alloc_size).
    fn alloc_sizes(&self, tensors: &[TensorInfo<'_>]) -> Result<Vec<usize>> {
        tensors
            .iter()
            .map(|tensor| self.alloc_size(tensor))
            .collect()
    }

    /// Returns the bytes that a tensor takes in each memory that it is split over, by name. Empty
    /// for memory that is one piece, for which [`alloc_size`](BufferType::alloc_size) suffices.
    ///
    /// # Errors
    /// As [`alloc_size`](BufferType::alloc_size).
    fn member_sizes(&self, _tensor: &TensorInfo<'_>) -> Result<Vec<(String, usize)>> {
        Ok(Vec::new())
    }

    /// Returns whether this is plain host memory in the standard layout. Then [`Buffer::host`]
    /// returns the memory, and every device that works on host memory can use it.
    fn is_host(&self) -> bool {
        false
    }

    /// Returns whether a weight of this layout, used as source 0 of `node`, may lie here. Types
    /// that pack accept only weights for which their device has kernels.
    fn accepts(&self, _node: Node<'_>) -> Support {
        Support::Yes
    }

    /// Returns the number of interleaved rows, a power of two. Whole groups of this size, counted
    /// from the first row of a matrix, can be written without reading the old contents. `None` if
    /// only writing whole tensors is cheap.
    fn row_group(&self) -> Option<usize> {
        Some(1)
    }

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>>;
}

/// Returns whether both handles refer to one buffer type.
pub fn same_buffer_type(a: &Arc<dyn BufferType>, b: &Arc<dyn BufferType>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// Place of a tensor in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Byte offset of the first element.
    pub offset: usize,
    /// Type, shape and strides.
    pub layout: Layout,
}

/// A piece of memory of some buffer type.
///
/// All methods may be called from any thread at any time. A buffer serialises conflicting accesses,
/// but they are *not* ordered with the work of streams. A caller that needs an order synchronizes
/// first, or uses the stream's methods.
pub trait Buffer: Send + Sync + fmt::Debug {
    /// Returns the buffer type.
    fn buffer_type(&self) -> &Arc<dyn BufferType>;

    /// Returns the size in bytes.
    fn size(&self) -> usize;

    /// Returns the purpose of the buffer.
    fn usage(&self) -> Usage;

    /// Returns the identity of the bytes in the buffer, always the same for one buffer. For a
    /// buffer over host memory it is the [host memory's location](HostMemory::location), for a
    /// buffer that views another one it is within that one. Otherwise it is a [memory of its
    /// own](crate::MemoryId::unique).
    fn location(&self) -> Location;

    /// Returns the memory itself, if it is host memory in the standard layout.
    fn host(&self) -> Option<&Arc<HostMemory>> {
        None
    }

    /// Returns whether the contents may change.
    fn is_writable(&self) -> bool {
        true
    }

    /// Prepares the buffer for a tensor at byte `offset`. Called once for each tensor in the
    /// buffer.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the buffer cannot hold such a tensor.
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
    /// If the range does not exist or the device fails.
    /// [`Error::Unsupported`](crate::Error::Unsupported) if weights are converted in one direction
    /// only.
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

    /// Copies a whole tensor of equal layout from another buffer without passing through the host.
    /// Returns `Ok(false)` if that is impossible.
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

    /// Lets a device recognise its own buffers.
    fn as_any(&self) -> &dyn Any;
}

/// Returns `offset` rounded up to a multiple of `alignment`, a power of two, or `None` if that
/// overflows.
pub fn align_up(offset: usize, alignment: usize) -> Option<usize> {
    offset.checked_next_multiple_of(alignment)
}
