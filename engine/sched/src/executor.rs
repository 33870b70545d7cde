//! Issuing the actions of a plan: waits, copies, splits.

use crate::bound::Bound;
use crate::detour::Detour;
use crate::devices::DeviceSet;
use crate::order::{Action, Lane, Wait, Work};
use crate::plan::Plan;
use crate::run::{Pace, Run, Step};
use crate::trace::Trace;
use samite_core::{
    CancelToken, Device, Error, Placed, Result, RunControl, Stream, TensorId, TensorRef,
};
use std::sync::Arc;

/// What a watcher of nodes wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Go on.
    Continue,
    /// Stop the run with [`Error::Cancelled`].
    Stop,
}

/// Watches a run node by node.
pub(crate) struct Watcher<'a> {
    /// Whether it wants to see a node.
    pub wants: &'a mut dyn FnMut(TensorId) -> bool,
    /// Sees the value of one.
    pub see: &'a mut dyn FnMut(TensorId, &TensorRef) -> Result<Watch>,
}

/// The streams of all devices, and what is needed to run bound plans on them.
pub(crate) struct Executor {
    streams: Vec<Box<dyn Stream>>,
    /// Streams for copies only, of devices that have some.
    copy_streams: Vec<Option<Box<dyn Stream>>>,
    pub detour: Detour,
    pub trace: Option<Trace>,
}

impl Executor {
    /// Opens the streams.
    pub fn new(devices: &DeviceSet) -> Result<Self> {
        let open = |device: &Arc<dyn Device>| Arc::clone(device).open_stream();
        Ok(Executor {
            streams: devices.iter().map(open).collect::<Result<_>>()?,
            copy_streams: (0..devices.len())
                .map(|device| {
                    let has_one = devices.has_copy_stream(device);
                    has_one.then(|| open(devices.get(device))).transpose()
                })
                .collect::<Result<_>>()?,
            detour: Detour::default(),
            trace: None,
        })
    }

    /// The stream that device number `device` computes on.
    pub fn stream(&mut self, device: usize) -> &mut dyn Stream {
        &mut *self.streams[device]
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Box<dyn Stream>> {
        let copies = self.copy_streams.iter_mut().flatten();
        self.streams.iter_mut().chain(copies)
    }

    /// The stream of a lane; `None` for the host's.
    fn lane(&mut self, lane: Lane) -> Option<&mut dyn Stream> {
        match lane {
            Lane::Host => None,
            Lane::Device(device) => Some(self.stream(device)),
            Lane::Copies(device) => match &mut self.copy_streams[device] {
                Some(stream) => Some(&mut **stream),
                None => Some(&mut *self.streams[device]),
            },
        }
    }

    /// Waits until all work is done; the first failure is returned.
    pub fn synchronize(&mut self) -> Result<()> {
        let mut first = Ok(());
        for stream in self.all() {
            first = first.and(stream.synchronize());
        }
        first
    }

    /// Waits until all work is done, after a failure that is reported already.
    pub fn drain(&mut self) {
        for stream in self.all() {
            if let Err(error) = stream.synchronize() {
                tracing::debug!(%error, "while draining after a failed run");
            }
        }
    }

    /// Blocks until the awaited action is done: by its event, or by waiting for its whole lane.
    pub fn wait_on_host(&mut self, plan: &Plan, bound: &Bound, wait: Wait) -> Result<()> {
        match bound.awaited(wait) {
            Some(event) => event.synchronize(),
            None => match self.lane(plan.actions[wait.action].lane) {
                Some(stream) => stream.synchronize(),
                None => Ok(()),
            },
        }
    }

    fn wait(&mut self, plan: &Plan, bound: &Bound, lane: Lane, wait: Wait) -> Result<()> {
        let start = self.trace.as_ref().map(Trace::now);
        match (self.lane(lane), bound.awaited(wait)) {
            (Some(stream), Some(event)) => stream.wait(&**event)?,
            _ => self.wait_on_host(plan, bound, wait)?,
        }
        if let (Some(trace), Some(start)) = (&self.trace, start) {
            trace.wait(lane, wait, start);
        }
        Ok(())
    }

    /// Runs a plan once. With a watcher, node by node: every action is done before the next one is issued. After a failure, nothing is in
    /// flight.
    pub fn run(
        &mut self,
        plan: &Arc<Plan>,
        bound: &mut Bound,
        cancel: &CancelToken,
        mut watcher: Option<Watcher<'_>>,
    ) -> Result<()> {
        let pace = match watcher {
            None => Pace::Overlapped,
            Some(_) => Pace::OneByOne,
        };
        let mut run = Run::new(pace);
        let mut last = Ok(());
        loop {
            last = match run.step(&plan.actions, last, cancel.is_cancelled()) {
                Step::Wait(lane, wait) => self.wait(plan, bound, lane, wait),
                Step::Issue(action) => self.issue(plan, bound, action, cancel, &mut watcher),
                Step::Record(action) => {
                    let stream = self.lane(plan.actions[action].lane);
                    match stream.zip(bound.event_of(action)) {
                        Some((stream, event)) => stream.record(&**event),
                        None => Ok(()),
                    }
                }
                Step::Finish(lane) => self
                    .lane(lane)
                    .map_or(Ok(()), |stream| stream.synchronize()),
                Step::Drain => {
                    self.drain();
                    Ok(())
                }
                Step::End(result) => {
                    if result.is_ok() {
                        bound.runs += 1;
                        bound.inputs_free = pace == Pace::OneByOne;
                    }
                    return result;
                }
            };
        }
    }

    fn issue(
        &mut self,
        plan: &Arc<Plan>,
        bound: &mut Bound,
        number: usize,
        cancel: &CancelToken,
        watcher: &mut Option<Watcher<'_>>,
    ) -> Result<()> {
        let action = &plan.actions[number];
        match (action.work, watcher) {
            (Work::Inputs, _) => Ok(()),
            (Work::Copy(copy), _) => self.copy(plan, bound, action, copy),
            (Work::Split(split), None) => self.split(plan, bound, split, cancel),
            (Work::Split(split), Some(watcher)) => {
                self.split_in_pieces(plan, bound, split, cancel, watcher)
            }
        }
    }

    fn copy(&mut self, plan: &Plan, bound: &Bound, action: &Action, number: usize) -> Result<()> {
        let copy = &plan.lowered.copies[number];
        let places = &bound.places[bound.copy()];
        let (Some(from), Some(to)) = (&places[copy.from.index()], &places[copy.to.index()]) else {
            return Err(Error::invalid(format!(
                "copy of {} has no place in memory",
                copy.from
            )));
        };
        let start = self.trace.as_ref().map(Trace::now);
        match action.copier {
            Some(device) => match self.lane(action.lane) {
                Some(stream) => stream.copy(from, to)?,
                None => self.streams[device].copy(from, to)?,
            },
            None => match copy.experts.and_then(|ids| places[ids.index()].as_ref()) {
                Some(ids) => self.detour.copy_experts(from, to, ids)?,
                None => self.detour.copy(from, to)?,
            },
        }
        if let (Some(trace), Some(start)) = (&self.trace, start) {
            trace.copy(plan, copy, action.lane, start);
        }
        Ok(())
    }

    fn split(
        &mut self,
        plan: &Arc<Plan>,
        bound: &mut Bound,
        number: usize,
        cancel: &CancelToken,
    ) -> Result<()> {
        let device = plan.lowered.splits[number].device;
        let start = self.trace.as_ref().map(Trace::now);
        let observer = self
            .trace
            .as_ref()
            .map(|trace| trace.observer(plan, device));
        let control = RunControl {
            cancel,
            observer: observer.as_ref(),
        };
        let copy = bound.copy();
        let prepared = &mut bound.prepared[copy][number];
        self.streams[device].run(&mut **prepared, control)?;
        if let (Some(trace), Some(start)) = (&self.trace, start) {
            trace.split(plan, number, start);
        }
        Ok(())
    }

    /// Nodes up to the next one that is wanted run together.
    fn split_in_pieces(
        &mut self,
        plan: &Plan,
        bound: &Bound,
        number: usize,
        cancel: &CancelToken,
        watcher: &mut Watcher<'_>,
    ) -> Result<()> {
        let split = &plan.lowered.splits[number];
        let places = &bound.places[bound.copy()];
        let stream = &mut self.streams[split.device];
        let mut rest = &split.nodes[..];
        while !rest.is_empty() {
            let wanted = rest.iter().position(|&id| (watcher.wants)(id));
            let (now, later) = rest.split_at(wanted.map_or(rest.len(), |at| at + 1));
            rest = later;
            let mut prepared = stream.prepare(Placed {
                graph: &plan.lowered.graph,
                nodes: now,
                places,
                workspace: bound.workspaces[number].as_ref(),
                compiled: None,
            })?;
            let control = RunControl {
                cancel,
                observer: None,
            };
            // Work that failed may still be in flight, and must end before it is dropped.
            let issued = stream.run(&mut *prepared, control);
            let done = stream.synchronize();
            issued.and(done)?;
            if let (Some(_), Some(&id)) = (wanted, now.last()) {
                let place = places[id.index()].as_ref();
                let place = place
                    .ok_or_else(|| Error::invalid(format!("tensor {id} has no place in memory")))?;
                if (watcher.see)(id, place)? == Watch::Stop {
                    return Err(Error::Cancelled);
                }
            }
        }
        Ok(())
    }
}

impl Drop for Executor {
    /// Nothing may be running in memory that is given back.
    fn drop(&mut self) {
        self.drain();
    }
}
