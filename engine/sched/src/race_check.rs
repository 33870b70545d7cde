//! Checks a plan for data races, independently of how its waits were computed.
//!
//! The checker simulates execution of a plan, node by node and byte range by byte range. Every pair
//! of conflicting accesses must have a happens-before edge. The checker shares no code with the
//! computation of waits: it determines accesses and clocks on its own. Tests run it over random
//! graphs and devices.

use crate::memory_plan::Blocks;
use crate::order::{Lane, Wait, Work};
use crate::plan::Plan;
use samite_core::{MemoryId, TensorId};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// A byte range of a memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MemoryRange {
    memory: Memory,
    range: Range<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Memory {
    /// The scheduler's memory, by memory and chunk.
    Chunk(usize, usize),
    /// Memory of stored tensors.
    Elsewhere(MemoryId),
}

impl MemoryRange {
    fn overlap(&self, other: &MemoryRange) -> bool {
        self.memory == other.memory
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }

    fn of_block(blocks: &Blocks, copy: usize, range: Range<usize>) -> Self {
        let block = blocks.get(copy);
        MemoryRange {
            memory: Memory::Chunk(blocks.memory, block.chunk),
            range: block.offset + range.start..block.offset + range.end,
        }
    }

    /// Returns the bytes of tensor `id` of the lowered graph for pipeline copy `copy`, or `None` if
    /// it is not needed.
    fn of_tensor(plan: &Plan, id: TensorId, copy: usize) -> Option<Self> {
        let graph = &plan.lowered.graph;
        let tensor = graph.tensor(id);
        let (owner, first) = match tensor.view {
            Some(view) => (view.base, view.offset),
            None => (id, 0),
        };
        let mut range = first..first + tensor.layout.bytes();
        if let Some(stored) = &graph.tensor(owner).stored {
            let place = stored.tensor();
            let start = place.buffer.location().offset + place.slot.offset;
            return Some(MemoryRange {
                memory: Memory::Elsewhere(place.buffer.location().memory),
                range: start + range.start..start + range.end,
            });
        }
        let blocks = plan.memory.tensors[owner.index()].as_ref()?;
        // Devices may write to extra room that they requested after the elements.
        if owner == id {
            range.end = range.end.max(blocks.get(copy).size);
        }
        Some(MemoryRange::of_block(blocks, copy, range))
    }
}

/// Memory accesses of one action.
#[derive(Debug, Default)]
struct Accesses {
    reads: Vec<MemoryRange>,
    writes: Vec<MemoryRange>,
}

impl Accesses {
    fn read(&mut self, bytes: Option<MemoryRange>) {
        self.reads
            .extend(bytes.filter(|bytes| !bytes.range.is_empty()));
    }

    fn write(&mut self, bytes: Option<MemoryRange>) {
        self.writes
            .extend(bytes.filter(|bytes| !bytes.range.is_empty()));
    }

    fn new(plan: &Plan, work: Work, copy: usize) -> Self {
        let graph = &plan.lowered.graph;
        let at = |id: TensorId| MemoryRange::of_tensor(plan, id, copy);
        let mut all = Accesses::default();
        match work {
            Work::Inputs => {
                for id in graph.ids().filter(|&id| graph.tensor(id).flags.input) {
                    all.write(at(id));
                }
            }
            Work::Copy(number) => {
                let moved = &plan.lowered.copies[number];
                all.read(at(moved.from));
                all.write(at(moved.to));
                // The host reads the ids of the needed experts.
                all.read(moved.experts.and_then(at));
            }
            Work::Split(number) => {
                let split = &plan.lowered.splits[number];
                for &id in &split.nodes {
                    let tensor = graph.tensor(id);
                    all.write(at(id));
                    for (index, &source) in tensor.sources.iter().enumerate() {
                        let Some(source) = source else { continue };
                        if tensor.op.written_sources().contains(&index) {
                            all.write(at(source));
                        }
                        all.read(at(source));
                    }
                }
                for keep in &split.kept {
                    all.read(at(keep.tensor));
                }
                // Devices may overwrite scratch memory.
                all.write(
                    plan.memory.workspaces[number].as_ref().map(|blocks| {
                        MemoryRange::of_block(blocks, copy, 0..blocks.get(copy).size)
                    }),
                );
            }
        }
        all
    }

    /// Returns `None` if this action may run concurrently with the `earlier` one. Otherwise returns
    /// whether this action writes.
    fn conflict(&self, earlier: &Accesses) -> Option<bool> {
        let meet = |mine: &[MemoryRange], theirs: &[MemoryRange]| {
            mine.iter().any(|a| theirs.iter().any(|b| a.overlap(b)))
        };
        if meet(&self.writes, &earlier.reads) || meet(&self.writes, &earlier.writes) {
            return Some(true);
        }
        meet(&self.reads, &earlier.writes).then_some(false)
    }
}

/// Two conflicting accesses without an order between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Race {
    /// The access that was issued first: run and action.
    pub first: (usize, usize),
    /// The access that was issued later without waiting.
    pub second: (usize, usize),
    /// True if the later one writes.
    pub second_writes: bool,
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "action {} of run {} {} memory that action {} of run {} may still use",
            self.second.1,
            self.second.0,
            if self.second_writes {
                "writes"
            } else {
                "reads"
            },
            self.first.1,
            self.first.0
        )
    }
}

/// Simulates `runs` consecutive runs of `plan` and returns every race.
pub fn check(plan: &Plan, runs: usize) -> Vec<Race> {
    /// An issued action: its accesses, and all actions that are certainly done before it ends,
    /// including itself.
    struct Issued {
        at: (usize, usize),
        accesses: Accesses,
        done_before: Vec<bool>,
    }
    if plan.actions.iter().all(|action| action.lane == Lane::Host) {
        return Vec::new(); // everything is done in order of issue
    }
    let total = runs * plan.actions.len();
    let mut issued: Vec<Issued> = Vec::with_capacity(total);
    // The last issued action of each lane.
    let mut last: BTreeMap<Lane, usize> = BTreeMap::new();
    let mut races = Vec::new();
    for run in 0..runs {
        for (number, action) in plan.actions.iter().enumerate() {
            let mut done = vec![false; total];
            let mut comes_after = |number: usize| {
                let theirs = &issued[number].done_before;
                done.iter_mut().zip(theirs).for_each(|(a, b)| *a |= b);
            };
            // A lane runs in order. Work of the host, which issues everything, is done.
            let before = [last.get(&action.lane), last.get(&Lane::Host)];
            before.into_iter().flatten().for_each(|&n| comes_after(n));
            for Wait { action, runs_ago } in &action.waits {
                if let Some(run) = run.checked_sub(*runs_ago) {
                    comes_after(run * plan.actions.len() + action);
                }
            }
            let accesses = Accesses::new(plan, action.work, run % plan.copies);
            for (earlier, _) in issued.iter().zip(&done).filter(|(_, done)| !**done) {
                if let Some(second_writes) = accesses.conflict(&earlier.accesses) {
                    races.push(Race {
                        first: earlier.at,
                        second: (run, number),
                        second_writes,
                    });
                }
            }
            done[issued.len()] = true;
            last.insert(action.lane, issued.len());
            issued.push(Issued {
                at: (run, number),
                accesses,
                done_before: done,
            });
        }
    }
    races
}

/// Checks that tensors in use at the same time do not share memory, and that all memory is aligned
/// and inside its chunk. Returns a description of each violation.
pub fn check_memory(plan: &Plan) -> Vec<String> {
    let graph = &plan.lowered.graph;
    let mut problems = Vec::new();
    // First and last step at which each memory is in use, in issue order.
    let mut steps: Vec<Option<(usize, usize)>> = vec![None; graph.len()];
    let mut inherits = vec![None; graph.len()];
    let mut step = 0;
    let touch_step = |id, at: usize, steps: &mut Vec<Option<(usize, usize)>>| {
        let base: samite_core::TensorId = graph.memory_of(id);
        let range = steps[base.index()].get_or_insert((at, at));
        range.1 = at;
    };
    for split in &plan.lowered.splits {
        for &c in &split.copies {
            step += 1;
            let copy = &plan.lowered.copies[c];
            for id in [copy.from, copy.to].into_iter().chain(copy.experts) {
                touch_step(id, step, &mut steps);
            }
        }
        for &id in &split.nodes {
            step += 1;
            for (index, source) in graph.tensor(id).operands() {
                touch_step(source, step, &mut steps);
                let start = |id| {
                    let bytes = MemoryRange::of_tensor(plan, id, 0);
                    bytes.map(|bytes| (bytes.memory, bytes.range.start))
                };
                let same = start(graph.memory_of(source)) == start(id);
                if same
                    && graph.memory_of(source) != graph.memory_of(id)
                    && graph.tensor(id).op.may_overwrite(index)
                {
                    inherits[id.index()] = Some(graph.memory_of(source));
                }
            }
            touch_step(id, step, &mut steps);
            // Kept memory is in use beyond the node, so even the node's result cannot reuse it.
            step += 1;
            let ends = split.kept.iter().filter(|keep| keep.until == id);
            for keep in ends {
                if steps[graph.memory_of(keep.tensor).index()].is_some() {
                    touch_step(keep.tensor, step, &mut steps);
                }
            }
        }
    }
    for id in graph.ids() {
        let tensor = graph.tensor(id);
        let kept = tensor.flags.input
            || matches!(tensor.op, samite_core::Op::Leaf) && id.index() < plan.graph.len();
        if let (true, Some(range)) = (kept, steps[id.index()].as_mut()) {
            *range = (0, usize::MAX);
        }
        if tensor.flags.output
            && let Some(range) = steps[graph.memory_of(id).index()].as_mut()
        {
            range.1 = usize::MAX;
        }
    }
    let owned: Vec<_> = graph
        .ids()
        .filter(|id| plan.memory.tensors[id.index()].is_some() && steps[id.index()].is_some())
        .collect();
    for (i, &a) in owned.iter().enumerate() {
        for copy in 0..plan.copies {
            if let Some(blocks) = &plan.memory.tensors[a.index()] {
                let block = blocks.get(copy);
                let alignment = plan.devices.memories()[blocks.memory].alignment();
                let chunk = plan.memory.chunks[blocks.memory]
                    .get(block.chunk)
                    .copied()
                    .unwrap_or(0);
                if block.offset % alignment != 0
                    || block.offset + block.size > chunk
                    || block.size < graph.tensor(a).layout.bytes()
                {
                    problems.push(format!(
                        "{a} has an impossible place {block:?} in a chunk of {chunk} bytes"
                    ));
                }
            }
        }
        for &b in &owned[..i] {
            let (Some(x), Some(y)) = (steps[a.index()], steps[b.index()]) else {
                continue;
            };
            // The last use of one may be the first use of the other only if the result reuses the
            // operand's memory.
            let overlap_in_time = x.0 < y.1 && y.0 < x.1
                || x.0 == y.1 && inherits[a.index()] != Some(b)
                || y.0 == x.1 && inherits[b.index()] != Some(a);
            if !overlap_in_time {
                continue;
            }
            for (ca, cb) in (0..plan.copies).flat_map(|ca| (0..plan.copies).map(move |cb| (ca, cb)))
            {
                if let (Some(p), Some(q)) = (
                    MemoryRange::of_tensor(plan, a, ca),
                    MemoryRange::of_tensor(plan, b, cb),
                ) && p.overlap(&q)
                {
                    problems.push(format!(
                        "{a} and {b} are in use at the same time and share memory"
                    ));
                    break;
                }
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Assignments, DeviceSet, Options};
    use samite_core::{DType, Graph, KeepAlive};
    use samite_reference::{ReferenceDevice, ReferenceOptions};

    /// Returns a plan that alternates between two asynchronous devices.
    fn plan(copies: usize) -> Plan {
        let device = |name: &str| -> std::sync::Arc<dyn samite_core::Device> {
            let options = ReferenceOptions {
                asynchronous: true,
                events: true,
                ..ReferenceOptions::named(name)
            };
            ReferenceDevice::new(options)
        };
        let devices = DeviceSet::new(vec![device("a"), device("b")]).unwrap();
        let mut graph = Graph::new();
        let mut assignments = Assignments::new();
        let mut x = graph.input("x", DType::F32, [64, 1, 1, 1]).unwrap();
        for i in 0..6 {
            x = graph.cumsum(x).unwrap();
            assignments.set(x, i % 2);
        }
        graph.set_output(x);
        Plan::new(
            &graph,
            &devices,
            &assignments,
            &Options {
                copies,
                ..Options::default()
            },
        )
        .unwrap()
    }

    #[test]
    fn removing_any_wait_causes_a_race() {
        for copies in [1, 2, 4] {
            let complete = plan(copies);
            let runs = 3 * copies + 3;
            assert_eq!(check(&complete, runs), []);
            let waits: Vec<_> = complete
                .actions
                .iter()
                .enumerate()
                .flat_map(|(a, action)| (0..action.waits.len()).map(move |w| (a, w)))
                .collect();
            assert!(!waits.is_empty());
            for (action, wait) in waits {
                let mut lacking = plan(copies);
                let wait = lacking.actions[action].waits.remove(wait);
                assert!(
                    !check(&lacking, runs).is_empty(),
                    "{copies} copies: nothing happens without {wait:?} of action {action}"
                );
            }
        }
    }

    #[test]
    fn copies_before_expert_selection_are_races() {
        let device = |name: &str| {
            ReferenceDevice::new(ReferenceOptions {
                asynchronous: true,
                events: true,
                wants_offload: true,
                ..ReferenceOptions::named(name)
            })
        };
        let host = ReferenceDevice::new(ReferenceOptions {
            host_memory: true,
            ..ReferenceOptions::named("host")
        });
        let layout = samite_core::Layout::contiguous(DType::F32, [4, 4, 8, 1]).unwrap();
        let weights = samite_core::TensorGroup::allocate(
            &samite_core::host_buffer_type(),
            samite_core::Usage::Weights,
            &[("experts", layout)],
        );
        let mut graph = Graph::new();
        let experts = graph.stored(&weights.unwrap().tensors[0]).unwrap();
        let table = graph.input("table", DType::I32, [2, 4, 1, 1]).unwrap();
        let row = graph.input("row", DType::I32, [1, 1, 1, 1]).unwrap();
        let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
        let chosen = graph.get_rows(table, row).unwrap();
        let y = graph.mul_mat_id(experts, x, chosen).unwrap();
        graph.set_output(y);
        let mut assignments = Assignments::new();
        assignments.set(chosen, 0);
        assignments.set(y, 1);
        let devices = DeviceSet::new(vec![device("chooser"), device("a"), host]).unwrap();
        let mut plan = Plan::new(&graph, &devices, &assignments, &Options::default()).unwrap();
        assert_eq!(check(&plan, 3), []);
        let is_partial =
            |work| matches!(work, Work::Copy(n) if plan.lowered.copies[n].experts.is_some());
        let copy = plan
            .actions
            .iter()
            .position(|a| is_partial(a.work))
            .unwrap();
        plan.actions[copy].waits.retain(|wait| wait.runs_ago > 0);
        let races = check(&plan, 3);
        assert!(races.iter().any(|race| race.second.1 == copy), "{races:?}");
    }

    #[test]
    fn overlapping_and_invalid_placements_are_detected() {
        let complete = plan(1);
        assert_eq!(check_memory(&complete), Vec::<String>::new());
        let owned: Vec<_> = (0..complete.memory.tensors.len())
            .filter(|&i| complete.memory.tensors[i].is_some())
            .collect();
        let mut found = 0;
        for &id in &owned {
            let mut wrong = plan(1);
            let stolen = wrong.memory.tensors[owned[0]].clone();
            if id != owned[0]
                && wrong.memory.tensors[id].as_ref().map(|b| b.memory)
                    == stolen.as_ref().map(|b| b.memory)
            {
                wrong.memory.tensors[id] = stolen;
                found += usize::from(!check_memory(&wrong).is_empty());
            }
            let mut outside = plan(1);
            if let Some(blocks) = &mut outside.memory.tensors[id] {
                blocks.blocks[0].offset += 1 << 20;
            }
            assert!(!check_memory(&outside).is_empty());
        }
        assert!(
            found > 0,
            "the input's place is taken by others, and nobody notices"
        );
    }

    #[test]
    fn reused_memory_that_must_be_preserved_is_detected() {
        let mut graph = Graph::new();
        let mut x = graph.input("x", DType::F32, [64, 1, 1, 1]).unwrap();
        let chain = [(); 4].map(|()| {
            x = graph.cumsum(x).unwrap();
            x
        });
        graph.set_output(x);
        let device = ReferenceDevice::new(ReferenceOptions::named("a"));
        let devices = DeviceSet::new(vec![device]).unwrap();
        for (until, is_wrong) in chain.into_iter().zip([false, false, true, true]) {
            let mut plan =
                Plan::new(&graph, &devices, Assignments::NONE, &Options::default()).unwrap();
            assert_eq!(check_memory(&plan), Vec::<String>::new());
            // The device requests now what it should have requested before memory planning.
            let tensor = chain[0];
            plan.lowered.splits[0]
                .kept
                .push(KeepAlive { tensor, until });
            assert_eq!(!check_memory(&plan).is_empty(), is_wrong, "until {until}");
        }
    }
}
