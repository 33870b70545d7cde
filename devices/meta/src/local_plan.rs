//! Plans a member's intermediate results, exact to the byte, in one piece of its memory.

use crate::partition::{Partition, PartitionStep};
use samite_core::arena::{Arena, Block};
use samite_core::{
    BufferType, Device, Error, Graph, Layout, Op, Result, Slot, TensorId, TensorInfo, TensorRef,
    Usage,
};
use std::sync::Arc;

/// Offsets of everything that a member computes.
#[derive(Debug)]
pub(crate) struct LocalPlan {
    /// Offset of each tensor of the member's graph; `None` for views, stored tensors and unused
    /// tensors.
    offsets: Vec<Option<usize>>,
    /// Offset and size of the scratch memory of the member's device.
    workspace: Option<(usize, usize)>,
    /// Total size in bytes.
    pub size: usize,
}

struct Planner<'a> {
    graph: &'a Graph,
    sizes: Vec<usize>,
    arena: Arena,
    blocks: Vec<Option<Block>>,
    /// Number of uses still to come, by owner of the memory.
    uses: Vec<usize>,
    device: &'a str,
}

impl Planner<'_> {
    fn take(&mut self, size: usize, what: &dyn Fn() -> String) -> Result<Block> {
        let block = self.arena.allocate(size);
        // Only the size is wanted, so everything must fit in one chunk.
        block
            .filter(|block| block.chunk == 0)
            .ok_or_else(|| Error::OutOfMemory {
                device: self.device.into(),
                what: format!("{} (one buffer does not hold all)", what()).into(),
                asked: size,
                free: None,
            })
    }

    fn allocate(&mut self, id: TensorId) -> Result<()> {
        if self.blocks[id.index()].is_none() {
            let name = &self.graph.tensor(id).name;
            let size = self.sizes[id.index()];
            let block = self.take(size, &|| format!("tensor {id} '{name}'"))?;
            self.blocks[id.index()] = Some(block);
        }
        Ok(())
    }

    /// Counts down the uses of a tensor.
    fn release(&mut self, id: TensorId) {
        let base = self.graph.memory_of(id);
        let uses = &mut self.uses[base.index()];
        *uses = uses.saturating_sub(1);
        if *uses == 0 {
            self.free(base);
        }
    }

    fn free(&mut self, base: TensorId) {
        if let Some(block) = self.blocks[base.index()]
            && self.graph.tensor(base).stored.is_none()
        {
            self.arena.free(block);
        }
    }

    /// Reuses the memory of an operand that has no later use for a result. Returns whether that was
    /// possible.
    fn take_over(&mut self, id: TensorId) -> bool {
        let graph = self.graph;
        let tensor = graph.tensor(id);
        for (index, source) in tensor.operands() {
            let operand = graph.tensor(source);
            let base = graph.memory_of(source);
            let whole = operand.view.is_none_or(|view| view.offset == 0)
                && operand.layout == tensor.layout
                && graph.tensor(base).layout.bytes() == operand.layout.bytes();
            let block = self.blocks[base.index()];
            let is_last = self.uses[base.index()] == 1;
            let fits = block.is_some_and(|block| block.size >= self.sizes[id.index()]);
            if tensor.op.may_overwrite(index)
                && whole
                && graph.tensor(base).stored.is_none()
                && is_last
                && fits
            {
                self.blocks[id.index()] = block;
                // The memory belongs to the result now.
                self.uses[base.index()] = usize::MAX;
                return true;
            }
        }
        false
    }
}

impl LocalPlan {
    /// Plans the memory of member number `member`.
    pub fn new(partition: &Partition, member: usize, device: &dyn Device) -> Result<Self> {
        let graph = &partition.graphs[member];
        let memory = device.buffer_type();
        let mut workspace = 0;
        for step in &partition.steps {
            if let PartitionStep::Run(nodes) = step
                && !nodes[member].is_empty()
            {
                workspace = workspace.max(device.workspace(graph, &nodes[member])?);
            }
        }
        let owners: Vec<TensorId> = graph
            .ids()
            .filter(|&id| {
                let tensor = graph.tensor(id);
                tensor.view.is_none() && tensor.stored.is_none()
            })
            .collect();
        let infos: Vec<_> = owners
            .iter()
            .map(|&id| TensorInfo::from_node(graph.node(id), Usage::Compute))
            .collect();
        let mut sizes = vec![0; graph.len()];
        for (id, size) in owners.iter().zip(memory.alloc_sizes(&infos)?) {
            sizes[id.index()] = size;
        }
        let mut planner = Planner {
            graph,
            sizes,
            arena: Arena::new(memory.alignment(), memory.max_size()),
            blocks: vec![None; graph.len()],
            uses: vec![0; graph.len()],
            device: device.name(),
        };
        let base = |id: TensorId| graph.memory_of(id).index();
        for step in &partition.steps {
            match step {
                PartitionStep::Run(nodes) => {
                    for &id in &nodes[member] {
                        let operands = graph.tensor(id).operands();
                        operands.for_each(|(_, source)| planner.uses[base(source)] += 1);
                    }
                }
                PartitionStep::Exchange(collective) => {
                    if let Some(source) = collective.sources[member] {
                        planner.uses[base(source)] += 1;
                    }
                }
            }
        }
        // Outputs are read after all nodes.
        for output in &partition.outputs {
            if let Some(local) = output.locals[member] {
                planner.uses[base(local)] += 1;
            }
        }
        let workspace = match workspace {
            0 => None,
            size => Some((planner.take(size, &|| "a workspace".to_owned())?, size)),
        };
        for input in &partition.inputs {
            if let Some(local) = input.locals[member]
                && planner.uses[local.index()] > 0
            {
                planner.allocate(local)?;
            }
        }
        for step in &partition.steps {
            match step {
                PartitionStep::Run(nodes) => {
                    for &id in &nodes[member] {
                        planner.node(id)?;
                    }
                }
                PartitionStep::Exchange(collective) => {
                    let result = collective.results[member];
                    planner.allocate(result)?;
                    if let Some(source) = collective.sources[member] {
                        planner.release(source);
                    }
                    if planner.uses[result.index()] == 0 {
                        planner.free(result);
                    }
                }
            }
        }
        Ok(LocalPlan {
            size: planner.arena.chunk_sizes().next().unwrap_or(0),
            offsets: planner
                .blocks
                .iter()
                .map(|block| block.map(|block| block.offset))
                .collect(),
            workspace: workspace.map(|(block, size)| (block.offset, size)),
        })
    }

    /// Returns the location of each tensor and of the workspace in a piece of memory of the planned
    /// size.
    pub fn bind(
        &self,
        graph: &Graph,
        arena: Option<&TensorRef>,
    ) -> Result<(Vec<Option<TensorRef>>, Option<TensorRef>)> {
        if let Some(arena) = arena
            && arena.layout().bytes() < self.size
        {
            return Err(Error::invalid(format!(
                "{} bytes of scratch memory instead of {}",
                arena.layout().bytes(),
                self.size
            )));
        }
        let place = |offset: usize, info: &TensorInfo<'_>| -> Result<TensorRef> {
            let arena = arena.ok_or_else(|| Error::invalid("a member has no scratch memory"))?;
            let slot = Slot {
                offset: arena.slot.offset + offset,
                layout: info.layout,
            };
            arena.buffer.init_tensor(slot.offset, info)?;
            Ok(TensorRef {
                buffer: Arc::clone(&arena.buffer),
                slot,
            })
        };
        let mut places: Vec<Option<TensorRef>> = vec![None; graph.len()];
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            places[id.index()] = match (&tensor.stored, tensor.view, self.offsets[id.index()]) {
                (Some(stored), _, _) => Some(stored.tensor().clone()),
                (None, Some(view), _) => places[view.base.index()].as_ref().map(|base| TensorRef {
                    buffer: Arc::clone(&base.buffer),
                    slot: Slot {
                        offset: base.slot.offset + view.offset,
                        layout: tensor.layout,
                    },
                }),
                (None, None, Some(offset)) => {
                    let info = TensorInfo::from_node(graph.node(id), Usage::Compute);
                    Some(place(offset, &info)?)
                }
                (None, None, None) => None,
            };
        }
        let workspace = self
            .workspace
            .map(|(offset, size)| {
                let bytes = Layout::contiguous(samite_core::DType::I8, [size, 1, 1, 1])?;
                place(offset, &TensorInfo::new("workspace", bytes, Usage::Compute))
            })
            .transpose()?;
        Ok((places, workspace))
    }

    /// Allocates memory for the plan. Returns `None` if the plan needs none.
    pub fn allocate(&self, memory: &Arc<dyn BufferType>) -> Result<Option<TensorRef>> {
        if self.size == 0 {
            return Ok(None);
        }
        Ok(Some(TensorRef {
            buffer: memory.allocate(self.size, Usage::Compute)?,
            slot: Slot {
                offset: 0,
                layout: Layout::contiguous(samite_core::DType::I8, [self.size, 1, 1, 1])?,
            },
        }))
    }
}

impl Planner<'_> {
    /// Allocates the result of a node, and frees memory without later uses.
    fn node(&mut self, id: TensorId) -> Result<()> {
        let graph = self.graph;
        let tensor = graph.tensor(id);
        // Leaves whose values do not matter, only their shape or memory.
        for (_, source) in tensor.operands() {
            let base = graph.memory_of(source);
            if matches!(graph.tensor(base).op, Op::Leaf) && graph.tensor(base).stored.is_none() {
                self.allocate(base)?;
            }
        }
        let is_new = tensor.view.is_none();
        if is_new && !self.take_over(id) {
            self.allocate(id)?;
        }
        for (_, source) in tensor.operands() {
            // Memory that a result reuses is not free.
            if self.uses[graph.memory_of(source).index()] != usize::MAX {
                self.release(source);
            }
        }
        if is_new && self.uses[id.index()] == 0 {
            self.free(id);
        }
        Ok(())
    }
}
