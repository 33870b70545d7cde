//! The rows of memory that hold the recurrent states of sequences.

use crate::error::{Result, try_filled};

/// Rows of recurrent states.
///
/// A row is never written while a sequence holds it: a batch writes to free rows, and its sequences
/// hold them only after the batch is done. A failed batch therefore changes nothing, and sequences
/// can share a row. A sequence can also hold the row of an earlier state: its mark, to which it can
/// return.
///
/// Row 0 consists of zeros, which are the state of an empty sequence, and is never written.
#[derive(Clone, Debug)]
pub(crate) struct States {
    /// By row: number of sequences that hold it, now or after the batch.
    holders: Vec<u32>,
    /// Row by sequence.
    rows: Vec<usize>,
    /// By sequence: row that the current batch wrote its state to.
    written: Vec<Option<usize>>,
    /// By sequence: row of its mark, and the position after it.
    marks: Vec<Option<(usize, i32)>>,
}

impl States {
    /// Returns the number of rows for `n_sequences`: for each, one that it holds, one for its mark,
    /// and one that a batch writes, plus the row of zeros.
    pub fn rows_for(n_sequences: usize) -> usize {
        n_sequences.saturating_mul(3).saturating_add(1)
    }

    /// Creates `n_sequences` empty sequences.
    ///
    /// # Errors
    /// Returns [`samite_core::Error::OutOfMemory`].
    pub fn new(n_sequences: usize) -> Result<Self> {
        const WHAT: &str = "the rows of states";
        Ok(States {
            holders: try_filled(0, Some(Self::rows_for(n_sequences)), WHAT)?,
            rows: try_filled(0, Some(n_sequences), WHAT)?,
            written: try_filled(None, Some(n_sequences), WHAT)?,
            marks: try_filled(None, Some(n_sequences), WHAT)?,
        })
    }

    /// Returns the row that the next tokens of `sequences` start with, which is that of the first
    /// sequence, and the row that their state is written to.
    pub fn advance(&mut self, sequences: &[u32]) -> (usize, usize) {
        let first = sequences.first().map_or(0, |&sequence| sequence as usize);
        let read = self.written[first].unwrap_or(self.rows[first]);
        let own = self.written[first].filter(|&row| self.holders[row] as usize == sequences.len());
        // There are more rows than sequences can hold and write.
        let free = || (1..self.holders.len()).find(|&row| self.holders[row] == 0);
        let write = own.or_else(free).unwrap_or(0);
        for &sequence in sequences {
            self.holders[write] += 1;
            if let Some(before) = self.written[sequence as usize].replace(write) {
                self.release(before);
            }
        }
        (read, write)
    }

    fn release(&mut self, row: usize) {
        self.holders[row] = self.holders[row].saturating_sub(1);
    }

    /// Makes sequences hold the rows that were written.
    pub fn commit(&mut self) {
        for sequence in 0..self.rows.len() {
            if let Some(row) = self.written[sequence].take() {
                self.release(self.rows[sequence]);
                self.rows[sequence] = row;
            }
        }
    }

    /// Discards the rows that were written.
    pub fn rollback(&mut self) {
        for sequence in 0..self.rows.len() {
            if let Some(row) = self.written[sequence].take() {
                self.release(row);
            }
        }
    }

    /// Returns the rows that the current batch writes, in order.
    pub fn written(&self) -> Vec<usize> {
        let mut written: Vec<usize> = self.written.iter().flatten().copied().collect();
        written.sort_unstable();
        written.dedup();
        written
    }

    /// Returns the rows that a sequence holds, in order: those of its state and of its mark.
    pub fn held(&self, sequence: usize) -> Vec<usize> {
        let mark = self.marks.get(sequence).copied().flatten();
        let mut held: Vec<usize> = [self.row(sequence)]
            .into_iter()
            .chain(mark.map(|(row, _)| row))
            .filter(|&row| row > 0)
            .collect();
        held.sort_unstable();
        held.dedup();
        held
    }

    /// Returns whether no sequence holds a row.
    pub fn is_free(&self, row: usize) -> bool {
        row > 0 && self.holders[row] == 0
    }

    /// Returns the row that a sequence holds.
    pub fn row(&self, sequence: usize) -> usize {
        self.rows.get(sequence).copied().unwrap_or(0)
    }

    /// Returns the position after the mark of a sequence.
    pub fn mark(&self, sequence: usize) -> Option<i32> {
        Some((*self.marks.get(sequence)?)?.1)
    }

    /// Marks the state of a sequence whose next token has this position.
    pub fn set_mark(&mut self, sequence: usize, position: i32) {
        self.forget_mark(sequence);
        let row = self.rows[sequence];
        self.holders[row] += 1;
        self.marks[sequence] = Some((row, position));
    }

    /// Restores the state at the mark of a sequence.
    pub fn go_back(&mut self, sequence: usize) {
        if let Some((row, _)) = self.marks[sequence] {
            self.holders[row] += 1;
            self.release(self.rows[sequence]);
            self.rows[sequence] = row;
        }
    }

    fn forget_mark(&mut self, sequence: usize) {
        if let Some((row, _)) = self.marks[sequence].take() {
            self.release(row);
        }
    }

    /// Removes a sequence.
    pub fn forget(&mut self, sequence: usize) {
        self.forget_mark(sequence);
        self.release(self.rows[sequence]);
        self.rows[sequence] = 0;
    }

    /// Makes `to` hold the state of `from`.
    pub fn share(&mut self, from: usize, to: usize) {
        let row = self.rows[from];
        self.holders[row] += 1;
        self.forget_mark(to);
        self.release(self.rows[to]);
        self.rows[to] = row;
    }

    /// Removes all sequences.
    pub fn clear(&mut self) {
        self.holders.fill(0);
        self.rows.fill(0);
        self.written.fill(None);
        self.marks.fill(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_rows_of_a_sequence_are_not_overwritten() {
        let mut states = States::new(2).unwrap();
        let (zeros, first) = states.advance(&[0]);
        assert_eq!(zeros, 0);
        assert_ne!(first, 0);
        // The same batch continues where it wrote.
        assert_eq!(states.advance(&[0]), (first, first));
        states.commit();
        let (read, second) = states.advance(&[0]);
        assert_eq!(read, first);
        assert_ne!(second, first);
        states.rollback();
        assert_eq!(states.advance(&[0]).0, first);
        states.rollback();
        states.share(0, 1);
        let (read, write) = states.advance(&[1]);
        assert!(read == first && write != first);
        states.commit();
        assert_eq!(states.advance(&[0]).0, first);
        states.rollback();
        states.forget(0);
        assert_eq!(states.advance(&[0]).0, 0);
    }

    #[test]
    fn a_state_mark_can_be_restored_repeatedly() {
        let mut states = States::new(2).unwrap();
        let (_, first) = states.advance(&[0]);
        states.commit();
        states.set_mark(0, 5);
        for _ in 0..5 {
            for _ in 0..3 {
                let (_, write) = states.advance(&[0]);
                assert!(write > 0 && write != first);
                let (_, other) = states.advance(&[1]);
                assert!(other > 0 && other != first && other != write);
                states.commit();
            }
            states.go_back(0);
            assert_eq!((states.row(0), states.mark(0)), (first, Some(5)));
        }
        // A sequence that replaces another has no mark, and its rows are free again.
        states.share(1, 0);
        assert_eq!((states.mark(0), states.holders[first]), (None, 0));
        states.set_mark(1, 2);
        states.forget(1);
        assert_eq!(states.mark(1), None);
        states.forget(0);
        assert!(states.holders[1..].iter().all(|&count| count == 0));
    }

    #[test]
    fn every_batch_gets_a_state_row() {
        let mut states = States::new(3).unwrap();
        for round in 0..20 {
            let written: Vec<usize> = (0..3).map(|seq| states.advance(&[seq]).1).collect();
            let mut distinct = written.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert!(distinct.len() == 3 && distinct[0] > 0, "{written:?}");
            if round % 3 == 0 {
                states.rollback();
            } else {
                states.commit();
            }
        }
        // A token of two sequences: both continue from the state of the first one, in one row.
        let (_, shared) = states.advance(&[0, 2]);
        states.commit();
        assert_eq!(states.advance(&[2]).0, shared);
        assert_eq!(states.advance(&[0]).0, shared);
    }
}
