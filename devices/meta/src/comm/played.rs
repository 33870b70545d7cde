//! A loopback transport: threads of one process act as processes, to test members that are each
//! alone.

use super::Transport;
use samite_core::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Messages of a round, and the number of members that have read them.
#[derive(Default)]
struct Round {
    sent: Vec<Option<Vec<u8>>>,
    taken: usize,
}

/// One end of a connection between threads that act as processes.
pub struct Played {
    rounds: Arc<Mutex<BTreeMap<usize, Round>>>,
    rank: usize,
    size: usize,
    round: usize,
    lens: Vec<usize>,
    gathered: Vec<u8>,
}

impl Played {
    /// Returns the ends of all members.
    pub fn all(size: usize) -> Vec<Played> {
        let rounds = Arc::default();
        (0..size)
            .map(|rank| Played {
                rounds: Arc::clone(&rounds),
                rank,
                size,
                round: 0,
                lens: Vec::new(),
                gathered: Vec::new(),
            })
            .collect()
    }

    fn rounds(&self) -> MutexGuard<'_, BTreeMap<usize, Round>> {
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for Played {
    fn name(&self) -> String {
        "threads that play processes".to_owned()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn begin(&mut self, head: &[u8], body: &[u8], lens: &[usize]) -> Result<()> {
        self.round += 1;
        lens.clone_into(&mut self.lens);
        let mut rounds = self.rounds();
        let round = rounds.entry(self.round).or_default();
        round.sent.resize(self.size, None);
        round.sent[self.rank] = Some([head, body].concat());
        Ok(())
    }

    fn test(&mut self) -> Result<bool> {
        let mut rounds = self.rounds();
        let round = rounds.entry(self.round).or_default();
        let sent: Option<Vec<&Vec<u8>>> = round.sent.iter().map(Option::as_ref).collect();
        let Some(sent) = sent else { return Ok(false) };
        let lens = sent.iter().map(|part| part.len());
        if !lens.eq(self.lens.iter().copied()) {
            return Err(Error::device(
                "meta",
                "members sent more or less than was expected",
            ));
        }
        let gathered = sent.into_iter().flatten().copied().collect();
        round.taken += 1;
        if round.taken == self.size {
            let number = self.round;
            rounds.remove(&number);
        }
        drop(rounds);
        self.gathered = gathered;
        Ok(true)
    }

    fn gathered(&self) -> &[u8] {
        &self.gathered
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }

    /// A thread cannot end other threads.
    fn abort(&mut self, _: i32) {}
}
