//! Best-fit planning of offsets in memory that is not allocated yet.

use crate::buffer::align_up;

/// A planned piece of memory: `size` bytes at `offset` of chunk number `chunk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Block {
    /// Index of the chunk.
    pub chunk: usize,
    /// Byte offset in the chunk.
    pub offset: usize,
    /// Size in bytes. Padded to the alignment, except at the end of a chunk of the maximum size.
    pub size: usize,
}

#[derive(Debug, Default)]
struct Chunk {
    /// Free ranges `(offset, size)` in ascending order, never adjacent. Everything from `end` on is
    /// also free.
    free: Vec<(usize, usize)>,
    /// Start of the unbounded free range at the end.
    end: usize,
    /// The largest `end` so far, which is the size of the chunk.
    high: usize,
}

/// Plans allocations of one kind of memory, in chunks of a limited size.
#[derive(Debug)]
pub struct Arena {
    alignment: usize,
    max_chunk: usize,
    chunks: Vec<Chunk>,
}

impl Arena {
    /// Creates an empty plan for memory with this alignment (a power of two) and this maximum
    /// buffer size.
    pub fn new(alignment: usize, max_chunk: usize) -> Self {
        Arena {
            alignment,
            max_chunk,
            chunks: Vec::new(),
        }
    }

    /// Iterates over the bytes that each chunk needs.
    pub fn chunk_sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.chunks.iter().map(|chunk| chunk.high)
    }

    /// Allocates `size` bytes: in the smallest free range that fits, or else at the end of the
    /// chunk that grows least. Returns `None` if the size exceeds the maximum chunk.
    pub fn allocate(&mut self, size: usize) -> Option<Block> {
        let (asked, max) = (size.max(1), self.max_chunk);
        let padded = align_up(asked, self.alignment)?;
        if asked > max {
            return None;
        }
        // At the end of a chunk of the maximum size, the bytes may fit without all of the padding.
        let size_at = |offset: usize| Some(padded.min(max - offset)).filter(|&size| size >= asked);
        let best = self
            .chunks
            .iter()
            .enumerate()
            .flat_map(|(c, chunk)| {
                chunk
                    .free
                    .iter()
                    .enumerate()
                    .map(move |(i, &(offset, free))| (free, c, i, offset))
            })
            .filter_map(|(free, c, i, offset)| {
                let size = size_at(offset).filter(|&size| size <= free)?;
                Some((free, c, i, size))
            })
            .min();
        if let Some((free, c, i, size)) = best {
            let range = &mut self.chunks[c].free[i];
            let offset = range.0;
            *range = (offset + size, free - size);
            if free == size {
                self.chunks[c].free.remove(i);
            }
            return Some(Block {
                chunk: c,
                offset,
                size,
            });
        }
        let grow = self
            .chunks
            .iter()
            .enumerate()
            .filter_map(|(c, chunk)| {
                let size = size_at(chunk.end)?;
                Some(((chunk.end + size).saturating_sub(chunk.high), c, size))
            })
            .min();
        let (c, size) = match grow {
            Some((_, c, size)) => (c, size),
            None => {
                self.chunks.push(Chunk::default());
                (self.chunks.len() - 1, padded.min(max))
            }
        };
        let chunk = &mut self.chunks[c];
        let offset = chunk.end;
        chunk.end += size;
        chunk.high = chunk.high.max(chunk.end);
        Some(Block {
            chunk: c,
            offset,
            size,
        })
    }

    /// Frees a block.
    pub fn free(&mut self, block: Block) {
        let chunk = &mut self.chunks[block.chunk];
        let at = chunk
            .free
            .partition_point(|&(offset, _)| offset < block.offset);
        let (mut offset, mut size) = (block.offset, block.size);
        if chunk
            .free
            .get(at)
            .is_some_and(|next| offset + size == next.0)
        {
            size += chunk.free.remove(at).1;
        }
        if at > 0 && chunk.free[at - 1].0 + chunk.free[at - 1].1 == offset {
            let before = chunk.free.remove(at - 1);
            (offset, size) = (before.0, before.1 + size);
        }
        if offset + size == chunk.end {
            chunk.end = offset;
        } else {
            let at = chunk.free.partition_point(|&(o, _)| o < offset);
            chunk.free.insert(at, (offset, size));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sizes(arena: &Arena) -> Vec<usize> {
        arena.chunk_sizes().collect()
    }

    #[test]
    fn best_fit_reuses_the_smallest_hole() {
        let mut arena = Arena::new(16, 1 << 30);
        let blocks: Vec<_> = [64, 16, 32, 16]
            .map(|n| arena.allocate(n).unwrap())
            .to_vec();
        arena.free(blocks[0]);
        arena.free(blocks[2]);
        assert_eq!(
            arena.allocate(20).unwrap().offset,
            80,
            "the 32-byte hole, not the 64-byte one"
        );
        assert_eq!(arena.allocate(60).unwrap().offset, 0);
        assert_eq!(sizes(&arena), [128]);
    }

    #[test]
    fn adjacent_holes_merge_and_the_last_hole_is_released() {
        let mut arena = Arena::new(16, 1 << 30);
        let [a, b, c] = [16, 16, 16].map(|n| arena.allocate(n).unwrap());
        arena.free(a);
        arena.free(c);
        arena.free(b);
        assert_eq!(arena.allocate(48).unwrap().offset, 0);
        assert_eq!(sizes(&arena), [48]);
    }

    #[test]
    fn chunks_are_limited() {
        let mut arena = Arena::new(16, 64);
        let blocks = [48, 32, 16].map(|n| arena.allocate(n).unwrap());
        assert_eq!(
            blocks.map(|b| (b.chunk, b.offset)),
            [(0, 0), (1, 0), (0, 48)]
        );
        assert_eq!(arena.allocate(65), None);
        assert_eq!(arena.allocate(usize::MAX), None);
        assert_eq!(sizes(&arena), [64, 32]);
    }

    #[test]
    fn no_chunk_is_larger_than_the_largest_buffer() {
        let mut arena = Arena::new(64, 100);
        let whole = arena.allocate(100).unwrap();
        assert_eq!((whole.size, sizes(&arena)), (100, vec![100]));
        arena.free(whole);
        arena.allocate(40).unwrap();
        assert_eq!(
            arena.allocate(37).unwrap().chunk,
            1,
            "only 36 bytes are left"
        );
        assert_eq!(arena.allocate(36).unwrap().offset, 64);
        assert_eq!(sizes(&arena), [100, 64]);
    }

    proptest! {
        #[test]
        fn live_blocks_never_overlap(
            steps in prop::collection::vec((0usize..200, any::<prop::sample::Index>(),
                any::<bool>()), 1..200),
            max in 200usize..600,
        ) {
            let mut arena = Arena::new(8, max);
            let mut live: Vec<Block> = Vec::new();
            for (size, which, free) in steps {
                if free && !live.is_empty() {
                    arena.free(live.swap_remove(which.index(live.len())));
                } else {
                    let block = arena.allocate(size).unwrap();
                    prop_assert!(block.size >= size && block.offset.is_multiple_of(8));
                    for other in &live {
                        let apart = other.chunk != block.chunk
                            || other.offset + other.size <= block.offset
                            || block.offset + block.size <= other.offset;
                        prop_assert!(apart, "{block:?} overlaps {other:?}");
                    }
                    live.push(block);
                }
                for (chunk, size) in arena.chunk_sizes().enumerate() {
                    prop_assert!(size <= max);
                    prop_assert!(
                        live.iter()
                            .filter(|b| b.chunk == chunk)
                            .all(|b| b.offset + b.size <= size)
                    );
                }
            }
            let total = arena.chunks.len();
            live.into_iter().for_each(|block| arena.free(block));
            prop_assert!(
                arena
                    .chunks
                    .iter()
                    .all(|chunk| chunk.end == 0 && chunk.free.is_empty()),
                "{total} chunks"
            );
        }
    }
}
