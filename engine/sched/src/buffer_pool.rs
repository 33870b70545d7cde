//! Memory of the scheduler: one buffer for each chunk, as large as the largest memory plan needs.

use crate::devices::DeviceSet;
use crate::memory_plan::{Blocks, MemoryPlan};
use samite_core::{Buffer, Error, Result, Slot, TensorInfo, TensorRef, Usage};
use std::sync::Arc;

/// Buffers by memory and chunk.
pub(crate) struct BufferPool {
    /// `None` for chunks whose allocation failed.
    buffers: Vec<Vec<Option<Arc<dyn Buffer>>>>,
}

/// A chunk that is not large enough.
pub(crate) struct Missing {
    memory: usize,
    chunk: usize,
    size: usize,
}

impl BufferPool {
    /// Creates an empty list of chunks for each of the memories.
    pub fn new(memories: usize) -> Self {
        BufferPool {
            buffers: vec![Vec::new(); memories],
        }
    }

    /// Returns the allocated bytes, by memory.
    pub fn sizes(&self) -> impl Iterator<Item = usize> {
        self.buffers.iter().map(|chunks| {
            let buffers = chunks.iter().flatten();
            buffers.map(|buffer| buffer.size()).sum()
        })
    }

    /// Returns the chunks that are too small for `plan`.
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

    /// Replaces chunks by larger ones. The old ones must be unused. They are freed first, so that
    /// both need not fit at the same time.
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

    /// Returns the tensor of a block for pipeline copy `copy`.
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
