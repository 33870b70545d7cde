//! Launches: which shader runs over which operands with which parameters, in how many workgroups.
//!
//! A launch is made from layouts alone. Places are added when work is prepared.

use crate::packed;
use crate::shader::{Access, Shader};
use crate::tuning::{MANY_ROWS, Tuning};
use bytemuck::{Pod, Zeroable};
use samite_core::{DIMS, DType, Layout, Node, TensorId};
use std::borrow::Cow;

/// Why there is no launch.
pub type Reason = Cow<'static, str>;

/// What a device may ask of its adapter.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Most bytes of an operand.
    pub binding: usize,
    /// Bindings begin at multiples of this.
    pub alignment: usize,
    /// Most operands of a kernel.
    pub operands: usize,
    /// Operations over subgroups may be used.
    pub subgroups: bool,
    /// Most workgroups along a dimension.
    pub groups: u32,
    /// Operands that overlap in memory may be bound by themselves.
    pub overlaps: bool,
    /// There are cooperative matrices of 16 x 16 halves that are summed as floats, and subgroups of 32.
    pub matrices: bool,
    /// These may be used for attention.
    pub attends_by_matrices: bool,
    /// Bytes of memory of a workgroup.
    pub memory: usize,
    /// Invocations and rows of a workgroup of products with packed weights, where somebody chose them.
    pub lanes: Option<usize>,
    pub height: Option<usize>,
    /// What suits the adapter.
    pub tuning: Tuning,
}

impl Capacity {
    /// Invocations and rows of a workgroup, for products of packed weights of rows of this length with so many columns.
    pub fn packed_shape(
        &self,
        [length, columns]: [usize; 2],
        nodes: &[Node<'_>],
    ) -> (usize, usize) {
        let rows: usize = nodes.iter().map(|node| node.layout().shape()[0]).sum();
        let lanes = if length / 32 > 64 { 64 } else { 32 };
        // Sums of more columns take more registers than were measured.
        let tuning = match columns {
            1 => self.tuning,
            _ => Tuning::default(),
        };
        let height = tuning.rows[usize::from(rows > MANY_ROWS)];
        (self.lanes.unwrap_or(lanes), self.height.unwrap_or(height))
    }
}

/// Invocations of a workgroup of most kernels.
pub const GROUP: u32 = 256;

/// The tensor that an operand is, or a window into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Result,
    Source(usize),
    /// Another node's.
    Tensor(TensorId),
    /// Scratch memory of the node.
    Workspace,
}

/// An operand: a window into a tensor, and how the kernel names and uses it.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    pub which: Which,
    pub name: char,
    pub access: Access,
    pub dtype: DType,
    pub shape: [usize; DIMS],
    pub strides: [usize; DIMS],
    /// Bytes from the tensor's first element to the window's.
    pub first: usize,
}

impl Operand {
    pub fn new(which: Which, name: char, access: Access, layout: &Layout) -> Self {
        Operand {
            which,
            name,
            access,
            dtype: layout.dtype(),
            shape: layout.shape(),
            strides: layout.strides(),
            first: 0,
        }
    }

    /// The same tensor, for a launch that is of several nodes.
    pub fn of(mut self, node: Node<'_>) -> Self {
        self.which = match self.which {
            Which::Result => Which::Tensor(node.id()),
            Which::Source(index) => node
                .source(index)
                .map_or(self.which, |source| Which::Tensor(source.id())),
            which => which,
        };
        self
    }

    /// By another name.
    pub fn named(mut self, name: char) -> Self {
        self.name = name;
        self
    }

    /// Rows that are [packed](crate::packed).
    pub fn packed(mut self) -> Self {
        self.access = Access::Packed;
        let row = packed::row_bytes(self.dtype, self.shape[0]);
        self.strides[1] = row;
        self.strides[2] = row * self.shape[1];
        self.strides[3] = self.strides[2] * self.shape[2];
        self
    }

    /// The first `count` numbers of scratch memory, of four bytes each.
    pub fn workspace(name: char, access: Access, dtype: DType, count: usize) -> Self {
        Operand {
            which: Which::Workspace,
            name,
            access,
            dtype,
            shape: [count, 1, 1, 1],
            strides: [4; DIMS],
            first: 0,
        }
    }

    /// Bytes from the first to behind the last element.
    pub fn bytes(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let last: usize = (0..DIMS)
            .map(|dim| match dim {
                0 => (self.shape[0] / self.dtype.block_len()).saturating_sub(1) * self.strides[0],
                _ => (self.shape[dim] - 1) * self.strides[dim],
            })
            .sum();
        last + self.dtype.block_bytes()
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// The part with indices `from` to `from + count` along `dim`, which is not 0 for blocks.
    pub fn part(mut self, dim: usize, from: usize, count: usize) -> Self {
        self.first += from * self.strides[dim];
        self.shape[dim] = count;
        self
    }

    /// The same bytes as 32-bit words, 16-bit halves or bytes in place of elements: for kernels that only move them.
    pub fn units(mut self, unit: DType) -> Self {
        let per_block = self.dtype.block_bytes() / unit.block_bytes();
        let blocks = self.shape[0] / self.dtype.block_len();
        self.shape[0] = blocks * per_block;
        if per_block > 1 || blocks == 1 {
            self.strides[0] = unit.block_bytes();
        }
        self.dtype = unit;
        self
    }

    /// Whether the elements of each row lie without gaps.
    pub fn has_contiguous_rows(&self) -> bool {
        self.shape[0] == self.dtype.block_len() || self.strides[0] == self.dtype.block_bytes()
    }
}

/// How many workgroups a launch needs.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// One invocation for each element of operand 0.
    Elements,
    /// One invocation for each of so many elements that follow each other in a row of operand 0.
    Pieces(usize),
    /// One workgroup for each row of operand 0.
    Rows,
    /// So many.
    Groups(usize),
}

/// One dispatch.
#[derive(Clone, Debug)]
pub struct Launch {
    pub shader: Shader,
    pub operands: Vec<Operand>,
    pub ints: [u32; 12],
    pub floats: [f32; 16],
    pub work: Work,
    /// Dimensions along which the work can be done in parts.
    pub cut: &'static [usize],
    /// A value from outside may be wrong.
    pub can_fail: bool,
}

impl Launch {
    /// A launch of `kernel` over `operands`, the result first.
    pub fn new(kernel: &'static str, operands: Vec<Operand>, work: Work) -> Self {
        let named = operands.iter().map(|o| (o.name, o.dtype, o.access));
        Launch {
            shader: Shader {
                kernel,
                operands: named.collect(),
                text: Vec::new(),
                bindings: Vec::new(),
                subgroups: None,
            },
            operands,
            ints: [0; 12],
            floats: [0.0; 16],
            work,
            cut: &[],
            can_fail: false,
        }
    }

    /// `name` in the kernel's text stands for `text`.
    pub fn with(mut self, name: &'static str, text: impl ToString) -> Self {
        self.shader.text.push((name, text.to_string()));
        self
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

    pub fn cut(mut self, dims: &'static [usize]) -> Self {
        self.cut = dims;
        self
    }

    pub fn can_fail(mut self) -> Self {
        self.can_fail = true;
        self
    }

    /// Adds the sums and maxima over a workgroup.
    pub fn reduces(mut self, capacity: &Capacity) -> Self {
        self.shader.subgroups = Some(capacity.subgroups);
        self
    }

    /// Workgroups along two dimensions.
    pub fn groups(&self, capacity: &Capacity) -> Result<[u32; 2], Reason> {
        let first = &self.operands[0];
        let groups = match self.work {
            Work::Elements => first.elements().div_ceil(GROUP as usize),
            Work::Pieces(len) => {
                (first.rows() * first.shape[0].div_ceil(len)).div_ceil(GROUP as usize)
            }
            Work::Rows => first.rows(),
            Work::Groups(groups) => groups,
        };
        let most = capacity.groups as usize;
        let lines = groups.div_ceil(most);
        if lines > most || groups > u32::MAX as usize / GROUP as usize {
            return Err("it is too large for one launch".into());
        }
        Ok([groups.min(most) as u32, lines as u32])
    }

    /// How many bindings it needs for what it computes with.
    fn bindings(&self) -> usize {
        self.operands.len() + usize::from(self.shader.reads_grids())
    }

    /// Whether the adapter allows so many.
    pub fn has_bindings(&self, capacity: &Capacity) -> bool {
        self.bindings() <= capacity.operands
    }

    pub fn fits(&self, capacity: &Capacity) -> bool {
        // What lies before a window in its binding takes room, too.
        let room = capacity.binding.saturating_sub(capacity.alignment + 4);
        self.operands.iter().all(|o| o.bytes() <= room) && self.groups(capacity).is_ok()
    }

    /// The launch, in parts where an operand is larger than a binding.
    ///
    /// # Errors
    /// If it cannot be done in parts.
    pub fn fit(self, capacity: &Capacity, parts: &mut Vec<Launch>) -> Result<(), Reason> {
        if !self.has_bindings(capacity) {
            return Err(format!(
                "it has {} operands, and the adapter allows {}",
                self.bindings(),
                capacity.operands
            )
            .into());
        }
        if self.operands[0].elements() == 0 && !matches!(self.work, Work::Groups(_)) {
            return Ok(());
        }
        if self.fits(capacity) {
            parts.push(self);
            return Ok(());
        }
        let extent = |dim: usize| self.operands[0].shape[dim];
        // The outermost dimension first: its parts lie closest together.
        let Some(&dim) = self.cut.iter().filter(|&&dim| extent(dim) > 1).max() else {
            let largest = self.operands.iter().map(Operand::bytes).max().unwrap_or(0);
            return Err(format!(
                "an operand of {largest} bytes is above the limit of one binding, {} bytes",
                capacity.binding
            )
            .into());
        };
        let whole = extent(dim);
        for (from, count) in [(0, whole / 2), (whole / 2, whole - whole / 2)] {
            let mut part = self.clone();
            for operand in &mut part.operands {
                if operand.shape[dim] == whole {
                    *operand = operand.part(dim, from, count);
                } else if operand.shape[dim] != 1 {
                    return Err("an operand that repeats is above the limit of one binding".into());
                }
            }
            part.fit(capacity, parts)?;
        }
        Ok(())
    }
}

/// A tensor as kernels see it.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct TensorParameters {
    pub shape: [u32; DIMS],
    /// In bytes.
    pub strides: [u32; DIMS],
    /// Byte of the first element in the binding.
    pub start: u32,
    pub unused: [u32; 3],
}

/// Most operands of any kernel.
pub const MOST_OPERANDS: usize = 11;

/// The parameters of one launch, as `kernels/preamble.wgsl` has them.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Parameters {
    /// What goes to the word for failures.
    pub node: u32,
    pub unused: [u32; 3],
    pub ints: [u32; 12],
    pub floats: [f32; 16],
    pub tensors: [TensorParameters; MOST_OPERANDS],
}

/// Operands of a node, for the table of operations.
pub trait Operands {
    /// The result, called `y`.
    fn result(&self) -> Operand;
    /// Source `index`, called `a`, `b`, and so on.
    fn source_operand(&self, index: usize) -> Result<Operand, Reason>;
    /// Source `index` if it is there.
    fn optional(&self, index: usize) -> Option<Operand>;
}

impl Operands for Node<'_> {
    fn result(&self) -> Operand {
        Operand::new(Which::Result, 'y', Access::Write, self.layout())
    }

    fn source_operand(&self, index: usize) -> Result<Operand, Reason> {
        self.optional(index)
            .ok_or_else(|| format!("source {index} is missing").into())
    }

    fn optional(&self, index: usize) -> Option<Operand> {
        let layout = self.source_layout(index)?;
        let name = char::from(b'a' + u8::try_from(index).ok()?);
        Some(Operand::new(
            Which::Source(index),
            name,
            Access::Read,
            layout,
        ))
    }
}
