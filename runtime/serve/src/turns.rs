//! Turns at work that few may do at the same time, shared among owners.

use crate::app::lock;
use crate::error::{ApiError, Result};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

/// Turns for requests: one whose owner has the fewest at work comes first, then the oldest.
#[derive(Debug)]
pub struct Turns {
    /// Name of the work, for errors.
    work: &'static str,
    at_once: usize,
    /// Requests of one owner that may wait.
    queue: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By owner.
    at_work: BTreeMap<u64, usize>,
    waiting: VecDeque<(u64, oneshot::Sender<Turn>)>,
}

/// A turn. It ends when it is dropped.
#[derive(Debug)]
pub struct Turn {
    turns: Arc<Turns>,
    /// `None` for a turn whose request left before it began.
    owner: Option<u64>,
}

impl Turns {
    /// Creates turns for `at_once` requests, with `queue` of each owner that may wait.
    pub fn new(work: &'static str, at_once: usize, queue: usize) -> Arc<Self> {
        Arc::new(Turns {
            work,
            at_once,
            queue,
            state: Mutex::default(),
        })
    }

    /// Waits for a turn.
    ///
    /// # Errors
    /// 503 if too many requests of the owner wait already.
    pub async fn begin(self: &Arc<Self>, owner: u64) -> Result<Turn> {
        let receiver = {
            let mut state = lock(&self.state);
            if state.at_work.values().sum::<usize>() < self.at_once {
                return Ok(state.begin(self, owner));
            }
            state.waiting.retain(|(_, sender)| !sender.is_closed());
            let waiting = state.waiting.iter().filter(|(other, _)| *other == owner);
            if waiting.count() >= self.queue {
                let message = format!("too many requests for {} wait: try again later", self.work);
                return Err(ApiError::new(503, message));
            }
            let (sender, receiver) = oneshot::channel();
            state.waiting.push_back((owner, sender));
            receiver
        };
        let gone = |_| ApiError::new(503, "the server is about to end");
        receiver.await.map_err(gone)
    }
}

impl State {
    fn begin(&mut self, turns: &Arc<Turns>, owner: u64) -> Turn {
        *self.at_work.entry(owner).or_default() += 1;
        Turn {
            turns: Arc::clone(turns),
            owner: Some(owner),
        }
    }

    fn end(&mut self, owner: u64) {
        if let Some(count) = self.at_work.get_mut(&owner) {
            *count -= 1;
            if *count == 0 {
                self.at_work.remove(&owner);
            }
        }
    }

    /// Takes out the waiting request that comes next.
    fn next(&mut self) -> Option<(u64, oneshot::Sender<Turn>)> {
        let count = |owner: &u64| self.at_work.get(owner).copied().unwrap_or(0);
        let waiting = self.waiting.iter().enumerate();
        let (at, _) = waiting.min_by_key(|(_, (owner, _))| count(owner))?;
        self.waiting.remove(at)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(owner) = self.owner else { return };
        let mut state = lock(&self.turns.state);
        state.end(owner);
        while let Some((owner, sender)) = state.next() {
            let turn = state.begin(&self.turns, owner);
            let Err(mut refused) = sender.send(turn) else {
                return;
            };
            // The request left. The lock is held here: the turn must not take it.
            refused.owner = None;
            state.end(owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Poll, Waker};

    /// Starts to wait for a turn.
    type Waiting = std::pin::Pin<Box<dyn Future<Output = Result<Turn>>>>;

    fn begin(turns: &Arc<Turns>, owner: u64) -> Waiting {
        let turns = Arc::clone(turns);
        Box::pin(async move { turns.begin(owner).await })
    }

    fn poll(waiting: &mut Waiting) -> Option<Result<Turn>> {
        match waiting
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    #[test]
    fn owners_take_turns() {
        let turns = Turns::new("grammars", 2, 3);
        let take = |owner| poll(&mut begin(&turns, owner)).unwrap().unwrap();
        let (first, second) = (take(1), take(1));
        let mut waiting = [1, 1, 1, 2].map(|owner| begin(&turns, owner));
        assert!(waiting.iter_mut().all(|one| poll(one).is_none()));
        // The queue of the first owner is full, and that of the second one is not.
        let full = poll(&mut begin(&turns, 1)).unwrap().unwrap_err();
        assert_eq!(full.status, 503);
        let gone = begin(&turns, 2);
        drop(first);
        let [one, next, last, other] = &mut waiting;
        let other = poll(other).unwrap().unwrap();
        assert!(poll(one).is_none());
        drop(second);
        let one = poll(one).unwrap().unwrap();
        drop(gone);
        drop(other);
        let next = poll(next).unwrap().unwrap();
        drop((one, next));
        drop(poll(last).unwrap().unwrap());
        let state = lock(&turns.state);
        assert!(state.at_work.is_empty() && state.waiting.is_empty());
    }

    #[test]
    fn whoever_leaves_takes_no_turn() {
        let turns = Turns::new("grammars", 1, 3);
        let first = poll(&mut begin(&turns, 1)).unwrap().unwrap();
        let mut gone = begin(&turns, 1);
        let mut stays = begin(&turns, 1);
        assert!(poll(&mut gone).is_none() && poll(&mut stays).is_none());
        drop(gone);
        drop(first);
        assert!(poll(&mut stays).is_some());
        assert!(lock(&turns.state).at_work.is_empty());
    }
}
