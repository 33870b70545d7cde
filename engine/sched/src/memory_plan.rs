//! Memory plan: memory for every tensor that the scheduler owns, exact to the byte, before any
//! allocation.
//!
//! Memory of a tensor is in use from the node that computes it to the last node or copy that reads
//! it, or to the node until which a device wants to keep it. Inputs, outputs and leaves keep their
//! memory for the whole run. A result may reuse the memory of an operand that is not needed
//! afterwards, if the operation allows it. A composite device plans tensors that only its own nodes
//! use. The plan holds no memory for these, but scratch memory for the device's members.

use crate::devices::DeviceSet;
use crate::split::Lowered;
use samite_core::arena::{Arena, Block};
use samite_core::{BufferType, Error, Graph, Op, Result, TensorId, TensorInfo, Usage};
use std::sync::Arc;

/// Blocks of one tensor: a single one, or one for each pipeline copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Memory, by index in the device set.
    pub memory: usize,
    /// Blocks by pipeline copy. A single one serves all copies.
    pub blocks: Vec<Block>,
}

impl Blocks {
    /// Returns the block for pipeline copy number `copy`.
    pub fn get(&self, copy: usize) -> Block {
        self.blocks[copy % self.blocks.len()]
    }
}

/// Memory of all tensors that the scheduler owns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Blocks by tensor of the lowered graph. `None` for views, stored and unneeded tensors.
    pub tensors: Vec<Option<Blocks>>,
    /// Scratch memory by split.
    pub workspaces: Vec<Option<Blocks>>,
    /// Scratch memory by split and member of its device.
    pub members: Vec<Vec<Option<Blocks>>>,
    /// Bytes of each chunk, by memory.
    pub chunks: Vec<Vec<usize>>,
    /// Number of results that reuse the memory of an operand.
    pub in_place: usize,
}

impl MemoryPlan {
    /// Returns the bytes of one memory.
    pub fn size(&self, memory: usize) -> usize {
        self.chunks[memory].iter().sum()
    }
}

/// Bytes that suffice for several plans, one after the other.
#[derive(Clone, Debug, Default)]
pub struct ReservedBytes {
    /// Bytes of each chunk, by memory: as many as the largest plan needs.
    chunks: Vec<Vec<usize>>,
}

impl ReservedBytes {
    /// Adds a plan.
    pub fn add(&mut self, plan: &MemoryPlan) {
        for (memory, chunks) in plan.chunks.iter().enumerate() {
            self.chunks
                .resize(self.chunks.len().max(memory + 1), Vec::new());
            let known = &mut self.chunks[memory];
            known.resize(known.len().max(chunks.len()), 0);
            for (known, &bytes) in known.iter_mut().zip(chunks) {
                *known = bytes.max(*known);
            }
        }
    }

    /// Returns the bytes by memory.
    pub fn by_memory(&self) -> Vec<usize> {
        let memories = self.chunks.iter();
        memories.map(|chunks| chunks.iter().sum()).collect()
    }
}

struct Planner<'a> {
    lowered: &'a Lowered,
    devices: &'a DeviceSet,
    arenas: Vec<Arena>,
    plan: MemoryPlan,
    /// Remaining uses of each owned memory, by its owner: operands of nodes and copies, and ends of
    /// kept memory.
    uses: Vec<usize>,
    /// Set for memory that is kept for the whole run.
    pinned: Vec<bool>,
    /// Bytes of each tensor with its own memory.
    sizes: Vec<usize>,
    /// Bytes of scratch memory by split.
    workspace_sizes: Vec<usize>,
    /// Set for tensors whose memory the device plans.
    is_inner: Vec<bool>,
}

/// Plans memory for a lowered graph.
///
/// # Errors
/// [`Error::OutOfMemory`] if a tensor exceeds its device's maximum buffer size.
pub fn plan(
    lowered: &Lowered,
    live: &[bool],
    devices: &DeviceSet,
    copies: usize,
) -> Result<MemoryPlan> {
    let graph = &lowered.graph;
    let n = graph.len();
    let arena = |memory: &Arc<dyn BufferType>| Arena::new(memory.alignment(), memory.max_size());
    let mut planner = Planner {
        lowered,
        devices,
        arenas: devices.memories().iter().map(arena).collect(),
        plan: MemoryPlan {
            tensors: vec![None; n],
            workspaces: vec![None; lowered.splits.len()],
            members: vec![Vec::new(); lowered.splits.len()],
            ..Default::default()
        },
        uses: vec![0; n],
        pinned: vec![false; n],
        sizes: vec![0; n],
        workspace_sizes: vec![0; lowered.splits.len()],
        is_inner: vec![false; n],
    };
    planner.find_inner();
    planner.ask_for_sizes(live)?;
    // Leaves first: they exist before the run and stay until its end.
    for id in graph.ids().take(live.len()).filter(|id| live[id.index()]) {
        let tensor = graph.tensor(id);
        if tensor.flags.output {
            planner.pinned[graph.memory_of(id).index()] = true;
        }
        if matches!(tensor.op, Op::Leaf) && tensor.stored.is_none() {
            planner.pinned[id.index()] = true;
            planner.allocate(id, if tensor.flags.input { copies } else { 1 })?;
        }
    }
    for split in &lowered.splits {
        for &id in &split.nodes {
            graph
                .tensor(id)
                .operands()
                .for_each(|(_, source)| planner.uses[graph.memory_of(source).index()] += 1);
        }
        for keep in &split.kept {
            planner.uses[graph.memory_of(keep.tensor).index()] += 1;
        }
        for &copy in &split.copies {
            let copy = &lowered.copies[copy];
            planner.uses[graph.memory_of(copy.from).index()] += 1;
            if let Some(ids) = copy.experts {
                planner.uses[graph.memory_of(ids).index()] += 1;
            }
        }
    }
    for (number, split) in lowered.splits.iter().enumerate() {
        for &copy in &split.copies {
            let copy = &lowered.copies[copy];
            planner.allocate(copy.to, copies)?;
            planner.release(copy.from);
            if let Some(ids) = copy.experts {
                planner.release(ids);
            }
        }
        let mut workspaces = planner.members(number)?;
        workspaces.extend(planner.workspace(number)?);
        let kept = split.kept_until();
        for &id in &split.nodes {
            let has_place = graph.tensor(id).view.is_none() && !planner.is_inner[id.index()];
            if has_place && !planner.take_over(id) {
                planner.allocate(id, 1)?;
            }
            for (_, source) in graph.tensor(id).operands() {
                planner.release(source);
            }
            // An unused result.
            if graph.tensor(id).view.is_none() && planner.uses[id.index()] == 0 {
                planner.free(id);
            }
            for &tensor in kept.get(&id).into_iter().flatten() {
                planner.release(tensor);
            }
        }
        for (memory, block) in workspaces {
            planner.arenas[memory].free(block);
        }
    }
    planner.plan.chunks = planner
        .arenas
        .iter()
        .map(|arena| arena.chunk_sizes().collect())
        .collect();
    Ok(planner.plan)
}

impl Planner<'_> {
    fn graph(&self) -> &Graph {
        &self.lowered.graph
    }

    fn memory_kind(&self, id: TensorId) -> usize {
        self.devices
            .memory_of(self.lowered.devices[id.index()].unwrap_or(self.devices.last()))
    }

    /// Finds results that only nodes of their own split use, on devices that plan these themselves.
    fn find_inner(&mut self) {
        let lowered = self.lowered;
        for split in &lowered.splits {
            if self.devices.members_of(split.device).is_empty() {
                continue;
            }
            let needed = lowered.graph.needed_outside(&split.nodes);
            for id in &split.nodes {
                self.is_inner[id.index()] = !needed[id.index()];
            }
        }
    }

    /// Queries the sizes with one call per memory type and per device.
    fn ask_for_sizes(&mut self, live: &[bool]) -> Result<()> {
        let (lowered, devices) = (self.lowered, self.devices);
        let graph = &lowered.graph;
        let mut asked: Vec<(Vec<TensorId>, Vec<TensorInfo<'_>>)> = Vec::new();
        asked.resize_with(devices.memories().len(), Default::default);
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            // Tensors after the original ones are copies.
            let is_live = live.get(id.index()).copied().unwrap_or(true);
            let is_inner = self.is_inner[id.index()];
            if is_live && tensor.stored.is_none() && tensor.view.is_none() && !is_inner {
                let (ids, infos) = &mut asked[self.memory_kind(id)];
                ids.push(id);
                infos.push(TensorInfo::from_node(graph.node(id), Usage::Compute));
            }
        }
        for (memory, (ids, infos)) in devices.memories().iter().zip(asked) {
            for (id, size) in ids.into_iter().zip(memory.alloc_sizes(&infos)?) {
                self.sizes[id.index()] = size;
            }
        }
        for (number, device) in devices.iter().enumerate() {
            let splits = lowered.splits.iter().enumerate();
            let (mine, parts): (Vec<usize>, Vec<&[TensorId]>) = splits
                .filter(|(_, split)| split.device == number)
                .map(|(number, split)| (number, &*split.nodes))
                .unzip();
            let sizes = device.workspaces(graph, &parts)?;
            mine.into_iter()
                .zip(sizes)
                .for_each(|(split, size)| self.workspace_sizes[split] = size);
        }
        Ok(())
    }

    fn take(&mut self, memory: usize, size: usize, what: &dyn Fn() -> String) -> Result<Block> {
        self.arenas[memory]
            .allocate(size)
            .ok_or_else(|| Error::OutOfMemory {
                device: self.devices.memories()[memory].name().into(),
                what: format!(
                    "{} (one buffer holds at most {} bytes)",
                    what(),
                    self.devices.memories()[memory].max_size()
                )
                .into(),
                asked: size,
                free: None,
            })
    }

    fn allocate(&mut self, id: TensorId, copies: usize) -> Result<()> {
        let memory = self.memory_kind(id);
        let tensor = self.graph().tensor(id);
        let size = self.sizes[id.index()];
        let what = format!("tensor {id} '{}'", tensor.name);
        let blocks = (0..copies)
            .map(|_| self.take(memory, size, &|| what.clone()))
            .collect::<Result<_>>()?;
        self.plan.tensors[id.index()] = Some(Blocks { memory, blocks });
        Ok(())
    }

    fn workspace(&mut self, number: usize) -> Result<Option<(usize, Block)>> {
        let split = &self.lowered.splits[number];
        let size = self.workspace_sizes[number];
        if size == 0 {
            return Ok(None);
        }
        let memory = self.devices.memory_of(split.device);
        let block = self.take(memory, size, &|| format!("the workspace of split {number}"))?;
        self.plan.workspaces[number] = Some(Blocks {
            memory,
            blocks: vec![block],
        });
        Ok(Some((memory, block)))
    }

    /// Allocates scratch memory for the members of a split's device.
    fn members(&mut self, number: usize) -> Result<Vec<(usize, Block)>> {
        let (lowered, devices) = (self.lowered, self.devices);
        let split = &lowered.splits[number];
        let memories = devices.members_of(split.device);
        if memories.is_empty() {
            return Ok(Vec::new());
        }
        let device = devices.get(split.device);
        let sizes = device.member_workspaces(&lowered.graph, &split.nodes)?;
        let mut taken = Vec::new();
        for (&memory, size) in memories.iter().zip(sizes) {
            if size == 0 {
                self.plan.members[number].push(None);
                continue;
            }
            let block = self.take(memory, size, &|| {
                format!(
                    "what a member of {} computes in split {number}",
                    device.name()
                )
            })?;
            let blocks = vec![block];
            self.plan.members[number].push(Some(Blocks { memory, blocks }));
            taken.push((memory, block));
        }
        Ok(taken)
    }

    /// Counts one use of the memory of `id` less, and frees the memory after the last use.
    fn release(&mut self, id: TensorId) {
        let base = self.graph().memory_of(id);
        self.uses[base.index()] -= 1;
        if self.uses[base.index()] == 0 {
            self.free(base);
        }
    }

    fn free(&mut self, base: TensorId) {
        if self.pinned[base.index()] {
            return;
        }
        // Reused memory belongs to the result; `take_over` pinned its former owner.
        if let Some(blocks) = &self.plan.tensors[base.index()] {
            let memory = blocks.memory;
            for &block in &blocks.blocks {
                self.arenas[memory].free(block);
            }
        }
    }

    /// Lets the result of `id` reuse the memory of an operand that is not used afterwards.
    fn take_over(&mut self, id: TensorId) -> bool {
        let graph = &self.lowered.graph;
        let tensor = graph.tensor(id);
        let memory = self.memory_kind(id);
        for (index, source) in tensor.operands() {
            if !tensor.op.may_overwrite(index) {
                continue;
            }
            let base = graph.memory_of(source);
            let operand = graph.tensor(source);
            let whole = operand.view.is_none_or(|view| view.offset == 0)
                && operand.layout == tensor.layout
                && graph.tensor(base).layout.bytes() == operand.layout.bytes();
            let uses_by_node = tensor
                .operands()
                .filter(|&(_, s)| graph.memory_of(s) == base)
                .count();
            let Some(blocks) = &self.plan.tensors[base.index()] else {
                continue;
            };
            if whole
                && !self.pinned[base.index()]
                && self.uses[base.index()] == 1
                && uses_by_node == 1
                && blocks.memory == memory
                && blocks.blocks.len() == 1
                && blocks.get(0).size >= self.sizes[id.index()]
            {
                let blocks = blocks.clone();
                self.pinned[base.index()] = true;
                self.plan.tensors[id.index()] = Some(blocks);
                self.plan.in_place += 1;
                return true;
            }
        }
        false
    }
}
