//! A plan bound to memory, with compiled splits and events.

use crate::buffer_pool::BufferPool;
use crate::compiler::Compiler;
use crate::executor::Executor;
use crate::memory_plan::Blocks;
use crate::order::{Lane, Wait, Work};
use crate::plan::Plan;
use crate::watch::Pieces;
use samite_core::{
    CancelToken, DType, Event, Layout, PlacedGraph, Prepared, Result, Slot, TensorId, TensorInfo,
    TensorRef, Usage,
};
use std::sync::Arc;

/// Everything that a run of a plan needs.
pub(crate) struct Bound {
    /// Tensors in memory, by pipeline copy, then tensor of the lowered graph.
    pub places: Vec<Vec<Option<TensorRef>>>,
    /// Scratch memory by split.
    pub workspaces: Vec<Option<TensorRef>>,
    /// Scratch memory by split and member of its device.
    pub members: Vec<Vec<Option<TensorRef>>>,
    /// Prepared splits, by pipeline copy, then split.
    pub prepared: Vec<Vec<Box<dyn Prepared>>>,
    /// The pieces of the splits in the last watched run, by pipeline copy. Empty before the first.
    pub pieces: Vec<Pieces>,
    /// Events by action, then pipeline copy. Present if an action waits and the device has events.
    events: Vec<Vec<Option<Arc<dyn Event>>>>,
    /// Number of runs so far.
    pub runs: usize,
    /// Number of recent runs that may still be in flight. Older runs are not waited for, since
    /// their events may report failures that were already handled.
    pub in_flight: usize,
    /// True if the inputs of the next run may be written.
    pub inputs_free: bool,
}

impl Bound {
    /// Binds every tensor of a plan to memory, lets devices compile and prepare the splits, and
    /// creates the events.
    pub fn new(
        plan: &Plan,
        buffer_pool: &BufferPool,
        compiler: &mut Compiler,
        executor: &mut Executor,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let graph = &plan.lowered.graph;
        let places = (0..plan.copies)
            .map(|copy| {
                let ids = graph.ids();
                ids.map(|id| place(plan, buffer_pool, id, copy)).collect()
            })
            .collect::<Result<Vec<Vec<_>>>>()?;
        for action in &plan.actions {
            if let (Work::Copy(number), None) = (action.work, action.copier) {
                let copy = &plan.lowered.copies[number];
                executor.host_copies.reserve(copy, graph, &places[0])?;
            }
        }
        let workspaces = (0..plan.lowered.splits.len())
            .map(|split| workspace(buffer_pool, plan.memory.workspaces[split].as_ref()))
            .collect::<Result<Vec<_>>>()?;
        let members = plan
            .memory
            .members
            .iter()
            .map(|members| {
                let members = members.iter();
                members
                    .map(|blocks| workspace(buffer_pool, blocks.as_ref()))
                    .collect()
            })
            .collect::<Result<Vec<Vec<_>>>>()?;
        let mut prepared: Vec<Vec<Box<dyn Prepared>>> = (0..plan.copies).map(|_| vec![]).collect();
        let scratch = workspaces.iter().zip(&members);
        for (split, (workspace, members)) in plan.lowered.splits.iter().zip(scratch) {
            cancel.check()?;
            let device = plan.devices.get(split.device);
            let compiled = compiler.compile(split.device, device, graph, &split.nodes, cancel)?;
            for (prepared, places) in prepared.iter_mut().zip(&places) {
                let work = PlacedGraph {
                    graph,
                    nodes: &split.nodes,
                    places,
                    workspace: workspace.as_ref(),
                    compiled: compiled.as_ref(),
                };
                let stream = executor.stream(split.device);
                prepared.push(stream.prepare_with_members(work, members)?);
            }
        }
        let event = |lane: Lane| match lane.device().map(|device| plan.devices.get(device)) {
            Some(device) if device.capabilities().events => device.create_event().map(Some),
            _ => Ok(None),
        };
        let events = plan
            .actions
            .iter()
            .map(|action| {
                (0..plan.copies)
                    .map(|_| {
                        if action.is_awaited {
                            event(action.lane)
                        } else {
                            Ok(None)
                        }
                    })
                    .collect()
            })
            .collect::<Result<_>>()?;
        Ok(Bound {
            pieces: places.iter().map(|_| Pieces::default()).collect(),
            places,
            workspaces,
            members,
            prepared,
            events,
            runs: 0,
            in_flight: 0,
            inputs_free: true,
        })
    }

    /// Returns the pipeline copy of the next run.
    pub fn copy(&self) -> usize {
        self.runs % self.places.len()
    }

    /// Returns the event that is recorded after an action of the next run.
    pub fn event_of(&self, action: usize) -> Option<&Arc<dyn Event>> {
        self.events[action][self.copy()].as_ref()
    }

    /// Returns whether `wait` of the next run refers to work that may still be in flight.
    pub fn must_wait(&self, wait: Wait) -> bool {
        wait.runs_ago <= self.in_flight
    }

    /// Returns the event for which `wait` of the next run waits.
    pub fn awaited(&self, wait: Wait) -> Option<&Arc<dyn Event>> {
        let copies = self.places.len();
        let slot = (self.runs + copies * (wait.runs_ago / copies + 1) - wait.runs_ago) % copies;
        self.events[wait.action][slot].as_ref()
    }
}

fn place(
    plan: &Plan,
    buffer_pool: &BufferPool,
    id: TensorId,
    copy: usize,
) -> Result<Option<TensorRef>> {
    let graph = &plan.lowered.graph;
    let tensor = graph.tensor(id);
    let base_id = graph.memory_of(id);
    let base = graph.tensor(base_id);
    let owner = match (&base.stored, &plan.memory.tensors[base_id.index()]) {
        (Some(stored), _) => stored.tensor().clone(),
        (None, Some(blocks)) => {
            let info = TensorInfo::new(&base.name, base.layout, Usage::Compute);
            buffer_pool.place(blocks, copy, &info)?
        }
        (None, None) => return Ok(None),
    };
    let offset = owner.slot.offset + tensor.view.map_or(0, |view| view.offset);
    Ok(Some(TensorRef {
        buffer: owner.buffer,
        slot: Slot {
            offset,
            layout: tensor.layout,
        },
    }))
}

fn workspace(buffer_pool: &BufferPool, blocks: Option<&Blocks>) -> Result<Option<TensorRef>> {
    let Some(blocks) = blocks else {
        return Ok(None);
    };
    let bytes = Layout::contiguous(DType::I8, [blocks.get(0).size, 1, 1, 1])?;
    let info = TensorInfo::new("workspace", bytes, Usage::Compute);
    buffer_pool.place(blocks, 0, &info).map(Some)
}
