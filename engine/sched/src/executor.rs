//! Execution of a plan's actions: waits, copies, splits.

use crate::bound::Bound;
use crate::devices::DeviceSet;
use crate::host_copies::HostCopier;
use crate::order::{Action, Lane, Wait, Work};
use crate::plan::Plan;
use crate::run::{OverlapMode, Run, RunStep};
use crate::trace::Trace;
use crate::watch::{Position, Walk};
use samite_core::{CancelToken, Device, Error, Prepared, Result, RunControl, Stream, TensorId};
use std::sync::Arc;

/// Streams of all devices, and everything else that runs of bound plans need.
pub(crate) struct Executor {
    streams: Vec<Box<dyn Stream>>,
    /// Thread limit of the streams.
    pub threads: Option<usize>,
    /// Streams only for copies, of devices that have them.
    copy_streams: Vec<Option<Box<dyn Stream>>>,
    pub host_copies: HostCopier,
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
            threads: None,
            host_copies: HostCopier::default(),
            trace: None,
        })
    }

    /// Limits devices that compute on the host to this number of threads, or to all.
    pub fn set_threads(&mut self, threads: Option<usize>) {
        self.threads = threads;
        for stream in &mut self.streams {
            stream.set_threads(threads);
        }
    }

    /// Closes the streams of device number `device`, which must be idle. Later devices are
    /// renumbered.
    pub fn remove_device(&mut self, device: usize) {
        self.streams.remove(device);
        self.copy_streams.remove(device);
    }

    /// Returns the compute stream of device number `device`.
    pub fn stream(&mut self, device: usize) -> &mut dyn Stream {
        &mut *self.streams[device]
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Box<dyn Stream>> {
        let copies = self.copy_streams.iter_mut().flatten();
        self.streams.iter_mut().chain(copies)
    }

    /// Returns the stream of a lane, or `None` for the host's lane.
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

    /// Waits until all work is done. Returns the first failure.
    pub fn synchronize(&mut self) -> Result<()> {
        let mut first = Ok(());
        for stream in self.all() {
            first = first.and(stream.synchronize());
        }
        first
    }

    /// Waits until all work is done, after a failure that was already reported.
    pub fn drain(&mut self) {
        for stream in self.all() {
            if let Err(error) = stream.synchronize() {
                tracing::debug!(%error, "while draining after a failed run");
            }
        }
    }

    /// Waits until all work is done, after a failure in runs of `bound`. Later runs do not wait for
    /// these runs.
    pub fn give_up(&mut self, bound: &mut Bound) {
        self.drain();
        bound.in_flight = 0;
    }

    /// Blocks until the awaited action is done: by its event, or else by waiting for its whole
    /// lane.
    pub fn wait_on_host(&mut self, plan: &Plan, bound: &Bound, wait: Wait) -> Result<()> {
        if !bound.must_wait(wait) {
            return Ok(());
        }
        match bound.awaited(wait) {
            Some(event) => event.synchronize(),
            None => match self.lane(plan.actions[wait.action].lane) {
                Some(stream) => stream.synchronize(),
                None => Ok(()),
            },
        }
    }

    fn wait(&mut self, plan: &Plan, bound: &Bound, lane: Lane, wait: Wait) -> Result<()> {
        if !bound.must_wait(wait) {
            return Ok(());
        }
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

    /// Runs a plan once. After a failure, nothing is in flight.
    pub fn run(&mut self, plan: &Arc<Plan>, bound: &mut Bound, cancel: &CancelToken) -> Result<()> {
        let mut run = Run::new(OverlapMode::Overlapped);
        let mut last = Ok(());
        self.host_copies.begin_run();
        loop {
            last = match run.step(&plan.actions, last, cancel.is_cancelled()) {
                RunStep::End(result) => {
                    if result.is_ok() {
                        bound.runs += 1;
                        bound.in_flight += 1;
                        bound.inputs_free = false;
                    }
                    return result;
                }
                step => self.perform(plan, bound, step, cancel),
            };
        }
    }

    /// Continues a watched run up to the next watched result. Every action is done before the next
    /// one is issued. After a failure, nothing is in flight.
    pub fn advance(
        &mut self,
        plan: &Arc<Plan>,
        bound: &mut Bound,
        cancel: &CancelToken,
        walk: &mut Walk,
    ) -> Result<Option<TensorId>> {
        while !walk.is_over {
            if let Some(id) = walk.next_seen() {
                return Ok(Some(id));
            }
            if let Some(position) = &mut walk.position {
                let Position { split, pieces, .. } = *position;
                if pieces < walk.cuts[split].len() && walk.last.is_ok() {
                    (position.pieces, position.shown) = (pieces + 1, 0);
                    let start = pieces.checked_sub(1);
                    let start = start.map_or(0, |before| walk.cuts[split][before].end);
                    let nodes = walk.cuts[split][pieces].end - start;
                    walk.last = self.piece(plan, bound, [split, pieces, nodes], cancel);
                    if walk.last.is_ok() {
                        continue;
                    }
                }
                walk.position = None;
            }
            let last = std::mem::replace(&mut walk.last, Ok(()));
            let step = walk.run.step(&plan.actions, last, cancel.is_cancelled());
            match step {
                RunStep::Issue(action) if let Work::Split(split) = plan.actions[action].work => {
                    walk.position = Some(Position {
                        split,
                        pieces: 0,
                        shown: 0,
                    });
                }
                RunStep::End(result) => {
                    walk.is_over = true;
                    result?;
                    bound.runs += 1;
                    bound.inputs_free = true;
                }
                step => walk.last = self.perform(plan, bound, step, cancel),
            }
        }
        Ok(None)
    }

    /// Performs one step.
    fn perform(
        &mut self,
        plan: &Arc<Plan>,
        bound: &mut Bound,
        step: RunStep,
        cancel: &CancelToken,
    ) -> Result<()> {
        match step {
            RunStep::Wait(lane, wait) => self.wait(plan, bound, lane, wait),
            RunStep::Issue(number) => {
                let action = &plan.actions[number];
                match action.work {
                    Work::Inputs => Ok(()),
                    Work::Copy(copy) => self.copy(plan, bound, action, copy),
                    Work::Split(split) => self.split(plan, bound, split, cancel),
                }
            }
            RunStep::Record(action) => {
                let stream = self.lane(plan.actions[action].lane);
                match stream.zip(bound.event_of(action)) {
                    Some((stream, event)) => stream.record(&**event),
                    None => Ok(()),
                }
            }
            RunStep::Finish(lane) => self
                .lane(lane)
                .map_or(Ok(()), |stream| stream.synchronize()),
            RunStep::Drain => {
                self.give_up(bound);
                Ok(())
            }
            RunStep::End(result) => result,
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
            None => match copy
                .experts
                .and_then(|id| Some((id, places[id.index()].as_ref()?)))
            {
                Some(ids) => self.host_copies.copy_experts(from, to, ids)?,
                None => self.host_copies.copy(from, to)?,
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
        let nodes = plan.lowered.splits[number].nodes.len();
        let copy = bound.copy();
        let prepared = &mut *bound.prepared[copy][number];
        self.run_prepared(plan, number, nodes, prepared, cancel, false)
    }

    /// Runs a piece of a split with this number of nodes, and waits for it.
    fn piece(
        &mut self,
        plan: &Arc<Plan>,
        bound: &mut Bound,
        [split, piece, nodes]: [usize; 3],
        cancel: &CancelToken,
    ) -> Result<()> {
        let copy = bound.copy();
        let prepared = &mut *bound.pieces[copy].prepared[split][piece];
        self.run_prepared(plan, split, nodes, prepared, cancel, true)
    }

    fn run_prepared(
        &mut self,
        plan: &Arc<Plan>,
        split: usize,
        nodes: usize,
        prepared: &mut dyn Prepared,
        cancel: &CancelToken,
        is_awaited: bool,
    ) -> Result<()> {
        let device = plan.lowered.splits[split].device;
        let start = self.trace.as_ref().map(Trace::now);
        let observer = self
            .trace
            .as_ref()
            .map(|trace| trace.observer(plan, device));
        let control = RunControl {
            cancel,
            observer: observer.as_ref(),
        };
        let stream = &mut self.streams[device];
        let mut result = stream.run(prepared, control);
        if is_awaited {
            // Failed work may still be in flight.
            result = result.and(stream.synchronize());
        }
        if let (Some(trace), Some(start), Ok(())) = (&self.trace, start, &result) {
            trace.split(plan, split, nodes, start);
        }
        result
    }
}

impl Drop for Executor {
    /// Waits for all work, which must not be running in memory that is freed.
    fn drop(&mut self) {
        self.drain();
    }
}
