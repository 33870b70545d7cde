//! What a kernel is, what it is built from, and the phases that it is built to.

use crate::detect::Isa;
use crate::operand::Operand;
use samite_core::{DType, Error, Glu, Node, Result};
use std::borrow::Cow;
use std::ops::Range;

/// How a node is computed.
pub(crate) struct Kernel {
    /// Bytes of scratch memory for a node, an instruction set and a number of threads; `None` if that overflows.
    pub scratch: fn(Node<'_>, Isa, usize) -> Option<usize>,
    /// Compiles the node. Only called for results that are not empty.
    pub build: Build,
}

/// What compiles a node. Parameters of its operation are part of it.
pub(crate) type Build = Box<dyn Fn(&KernelContext<'_>) -> Result<Vec<Phase>>>;

impl Kernel {
    /// A kernel without scratch memory.
    pub fn plain(build: impl Fn(&KernelContext<'_>) -> Result<Vec<Phase>> + 'static) -> Self {
        Self::with_scratch(|_, _, _| Some(0), build)
    }

    /// A kernel of one phase, without scratch memory.
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

/// Why there is no kernel.
pub(crate) type Reason = Cow<'static, str>;

/// Refuses sources whose rows have gaps.
pub(crate) fn dense_rows(node: Node<'_>, source: usize) -> Result<(), Reason> {
    match node.source_layout(source) {
        Some(layout) if !layout.has_contiguous_rows() => {
            Err(format!("the rows of source {source} have gaps").into())
        }
        _ => Ok(()),
    }
}

/// Refuses types that cannot be decoded.
pub(crate) fn decodable(dtype: DType) -> Result<(), Reason> {
    if samite_quant::can_decode(dtype) {
        Ok(())
    } else {
        Err(format!("{dtype} cannot be decoded").into())
    }
}

/// Work below this many estimated nanoseconds is not shared out: a barrier and another cache cost as much.
const WORTH_SHARING: f64 = 8_000.0;

/// Estimated nanoseconds of the smallest part of a phase that a worker takes: less would cost more than waiting for it.
const WORTH_TAKING: f64 = 1_000.0;

/// Estimated nanoseconds of work between two looks at the token that cancels it.
const LOOK_AFTER: f64 = 2e7;

/// A value in memory that a kernel refuses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    /// Which source holds the value.
    pub source: usize,
    /// Which element of the source it is.
    pub at: usize,
    /// The value.
    pub value: i64,
    /// It must be at least 0 and below this.
    pub limit: usize,
}

/// Runs a range of tasks in worker number `usize`.
pub(crate) type Run = Box<dyn Fn(Range<usize>, usize) -> Result<(), Fault> + Send + Sync>;

/// A part of a node's work whose tasks are independent of each other.
pub(crate) struct Phase {
    pub tasks: usize,
    pub run: Run,
    /// Estimated nanoseconds of all tasks in one thread.
    cost: f64,
    /// Fewest and most tasks that a worker takes, and whether there is something to share: set when the program is complete.
    pub grain: usize,
    pub most: usize,
    pub shared: bool,
}

impl Phase {
    /// `tasks` tasks that take about `cost` nanoseconds together.
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
            most: tasks,
            shared: false,
        }
    }

    /// This phase and one that is independent of it as one.
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
    /// How a product comes by its columns, or rope by its angles.
    pub input: InputSource,
    pub result: Operand,
    pub sources: Vec<Option<Operand>>,
    pub workspace: Workspace,
}

/// Memory for the whole work.
#[derive(Clone, Copy)]
pub(crate) struct Workspace {
    pub memory: Option<(*mut u8, usize)>,
    /// Bytes at its start that are for angles, which nodes leave there for others.
    pub angles: usize,
}

impl KernelContext<'_> {
    pub fn result(&self) -> Operand {
        self.result
    }

    /// A source that the operation always has.
    pub fn source(&self, index: usize) -> Result<Operand> {
        self.optional(index)
            .ok_or_else(|| Error::invalid(format!("{}: source {index} is missing", self.node.op())))
    }

    pub fn optional(&self, index: usize) -> Option<Operand> {
        self.sources.get(index).copied().flatten()
    }

    /// `bytes` of scratch memory, aligned to a cache line.
    pub fn scratch(&self, bytes: usize) -> Result<Scratch> {
        self.part(self.workspace.angles, bytes)
    }

    /// `bytes` of memory for angles, aligned to a cache line.
    pub fn angles(&self, bytes: usize) -> Result<Scratch> {
        debug_assert!(bytes <= self.workspace.angles);
        self.part(0, bytes)
    }

    /// `bytes` of the workspace from byte `start` on.
    fn part(&self, start: usize, bytes: usize) -> Result<Scratch> {
        let len = self.workspace.memory.map_or(0, |(_, len)| len);
        match self.workspace.memory {
            // Never read or written, but a slice of nothing must not start at null.
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

/// Scratch memory; who uses which part of it is the kernel's business.
#[derive(Clone, Copy)]
pub(crate) struct Scratch(*mut u8);

// SAFETY: an address like `Operand`.
unsafe impl Send for Scratch {}
// SAFETY: `at` only computes an address; the kernel that reads or writes there keeps workers apart.
unsafe impl Sync for Scratch {}

impl Scratch {
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }

    /// What comes from a byte on.
    pub fn behind(&self, offset: usize) -> Self {
        Scratch(self.at(offset))
    }
}

/// How a product comes by the columns of source 1, or rope by its angles.
#[derive(Clone, Copy)]
#[allow(clippy::large_enum_variant)] // there is one for each node, and boxes are not `Copy`
pub(crate) enum InputSource {
    /// They are the source.
    Memory,
    /// The one before left them in the scratch memory, in the same form.
    Shared,
    /// They are made from the operands of the nodes before.
    Fused(Prologue),
}

/// What makes rows of F32 numbers from rows of F32 numbers without gaps.
#[derive(Clone, Copy)]
pub(crate) enum Prologue {
    /// The RMS norm of a row of `x`, times the row `scale`.
    Norm {
        /// What `x` is the sum of, if it has still to be written.
        sum: Option<[Operand; 2]>,
        /// May lie in the memory of one operand of the sum.
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
