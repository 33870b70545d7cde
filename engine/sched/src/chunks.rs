//! The scheduler's own memory: a buffer for each chunk of the memory plans, as large as the largest of them needs.

use crate::devices::DeviceSet;
use crate::memory_plan::{Blocks, MemoryPlan};
use samite_core::{Buffer, Error, Result, Slot, TensorInfo, TensorRef, Usage};
use std::sync::Arc;

/// Buffers by kind of memory and chunk.
pub(crate) struct Chunks {
    /// `None` for chunks that a failed allocation left without memory.
    buffers: Vec<Vec<Option<Arc<dyn Buffer>>>>,
}

/// A chunk that is not large enough.
pub(crate) struct Missing {
    memory: usize,
    chunk: usize,
    size: usize,
}

impl Chunks {
    /// Without buffers, for so many kinds of memory.
    pub fn new(memories: usize) -> Self {
        Chunks {
            buffers: vec![Vec::new(); memories],
        }
    }

    /// Bytes allocated, by kind of memory.
    pub fn sizes(&self) -> impl Iterator<Item = usize> {
        self.buffers.iter().map(|chunks| {
            let buffers = chunks.iter().flatten();
            buffers.map(|buffer| buffer.size()).sum()
        })
    }

    /// The chunks that `plan` needs larger than they are.
    pub fn missing(&self, plan: &MemoryPlan) -> Vec<Missing> {
        let mut missing = Vec::new();
        for (memory, sizes) in plan.chunks.iter().enumerate() {
            for (chunk, &size) in sizes.iter().enumerate() {
                let buffer = self.buffers[memory].get(chunk).and_then(Option::as_ref);
                if buffer.is_none_or(|buffer| buffer.size() < size) {
                    missing.push(Missing {
                        memory,
                        chunk,
                        size,
                    });
                }
            }
        }
        missing
    }

    /// Replaces chunks by larger ones. Nothing may use the old ones any more: they are let go first, so that both need not fit.
    pub fn allocate(&mut self, missing: Vec<Missing>, devices: &DeviceSet) -> Result<()> {
        for missing in &missing {
            let chunks = &mut self.buffers[missing.memory];
            if chunks.len() <= missing.chunk {
                chunks.resize_with(missing.chunk + 1, || None);
            }
            chunks[missing.chunk] = None;
        }
        for Missing {
            memory,
            chunk,
            size,
        } in missing
        {
            if let Some(owner) = devices.owner_of(memory) {
                devices
                    .get(owner)
                    .check_free(size, "intermediate results")?;
            }
            let buffer = devices.memories()[memory].allocate(size, Usage::Compute)?;
            self.buffers[memory][chunk] = Some(buffer);
        }
        Ok(())
    }

    /// The place of a tensor in its block for pipeline copy `copy`.
    pub fn place(
        &self,
        blocks: &Blocks,
        copy: usize,
        tensor: &TensorInfo<'_>,
    ) -> Result<TensorRef> {
        let block = blocks.get(copy);
        let buffer = self.buffers[blocks.memory]
            .get(block.chunk)
            .and_then(Option::as_ref)
            .ok_or_else(|| Error::invalid("a planned buffer is missing"))?;
        buffer.init_tensor(block.offset, tensor)?;
        Ok(TensorRef {
            buffer: Arc::clone(buffer),
            slot: Slot {
                offset: block.offset,
                layout: tensor.layout,
            },
        })
    }
}
