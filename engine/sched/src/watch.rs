//! Watched runs: the nodes of each split are cut into pieces behind those that somebody wants to see, and each piece is done before the next
//! one begins. Nodes that nobody wants to see run together.

use crate::bound::Bound;
use crate::compiler::Compiler;
use crate::executor::Executor;
use crate::plan::Plan;
use crate::run::{Pace, Run};
use crate::scheduler::Scheduler;
use samite_core::{CancelToken, Error, Graph, Placed, Prepared, Result, TensorId, TensorRef};
use std::collections::BTreeMap;

/// What a watcher of nodes wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Go on.
    Continue,
    /// Stop the run with [`Error::Stopped`].
    Stop,
}

/// Nodes of a split that run together, and what is seen after them.
pub(crate) struct Cut {
    /// The number of nodes before the end of the piece.
    pub end: usize,
    /// The last of them, and views of its result, as far as they are wanted.
    pub seen: Vec<TensorId>,
}

/// The splits of a plan in pieces, bound to memory.
#[derive(Default)]
pub(crate) struct Pieces {
    /// By split: the end of each piece.
    ends: Vec<Vec<usize>>,
    /// By split, then piece.
    pub prepared: Vec<Vec<Box<dyn Prepared>>>,
}

/// A watched run that has begun: where it is.
pub(crate) struct Walk {
    pub run: Run,
    /// How the last step went.
    pub last: Result<()>,
    /// By split.
    pub cuts: Vec<Vec<Cut>>,
    /// The split that is being worked on.
    pub position: Option<Position>,
    pub is_over: bool,
}

/// Where a watched run is inside of a split.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    pub split: usize,
    /// Pieces that were run.
    pub pieces: usize,
    /// Results of the last piece that were shown.
    pub shown: usize,
}

impl Walk {
    pub fn new(cuts: Vec<Vec<Cut>>) -> Self {
        Walk {
            run: Run::new(Pace::OneByOne),
            last: Ok(()),
            cuts,
            position: None,
            is_over: false,
        }
    }

    /// The next result of the last piece.
    pub fn next_seen(&mut self) -> Option<TensorId> {
        let position = self.position.as_mut()?;
        let last = position.pieces.checked_sub(1)?;
        let id = self.cuts[position.split][last].seen.get(position.shown)?;
        position.shown += 1;
        Some(*id)
    }
}

/// Where the splits of `plan` are cut, for someone who `wants` to see some nodes and views of their results.
pub(crate) fn cuts(plan: &Plan, mut wants: impl FnMut(TensorId) -> bool) -> Vec<Vec<Cut>> {
    let views = views(&plan.graph, &plan.live);
    let splits = plan.lowered.splits.iter();
    splits
        .map(|split| {
            let mut cuts = Vec::new();
            for (at, id) in split.nodes.iter().enumerate() {
                let results = std::iter::once(id).chain(views.get(id).into_iter().flatten());
                let seen: Vec<_> = results.copied().filter(|&id| wants(id)).collect();
                let end = at + 1;
                if !seen.is_empty() || end == split.nodes.len() {
                    cuts.push(Cut { end, seen });
                }
            }
            cuts
        })
        .collect()
}

/// The views of each computed node's result. Views of leaves have no node after which they could be seen.
fn views(graph: &Graph, live: &[bool]) -> BTreeMap<TensorId, Vec<TensorId>> {
    let mut node_of: BTreeMap<TensorId, TensorId> = BTreeMap::new();
    let mut views: BTreeMap<TensorId, Vec<TensorId>> = BTreeMap::new();
    for id in graph.ids().filter(|id| live[id.index()]) {
        let tensor = graph.tensor(id);
        if tensor.is_computed() {
            node_of.insert(id, id);
        } else if let Some((_, source)) = tensor.operands().next()
            && let Some(&node) = node_of.get(&source)
        {
            node_of.insert(id, node);
            views.entry(node).or_default().push(id);
        }
    }
    views
}

impl Pieces {
    fn fits(&self, cuts: &[Vec<Cut>]) -> bool {
        self.ends.len() == cuts.len()
            && self.ends.iter().zip(cuts).all(|(ends, cuts)| {
                let wanted = cuts.iter().map(|cut| cut.end);
                ends.iter().copied().eq(wanted)
            })
    }
}

impl Bound {
    /// Cuts the splits for the next run, if they are not cut that way already. Returns how many pieces were bound anew.
    pub(crate) fn cut(
        &mut self,
        plan: &Plan,
        cuts: &[Vec<Cut>],
        compiler: &mut Compiler,
        executor: &mut Executor,
        cancel: &CancelToken,
    ) -> Result<usize> {
        let copy = self.copy();
        if self.pieces[copy].fits(cuts) {
            return Ok(0);
        }
        self.pieces[copy] = Pieces::default();
        let (graph, mut pieces, mut count) = (&plan.lowered.graph, Pieces::default(), 0);
        for (number, (split, cuts)) in plan.lowered.splits.iter().zip(cuts).enumerate() {
            let device = plan.devices.get(split.device);
            if cuts.len() > 1 && !plan.devices.members_of(split.device).is_empty() {
                return Err(Error::unsupported(
                    device.name(),
                    "watching its results",
                    "they lie in pieces with its members: run the model on one device to see them",
                ));
            }
            let (mut start, mut prepared) = (0, Vec::with_capacity(cuts.len()));
            for &Cut { end, .. } in cuts {
                cancel.check()?;
                let nodes = &split.nodes[start..end];
                let compiled = compiler.compile(split.device, device, graph, nodes, cancel)?;
                let work = Placed {
                    graph,
                    nodes,
                    places: &self.places[copy],
                    workspace: self.workspaces[number].as_ref(),
                    compiled: compiled.as_ref(),
                };
                let stream = executor.stream(split.device);
                prepared.push(stream.prepare_with_members(work, &self.members[number])?);
                start = end;
            }
            count += prepared.len();
            pieces.ends.push(cuts.iter().map(|cut| cut.end).collect());
            pieces.prepared.push(prepared);
        }
        self.pieces[copy] = pieces;
        Ok(count)
    }
}

/// A run of the loaded graph that goes on when it is asked to: see [`Scheduler::watch`].
///
/// One that is dropped before its end stays undone from there on. What it wrote to stored tensors stays written.
pub struct WatchedRun<'s> {
    scheduler: &'s mut Scheduler,
    cancel: &'s CancelToken,
    walk: Walk,
}

impl<'s> WatchedRun<'s> {
    pub(crate) fn new(
        scheduler: &'s mut Scheduler,
        cancel: &'s CancelToken,
        cuts: Vec<Vec<Cut>>,
    ) -> Self {
        WatchedRun {
            scheduler,
            cancel,
            walk: Walk::new(cuts),
        }
    }

    /// The plan that runs.
    ///
    /// # Errors
    /// None, as long as the run goes on.
    pub fn plan(&self) -> Result<&Plan> {
        self.scheduler.current_plan()
    }

    /// Runs up to the next wanted result; says which it is and where it lies. Nothing is running then, so it may be read and written. `None`
    /// at the end.
    ///
    /// # Errors
    /// As [`Scheduler::run`]. The run is over then.
    pub fn advance(&mut self) -> Result<Option<(TensorId, TensorRef)>> {
        self.scheduler.advance(&mut self.walk, self.cancel)
    }

    /// Ends the run with `error`.
    ///
    /// # Errors
    /// `error`.
    pub fn fail(mut self, error: Error) -> Result<()> {
        self.walk.last = Err(error);
        self.walk.position = None;
        self.advance().map(|_| ())
    }
}
