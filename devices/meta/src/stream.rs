//! Executes a divided graph: every member, on its own thread or in its own process, runs its parts
//! of the nodes in order and exchanges data with the others.

use crate::comm::{Communicator, ProcessGroup, ThreadGroup, grow};
use crate::device::MetaDevice;
use crate::partition::{Collective, Exchange, PartitionStep};
use crate::shard_workers::{ShardJob, ShardWorkers};
use crate::state::{AxisRuns, SplitState, pieces};
use samite_core::{
    CancelToken, Device, Error, Layout, PlacedGraph, Prepared, Result, RunControl, Stream,
    TensorId, TensorRef,
};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

/// Stream and communicator of one member.
struct MemberStream {
    stream: Box<dyn Stream>,
    comm: Box<dyn Communicator>,
    scratch: HostScratch,
}

/// Host memory that stops growing once every step has run.
#[derive(Default)]
struct HostScratch {
    bytes: Vec<u8>,
    whole: Vec<u8>,
    numbers: Vec<f32>,
}

fn sized<T: Clone + Default>(list: &mut Vec<T>, len: usize) -> Result<&mut [T]> {
    grow(list, len)?;
    Ok(&mut list[..len])
}

/// A step of one member in a run.
enum Action {
    /// Copies an input from outside.
    Fetch { from: TensorRef, to: TensorRef },
    /// Computes nodes.
    Run(Box<dyn Prepared>),
    /// Sums the data of all members.
    Sum { from: TensorRef, to: TensorRef },
    /// Gathers the data of all members.
    Gather(Gather),
    /// Receives the data of the first member.
    Broadcast {
        from: Option<TensorRef>,
        to: TensorRef,
    },
    /// Copies an output to the outside.
    Give { from: TensorRef, to: TensorRef },
    /// Copies its part of an output to the outside.
    GivePart {
        from: TensorRef,
        to: TensorRef,
        axis: usize,
        runs: AxisRuns,
    },
    /// Gathers an output whose location differs between members.
    GiveGathered(Gather),
}

/// Shards that become a whole tensor.
struct Gather {
    from: Option<TensorRef>,
    to: TensorRef,
    layout: Layout,
    axis: usize,
    runs: AxisRuns,
    counts: Vec<usize>,
}

/// Connection of the members.
#[derive(Clone)]
enum Group {
    Threads(ThreadGroup),
    Processes(ProcessGroup),
}

impl Group {
    fn abort(&self, reason: &str) {
        match self {
            Group::Threads(group) => group.abort(reason),
            Group::Processes(group) => group.abort(reason),
        }
    }
}

/// Prepared work of all members, bound to memory.
struct MetaPrepared {
    /// Steps of each member of this process.
    actions: Arc<Vec<Mutex<Vec<Action>>>>,
    /// Members of the stream that prepared it.
    of: Arc<Vec<Mutex<MemberStream>>>,
}

impl Prepared for MetaPrepared {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

/// The stream of a divided device. All work is complete when a call returns.
pub(crate) struct MetaStream {
    device: Arc<MetaDevice>,
    /// Members of this process.
    seats: Arc<Vec<Mutex<MemberStream>>>,
    group: Group,
    shard_workers: ShardWorkers,
}

impl MetaStream {
    pub fn new(device: Arc<MetaDevice>) -> Result<Self> {
        let (group, ends) = match &device.group {
            None => {
                let size = device.members.len();
                let group = ThreadGroup::new(size, device.spins(), device.deadline);
                let ends = group.members().into_iter();
                let ends = ends.map(|end| Box::new(end) as Box<dyn Communicator>);
                (Group::Threads(group.clone()), ends.collect::<Vec<_>>())
            }
            Some(group) => (
                Group::Processes(group.clone()),
                vec![Box::new(group.communicator()) as _],
            ),
        };
        let members = device.members.here.clone();
        let shard_workers =
            ShardWorkers::new(&device.name, members.len(), device.spins(), device.deadline)?;
        let seats = device.members.devices[members]
            .iter()
            .zip(ends)
            .map(|(member, comm)| {
                Ok(Mutex::new(MemberStream {
                    stream: Arc::clone(member).open_stream()?,
                    comm,
                    scratch: HostScratch::default(),
                }))
            })
            .collect::<Result<_>>()?;
        Ok(MetaStream {
            shard_workers,
            seats: Arc::new(seats),
            group,
            device,
        })
    }

    fn lost(&self, message: impl Into<Box<str>>) -> Error {
        Error::DeviceLost {
            device: self.device.name.as_str().into(),
            message: message.into(),
        }
    }

    fn check_lost(&self) -> Result<()> {
        if self.shard_workers.is_lost() {
            Err(self.lost("a member does not come back from its work"))
        } else {
            Ok(())
        }
    }

    /// Returns the cause of several members' results: the first failure that is not a consequence
    /// of another member's.
    fn first_failure(&self, results: Vec<Option<Result<()>>>) -> Result<()> {
        let names = self.device.here();
        let mut failures = Vec::new();
        for (device, result) in names.zip(results) {
            match result {
                Some(Ok(())) => {}
                Some(Err(error)) => failures.push((device.name(), error)),
                None => {
                    let message =
                        format!("member {} does not come back from its work", device.name());
                    failures.insert(0, (device.name(), self.lost(message)));
                }
            }
        }
        let is_echo = |error: &Error| {
            matches!(error,
            Error::Device { device,
            message } if &**device == "meta" && message.starts_with("the members stopped"))
        };
        let at = failures
            .iter()
            .position(|(_, error)| !is_echo(error))
            .unwrap_or(0);
        if failures.is_empty() {
            return Ok(());
        }
        let (name, error) = failures.swap_remove(at);
        Err(match error {
            Error::Cancelled => Error::Cancelled,
            Error::DeviceLost { device, message } if *device != *self.device.name => {
                self.lost(format!("member {name}: {message}"))
            }
            error => error,
        })
    }
}

/// Locks a seat or its work. It is free unless a member is lost.
fn take<'a, T>(place: &'a Mutex<T>, device: &MetaDevice) -> Result<std::sync::MutexGuard<'a, T>> {
    match place.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => Err(Error::DeviceLost {
            device: device.name.as_str().into(),
            message: "a member does not come back from its work".into(),
        }),
    }
}

fn needed(place: Option<&TensorRef>) -> Result<TensorRef> {
    place
        .cloned()
        .ok_or_else(|| Error::invalid("a member's tensor has no place in its memory"))
}

impl Stream for MetaStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        self.prepare_with_members(work, &[])
    }

    fn prepare_with_members(
        &mut self,
        work: PlacedGraph<'_>,
        arenas: &[Option<TensorRef>],
    ) -> Result<Box<dyn Prepared>> {
        self.check_lost()?;
        let partition = self.device.partition(work.graph, work.nodes)?;
        let plans = self.device.plans(&partition)?;
        if let Some(group) = &self.device.group {
            // Compare before any member waits for a message that another process never sends.
            group.agree("graph", partition.fingerprint())?;
        }
        let mut all = Vec::new();
        let here = self.device.members.here.clone();
        for (seat, member) in here.enumerate() {
            let plan = &plans[member];
            let device = &self.device.members.devices[member];
            let graph = &partition.graphs[member];
            let own;
            let arena = match arenas.get(member) {
                Some(arena) => arena.as_ref(),
                // The caller provided no workspace.
                None => {
                    own = plan.allocate(&device.buffer_type())?;
                    own.as_ref()
                }
            };
            let (places, workspace) = plan.bind(graph, arena)?;
            let seat = &mut *take(&self.seats[seat], &self.device)?;
            let mut actions = Vec::new();
            for input in &partition.inputs {
                if let Some(local) = input.locals[member]
                    && let Some(to) = &places[local.index()]
                {
                    actions.push(Action::Fetch {
                        from: work.place(input.tensor)?.clone(),
                        to: to.clone(),
                    });
                }
            }
            for step in &partition.steps {
                match step {
                    PartitionStep::Run(nodes) if nodes[member].is_empty() => {}
                    PartitionStep::Run(nodes) => {
                        let prepared = seat.stream.prepare(PlacedGraph {
                            graph,
                            nodes: &nodes[member],
                            places: &places,
                            workspace: workspace.as_ref(),
                            compiled: None,
                        })?;
                        actions.push(Action::Run(prepared));
                    }
                    PartitionStep::Exchange(collective) => {
                        actions.push(self.exchange(collective, member, &places)?);
                    }
                }
            }
            for output in &partition.outputs {
                let to = work.place(output.tensor)?.clone();
                let place = |local: TensorId| needed(places[local.index()].as_ref());
                let from = output.locals[member].map(place).transpose()?;
                match (&output.state, from, &self.group) {
                    (SplitState::Split { axis, runs }, from, Group::Processes(_)) => {
                        let layout = *to.layout();
                        actions.push(Action::GiveGathered(Gather {
                            from,
                            to,
                            layout,
                            axis: *axis,
                            runs: runs.clone(),
                            counts: self.counts(&output.state, &layout)?,
                        }));
                    }
                    (SplitState::Split { axis, runs }, Some(from), Group::Threads(_)) => {
                        actions.push(Action::GivePart {
                            from,
                            to,
                            axis: *axis,
                            runs: runs.clone(),
                        });
                    }
                    (
                        SplitState::Mirrored | SplitState::Partial,
                        Some(from),
                        Group::Processes(_),
                    ) => {
                        actions.push(Action::Give { from, to });
                    }
                    (SplitState::Mirrored | SplitState::Partial, Some(from), Group::Threads(_))
                        if member == 0 =>
                    {
                        actions.push(Action::Give { from, to });
                    }
                    _ => {}
                }
            }
            all.push(Mutex::new(actions));
        }
        tracing::debug!(device = self.device.name, "{}", partition.summary());
        Ok(Box::new(MetaPrepared {
            actions: Arc::new(all),
            of: Arc::clone(&self.seats),
        }))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        self.check_lost()?;
        let Some(prepared) = prepared.as_any().downcast_mut::<MetaPrepared>() else {
            return Err(Error::invalid(
                "work that another device prepared cannot run here",
            ));
        };
        if !Arc::ptr_eq(&prepared.of, &self.seats) {
            return Err(Error::invalid(
                "work that another stream prepared cannot run here",
            ));
        }
        let (seats, actions) = (Arc::clone(&self.seats), Arc::clone(&prepared.actions));
        let (device, cancel) = (Arc::clone(&self.device), control.cancel.clone());
        let group = self.group.clone();
        let job: ShardJob = Arc::new(move |number| {
            let result = take(&seats[number], &device).and_then(|mut seat| {
                let mut actions = take(&actions[number], &device)?;
                seat.work(&mut actions, &cancel)
            });
            if let Err(error) = &result {
                // The others would wait for this member forever.
                let name = device.members.devices[device.members.here.start + number].name();
                group.abort(&format!("{name}: {error}"));
            }
            result
        });
        let results = self.shard_workers.run(&job);
        let result = self.first_failure(results);
        if let Group::Threads(group) = &self.group
            && group.is_poisoned()
            && !self.shard_workers.is_lost()
        {
            // All members have returned, so the group can be reset.
            group.reset();
        }
        result
    }

    fn set_threads(&mut self, threads: Option<usize>) {
        // The number of threads is for all members of this process together.
        let members = self.seats.len();
        for (member, seat) in self.seats.iter().enumerate() {
            let mine = threads.map(|all| {
                let more = usize::from(member < all % members);
                (all / members + more).max(1)
            });
            if let Ok(mut seat) = take(seat, &self.device) {
                seat.stream.set_threads(mine);
            }
        }
    }

    fn synchronize(&mut self) -> Result<()> {
        self.check_lost()
    }
}

impl MetaStream {
    /// Returns the bytes of each member's part.
    fn counts(&self, state: &SplitState, layout: &Layout) -> Result<Vec<usize>> {
        let bytes = |member| {
            let shape = state.local_shape(layout.shape(), member);
            Ok(Layout::contiguous(layout.dtype(), shape)?.bytes())
        };
        (0..self.device.members.len()).map(bytes).collect()
    }

    /// Performs a member's part of a collective operation.
    fn exchange(
        &self,
        collective: &Collective,
        member: usize,
        places: &[Option<TensorRef>],
    ) -> Result<Action> {
        let to = needed(places[collective.results[member].index()].as_ref())?;
        let from = collective.sources[member]
            .map(|id| needed(places[id.index()].as_ref()))
            .transpose()?;
        Ok(match (collective.exchange, &collective.from) {
            (Exchange::Sum, _) => Action::Sum {
                from: from.ok_or_else(|| Error::invalid("a member has no part of a sum"))?,
                to,
            },
            (Exchange::Gather, SplitState::Split { axis, runs }) => Action::Gather(Gather {
                from,
                to,
                layout: collective.layout,
                axis: *axis,
                runs: runs.clone(),
                counts: self.counts(&collective.from, &collective.layout)?,
            }),
            _ => Action::Broadcast { from, to },
        })
    }
}

impl MemberStream {
    fn work(&mut self, actions: &mut [Action], cancel: &CancelToken) -> Result<()> {
        for action in actions {
            cancel.check()?;
            self.act(action, cancel)?;
        }
        self.stream.synchronize()
    }

    fn act(&mut self, action: &mut Action, cancel: &CancelToken) -> Result<()> {
        let MemberStream {
            stream,
            comm,
            scratch,
        } = self;
        match action {
            Action::Fetch { from, to } => {
                let both_host = from.buffer.host().is_some() && to.buffer.host().is_some();
                if both_host && from.layout() == to.layout() {
                    return to.copy_from(from);
                }
                let bytes = sized(&mut scratch.bytes, from.layout().bytes())?;
                from.read(0, bytes)?;
                let layout = *from.layout();
                if layout.is_contiguous() {
                    return stream.write(to, 0, bytes);
                }
                let whole = sized(&mut scratch.whole, to.layout().bytes())?;
                compact(&layout, bytes, whole);
                stream.write(to, 0, whole)
            }
            Action::Run(prepared) => {
                let control = RunControl {
                    cancel,
                    observer: None,
                };
                stream.run(&mut **prepared, control)
            }
            Action::Sum { from, to } => {
                let numbers = sized(&mut scratch.numbers, from.layout().elements())?;
                stream.read(from, 0, bytemuck::cast_slice_mut(numbers))?;
                comm.all_reduce(numbers)?;
                stream.write(to, 0, bytemuck::cast_slice(numbers))
            }
            Action::Gather(gather) => {
                let whole = gather.whole(&mut **stream, &mut **comm, scratch)?;
                stream.write(&gather.to, 0, whole)
            }
            Action::GiveGathered(gather) => {
                let whole = gather.whole(&mut **stream, &mut **comm, scratch)?;
                gather.to.write(0, whole)
            }
            Action::Broadcast { from, to } => {
                let bytes = sized(&mut scratch.bytes, to.layout().bytes())?;
                if let (Some(from), 0) = (from, comm.rank()) {
                    stream.read(from, 0, bytes)?;
                }
                comm.broadcast(0, bytes)?;
                stream.write(to, 0, bytes)
            }
            Action::Give { from, to } => {
                let bytes = sized(&mut scratch.bytes, from.layout().bytes())?;
                stream.read(from, 0, bytes)?;
                to.write(0, bytes)
            }
            Action::GivePart {
                from,
                to,
                axis,
                runs,
            } => {
                let bytes = sized(&mut scratch.bytes, from.layout().bytes())?;
                stream.read(from, 0, bytes)?;
                let layout = *to.layout();
                let rank = comm.rank();
                pieces(&layout, *axis, runs, 0, layout.bytes(), |piece| {
                    if piece.member == rank {
                        to.write(piece.global, &bytes[piece.local..piece.local + piece.len])
                    } else {
                        Ok(())
                    }
                })
            }
        }
    }
}

impl Gather {
    /// Returns the data of all members.
    fn whole<'a>(
        &self,
        stream: &mut dyn Stream,
        comm: &mut dyn Communicator,
        scratch: &'a mut HostScratch,
    ) -> Result<&'a [u8]> {
        let (counts, layout) = (&self.counts, &self.layout);
        let own = counts[comm.rank()];
        let mine = sized(&mut scratch.bytes, own + layout.bytes())?;
        let (mine, all) = mine.split_at_mut(own);
        if let Some(from) = &self.from {
            stream.read(from, 0, mine)?;
        }
        comm.all_gather(mine, counts, all)?;
        let whole = sized(&mut scratch.whole, layout.bytes())?;
        pieces(layout, self.axis, &self.runs, 0, layout.bytes(), |piece| {
            let start: usize = counts[..piece.member].iter().sum::<usize>() + piece.local;
            whole[piece.global..piece.global + piece.len]
                .copy_from_slice(&all[start..start + piece.len]);
            Ok(())
        })?;
        Ok(whole)
    }
}

/// Copies the elements of a tensor with gaps or in another order to a contiguous one.
fn compact(layout: &Layout, bytes: &[u8], out: &mut [u8]) {
    let block = layout.dtype().block_bytes();
    let blocks = layout.shape()[0] / layout.dtype().block_len();
    let mut at = 0;
    for row in 0..layout.rows() {
        let [i1, i2, i3] = layout.row_index(row);
        let start = layout.row_offset(i1, i2, i3);
        for i in 0..blocks {
            let from = start + i * layout.strides()[0];
            out[at..at + block].copy_from_slice(&bytes[from..from + block]);
            at += block;
        }
    }
}

impl Drop for MetaStream {
    fn drop(&mut self) {
        if self.shard_workers.is_lost() {
            return;
        }
        for seat in self.seats.iter() {
            let mut seat = seat.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = seat.stream.synchronize();
        }
    }
}
