//! Compiled graphs: a flat list of phases with everything resolved, and its execution.

use crate::detect::Isa;
use crate::fuse::{Fusion, fusions};
use crate::kernel::{Fault, InputSource, KernelContext, Phase, Prologue, Workspace};
use crate::kernels::{matmul, reduce, rope};
use crate::operand::Operand;
use crate::packed::memory_of;
use crate::table::kernel_for;
use samite_core::environment::Instant;
use samite_core::{
    Access, Buffer, Error, MemorySet, Node, Op, PlacedGraph, Result, RunControl, TensorId,
    TensorRef,
};
use samite_threads::{Pool, Team};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// Phases of one node.
struct NodePhases {
    id: TensorId,
    phases: Range<usize>,
    /// Operation and name, for errors.
    label: Box<str>,
}

/// Work that was compiled for repeated runs.
pub(crate) struct Program {
    device: Box<str>,
    threads: usize,
    steps: Vec<NodePhases>,
    phases: Vec<Phase>,
    memory: MemorySet,
    any_shared: bool,
    /// Keeps the memory alive to which addresses point.
    buffers: Vec<Arc<dyn Buffer>>,
}

/// Reason for the early end of a run.
enum RunError {
    Fault(usize, Fault),
    Panic(usize),
    Cancelled,
}

impl Program {
    pub fn compile(work: PlacedGraph<'_>, device: &str, isa: Isa, threads: usize) -> Result<Self> {
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
        let fusions = fusions(&work, isa, threads);
        for node in work.computed() {
            program.add(node, &fusions, &work, isa, workspace)?;
        }
        program
            .phases
            .iter_mut()
            .for_each(|phase| phase.share(threads));
        program.any_shared = program.phases.iter().any(|phase| phase.shared);
        Ok(program)
    }

    /// Creates a program of one phase without memory.
    #[cfg(test)]
    pub fn of_phase(mut phase: Phase, device: &str, threads: usize) -> Self {
        phase.share(threads);
        Program {
            device: device.into(),
            threads,
            steps: vec![NodePhases {
                id: TensorId::from_index(0),
                phases: 0..1,
                label: "".into(),
            }],
            any_shared: phase.shared,
            phases: vec![phase],
            memory: MemorySet::default(),
            buffers: Vec::new(),
        }
    }

    fn touch(&mut self, place: &TensorRef, access: Access) -> Result<()> {
        let Some(memory) = memory_of(place) else {
            return Ok(()); // `Operand::resolve` reports it
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
        fusions: &[Fusion],
        work: &PlacedGraph<'_>,
        isa: Isa,
        workspace: Workspace,
    ) -> Result<()> {
        let (threads, fusion) = (self.threads, fusions[node.id().index()]);
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
        let prologue = match fusion {
            Fusion::ScaledNorm => Some(prologue(node, fusions, &mut resolve)?),
            Fusion::FusedPrologue | Fusion::PreparesActivations { fused: true } => {
                let columns = node
                    .source(1)
                    .map(|columns| work.graph.node(work.graph.memory_of(columns.id())));
                columns
                    .map(|node| prologue(node, fusions, &mut resolve))
                    .transpose()?
            }
            _ => None,
        };
        let input = match (fusion, prologue) {
            (Fusion::SharesActivations | Fusion::JoinsPhase | Fusion::SharesAngles, _) => {
                InputSource::Shared
            }
            (Fusion::FusedPrologue | Fusion::PreparesActivations { .. }, Some(prologue)) => {
                InputSource::Fused(prologue)
            }
            _ => InputSource::Memory,
        };
        let operands = match fusion {
            Fusion::GatedEpilogue => Some(gated_operands(node, &mut resolve)?),
            _ => None,
        };
        let context = KernelContext {
            node,
            isa,
            threads,
            input,
            result,
            sources,
            workspace,
        };
        let first = self.phases.len();
        if !node.layout().is_empty()
            && !matches!(fusion, Fusion::Absorbed | Fusion::WrittenByPrologue)
        {
            let phases = match (fusion, prologue, operands) {
                (Fusion::ScaledNorm, Some(Prologue::Norm { x, eps, scale, .. }), _) => {
                    vec![reduce::scaled_norm(&context, x, eps, scale)]
                }
                (Fusion::PreparesActivations { .. }, ..) => matmul::pack(&context)?,
                (_, _, Some((product, weights, x))) => {
                    matmul::gated(&context, product, weights, x)?
                }
                _ => (kernel.build)(&context)?,
            };
            match self.phases.pop_if(|_| fusion == Fusion::JoinsPhase) {
                Some(before) => self
                    .phases
                    .push(phases.into_iter().fold(before, Phase::and)),
                None => self.phases.extend(phases),
            }
        }
        self.steps.push(NodePhases {
            id: node.id(),
            phases: first..self.phases.len(),
            label: format!("{} '{}'", node.op().name(), node.tensor().name).into(),
        });
        Ok(())
    }

    /// Returns whether the program was compiled for such a device, with scratch memory for each of
    /// its threads.
    pub fn is_for(&self, device: &str, threads: usize) -> bool {
        *self.device == *device && self.threads == threads
    }

    /// Runs the program once, with at most `threads` threads. That may be fewer than it was
    /// compiled for, which only bounds scratch memory and the sizes of tasks.
    pub fn run(&self, pool: &Pool, threads: usize, control: RunControl<'_>) -> Result<()> {
        let threads = threads.min(self.threads);
        self.memory.with(|| {
            if self.any_shared && threads > 1 {
                self.run_shared(pool, threads, control)
            } else {
                pool.bind_caller();
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
                    return Err(RunError::Cancelled);
                }
                let start = control.observer.map(|_| begin.elapsed());
                for phase in &self.phases[step.phases.clone()] {
                    for first in (0..phase.tasks).step_by(phase.most) {
                        if first > 0 && control.cancel.is_cancelled() {
                            return Err(RunError::Cancelled);
                        }
                        let tasks = first..phase.tasks.min(first + phase.most);
                        (phase.run)(tasks, 0).map_err(|fault| RunError::Fault(number, fault))?;
                    }
                }
                if let (Some(observer), Some(start)) = (control.observer, start) {
                    observer.ran(step.id, start, begin.elapsed().saturating_sub(start));
                }
            }
            Ok(())
        }));
        outcome
            .unwrap_or(Err(RunError::Panic(current)))
            .map_err(|trouble| self.error(trouble))
    }

    fn run_shared(&self, pool: &Pool, threads: usize, control: RunControl<'_>) -> Result<()> {
        let trouble = Mutex::new(None);
        let outcome = pool.run_with(threads, &|worker, team| {
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

    /// Runs one worker through all phases. Phases that are not shared run in worker 0, one after
    /// the other without barriers. All workers wait at a barrier before and after each shared
    /// phase.
    fn work(&self, worker: usize, team: &Team, control: RunControl<'_>, report: &dyn Fn(RunError)) {
        // Worker 0 has finished phases whose end the others have not seen yet. After a failure
        // there it stops on its own; the others learn of it at the next barrier.
        let (mut unseen, mut halted) = (false, false);
        let begin = Instant::now();
        for (number, step) in self.steps.iter().enumerate() {
            let start = (worker == 0)
                .then(|| control.observer.map(|_| begin.elapsed()))
                .flatten();
            if worker == 0 && !halted && control.cancel.is_cancelled() {
                report(RunError::Cancelled);
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
                    let tasks = team.take(phase.tasks, phase.grain, phase.most);
                    if tasks.is_empty() || !attempt(phase, tasks, number, worker, report) {
                        break;
                    }
                    if phase.most < phase.tasks {
                        if worker == 0 && control.cancel.is_cancelled() {
                            report(RunError::Cancelled);
                        }
                        if team.is_asked_to_stop() {
                            break;
                        }
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

    fn error(&self, trouble: RunError) -> Error {
        let label = |number: usize| self.steps.get(number).map_or("", |step| &step.label);
        match trouble {
            RunError::Cancelled => Error::Cancelled,
            RunError::Panic(number) => Error::device(
                &self.device,
                format!("{}: a kernel panicked", label(number)),
            ),
            RunError::Fault(number, fault) => Error::device(
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

/// Returns the prologue that computes the rows of a scaled norm or of a gated unit.
fn prologue<'g>(
    node: Node<'g>,
    fusions: &[Fusion],
    resolve: &mut impl FnMut(Node<'g>, Access) -> Result<Operand>,
) -> Result<Prologue> {
    let mut operand = |node: Node<'g>, index| {
        let source = node
            .source(index)
            .ok_or_else(|| Error::invalid(format!("{}: source {index} is missing", node.op())))?;
        resolve(source, Access::Read)
    };
    match (node.op(), node.source(0).map(|norm| (norm, norm.op()))) {
        (&Op::Glu { kind, .. }, _) => Ok(Prologue::Gated {
            x: operand(node, 0)?,
            gate: operand(node, 1)?,
            kind,
        }),
        (Op::Mul, Some((norm, &Op::RmsNorm { eps }))) => {
            let is_later = |sum: &Node<'_>| fusions[sum.id().index()] == Fusion::WrittenByPrologue;
            let sum = match norm.source(0).filter(is_later) {
                Some(sum) => Some([operand(sum, 0)?, operand(sum, 1)?]),
                None => None,
            };
            // If it is a sum, writing it was announced when its node was added.
            Ok(Prologue::Norm {
                sum,
                x: operand(norm, 0)?,
                eps,
                scale: operand(node, 1)?,
            })
        }
        (op, _) => Err(Error::invalid(format!("{op} makes no rows"))),
    }
}

/// Returns one of the two products of a gated unit, the weights of both, and their columns.
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

/// Runs tasks, and returns whether they succeeded.
fn attempt(
    phase: &Phase,
    tasks: Range<usize>,
    step: usize,
    worker: usize,
    report: &dyn Fn(RunError),
) -> bool {
    match catch_unwind(AssertUnwindSafe(|| (phase.run)(tasks, worker))) {
        Ok(Ok(())) => true,
        Ok(Err(fault)) => {
            report(RunError::Fault(step, fault));
            false
        }
        Err(_) => {
            report(RunError::Panic(step));
            false
        }
    }
}
