//! The cells of the cache: which token each cell holds, and which sequences it belongs to.

use crate::error::{Error, Result, try_filled};
use std::collections::BTreeSet;
use std::ops::{Bound, Range, RangeBounds, RangeInclusive};

/// Cells of a cache: each is free, or holds one token at a position of one or several sequences.
///
/// Sequences that share a prefix share its cells. A token sees the cells of its own sequence at
/// positions up to its own. The location of cells in the cache does not affect the results. It
/// affects speed: attention skips blocks of cells that a token does not see, so each of several
/// sequences gets blocks of 64 adjacent cells while such blocks are free.
#[derive(Clone, Debug)]
pub struct Cells {
    /// Position by cell; -1 for free cells.
    positions: Vec<i32>,
    /// Distance by which keys have to be rotated before their next use.
    shifts: Vec<i32>,
    /// Sequences of each cell, as `words` of bits.
    sequences: Vec<u64>,
    words: usize,
    n_sequences: usize,
    /// All cells before this one are used.
    first_free: usize,
    /// All cells from this one on are free.
    end: usize,
    /// Number of used cells in each block.
    used_of_block: Vec<u8>,
    free_blocks: usize,
    /// No block before this one is completely free.
    first_free_block: usize,
    /// By sequence: the cell after the one that it allocated last.
    next: Vec<usize>,
    used: usize,
    /// Largest position by sequence; -1 for none.
    last: Vec<i32>,
    /// Number of changes by sequence.
    changes: Vec<u64>,
    has_shifts: bool,
    /// Cells allocated since the last [`commit`](Self::commit), which [`rollback`](Self::rollback)
    /// frees. Each comes with the sequence whose block it continues and that sequence's previous
    /// `next`.
    taken: Vec<(usize, Option<(usize, usize)>)>,
    /// True if any cell was ever allocated, so that the memory of the cache may not be zero.
    pub(super) were_used: bool,
}

/// Cells of a block, which a sequence gets at a time if there are several sequences.
const BLOCK: usize = 64;

const _: () = assert!(BLOCK <= u8::MAX as usize);

/// Converts a range of positions to first and last + 1.
pub(super) fn bounds(range: &impl RangeBounds<i32>) -> (i32, i32) {
    let first = match range.start_bound() {
        Bound::Included(&first) => first,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => i32::MAX,
    };
    (first, end)
}

impl Cells {
    /// Creates `count` free cells for up to `n_sequences` sequences.
    ///
    /// # Errors
    /// Returns [`samite_core::Error::OutOfMemory`].
    pub fn new(count: usize, n_sequences: usize) -> Result<Self> {
        const WHAT: &str = "the cells of the KV cache";
        let words = n_sequences.div_ceil(64);
        let mut taken = try_filled((0, None), Some(count), WHAT)?;
        taken.clear();
        Ok(Cells {
            positions: try_filled(-1, Some(count), WHAT)?,
            shifts: try_filled(0, Some(count), WHAT)?,
            sequences: try_filled(0, count.checked_mul(words), WHAT)?,
            words,
            n_sequences,
            first_free: 0,
            end: 0,
            used_of_block: try_filled(0, Some(count / BLOCK), WHAT)?,
            free_blocks: count / BLOCK,
            first_free_block: 0,
            next: try_filled(0, Some(n_sequences), WHAT)?,
            used: 0,
            last: try_filled(-1, Some(n_sequences), WHAT)?,
            changes: try_filled(0, Some(n_sequences), WHAT)?,
            has_shifts: false,
            taken,
            were_used: false,
        })
    }

    /// Returns the number of cells.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Returns whether no cell is used.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Returns the maximum number of sequences.
    pub fn n_sequences(&self) -> usize {
        self.n_sequences
    }

    /// Returns the number of cells that hold a token.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Returns the number of free cells.
    pub fn free(&self) -> usize {
        self.len() - self.used
    }

    /// Returns the number of completely free blocks of 64 cells.
    pub fn free_blocks(&self) -> usize {
        self.free_blocks
    }

    /// Returns the number of free blocks that `sequence` needs for `tokens` more tokens in its own
    /// blocks. `None` stands for an empty sequence. Returns 0 if there is only one sequence.
    ///
    /// # Panics
    /// Panics if the sequence does not exist.
    pub fn blocks_for(&self, sequence: Option<usize>, tokens: usize) -> usize {
        if self.n_sequences == 1 {
            return 0;
        }
        let next = sequence.map_or(0, |sequence| self.next[sequence]);
        let run = next..next.next_multiple_of(BLOCK).min(self.len());
        let here = run.take_while(|&cell| self.positions[cell] < 0).count();
        tokens.saturating_sub(here).div_ceil(BLOCK)
    }

    /// Returns the last used cell plus 1, which limits how far attention has to read.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Returns the largest position in `sequence`.
    pub fn last_position(&self, sequence: usize) -> Option<i32> {
        self.last.get(sequence).copied().filter(|&last| last >= 0)
    }

    /// Returns the position after the largest one in `sequence`: 0 if the sequence is empty.
    pub fn next_position(&self, sequence: usize) -> i32 {
        self.last_position(sequence)
            .map_or(0, |last| last.saturating_add(1))
    }

    /// Returns the smallest position in `sequence`.
    pub fn first_position(&self, sequence: usize) -> Option<i32> {
        self.last_position(sequence)?;
        (0..self.end)
            .filter(|&cell| self.belongs(cell, sequence))
            .map(|cell| self.positions[cell])
            .min()
    }

    /// Returns the number of changes to `sequence` so far. A caller can compare it later to detect
    /// changes by other code.
    pub fn changes(&self, sequence: usize) -> u64 {
        self.changes.get(sequence).copied().unwrap_or(0)
    }

    /// Returns the number of cells that `sequence` uses.
    pub fn sequence_len(&self, sequence: usize) -> usize {
        (0..self.end)
            .filter(|&cell| self.belongs(cell, sequence))
            .count()
    }

    fn belongs(&self, cell: usize, sequence: usize) -> bool {
        self.sequences[cell * self.words + sequence / 64] >> (sequence % 64) & 1 == 1
    }

    fn row(&self, cell: usize) -> &[u64] {
        &self.sequences[cell * self.words..][..self.words]
    }

    pub(crate) fn check(&self, sequence: usize) -> Result<()> {
        if sequence >= self.n_sequences {
            return Err(Error::invalid(format!(
                "sequence {sequence}: the context has {} (0 to {})",
                self.n_sequences,
                self.n_sequences.saturating_sub(1)
            )));
        }
        Ok(())
    }

    /// Allocates a cell for the token at `position` of `sequences`, which must exist. Returns
    /// `None` if the cache is full.
    pub(crate) fn take(&mut self, position: i32, sequences: &[u32]) -> Option<usize> {
        let owner = sequences.first().map(|&sequence| sequence as usize);
        let cell = match owner.and_then(|owner| self.in_run(owner)) {
            Some(cell) => cell,
            None => {
                let free = (self.first_free..self.len()).find(|&cell| self.positions[cell] < 0);
                self.first_free = free.unwrap_or(self.len());
                free?
            }
        };
        let before = owner.map(|owner| (owner, std::mem::replace(&mut self.next[owner], cell + 1)));
        self.end = self.end.max(cell + 1);
        self.used += 1;
        if let Some(used) = self.used_of_block.get_mut(cell / BLOCK) {
            self.free_blocks -= usize::from(*used == 0);
            *used += 1;
        }
        self.positions[cell] = position;
        self.shifts[cell] = 0;
        for &sequence in sequences {
            let sequence = sequence as usize;
            self.sequences[cell * self.words + sequence / 64] |= 1 << (sequence % 64);
            self.last[sequence] = self.last[sequence].max(position);
            self.changes[sequence] += 1;
        }
        self.taken.push((cell, before));
        self.were_used = true;
        Some(cell)
    }

    /// Finds a free cell next to the one that a sequence allocated last, or the first cell of a
    /// free block.
    fn in_run(&mut self, sequence: usize) -> Option<usize> {
        if self.n_sequences == 1 {
            return None;
        }
        let next = self.next[sequence];
        let is_free = |cell: &usize| self.positions.get(*cell).is_some_and(|&p| p < 0);
        if !next.is_multiple_of(BLOCK) && is_free(&next) {
            return Some(next);
        }
        let runs = self.used_of_block.len();
        let free = (self.first_free_block..runs).find(|&run| self.used_of_block[run] == 0);
        self.first_free_block = free.map_or(runs, |run| run + 1);
        free.map(|run| run * BLOCK)
    }

    /// Frees the cells that are at least `size` positions before the next token of each of their
    /// sequences.
    pub(crate) fn forget_before(&mut self, size: usize) {
        let size = i32::try_from(size).unwrap_or(i32::MAX);
        for cell in 0..self.end {
            let position = self.positions[cell];
            let is_seen = (0..self.n_sequences).any(|sequence| {
                self.belongs(cell, sequence) && self.last[sequence] - position < size - 1
            });
            if position >= 0 && !is_seen {
                self.release(cell);
            }
        }
        self.tidy();
    }

    /// Returns the positions and cells of a sequence, in the order of positions.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist.
    pub(crate) fn sorted(&self, sequence: usize) -> Result<Vec<(i32, usize)>> {
        self.check(sequence)?;
        let cells = self.in_range(sequence, (0, i32::MAX));
        let mut sorted: Vec<_> = cells.map(|cell| (self.positions[cell], cell)).collect();
        sorted.sort_unstable();
        Ok(sorted)
    }

    /// Returns the number of cells that a sequence has in a range of positions.
    pub(crate) fn count(&self, sequence: usize, range: Range<i32>) -> usize {
        self.in_range(sequence, (range.start, range.end)).count()
    }

    /// Returns the cells that were allocated since the last [`commit`](Self::commit), in order.
    pub(crate) fn taken(&self) -> Vec<usize> {
        let mut taken: Vec<usize> = self.taken.iter().map(|&(cell, _)| cell).collect();
        taken.sort_unstable();
        taken
    }

    /// Returns the free cells, in order.
    pub(crate) fn free_cells(&self) -> Vec<usize> {
        let cells = self.positions.iter().enumerate();
        let free = cells.filter(|(_, position)| **position < 0);
        free.map(|(cell, _)| cell).collect()
    }

    /// Returns the cells that belong only to `sequence`, in order.
    pub(crate) fn only_of(&self, sequence: usize) -> Vec<usize> {
        let holders = |cell| {
            self.row(cell)
                .iter()
                .map(|word| word.count_ones())
                .sum::<u32>()
        };
        let cells = self.in_range(sequence, (0, i32::MAX));
        cells.filter(|&cell| holders(cell) == 1).collect()
    }

    /// Commits the allocated cells.
    pub(crate) fn commit(&mut self) {
        self.taken.clear();
    }

    /// Frees the cells that were allocated since the last [`commit`](Self::commit).
    pub(crate) fn rollback(&mut self) {
        while let Some((cell, before)) = self.taken.pop() {
            self.release(cell);
            // A retry allocates the same cells for the same tokens, so that sums over them are
            // bit-identical.
            if let Some((owner, next)) = before {
                self.next[owner] = next;
            }
        }
        self.tidy();
    }

    fn release(&mut self, cell: usize) {
        self.positions[cell] = -1;
        self.shifts[cell] = 0;
        for sequence in 0..self.n_sequences {
            self.changes[sequence] += u64::from(self.belongs(cell, sequence));
        }
        self.sequences[cell * self.words..][..self.words].fill(0);
        self.used -= 1;
        if let Some(used) = self.used_of_block.get_mut(cell / BLOCK) {
            *used -= 1;
            self.free_blocks += usize::from(*used == 0);
        }
        self.first_free = self.first_free.min(cell);
        self.first_free_block = self.first_free_block.min(cell / BLOCK);
    }

    /// Updates derived values after some cells were freed or changed.
    fn tidy(&mut self) {
        while self.end > 0 && self.positions[self.end - 1] < 0 {
            self.end -= 1;
        }
        self.last.fill(-1);
        self.has_shifts = false;
        for cell in 0..self.end {
            self.has_shifts |= self.shifts[cell] != 0;
            for sequence in 0..self.n_sequences {
                if self.belongs(cell, sequence) {
                    self.last[sequence] = self.last[sequence].max(self.positions[cell]);
                }
            }
        }
        // An empty sequence starts in its own block.
        for (next, _) in self
            .next
            .iter_mut()
            .zip(&self.last)
            .filter(|(_, last)| **last < 0)
        {
            *next = 0;
        }
    }

    fn in_range(
        &self,
        sequence: usize,
        (first, end): (i32, i32),
    ) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let chosen: Vec<usize> = (0..self.end)
            .filter(|&cell| {
                self.belongs(cell, sequence) && (first..end).contains(&self.positions[cell])
            })
            .collect();
        chosen.into_iter()
    }

    fn leave(&mut self, cell: usize, sequence: usize) {
        self.sequences[cell * self.words + sequence / 64] &= !(1 << (sequence % 64));
        self.changes[sequence] += 1;
        if self.row(cell).iter().all(|&word| word == 0) {
            self.release(cell);
            // A sequence that continues after its end was removed, as with drafts, leaves no gap.
            if self.next[sequence] == cell + 1 {
                self.next[sequence] = cell;
            }
        }
    }

    /// Removes the positions `range` from `sequence`. Cells without another sequence become free.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist.
    pub fn remove(&mut self, sequence: usize, range: impl RangeBounds<i32>) -> Result<()> {
        self.check(sequence)?;
        for cell in self.in_range(sequence, bounds(&range)).rev() {
            self.leave(cell, sequence);
        }
        self.tidy();
        Ok(())
    }

    /// Makes sequence `to` share the positions `range` of `from`, and replaces the previous
    /// contents of `to` there.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if a sequence does not exist.
    pub fn copy(&mut self, from: usize, to: usize, range: impl RangeBounds<i32>) -> Result<()> {
        self.check(from)?;
        self.check(to)?;
        if from == to {
            return Ok(());
        }
        let range = bounds(&range);
        for cell in self.in_range(to, range) {
            self.leave(cell, to);
        }
        for cell in self.in_range(from, range) {
            self.sequences[cell * self.words + to / 64] |= 1 << (to % 64);
            self.changes[to] += 1;
        }
        self.tidy();
        Ok(())
    }

    /// Removes every sequence but this one.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist.
    pub fn keep(&mut self, sequence: usize) -> Result<()> {
        self.check(sequence)?;
        for other in (0..self.n_sequences).filter(|&other| other != sequence) {
            for cell in self.in_range(other, (0, i32::MAX)) {
                self.leave(cell, other);
            }
        }
        self.tidy();
        Ok(())
    }

    /// Shifts the positions `range` of `sequence` by `delta`. The keys are rotated before their
    /// next use.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist, if a position would
    /// become negative, overflow, or equal that of another token of the sequence, or if a cell is
    /// shared with another sequence. After an error, nothing is changed.
    pub fn shift(
        &mut self,
        sequence: usize,
        range: impl RangeBounds<i32>,
        delta: i32,
    ) -> Result<()> {
        self.check(sequence)?;
        let (first, end) = bounds(&range);
        let cells: Vec<usize> = self.in_range(sequence, (first, end)).collect();
        let mut moved = Vec::with_capacity(cells.len());
        for &cell in &cells {
            let old = self.positions[cell];
            let sequences: u32 = self.row(cell).iter().map(|word| word.count_ones()).sum();
            if sequences > 1 {
                return Err(Error::invalid(format!(
                    "position {old} of sequence {sequence} is shared with another sequence and cannot be moved"
                )));
            }
            let (Some(position), Some(shift)) =
                (old.checked_add(delta), self.shifts[cell].checked_add(delta))
            else {
                return Err(Error::invalid(format!(
                    "position {old} + {delta} overflows"
                )));
            };
            if position < 0 {
                return Err(Error::invalid(format!(
                    "position {old} of sequence {sequence} would become {position}: remove it before moving the others"
                )));
            }
            moved.push((cell, position, shift));
        }
        let staying: BTreeSet<i32> = (0..self.end)
            .filter(|&cell| self.belongs(cell, sequence))
            .map(|cell| self.positions[cell])
            .filter(|position| !(first..end).contains(position))
            .collect();
        if let Some((_, position, _)) = moved.iter().find(|moved| staying.contains(&moved.1)) {
            return Err(Error::invalid(format!(
                "position {position} of sequence {sequence} is taken already: remove it before moving others there"
            )));
        }
        for (cell, position, shift) in moved {
            self.positions[cell] = position;
            self.shifts[cell] = shift;
            self.changes[sequence] += 1;
        }
        self.tidy();
        Ok(())
    }

    /// Frees every cell.
    pub fn clear(&mut self) {
        for cell in 0..self.end {
            if self.positions[cell] >= 0 {
                self.release(cell);
            }
        }
        self.taken.clear();
        self.next.fill(0);
        self.tidy();
    }

    /// Returns whether keys have a pending rotation.
    pub(crate) fn has_shifts(&self) -> bool {
        self.has_shifts
    }

    /// Returns up to `limit` cells whose keys have a pending rotation, with the distance.
    pub(crate) fn pending_shifts(&self, limit: usize) -> Vec<(usize, i32)> {
        let shifts = self.shifts[..self.end].iter().copied().enumerate();
        shifts
            .filter(|&(_, shift)| shift != 0)
            .take(limit)
            .collect()
    }

    /// Records that the keys of these cells were rotated.
    pub(crate) fn shifted(&mut self, cells: &[(usize, i32)]) {
        for &(cell, _) in cells {
            self.shifts[cell] = 0;
        }
        self.has_shifts = self.shifts[..self.end].iter().any(|&shift| shift != 0);
    }

    /// Writes the mask of a token of `sequence` that sees these positions, for the first cells of
    /// the cache up to the length of `row`: 0 for visible cells, else minus infinity.
    pub(crate) fn visible(
        &self,
        sequence: u32,
        positions: RangeInclusive<i32>,
        row: &mut [half::f16],
    ) {
        let (word, bit) = (sequence as usize / 64, sequence % 64);
        let words = self.sequences.iter().skip(word).step_by(self.words.max(1));
        for ((out, &cell), &bits) in row.iter_mut().zip(&self.positions).zip(words) {
            let sees = positions.contains(&cell) && bits >> bit & 1 == 1;
            *out = if sees {
                half::f16::ZERO
            } else {
                half::f16::NEG_INFINITY
            };
        }
    }

    /// Replaces the zeros in `row`, the mask of a token at `position`, by the negative distances of
    /// the cells.
    pub(crate) fn distances(&self, position: i32, row: &mut [half::f16]) {
        for (out, &cell) in row.iter_mut().zip(&self.positions) {
            if *out == half::f16::ZERO {
                *out = half::f16::from_f32(-(position.abs_diff(cell) as f32));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filled(tokens: &[(i32, &[u32])]) -> Cells {
        let mut cells = Cells::new(8, 70).unwrap();
        for (position, sequences) in tokens {
            cells.take(*position, sequences).unwrap();
        }
        cells.commit();
        cells
    }

    fn positions(cells: &Cells, sequence: usize) -> Vec<i32> {
        let mut positions: Vec<i32> = (0..cells.end)
            .filter(|&cell| cells.belongs(cell, sequence))
            .map(|cell| cells.positions[cell])
            .collect();
        positions.sort_unstable();
        positions
    }

    #[test]
    fn freed_cells_are_reused_first() {
        let mut cells = filled(&[(0, &[0]), (1, &[0]), (2, &[0])]);
        cells.remove(0, 1..2).unwrap();
        assert_eq!((cells.used(), cells.free(), cells.end()), (2, 6, 3));
        assert_eq!(cells.take(7, &[69]), Some(1));
        assert_eq!(cells.last_position(69), Some(7));
        cells.rollback();
        assert_eq!(cells.last_position(69), None);
        assert_eq!(positions(&cells, 0), [0, 2]);
        cells.clear();
        assert_eq!((cells.end(), cells.used()), (0, 0));
        assert!((0..8).all(|_| cells.take(0, &[0]).is_some()));
        assert_eq!(cells.take(0, &[0]), None);
    }

    #[test]
    fn sequences_get_blocks_of_cells_until_none_are_left() {
        let mut cells = Cells::new(2 * BLOCK + 10, 3).unwrap();
        for position in 0..40 {
            assert_eq!(cells.take(position, &[0]), Some(position as usize));
            assert_eq!(cells.take(position, &[1]), Some(BLOCK + position as usize));
        }
        // There is no third block: any free cell is allocated.
        let rest: Vec<_> = std::iter::from_fn(|| cells.take(0, &[2])).collect();
        assert!(
            rest.into_iter()
                .eq((40..BLOCK).chain(BLOCK + 40..2 * BLOCK + 10))
        );
        assert_eq!(cells.free(), 0);
        cells.remove(0, ..).unwrap();
        cells.remove(2, ..).unwrap();
        assert_eq!(cells.take(0, &[2]), Some(0));
        assert_eq!(cells.take(1, &[2]), Some(1));
    }

    #[test]
    fn removal_from_the_end_leaves_no_gap() {
        let mut cells = Cells::new(2 * BLOCK, 2).unwrap();
        let take = |cells: &mut Cells, position| cells.take(position, &[0]).unwrap();
        for position in 0..5 {
            assert_eq!(take(&mut cells, position), position as usize);
        }
        cells.remove(0, 3..).unwrap();
        assert_eq!(take(&mut cells, 3), 3);
        // The end of a block as well, and all of the next one.
        for position in 4..BLOCK as i32 + 3 {
            assert_eq!(take(&mut cells, position), position as usize);
        }
        cells.remove(0, BLOCK as i32 - 1..).unwrap();
        assert_eq!(take(&mut cells, BLOCK as i32 - 1), BLOCK - 1);
        // Nothing is left: another sequence gets the block.
        cells.remove(0, ..).unwrap();
        assert_eq!(cells.take(0, &[1]), Some(0));
        assert_eq!(take(&mut cells, 0), BLOCK);
    }

    #[test]
    fn needed_and_free_blocks_are_counted() {
        let mut cells = Cells::new(3 * BLOCK + 10, 2).unwrap();
        assert_eq!((cells.free_blocks(), cells.blocks_for(Some(0), 1)), (3, 1));
        for position in 0..5 {
            cells.take(position, &[0]).unwrap();
        }
        assert_eq!(cells.free_blocks(), 2);
        assert_eq!(
            [0, BLOCK - 5, BLOCK - 4].map(|tokens| cells.blocks_for(Some(0), tokens)),
            [0, 0, 1]
        );
        assert_eq!(cells.blocks_for(None, 2 * BLOCK), 2);
        cells.take(0, &[1]).unwrap();
        assert_eq!(cells.free_blocks(), 1);
        cells.rollback();
        assert_eq!(cells.free_blocks(), 3);
        // A single sequence needs no blocks.
        assert_eq!(Cells::new(BLOCK, 1).unwrap().blocks_for(Some(0), 9), 0);
    }

    #[test]
    fn returned_cells_are_allocated_again() {
        let mut cells = Cells::new(4 * BLOCK, 2).unwrap();
        for position in 0..BLOCK as i32 - 1 {
            cells.take(position, &[0]).unwrap();
        }
        cells.commit();
        let take = |cells: &mut Cells| {
            let taken = (0..4).map(|i| cells.take(BLOCK as i32 - 1 + i, &[0]));
            taken.collect::<Vec<_>>()
        };
        let first = take(&mut cells);
        cells.rollback();
        assert_eq!(take(&mut cells), first);
    }

    #[test]
    fn copies_share_cells_and_keep_removes_other_sequences() {
        let mut cells = filled(&[(0, &[0]), (1, &[0]), (5, &[1])]);
        cells.copy(0, 1, ..).unwrap();
        assert_eq!(positions(&cells, 1), [0, 1]);
        assert_eq!(cells.used(), 2);
        cells.remove(0, ..).unwrap();
        assert_eq!(cells.used(), 2);
        cells.keep(0).unwrap();
        assert!(cells.is_empty());
    }

    #[test]
    fn shifts_are_checked_before_anything_moves() {
        let mut cells = filled(&[(0, &[0]), (1, &[0]), (4, &[0]), (9, &[1, 2])]);
        for (sequence, range, delta, expected) in [
            (0, 1..9, -2, "would become -1"),
            (0, 4..9, -4, "taken already"),
            (0, 4..9, i32::MAX, "overflows"),
            (1, 0..99, 1, "shared"),
            (70, 0..1, 1, "0 to 69"),
        ] {
            let message = cells.shift(sequence, range, delta).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert!(!cells.has_shifts());
        cells.shift(0, 1.., 3).unwrap();
        cells.shift(0, 7.., -3).unwrap_err();
        cells.shift(0, 4..=4, -2).unwrap();
        assert_eq!(positions(&cells, 0), [0, 2, 7]);
        assert_eq!(cells.pending_shifts(9), [(1, 1), (2, 3)]);
        cells.shifted(&[(1, 1)]);
        assert!(cells.has_shifts());
        cells.shifted(&[(2, 3)]);
        assert!(!cells.has_shifts());
    }

    #[test]
    fn a_token_sees_its_own_past() {
        let cells = filled(&[(0, &[0, 1]), (1, &[0]), (1, &[1]), (2, &[0])]);
        let mut row = vec![half::f16::ONE; 6];
        cells.visible(0, 0..=1, &mut row);
        let seen: Vec<bool> = row.iter().map(|&x| x == half::f16::ZERO).collect();
        assert_eq!(seen, [true, true, false, false, false, false]);
        // The second sequence, through a window of one position.
        cells.visible(0, 1..=1, &mut row);
        cells.distances(3, &mut row);
        assert_eq!(
            row[..2],
            [half::f16::NEG_INFINITY, half::f16::from_f32(-2.0)]
        );
    }

    proptest! {
        /// Edits have the same effect as the same edits of sets of positions.
        #[test]
        fn edits_match_a_set_model(edits in prop::collection::vec((0u8..5, 0usize..3, 0usize..3,
            0i32..6, 0i32..6), 0..40)) {
            let mut cells = Cells::new(2 * BLOCK + 3, 3).unwrap();
            let mut sets = vec![BTreeSet::new(); 3];
            for (edit, a, b, from, to) in edits {
                match edit {
                    0 | 1 => {
                        let position = cells.next_position(a);
                        if cells.take(position, &[a as u32]).is_some() {
                            sets[a].insert(position);
                        }
                        cells.commit();
                    }
                    2 => {
                        cells.remove(a, from..to).unwrap();
                        sets[a].retain(|position| !(from..to).contains(position));
                    }
                    3 => {
                        cells.copy(a, b, from..to).unwrap();
                        if a != b {
                            let copied: Vec<i32> = sets[a]
                                .iter()
                                .copied()
                                .filter(|p| (from..to).contains(p))
                                .collect();
                            sets[b].retain(|position| !(from..to).contains(position));
                            sets[b].extend(copied);
                        }
                    }
                    _ => {
                        let before = cells.clone();
                        let position = cells.next_position(a);
                        cells.take(position, &[a as u32]);
                        cells.take(position + 1, &[a as u32]);
                        cells.rollback();
                        prop_assert_eq!(&before.positions, &cells.positions);
                        prop_assert_eq!(&before.sequences, &cells.sequences);
                        prop_assert_eq!((before.end, before.used), (cells.end, cells.used));
                    }
                }
                for (sequence, set) in sets.iter().enumerate() {
                    prop_assert_eq!(
                        positions(&cells, sequence),
                        set.iter().copied().collect::<Vec<_>>()
                    );
                    prop_assert_eq!(cells.last_position(sequence), set.last().copied());
                }
                prop_assert_eq!(
                    cells.used(),
                    cells.positions.iter().filter(|&&p| p >= 0).count()
                );
                prop_assert!(cells.positions[cells.end..].iter().all(|&p| p < 0));
                let runs = cells.positions.chunks_exact(BLOCK);
                prop_assert_eq!(
                    cells.free_blocks(),
                    runs.filter(|run| run.iter().all(|&p| p < 0)).count()
                );
            }
        }
    }
}
