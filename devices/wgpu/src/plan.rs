//! Launches: a shader with operands, parameters and a workgroup count.
//!
//! A launch depends on layouts alone. Buffers are bound when work is prepared.

use crate::shader::{Access, Shader};
use crate::template::Values;
use crate::tuning::{MANY_ROWS, Tuning};
use bytemuck::{Pod, Zeroable};
use samite_core::{DIMS, DType, Layout, Node, TensorId};
use std::borrow::Cow;

/// Reason why a launch is unsupported.
pub type UnsupportedLaunch = Cow<'static, str>;

/// Features and limits that launches may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// Maximum bytes of an operand.
    pub binding: usize,
    /// Alignment of bindings in bytes.
    pub alignment: usize,
    /// Maximum number of operands of a kernel.
    pub operands: usize,
    /// True if subgroup operations may be used.
    pub subgroups: bool,
    /// Maximum number of workgroups along a dimension.
    pub groups: u32,
    /// True if operands that overlap in memory may have separate bindings.
    pub overlaps: bool,
    /// True if cooperative matrices of 16 x 16 halves with float accumulators and subgroups of 32
    /// may be used.
    pub matrices: bool,
    /// True if attention may use cooperative matrices.
    pub attends_by_matrices: bool,
    /// Bytes of workgroup memory.
    pub memory: usize,
    /// Invocations and rows per workgroup of products with packed weights, if the user set them.
    pub lanes: Option<usize>,
    pub height: Option<usize>,
    /// Sizes that suit the adapter.
    pub tuning: Tuning,
}

impl Capacity {
    /// Returns the invocations and rows per workgroup for products of packed weights, with rows of
    /// `length` elements and `columns` columns.
    pub fn packed_shape(
        &self,
        [length, columns]: [usize; 2],
        nodes: &[Node<'_>],
    ) -> (usize, usize) {
        let rows: usize = nodes.iter().map(|node| node.layout().shape()[0]).sum();
        let lanes = if length / 32 > 64 { 64 } else { 32 };
        // More columns need more registers than the tuning measured.
        let tuning = match columns {
            1 => self.tuning,
            _ => Tuning::default(),
        };
        let height = tuning.rows[usize::from(rows > MANY_ROWS)];
        (self.lanes.unwrap_or(lanes), self.height.unwrap_or(height))
    }
}

/// Invocations per workgroup of most kernels.
pub const GROUP: u32 = 256;

/// The tensor behind an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandSource {
    Result,
    Source(usize),
    /// A tensor of another node.
    Tensor(TensorId),
    /// Scratch memory of the node.
    Workspace,
}

/// An operand: a window into a tensor, and how the kernel names and accesses it.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    pub which: OperandSource,
    pub name: char,
    pub access: Access,
    pub dtype: DType,
    pub shape: [usize; DIMS],
    pub strides: [usize; DIMS],
    /// Offset in bytes of the window's first element from the tensor's.
    pub first: usize,
}

impl Operand {
    pub fn new(which: OperandSource, name: char, access: Access, layout: &Layout) -> Self {
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

    /// Returns the operand for a launch of several nodes, with an explicit tensor.
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

    /// Returns the operand under another name.
    pub fn named(mut self, name: char) -> Self {
        self.name = name;
        self
    }

    /// Returns the operand with [packed](samite_quant::RowPacking) rows.
    pub fn packed(mut self) -> Self {
        self.access = Access::Packed;
        let row = samite_quant::packed_row_bytes(self.dtype, self.shape[0]);
        self.strides[1] = row;
        self.strides[2] = row * self.shape[1];
        self.strides[3] = self.strides[2] * self.shape[2];
        self
    }

    /// Returns the first `count` elements of scratch memory as an operand. Elements have four
    /// bytes.
    pub fn workspace(name: char, access: Access, dtype: DType, count: usize) -> Self {
        Operand {
            which: OperandSource::Workspace,
            name,
            access,
            dtype,
            shape: [count, 1, 1, 1],
            strides: [4; DIMS],
            first: 0,
        }
    }

    /// Returns the distance in bytes from the first element to the end of the last.
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

    /// Returns the part with indices `from` to `from + count` along `dim`. For quantized types,
    /// `dim` must not be 0.
    pub fn part(mut self, dim: usize, from: usize, count: usize) -> Self {
        self.first += from * self.strides[dim];
        self.shape[dim] = count;
        self
    }

    /// Returns an operand that views the same bytes as 32-bit, 16-bit or 8-bit units, for kernels
    /// that only move data.
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

    /// Returns whether the elements of each row are contiguous.
    pub fn has_contiguous_rows(&self) -> bool {
        self.shape[0] == self.dtype.block_len() || self.strides[0] == self.dtype.block_bytes()
    }
}

/// Number of workgroups of a launch.
#[derive(Clone, Copy, Debug)]
pub enum WorkgroupCount {
    /// One invocation per element of operand 0.
    Elements,
    /// One invocation per piece of this many consecutive elements in a row of operand 0.
    Pieces(usize),
    /// One workgroup per row of operand 0.
    Rows,
    /// A fixed number of workgroups.
    Groups(usize),
}

/// One dispatch.
#[derive(Clone, Debug)]
pub struct Launch {
    pub shader: Shader,
    pub operands: Vec<Operand>,
    pub ints: [u32; 12],
    pub floats: [f32; 16],
    pub work: WorkgroupCount,
    /// Dimensions along which the launch can be split.
    pub cut: &'static [usize],
    /// True if an index from a tensor may be invalid.
    pub can_fail: bool,
}

impl Launch {
    /// Creates a launch of `kernel` over `operands`. The result comes first.
    pub fn new(kernel: &'static str, operands: Vec<Operand>, work: WorkgroupCount) -> Self {
        let named = operands.iter().map(|o| (o.name, o.dtype, o.access));
        Launch {
            shader: Shader {
                kernel,
                operands: named.collect(),
                values: Values::new(),
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

    /// Sets the value of `name` in the kernel's [template](crate::template).
    pub fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.shader.values.insert(name, value.to_string());
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

    /// Adds the functions that compute sums and maxima over a workgroup.
    pub fn reduces(mut self, capacity: &Capacity) -> Self {
        self.shader.subgroups = Some(capacity.subgroups);
        self
    }

    /// Returns the number of workgroups along two dimensions.
    pub fn groups(&self, capacity: &Capacity) -> Result<[u32; 2], UnsupportedLaunch> {
        let first = &self.operands[0];
        let groups = match self.work {
            WorkgroupCount::Elements => first.elements().div_ceil(GROUP as usize),
            WorkgroupCount::Pieces(len) => {
                (first.rows() * first.shape[0].div_ceil(len)).div_ceil(GROUP as usize)
            }
            WorkgroupCount::Rows => first.rows(),
            WorkgroupCount::Groups(groups) => groups,
        };
        let most = capacity.groups as usize;
        let lines = groups.div_ceil(most);
        if lines > most || groups > u32::MAX as usize / GROUP as usize {
            return Err("it is too large for one launch".into());
        }
        Ok([groups.min(most) as u32, lines as u32])
    }

    /// Returns the number of bindings for operands and grids.
    fn bindings(&self) -> usize {
        self.operands.len() + usize::from(self.shader.reads_grids())
    }

    /// Returns whether the adapter allows this many bindings.
    pub fn has_bindings(&self, capacity: &Capacity) -> bool {
        self.bindings() <= capacity.operands
    }

    pub fn fits(&self, capacity: &Capacity) -> bool {
        // A binding starts at an aligned offset, so it may include bytes before the window.
        let room = capacity.binding.saturating_sub(capacity.alignment + 4);
        self.operands.iter().all(|o| o.bytes() <= room) && self.groups(capacity).is_ok()
    }

    /// Adds the launch to `parts`, split if an operand is larger than a binding.
    ///
    /// # Errors
    /// Returns the reason if the launch cannot be split.
    pub fn fit(
        self,
        capacity: &Capacity,
        parts: &mut Vec<Launch>,
    ) -> Result<(), UnsupportedLaunch> {
        if !self.has_bindings(capacity) {
            return Err(format!(
                "it has {} operands, and the adapter allows {}",
                self.bindings(),
                capacity.operands
            )
            .into());
        }
        if self.operands[0].elements() == 0 && !matches!(self.work, WorkgroupCount::Groups(_)) {
            return Ok(());
        }
        if self.fits(capacity) {
            parts.push(self);
            return Ok(());
        }
        let extent = |dim: usize| self.operands[0].shape[dim];
        // Split the outermost dimension first, because its parts are the most compact.
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

/// A tensor, as kernels see it.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct TensorParameters {
    pub shape: [u32; DIMS],
    /// Strides in bytes.
    pub strides: [u32; DIMS],
    /// Byte offset of the first element in the binding.
    pub start: u32,
    pub unused: [u32; 3],
}

/// Maximum number of operands of any kernel.
pub const MAX_OPERANDS: usize = 11;

/// Parameters of one launch, with the layout of `kernels/preamble.wgsl`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Parameters {
    /// Number that a failing kernel writes to the failure word.
    pub node: u32,
    pub unused: [u32; 3],
    pub ints: [u32; 12],
    pub floats: [f32; 16],
    pub tensors: [TensorParameters; MAX_OPERANDS],
}

/// Operands of a node, for the operation table.
pub trait Operands {
    /// Returns the result, called `y`.
    fn result(&self) -> Operand;
    /// Returns source `index`, called `a`, `b`, and so on.
    fn source_operand(&self, index: usize) -> Result<Operand, UnsupportedLaunch>;
    /// Returns source `index` if it exists.
    fn optional(&self, index: usize) -> Option<Operand>;
}

impl Operands for Node<'_> {
    fn result(&self) -> Operand {
        Operand::new(OperandSource::Result, 'y', Access::Write, self.layout())
    }

    fn source_operand(&self, index: usize) -> Result<Operand, UnsupportedLaunch> {
        self.optional(index)
            .ok_or_else(|| format!("source {index} is missing").into())
    }

    fn optional(&self, index: usize) -> Option<Operand> {
        let layout = self.source_layout(index)?;
        let name = char::from(b'a' + u8::try_from(index).ok()?);
        Some(Operand::new(
            OperandSource::Source(index),
            name,
            Access::Read,
            layout,
        ))
    }
}
