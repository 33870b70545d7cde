//! Watched runs. Each split is cut into pieces after the watched nodes, and each piece is done
//! before the next one starts. The nodes between them run together.

use crate::bound::Bound;
use crate::compiler::Compiler;
use crate::executor::Executor;
use crate::plan::Plan;
use crate::run::{OverlapMode, Run};
use crate::scheduler::Scheduler;
use samite_core::{CancelToken, Error, Graph, PlacedGraph, Prepared, Result, TensorId, TensorRef};
use std::collections::BTreeMap;

/// Decision of a watcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Continue the run.
    Continue,
    /// Stop the run with [`Error::Stopped`].
    Stop,
}

/// A piece of a split: nodes that run together, and the results shown after them.
pub(crate) struct Cut {
    /// Number of nodes up to the end of the piece.
    pub end: usize,
    /// The last node and views of its result, if they are watched.
    pub seen: Vec<TensorId>,
}

/// Pieces of a plan's splits, bound to memory.
#[derive(Default)]
pub(crate) struct Pieces {
    /// Ends of the pieces, by split.
    ends: Vec<Vec<usize>>,
    /// Prepared pieces, by split, then piece.
    pub prepared: Vec<Vec<Box<dyn Prepared>>>,
}

/// Progress of a watched run.
pub(crate) struct Walk {
    pub run: Run,
    /// Result of the last step.
    pub last: Result<()>,
    /// Pieces by split.
    pub cuts: Vec<Vec<Cut>>,
    /// The current split.
    pub position: Option<Position>,
    pub is_over: bool,
}

/// Progress within a split.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    pub split: usize,
    /// Number of finished pieces.
    pub pieces: usize,
    /// Number of shown results of the last piece.
    pub shown: usize,
}

impl Walk {
    pub fn new(cuts: Vec<Vec<Cut>>) -> Self {
        Walk {
            run: Run::new(OverlapMode::OneByOne),
            last: Ok(()),
            cuts,
            position: None,
            is_over: false,
        }
    }

    /// Returns the next result of the last piece.
    pub fn next_seen(&mut self) -> Option<TensorId> {
        let position = self.position.as_mut()?;
        let last = position.pieces.checked_sub(1)?;
        let id = self.cuts[position.split][last].seen.get(position.shown)?;
        position.shown += 1;
        Some(*id)
    }
}

/// Returns the pieces of the splits of `plan`. `wants` selects the watched nodes and views of their
/// results.
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

/// Returns the views of each computed node's result. Views of leaves have no node after which they
/// could be shown.
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
    /// Cuts the splits for the next run, unless they are already cut in the same way. Returns the
    /// number of newly prepared pieces.
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
                let work = PlacedGraph {
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

/// A run of the loaded graph that the caller advances step by step. See [`Scheduler::watch`].
///
/// If it is dropped early, the rest of the run is skipped. Writes to stored tensors remain.
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

    /// Returns the plan of the run.
    ///
    /// # Errors
    /// None while the run is in progress.
    pub fn plan(&self) -> Result<&Plan> {
        self.scheduler.current_plan()
    }

    /// Runs up to the next watched result and returns its id and memory. Nothing is running then,
    /// so it may be read and written. Returns `None` at the end.
    ///
    /// # Errors
    /// As [`Scheduler::run`]. Then the run is over.
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
