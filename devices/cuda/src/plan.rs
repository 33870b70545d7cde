//! Launches: a kernel with operands, parameters and a grid.
//!
//! A launch depends on layouts alone. Addresses are added when work is prepared.

use crate::modules;
use bytemuck::{Pod, Zeroable};
use samite_core::{DIMS, DType, Layout, Node, TensorId};
use std::borrow::Cow;

/// Reason why a node is unsupported.
pub type Unsupported = Cow<'static, str>;

/// Facts about a card that decide between kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// Compute capability, such as 90 for 9.0.
    pub capability: u32,
    /// Number of multiprocessors.
    pub processors: u32,
}

/// Threads of a group of most kernels.
pub const GROUP: u32 = 256;

/// The tensor behind an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandSource {
    /// A missing operand: a null pointer.
    Missing,
    /// Result of the node.
    Result,
    /// A source of the node.
    Source(usize),
    /// A tensor of another node.
    Tensor(TensorId),
    /// Scratch memory of the node.
    Workspace,
}

/// An operand: a window into a tensor.
#[derive(Clone, Copy, Debug)]
pub struct LaunchOperand {
    pub which: OperandSource,
    pub dtype: DType,
    pub shape: [usize; DIMS],
    /// Strides in bytes. The first one is the distance of elements or blocks.
    pub strides: [usize; DIMS],
    /// Offset in bytes of the window's first element from the tensor's.
    pub first: usize,
    /// True if its rows are [packed](samite_quant::RowPacking).
    pub is_packed: bool,
}

impl LaunchOperand {
    pub fn new(which: OperandSource, layout: &Layout) -> Self {
        LaunchOperand {
            which,
            dtype: layout.dtype(),
            shape: layout.shape(),
            strides: layout.strides(),
            first: 0,
            is_packed: false,
        }
    }

    /// Returns the operand for an optional source that is absent.
    pub fn missing() -> Self {
        LaunchOperand {
            which: OperandSource::Missing,
            dtype: DType::F32,
            shape: [0; DIMS],
            strides: [0; DIMS],
            first: 0,
            is_packed: false,
        }
    }

    /// Returns `count` elements of scratch memory from byte `first` on. Elements have four bytes.
    pub fn workspace(dtype: DType, first: usize, count: usize) -> Self {
        LaunchOperand {
            which: OperandSource::Workspace,
            dtype,
            shape: [count, 1, 1, 1],
            strides: [4, 4 * count, 4 * count, 4 * count],
            first,
            is_packed: false,
        }
    }

    /// Returns the operand with packed rows.
    pub fn packed(mut self) -> Self {
        let row = samite_quant::packed_row_bytes(self.dtype, self.shape[0]);
        self.is_packed = true;
        self.strides[1] = row;
        self.strides[2] = row * self.shape[1];
        self.strides[3] = self.strides[2] * self.shape[2];
        self
    }

    /// Returns `bytes` bytes of scratch memory from byte `first` on.
    pub fn scratch_bytes(first: usize, bytes: usize) -> Self {
        LaunchOperand::workspace(DType::F32, first, bytes.div_ceil(4))
    }

    /// Returns the operand with an explicit tensor, for a launch of several nodes.
    pub fn in_node(mut self, node: Node<'_>) -> Self {
        self.which = match self.which {
            OperandSource::Result => OperandSource::Tensor(node.id()),
            OperandSource::Source(index) => node
                .source(index)
                .map_or(self.which, |source| OperandSource::Tensor(source.id())),
            which => which,
        };
        self
    }

    /// Returns the distance in bytes from the first element to the end of the last.
    pub fn bytes(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let blocks = self.shape[0] / self.dtype.block_len();
        let last = blocks.saturating_sub(1) * self.strides[0]
            + (1..DIMS)
                .map(|dim| (self.shape[dim] - 1) * self.strides[dim])
                .sum::<usize>();
        last + self.dtype.block_bytes()
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Returns whether the elements of each row are contiguous.
    pub fn has_contiguous_rows(&self) -> bool {
        self.shape[0] == self.dtype.block_len() || self.strides[0] == self.dtype.block_bytes()
    }

    /// Returns whether the elements have no gaps and lie in order.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = self.dtype.block_bytes() * (self.shape[0] / self.dtype.block_len());
        self.has_contiguous_rows()
            && (1..DIMS).all(|dim| {
                let fits = self.shape[dim] == 1 || self.strides[dim] == expected;
                expected *= self.shape[dim];
                fits
            })
    }
}

/// One launch of a kernel.
#[derive(Clone, Debug)]
pub struct PlannedLaunch {
    /// Module and function.
    pub module: &'static modules::Module,
    pub function: Cow<'static, str>,
    /// Operands in the order of the kernel's parameters, the result first.
    pub operands: Vec<LaunchOperand>,
    pub ints: [u32; 12],
    pub floats: [f32; 16],
    /// Number of groups.
    pub groups: usize,
    /// Threads of a group.
    pub threads: u32,
    /// True if an index from a tensor may be invalid.
    pub can_fail: bool,
}

impl PlannedLaunch {
    /// Creates a launch of `function` in module `module` over `operands`, with 256 threads per
    /// group.
    ///
    /// # Errors
    /// Returns the reason if there is no such module.
    pub fn new(
        module: &str,
        function: impl Into<Cow<'static, str>>,
        operands: Vec<LaunchOperand>,
        groups: usize,
    ) -> Result<Self, Unsupported> {
        Ok(PlannedLaunch {
            module: modules::find(module).ok_or_else(|| format!("there is no module {module}"))?,
            function: function.into(),
            operands,
            ints: [0; 12],
            floats: [0.0; 16],
            groups,
            threads: GROUP,
            can_fail: false,
        })
    }

    pub fn ints<const N: usize>(mut self, ints: [usize; N]) -> Self {
        for (to, from) in self.ints.iter_mut().zip(ints) {
            *to = u32::try_from(from).unwrap_or(u32::MAX);
        }
        self
    }

    pub fn floats<const N: usize>(mut self, floats: [f32; N]) -> Self {
        self.floats[..N].copy_from_slice(&floats);
        self
    }

    pub fn threads(mut self, threads: u32) -> Self {
        self.threads = threads;
        self
    }

    pub fn can_fail(mut self) -> Self {
        self.can_fail = true;
        self
    }
}

/// Returns the number of groups for one thread per element, or fewer: kernels walk with a stride.
pub fn groups_for(elements: usize) -> usize {
    elements.div_ceil(GROUP as usize).min(MAX_GROUPS)
}

/// Maximum number of groups of a kernel that walks with a stride.
pub const MAX_GROUPS: usize = 1 << 16;

/// Number of operands whose layouts a kernel gets. It knows the layouts of further ones.
pub const MAX_OPERANDS: usize = 10;

/// A tensor, as kernels see it. `kernels/prelude.h` has the same structure.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct TensorParameters {
    pub strides: [u64; DIMS],
    pub shape: [u32; DIMS],
    /// ggml's number of the type.
    pub dtype: u32,
    pub unused: u32,
}

/// Parameters of a launch, by value. `kernels/prelude.h` has the same structure.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct KernelParameters {
    pub tensors: [TensorParameters; MAX_OPERANDS],
    pub ints: [u32; 12],
    pub floats: [f32; 16],
    /// Number that a failing kernel reports.
    pub node: u32,
    pub unused: u32,
}

/// Operands of a node, for the operation table.
pub trait LaunchOperands {
    /// Returns the result.
    fn result(&self) -> LaunchOperand;
    /// Returns source `index`.
    ///
    /// # Errors
    /// Returns the reason if it is missing.
    fn operand(&self, index: usize) -> Result<LaunchOperand, Unsupported>;
    /// Returns source `index`, or a [missing](LaunchOperand::missing) operand.
    fn optional(&self, index: usize) -> LaunchOperand;
}

impl LaunchOperands for Node<'_> {
    fn result(&self) -> LaunchOperand {
        LaunchOperand::new(OperandSource::Result, self.layout())
    }

    fn operand(&self, index: usize) -> Result<LaunchOperand, Unsupported> {
        let layout = self
            .source_layout(index)
            .ok_or_else(|| format!("source {index} is missing"))?;
        Ok(LaunchOperand::new(OperandSource::Source(index), layout))
    }

    fn optional(&self, index: usize) -> LaunchOperand {
        self.source_layout(index)
            .map_or_else(LaunchOperand::missing, |layout| {
                LaunchOperand::new(OperandSource::Source(index), layout)
            })
    }
}
