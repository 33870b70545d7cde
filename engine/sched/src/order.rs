//! Order of a run: actions, the lanes they run on, and the waits between them.
//!
//! A run is a sequence of *actions*: copies and splits. Each runs on a *lane*: the host's, or that
//! of an asynchronous device, whose work continues while the host continues. Two actions conflict
//! if they touch overlapping memory and one of them writes. Conflicting actions on different lanes
//! need a *wait*. To find the waits, the code simulates enough consecutive runs to see every reuse
//! of a pipeline copy, with a vector clock for each lane (Mattern 1988).

use crate::devices::DeviceSet;
use crate::memory_plan::{Blocks, MemoryPlan};
use crate::split::{Lowered, Split};
use samite_core::{BufferType, Graph, MemoryId, Result, TensorId};
use serde::Serialize;
use std::sync::Arc;

/// Sequence in which an action runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    /// The host's thread. The action is done when the call returns.
    Host,
    /// An asynchronous device's compute stream, by device number.
    Device(usize),
    /// An asynchronous device's stream for copies, by device number.
    Copies(usize),
}

impl Lane {
    /// Returns the device number, or `None` for the host.
    pub fn device(self) -> Option<usize> {
        match self {
            Lane::Host => None,
            Lane::Device(device) | Lane::Copies(device) => Some(device),
        }
    }
}

/// Work of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// The application writes the inputs.
    Inputs,
    /// Makes this copy, by number in the lowered graph's copies.
    Copy(usize),
    /// Runs this split, by number.
    Split(usize),
}

/// One step of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Action {
    /// The work.
    pub work: Work,
    /// The lane.
    pub lane: Lane,
    /// The device whose stream makes a copy. If absent, the copy goes through the host.
    pub copier: Option<usize>,
    /// Actions that must be done before.
    pub waits: Vec<Wait>,
    /// True if another action waits for this one, so that its end must be recorded.
    pub is_awaited: bool,
}

/// An action of this or an earlier run that must be done first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Wait {
    /// The action's number.
    pub action: usize,
    /// Number of runs ago. 0 for this run.
    pub runs_ago: usize,
}

/// A memory region, for conflict detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Space {
    /// A chunk of the scheduler's memory: memory and chunk index.
    Planned(usize, usize),
    /// Other memory, of stored tensors.
    Stored(MemoryId),
}

/// Access to a byte range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ByteAccess {
    pub space: Space,
    pub start: usize,
    pub end: usize,
    pub write: bool,
}

impl ByteAccess {
    pub fn conflicts(&self, other: &ByteAccess) -> bool {
        self.space == other.space
            && self.start < other.end
            && other.start < self.end
            && (self.write || other.write)
    }
}

/// Lookup of the memory of tensors.
pub(crate) struct Map<'a> {
    pub graph: &'a Graph,
    pub memory: &'a MemoryPlan,
}

impl Map<'_> {
    /// Returns the bytes of tensor `id` for pipeline copy `copy`.
    pub fn touch(&self, id: TensorId, copy: usize, write: bool) -> Option<ByteAccess> {
        let tensor = self.graph.tensor(id);
        let base = self.graph.memory_of(id);
        let shift = tensor.view.map_or(0, |view| view.offset);
        let mut bytes = tensor.layout.bytes();
        let (space, start) = match &self.graph.tensor(base).stored {
            Some(stored) => {
                let place = stored.tensor().location();
                (Space::Stored(place.memory), place.offset)
            }
            None => {
                let blocks = self.memory.tensors.get(base.index())?.as_ref()?;
                // Extra bytes that a device requested after a tensor are accessed with it.
                if id == base {
                    bytes = bytes.max(blocks.get(copy).size);
                }
                self.planned(blocks, copy)
            }
        };
        Some(ByteAccess {
            space,
            start: start + shift,
            end: start + shift + bytes,
            write,
        })
    }

    fn planned(&self, blocks: &Blocks, copy: usize) -> (Space, usize) {
        let block = blocks.get(copy);
        (Space::Planned(blocks.memory, block.chunk), block.offset)
    }

    /// Returns all accesses of one computed node.
    pub fn node(&self, id: TensorId, copy: usize) -> impl Iterator<Item = ByteAccess> + '_ {
        let tensor = self.graph.tensor(id);
        let written = tensor.op.written_sources();
        tensor
            .operands()
            .filter_map(move |(index, source)| self.touch(source, copy, written.contains(&index)))
            .chain(self.touch(id, copy, true))
    }

    /// Returns the memory that a split's device keeps, and so may read until the split's end.
    pub fn kept<'a>(
        &'a self,
        split: &'a Split,
        copy: usize,
    ) -> impl Iterator<Item = ByteAccess> + 'a {
        let kept = split.kept.iter();
        kept.filter_map(move |keep| self.touch(keep.tensor, copy, false))
    }

    /// Returns the workspace of split number `split`.
    pub fn workspace(&self, split: usize, copy: usize) -> Option<ByteAccess> {
        let blocks = self.memory.workspaces[split].as_ref()?;
        let (space, start) = self.planned(blocks, copy);
        Some(ByteAccess {
            space,
            start,
            end: start + blocks.get(copy).size,
            write: true,
        })
    }

    /// Returns all accesses of an action, merged into few ranges.
    pub fn action(&self, work: Work, lowered: &Lowered, copy: usize) -> Vec<ByteAccess> {
        let mut touches: Vec<ByteAccess> = match work {
            Work::Inputs => {
                let is_input = |id: &TensorId| self.graph.tensor(*id).flags.input;
                self.graph
                    .ids()
                    .filter(is_input)
                    .filter_map(|id| self.touch(id, copy, true))
                    .collect()
            }
            Work::Copy(number) => {
                let c = &lowered.copies[number];
                [
                    self.touch(c.from, copy, false),
                    self.touch(c.to, copy, true),
                ]
                .into_iter()
                .chain([c.experts.and_then(|ids| self.touch(ids, copy, false))])
                .flatten()
                .collect()
            }
            Work::Split(number) => {
                let split = &lowered.splits[number];
                let nodes = split.nodes.iter().flat_map(|&id| self.node(id, copy));
                nodes
                    .chain(self.kept(split, copy))
                    .chain(self.workspace(number, copy))
                    .collect()
            }
        };
        touches.retain(|t| t.start < t.end);
        touches.sort_unstable_by_key(|t| (t.space, t.write, t.start));
        touches.dedup_by(|next, last| {
            let joins =
                next.space == last.space && next.write == last.write && next.start <= last.end;
            if joins {
                last.end = last.end.max(next.end);
            }
            joins
        });
        touches
    }
}

/// Vector clock: the known progress of each lane.
#[derive(Clone, Debug)]
pub(crate) struct Clock(Vec<usize>);

impl Clock {
    pub fn new(lanes: usize) -> Self {
        Clock(vec![0; lanes])
    }

    pub fn join(&mut self, other: &Clock) {
        self.0
            .iter_mut()
            .zip(&other.0)
            .for_each(|(a, b)| *a = (*a).max(*b));
    }

    pub fn tick(&mut self, lane: usize) {
        self.0[lane] += 1;
    }
}

/// Returns the number of a lane. The host is lane 0, device `i` has lanes `2 i + 1` and `2 i + 2`.
pub(crate) fn lane_number(lane: Lane) -> usize {
    match lane {
        Lane::Host => 0,
        Lane::Device(device) => 2 * device + 1,
        Lane::Copies(device) => 2 * device + 2,
    }
}

/// Returns the number of lanes for this number of devices.
pub(crate) fn lane_count(devices: usize) -> usize {
    2 * devices + 1
}

/// Returns the actions of one run, with the waits that consecutive runs need.
pub fn order(
    lowered: &Lowered,
    memory: &MemoryPlan,
    devices: &DeviceSet,
    copies: usize,
) -> Result<Vec<Action>> {
    let mut actions = vec![Action {
        work: Work::Inputs,
        lane: Lane::Host,
        copier: None,
        waits: Vec::new(),
        is_awaited: false,
    }];
    for (number, split) in lowered.splits.iter().enumerate() {
        for &copy in &split.copies {
            let copier = copier(lowered, copy, split.device, devices);
            let lane = match copier {
                Some(device) if devices.has_copy_stream(device) => Lane::Copies(device),
                Some(device) if devices.is_asynchronous(device) => Lane::Device(device),
                _ => Lane::Host,
            };
            actions.push(Action {
                work: Work::Copy(copy),
                lane,
                copier,
                waits: Vec::new(),
                is_awaited: false,
            });
        }
        let lane = if devices.is_asynchronous(split.device) {
            Lane::Device(split.device)
        } else {
            Lane::Host
        };
        actions.push(Action {
            work: Work::Split(number),
            lane,
            copier: None,
            waits: Vec::new(),
            is_awaited: false,
        });
    }
    if actions.iter().any(|action| action.lane != Lane::Host) {
        find_waits(&mut actions, lowered, memory, devices, copies);
    }
    Ok(actions)
}

/// Returns the memory from which a tensor is copied.
pub(crate) fn origin<'a>(
    lowered: &'a Lowered,
    from: TensorId,
    devices: &'a DeviceSet,
) -> &'a Arc<dyn BufferType> {
    let base = lowered.graph.memory_of(from);
    match &lowered.graph.tensor(base).stored {
        Some(stored) => stored.tensor().buffer.buffer_type(),
        None => target(
            devices,
            lowered.devices[base.index()].unwrap_or(devices.last()),
        ),
    }
}

/// Returns the memory to which copies for `device` go.
fn target(devices: &DeviceSet, device: usize) -> &Arc<dyn BufferType> {
    &devices.memories()[devices.memory_of(device)]
}

/// Returns the device that can make a copy: the receiver or the sender.
fn copier(lowered: &Lowered, number: usize, receiver: usize, devices: &DeviceSet) -> Option<usize> {
    let copy = &lowered.copies[number];
    if copy.experts.is_some() {
        return None; // the host reads which experts are needed
    }
    let (from, to) = (
        origin(lowered, copy.from, devices),
        target(devices, receiver),
    );
    if devices.get(receiver).can_copy(from, to) {
        return Some(receiver);
    }
    (0..devices.len())
        .find(|&d| devices.get(d).supports_buffer_type(from) && devices.get(d).can_copy(from, to))
}

/// Returns whether two actions conflict. Both lists are ordered by space.
fn conflict(mine: &[ByteAccess], theirs: &[ByteAccess]) -> bool {
    mine.chunk_by(|a, b| a.space == b.space).any(|mine| {
        let space = mine[0].space;
        let first = theirs.partition_point(|touch| touch.space < space);
        let mut theirs = theirs[first..].iter().take_while(|t| t.space == space);
        theirs.any(|b| mine.iter().any(|a| a.conflicts(b)))
    })
}

fn find_waits(
    actions: &mut [Action],
    lowered: &Lowered,
    memory: &MemoryPlan,
    devices: &DeviceSet,
    copies: usize,
) {
    struct AccessHistory {
        /// Position in issue order.
        number: usize,
        action: usize,
        run: usize,
        clock: Clock,
    }
    let map = Map {
        graph: &lowered.graph,
        memory,
    };
    let touches: Vec<Vec<Vec<ByteAccess>>> = actions
        .iter()
        .map(|action| {
            (0..copies)
                .map(|copy| map.action(action.work, lowered, copy))
                .collect()
        })
        .collect();
    let lanes = lane_count(devices.len());
    let mut clocks = vec![Clock::new(lanes); lanes];
    // Past actions by lane. Action number `n` of a lane made its clock `n + 1`.
    let mut past: Vec<Vec<AccessHistory>> = (0..lanes).map(|_| Vec::new()).collect();
    let mut issued = 0;
    // After `copies` runs, every pipeline copy is used for the second time. One more run shows the
    // steady state.
    for run in 0..copies + 2 {
        for number in 0..actions.len() {
            let lane = lane_number(actions[number].lane);
            // The host issues the work, so everything that the host has waited for is done.
            let mut clock = clocks[lane].clone();
            clock.join(&clocks[0]);
            let mine = &touches[number][run % copies];
            // From the newest to the oldest of the actions that are not already ordered before this
            // one.
            let mut rest: Vec<usize> = past.iter().map(Vec::len).collect();
            while let Some(earlier) = (0..lanes)
                .filter(|&lane| rest[lane] > clock.0[lane])
                .map(|lane| (&past[lane][rest[lane] - 1], lane))
                .max_by_key(|(earlier, _)| earlier.number)
                .map(|(earlier, lane)| {
                    rest[lane] -= 1;
                    earlier
                })
            {
                let theirs = &touches[earlier.action][earlier.run % copies];
                if conflict(mine, theirs) {
                    clock.join(&earlier.clock);
                    let wait = Wait {
                        action: earlier.action,
                        runs_ago: run - earlier.run,
                    };
                    if !actions[number].waits.contains(&wait) {
                        actions[number].waits.push(wait);
                    }
                }
            }
            clock.tick(lane);
            clocks[lane] = clock.clone();
            past[lane].push(AccessHistory {
                number: issued,
                action: number,
                run,
                clock,
            });
            issued += 1;
        }
    }
    for number in 0..actions.len() {
        for wait in actions[number].waits.clone() {
            actions[wait.action].is_awaited = true;
        }
    }
}
