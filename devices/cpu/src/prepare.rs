//! Compiled graphs: a flat list of phases with everything resolved, and its execution.

use crate::detect::Isa;
use crate::fuse::{Part, parts};
use crate::kernels::columns::{Maker, Origin};
use crate::kernels::{matmul, reduce, rope};
use crate::operand::Operand;
use crate::packed::memory_of;
use crate::table::kernel_for;
use samite_core::{
    Access, Buffer, Error, MemorySet, Node, Op, Placed, Result, RunControl, TensorId, TensorRef,
};
use samite_threads::{Pool, Team};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Work below this many estimated nanoseconds is not shared out: a barrier and another cache cost as much.
const WORTH_SHARING: f64 = 8_000.0;

/// Estimated nanoseconds of the smallest part of a phase that a worker takes: less would cost more than waiting for it.
const WORTH_TAKING: f64 = 1_000.0;

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
    tasks: usize,
    run: Run,
    /// Estimated nanoseconds of all tasks in one thread.
    cost: f64,
    /// Fewest tasks that a worker takes, and whether there is something to share: set when the program is complete.
    grain: usize,
    shared: bool,
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
            shared: false,
        }
    }

    /// This phase and one that is independent of it as one.
    fn and(self, other: Phase) -> Self {
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

    fn share(&mut self, threads: usize) {
        self.shared = threads > 1 && self.tasks > 1 && self.cost >= WORTH_SHARING;
        let each = self.cost / self.tasks.max(1) as f64;
        self.grain = ((WORTH_TAKING / each) as usize).clamp(1, self.tasks.max(1));
    }
}

/// The addresses and parameters from which a kernel is built.
pub(crate) struct Site<'a> {
    pub node: Node<'a>,
    pub isa: Isa,
    pub threads: usize,
    /// How a product comes by its columns, or rope by its angles.
    pub origin: Origin,
    result: Operand,
    sources: Vec<Option<Operand>>,
    workspace: Workspace,
}

/// Memory for the whole work.
#[derive(Clone, Copy)]
struct Workspace {
    memory: Option<(*mut u8, usize)>,
    /// Bytes at its start that are for angles, which nodes leave there for others.
    angles: usize,
}

impl Site<'_> {
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
// SAFETY: as above.
unsafe impl Sync for Scratch {}

impl Scratch {
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// The phases of one node.
struct Step {
    id: TensorId,
    phases: Range<usize>,
    /// Operation and name, for errors.
    label: Box<str>,
}

/// Work that was compiled for repeated runs.
pub(crate) struct Program {
    device: Box<str>,
    threads: usize,
    steps: Vec<Step>,
    phases: Vec<Phase>,
    memory: MemorySet,
    any_shared: bool,
    /// Keeps the memory alive that addresses point to.
    buffers: Vec<Arc<dyn Buffer>>,
}

/// Why a run ended early.
enum Trouble {
    Fault(usize, Fault),
    Panic(usize),
    Cancelled,
}

impl Program {
    pub fn compile(work: Placed<'_>, device: &str, isa: Isa, threads: usize) -> Result<Self> {
        let mut program = Program {
            device: device.into(),
            threads,
            steps: Vec::new(),
            phases: Vec::new(),
            memory: MemorySet::default(),
            any_shared: false,
            buffers: Vec::new(),
        };
        let memory = match work.workspace {
            Some(place) => {
                program.touch(place, Access::Write)?;
                let operand = Operand::resolve(place, "workspace")?;
                Some((operand.base(), place.layout().bytes()))
            }
            None => None,
        };
        let workspace = Workspace {
            memory,
            angles: rope::table_bytes(work.computed())?,
        };
        let parts = parts(&work, isa, threads);
        for node in work.computed() {
            program.add(node, &parts, &work, isa, workspace)?;
        }
        program
            .phases
            .iter_mut()
            .for_each(|phase| phase.share(threads));
        program.any_shared = program.phases.iter().any(|phase| phase.shared);
        Ok(program)
    }

    fn touch(&mut self, place: &TensorRef, access: Access) -> Result<()> {
        let Some(memory) = memory_of(place) else {
            return Ok(()); // `Operand::resolve` says it
        };
        self.memory.add(memory, access)?;
        if !self
            .buffers
            .iter()
            .any(|buffer| Arc::ptr_eq(buffer, &place.buffer))
        {
            self.buffers.push(Arc::clone(&place.buffer));
        }
        Ok(())
    }

    fn add(
        &mut self,
        node: Node<'_>,
        parts: &[Part],
        work: &Placed<'_>,
        isa: Isa,
        workspace: Workspace,
    ) -> Result<()> {
        let (threads, part) = (self.threads, parts[node.id().index()]);
        let kernel = kernel_for(node).map_err(|reason| {
            Error::unsupported(&self.device, node.op().to_string(), reason.into_owned())
        })?;
        let mut resolve = |node: Node<'_>, access| {
            let place = work.place(node.id())?;
            let name = &node.tensor().name;
            if place.layout() != node.layout() {
                return Err(Error::invalid(format!(
                    "'{name}' is {}, but its place is for {}",
                    node.layout(),
                    place.layout()
                )));
            }
            self.touch(place, access)?;
            Operand::resolve(place, name)
        };
        let result = resolve(node, Access::Write)?;
        let written = node.op().written_sources();
        let sources = (0..node.tensor().sources.len())
            .map(|index| {
                node.source(index)
                    .map(|source| {
                        let access = if written.contains(&index) {
                            Access::Write
                        } else {
                            Access::Read
                        };
                        resolve(source, access)
                    })
                    .transpose()
            })
            .collect::<Result<_>>()?;
        let maker = match part {
            Part::ScaledNorm => Some(maker(node, parts, &mut resolve)?),
            Part::MakesColumns | Part::PacksColumns { made: true } => {
                let columns = node
                    .source(1)
                    .map(|columns| work.graph.node(work.graph.memory_of(columns.id())));
                columns
                    .map(|node| maker(node, parts, &mut resolve))
                    .transpose()?
            }
            _ => None,
        };
        let origin = match (part, maker) {
            (Part::SharesColumns | Part::JoinsProduct | Part::SharesAngles, _) => Origin::Ready,
            (Part::MakesColumns | Part::PacksColumns { .. }, Some(maker)) => Origin::Made(maker),
            _ => Origin::Source,
        };
        let operands = match part {
            Part::GatedProducts => Some(gated_operands(node, &mut resolve)?),
            _ => None,
        };
        let site = Site {
            node,
            isa,
            threads,
            origin,
            result,
            sources,
            workspace,
        };
        let first = self.phases.len();
        if !node.layout().is_empty() && !matches!(part, Part::Inner | Part::Later) {
            let phases = match (part, maker, operands) {
                (Part::ScaledNorm, Some(Maker::Norm { x, eps, scale, .. }), _) => {
                    vec![reduce::scaled_norm(&site, x, eps, scale)]
                }
                (Part::PacksColumns { .. }, ..) => matmul::pack(&site)?,
                (_, _, Some((product, weights, x))) => matmul::gated(&site, product, weights, x)?,
                _ => (kernel.build)(&site)?,
            };
            match self.phases.pop_if(|_| part == Part::JoinsProduct) {
                Some(before) => self
                    .phases
                    .push(phases.into_iter().fold(before, Phase::and)),
                None => self.phases.extend(phases),
            }
        }
        self.steps.push(Step {
            id: node.id(),
            phases: first..self.phases.len(),
            label: format!("{} '{}'", node.op().name(), node.tensor().name).into(),
        });
        Ok(())
    }

    /// Whether it was compiled for such a device: scratch memory is there for each of its threads.
    pub fn is_for(&self, device: &str, threads: usize) -> bool {
        *self.device == *device && self.threads == threads
    }

    /// Runs everything once.
    pub fn run(&self, pool: &Pool, control: RunControl<'_>) -> Result<()> {
        self.memory.with(|| {
            if self.any_shared && pool.threads() > 1 {
                self.run_shared(pool, control)
            } else {
                self.run_alone(control)
            }
        })
    }

    fn run_alone(&self, control: RunControl<'_>) -> Result<()> {
        let mut current = 0;
        let begin = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            for (number, step) in self.steps.iter().enumerate() {
                current = number;
                if control.cancel.is_cancelled() {
                    return Err(Trouble::Cancelled);
                }
                let start = control.observer.map(|_| begin.elapsed());
                for phase in &self.phases[step.phases.clone()] {
                    (phase.run)(0..phase.tasks, 0)
                        .map_err(|fault| Trouble::Fault(number, fault))?;
                }
                if let (Some(observer), Some(start)) = (control.observer, start) {
                    observer.ran(step.id, start, begin.elapsed().saturating_sub(start));
                }
            }
            Ok(())
        }));
        outcome
            .unwrap_or(Err(Trouble::Panic(current)))
            .map_err(|trouble| self.error(trouble))
    }

    fn run_shared(&self, pool: &Pool, control: RunControl<'_>) -> Result<()> {
        let trouble = Mutex::new(None);
        let outcome = pool.run(&|worker, team| {
            let report = |what| {
                trouble
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get_or_insert(what);
                team.ask_to_stop();
            };
            self.work(worker, team, control, &report);
        });
        if let Some(trouble) = trouble.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(self.error(trouble));
        }
        outcome.map_err(|panicked| Error::device(&self.device, panicked.to_string()))
    }

    /// One worker's way through all phases. Phases that are not shared run in worker 0, one after the other without
    /// barriers; all workers meet before and after each shared phase.
    fn work(&self, worker: usize, team: &Team, control: RunControl<'_>, report: &dyn Fn(Trouble)) {
        // Worker 0 has done phases that the others have not seen the end of. It stops on its own after trouble there;
        // the others learn of it at the next barrier.
        let (mut unseen, mut halted) = (false, false);
        let begin = Instant::now();
        for (number, step) in self.steps.iter().enumerate() {
            let start = (worker == 0)
                .then(|| control.observer.map(|_| begin.elapsed()))
                .flatten();
            if worker == 0 && !halted && control.cancel.is_cancelled() {
                report(Trouble::Cancelled);
                halted = true;
            }
            for phase in &self.phases[step.phases.clone()] {
                if !phase.shared {
                    if worker == 0 && !halted {
                        halted = !attempt(phase, 0..phase.tasks, number, worker, report);
                    }
                    unseen = true;
                    continue;
                }
                if unseen && !team.barrier() {
                    return;
                }
                unseen = false;
                loop {
                    let tasks = team.take(phase.tasks, phase.grain);
                    if tasks.is_empty() || !attempt(phase, tasks, number, worker, report) {
                        break;
                    }
                }
                if !team.barrier() {
                    return;
                }
            }
            if let (Some(observer), Some(start), false) = (control.observer, start, halted) {
                observer.ran(step.id, start, begin.elapsed().saturating_sub(start));
            }
        }
    }

    fn error(&self, trouble: Trouble) -> Error {
        let label = |number: usize| self.steps.get(number).map_or("", |step| &step.label);
        match trouble {
            Trouble::Cancelled => Error::Cancelled,
            Trouble::Panic(number) => Error::device(
                &self.device,
                format!("{}: a kernel panicked", label(number)),
            ),
            Trouble::Fault(number, fault) => Error::device(
                &self.device,
                format!(
                    "{}: element {} of source {} is {}, which is not one of the {} possible row numbers",
                    label(number),
                    fault.at,
                    fault.source,
                    fault.value,
                    fault.limit
                ),
            ),
        }
    }
}

/// What makes the rows of a scaled norm or of a gated unit.
fn maker<'g>(
    node: Node<'g>,
    parts: &[Part],
    resolve: &mut impl FnMut(Node<'g>, Access) -> Result<Operand>,
) -> Result<Maker> {
    let mut operand = |node: Node<'g>, index| {
        let source = node
            .source(index)
            .ok_or_else(|| Error::invalid(format!("{}: source {index} is missing", node.op())))?;
        resolve(source, Access::Read)
    };
    match (node.op(), node.source(0).map(|norm| (norm, norm.op()))) {
        (&Op::Glu { kind, .. }, _) => Ok(Maker::Gated {
            x: operand(node, 0)?,
            gate: operand(node, 1)?,
            kind,
        }),
        (Op::Mul, Some((norm, &Op::RmsNorm { eps }))) => {
            let is_later = |sum: &Node<'_>| parts[sum.id().index()] == Part::Later;
            let sum = match norm.source(0).filter(is_later) {
                Some(sum) => Some([operand(sum, 0)?, operand(sum, 1)?]),
                None => None,
            };
            // If it is a sum, writing it was announced when its node was added.
            Ok(Maker::Norm {
                sum,
                x: operand(norm, 0)?,
                eps,
                scale: operand(node, 1)?,
            })
        }
        (op, _) => Err(Error::invalid(format!("{op} makes no rows"))),
    }
}

/// One of the products that a gated unit is of, the weights of both, and their columns.
fn gated_operands<'g>(
    node: Node<'g>,
    resolve: &mut impl FnMut(Node<'g>, Access) -> Result<Operand>,
) -> Result<(Node<'g>, [Operand; 2], Operand)> {
    let missing = || Error::invalid(format!("{}: a product is missing", node.op()));
    let mut operand = |product: usize, index| {
        let product = node.source(product).ok_or_else(missing)?;
        resolve(product.source(index).ok_or_else(missing)?, Access::Read)
    };
    Ok((
        node.source(0).ok_or_else(missing)?,
        [operand(0, 0)?, operand(1, 0)?],
        operand(0, 1)?,
    ))
}

/// Runs tasks; whether that went well.
fn attempt(
    phase: &Phase,
    tasks: Range<usize>,
    step: usize,
    worker: usize,
    report: &dyn Fn(Trouble),
) -> bool {
    match catch_unwind(AssertUnwindSafe(|| (phase.run)(tasks, worker))) {
        Ok(Ok(())) => true,
        Ok(Err(fault)) => {
            report(Trouble::Fault(step, fault));
            false
        }
        Err(_) => {
            report(Trouble::Panic(step));
            false
        }
    }
}
