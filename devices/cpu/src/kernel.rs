//! Kernels, the context that they are built from, and the phases that they consist of.

use crate::detect::Isa;
use crate::operand::Operand;
use samite_core::{DType, Error, Glu, Node, Result};
use std::borrow::Cow;
use std::ops::Range;

/// Implementation of a node.
pub(crate) struct Kernel {
    /// Bytes of scratch memory for a node, an instruction set and a number of threads; `None` if
    /// that overflows.
    pub scratch: fn(Node<'_>, Isa, usize) -> Option<usize>,
    /// Compiles the node. Called only for results that are not empty.
    pub build: Build,
}

/// Function that compiles a node. It captures the parameters of its operation.
pub(crate) type Build = Box<dyn Fn(&KernelContext<'_>) -> Result<Vec<Phase>>>;

impl Kernel {
    /// Returns a kernel without scratch memory.
    pub fn plain(build: impl Fn(&KernelContext<'_>) -> Result<Vec<Phase>> + 'static) -> Self {
        Self::with_scratch(|_, _, _| Some(0), build)
    }

    /// Returns a kernel of one phase, without scratch memory.
    pub fn one_phase(build: impl Fn(&KernelContext<'_>) -> Result<Phase> + 'static) -> Self {
        Self::plain(move |context| Ok(vec![build(context)?]))
    }

    pub fn with_scratch(
        scratch: fn(Node<'_>, Isa, usize) -> Option<usize>,
        build: impl Fn(&KernelContext<'_>) -> Result<Vec<Phase>> + 'static,
    ) -> Self {
        Kernel {
            scratch,
            build: Box::new(build),
        }
    }
}

/// Reason for the lack of a kernel.
pub(crate) type UnsupportedKernel = Cow<'static, str>;

/// Refuses sources whose rows have gaps.
pub(crate) fn dense_rows(node: Node<'_>, source: usize) -> Result<(), UnsupportedKernel> {
    match node.source_layout(source) {
        Some(layout) if !layout.has_contiguous_rows() => {
            Err(format!("the rows of source {source} have gaps").into())
        }
        _ => Ok(()),
    }
}

/// Refuses types that cannot be decoded.
pub(crate) fn decodable(dtype: DType) -> Result<(), UnsupportedKernel> {
    if samite_quant::can_decode(dtype) {
        Ok(())
    } else {
        Err(format!("{dtype} cannot be decoded").into())
    }
}

/// Work below this many estimated nanoseconds is not shared among threads: a barrier and cache
/// transfers cost as much.
const WORTH_SHARING: f64 = 8_000.0;

/// Minimum estimated nanoseconds of the part of a phase that a worker takes. Smaller parts cost
/// more than waiting.
const WORTH_TAKING: f64 = 1_000.0;

/// Estimated nanoseconds of work between two looks at the token that cancels it.
const LOOK_AFTER: f64 = 2e7;

/// An invalid value in memory, which a kernel reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    /// The source that holds the value.
    pub source: usize,
    /// Index of the element in the source.
    pub at: usize,
    /// The value.
    pub value: i64,
    /// Exclusive upper limit of the value. The lower limit is 0.
    pub limit: usize,
}

/// Function that runs a range of tasks in the worker with the given number.
pub(crate) type Run = Box<dyn Fn(Range<usize>, usize) -> Result<(), Fault> + Send + Sync>;

/// A part of a node's work, whose tasks are independent of each other.
pub(crate) struct Phase {
    pub tasks: usize,
    pub run: Run,
    /// Estimated nanoseconds of all tasks in one thread.
    cost: f64,
    /// Minimum and maximum number of tasks that a worker takes, and whether the work is shared. Set
    /// when the program is complete.
    pub grain: usize,
    pub most: usize,
    pub shared: bool,
}

impl Phase {
    /// Creates a phase of `tasks` tasks that together take about `cost` nanoseconds.
    pub fn new(
        tasks: usize,
        cost: f64,
        run: impl Fn(Range<usize>, usize) -> Result<(), Fault> + Send + Sync + 'static,
    ) -> Self {
        Phase {
            tasks,
            cost,
            run: Box::new(run),
            grain: 1,
            most: 1,
            shared: false,
        }
    }

    /// Combines this phase with an independent one.
    pub fn and(self, other: Phase) -> Self {
        let first = self.tasks;
        Phase::new(
            first + other.tasks,
            self.cost + other.cost,
            move |tasks, worker| {
                let (start, end) = (tasks.start, tasks.end);
                (self.run)(start.min(first)..end.min(first), worker)?;
                (other.run)(start.max(first) - first..end.max(first) - first, worker)
            },
        )
    }

    pub fn share(&mut self, threads: usize) {
        self.shared = threads > 1 && self.tasks > 1 && self.cost >= WORTH_SHARING;
        let all = self.tasks.max(1);
        let each = self.cost / all as f64;
        self.grain = ((WORTH_TAKING / each) as usize).clamp(1, all);
        self.most = ((LOOK_AFTER / each) as usize).clamp(self.grain, all);
    }
}

/// The addresses and parameters from which a kernel is built.
pub(crate) struct KernelContext<'a> {
    pub node: Node<'a>,
    pub isa: Isa,
    pub threads: usize,
    /// Source of a product's columns or of rope's angles.
    pub input: InputSource,
    pub result: Operand,
    pub sources: Vec<Option<Operand>>,
    pub workspace: Workspace,
}

/// Memory for the whole program.
#[derive(Clone, Copy)]
pub(crate) struct Workspace {
    pub memory: Option<(*mut u8, usize)>,
    /// Bytes at its start for angles, which nodes leave there for later nodes.
    pub angles: usize,
}

impl KernelContext<'_> {
    pub fn result(&self) -> Operand {
        self.result
    }

    /// Returns a source that the operation always has.
    pub fn source(&self, index: usize) -> Result<Operand> {
        self.optional(index)
            .ok_or_else(|| Error::invalid(format!("{}: source {index} is missing", self.node.op())))
    }

    pub fn optional(&self, index: usize) -> Option<Operand> {
        self.sources.get(index).copied().flatten()
    }

    /// Returns `bytes` of scratch memory, aligned to a cache line.
    pub fn scratch(&self, bytes: usize) -> Result<Scratch> {
        self.part(self.workspace.angles, bytes)
    }

    /// Returns `bytes` of memory for angles, aligned to a cache line.
    pub fn angles(&self, bytes: usize) -> Result<Scratch> {
        debug_assert!(bytes <= self.workspace.angles);
        self.part(0, bytes)
    }

    /// Returns `bytes` of the workspace, from byte `start`.
    fn part(&self, start: usize, bytes: usize) -> Result<Scratch> {
        let len = self.workspace.memory.map_or(0, |(_, len)| len);
        match self.workspace.memory {
            // Never read or written, but even an empty slice must not start at null.
            _ if bytes == 0 => Ok(Scratch(std::ptr::without_provenance_mut(64))),
            Some((base, len)) if start.checked_add(bytes).is_some_and(|end| end <= len) => {
                Ok(Scratch(base.wrapping_add(start)))
            }
            _ => Err(Error::invalid(format!(
                "{}: the workspace has {len} bytes, {bytes} are needed from byte {start} on",
                self.node.op(),
            ))),
        }
    }
}

/// Scratch memory. The kernel assigns its parts to workers.
#[derive(Clone, Copy)]
pub(crate) struct Scratch(*mut u8);

// SAFETY: an address like `Operand`.
unsafe impl Send for Scratch {}
// SAFETY: `at` only computes an address. The kernel that reads or writes there keeps workers apart.
unsafe impl Sync for Scratch {}

impl Scratch {
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }

    /// Returns the memory after a byte offset.
    pub fn behind(&self, offset: usize) -> Self {
        Scratch(self.at(offset))
    }
}

/// Source of the columns of source 1 of a product, or of rope's angles.
#[derive(Clone, Copy)]
#[allow(clippy::large_enum_variant)] // there is one for each node, and boxes are not `Copy`
pub(crate) enum InputSource {
    /// The source itself.
    Memory,
    /// The previous product left them in scratch memory, in the same form.
    Shared,
    /// The product computes them from the operands of earlier nodes.
    Fused(Prologue),
}

/// Computation of F32 rows from F32 rows without gaps.
#[derive(Clone, Copy)]
pub(crate) enum Prologue {
    /// The RMS norm of a row of `x`, times the row `scale`.
    Norm {
        /// The operands of the sum `x`, if it has yet to be written.
        sum: Option<[Operand; 2]>,
        /// Operand of the norm. May lie in the memory of one operand of the sum.
        x: Operand,
        eps: f32,
        scale: Operand,
    },
    /// A gated linear unit.
    Gated {
        x: Operand,
        gate: Operand,
        kind: Glu,
    },
}
