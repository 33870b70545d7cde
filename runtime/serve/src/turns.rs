//! Turns at expensive work, shared fairly among owners.

use crate::app::lock;
use crate::error::{ApiError, Result};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

/// Turns for requests. The next turn goes to the owner with the fewest running requests, then to
/// the oldest request.
#[derive(Debug)]
pub struct Turns {
    /// Name of the work, for errors.
    work: &'static str,
    at_once: usize,
    /// Maximum concurrent turns of one owner if there are several owners.
    each: usize,
    /// Maximum number of waiting requests per owner.
    queue: usize,
    state: Mutex<TurnQueue>,
}

#[derive(Debug, Default)]
struct TurnQueue {
    /// Running turns by owner.
    at_work: BTreeMap<u64, usize>,
    waiting: VecDeque<(u64, oneshot::Sender<Turn>)>,
}

/// A turn. Dropping it ends it.
#[derive(Debug)]
pub struct Turn {
    turns: Arc<Turns>,
    /// `None` if the request left before its turn began.
    owner: Option<u64>,
}

/// Returns how many requests may do expensive work at once: half of the processors, at least 1 and
/// at most 2, so that the engine keeps the others.
pub fn beside_engine() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / 2).clamp(1, 2)
}

impl Turns {
    /// Creates turns for `at_once` requests, with at most `queue` waiting requests per owner. If
    /// there are several owners, none gets all turns.
    pub fn new(work: &'static str, at_once: usize, queue: usize) -> Arc<Self> {
        Arc::new(Turns {
            work,
            at_once,
            each: at_once.saturating_sub(1).max(1),
            queue,
            state: Mutex::default(),
        })
    }

    /// Waits for a turn.
    ///
    /// # Errors
    /// Returns status 503 if too many requests of the owner are waiting.
    pub async fn begin(self: &Arc<Self>, owner: u64) -> Result<Turn> {
        self.receiver(owner)?.await.map_err(gone)
    }

    /// Waits for a turn on a thread that may block.
    ///
    /// # Errors
    /// Returns the errors of [`begin`](Self::begin).
    pub fn begin_blocking(self: &Arc<Self>, owner: u64) -> Result<Turn> {
        self.receiver(owner)?.blocking_recv().map_err(gone)
    }

    fn receiver(self: &Arc<Self>, owner: u64) -> Result<oneshot::Receiver<Turn>> {
        let (sender, receiver) = oneshot::channel();
        let mut state = lock(&self.state);
        state.waiting.retain(|(_, sender)| !sender.is_closed());
        let waiting = state.waiting.iter().filter(|(other, _)| *other == owner);
        if waiting.count() >= self.queue && !state.has_room(self, owner) {
            let message = format!("too many requests for {} wait: try again later", self.work);
            return Err(ApiError::new(503, message));
        }
        state.waiting.push_back((owner, sender));
        state.give_turns(self);
        Ok(receiver)
    }
}

fn gone<E>(_: E) -> ApiError {
    ApiError::ending()
}

impl TurnQueue {
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

    /// Returns whether a request of `owner` may start.
    fn has_room(&self, turns: &Turns, owner: u64) -> bool {
        let count = self.at_work.get(&owner).copied().unwrap_or(0);
        let all = self.at_work.values().sum::<usize>();
        all < turns.at_once && (owner == 0 || count < turns.each)
    }

    /// Removes and returns the waiting request that comes next and may start.
    fn next(&mut self, turns: &Turns) -> Option<(u64, oneshot::Sender<Turn>)> {
        let count = |owner: &u64| self.at_work.get(owner).copied().unwrap_or(0);
        let waiting = self.waiting.iter().enumerate();
        let waiting = waiting.filter(|(_, (owner, _))| self.has_room(turns, *owner));
        let (at, _) = waiting.min_by_key(|(_, (owner, _))| count(owner))?;
        self.waiting.remove(at)
    }

    fn give_turns(&mut self, turns: &Arc<Turns>) {
        while let Some((owner, sender)) = self.next(turns) {
            let turn = self.begin(turns, owner);
            if let Err(mut refused) = sender.send(turn) {
                // The request left. The lock is held here, so dropping the turn must not take it.
                refused.owner = None;
                self.end(owner);
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(owner) = self.owner else { return };
        let mut state = lock(&self.turns.state);
        state.end(owner);
        state.give_turns(&self.turns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Poll, Waker};

    /// A request that waits for a turn.
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
        let turns = Turns::new("grammars", 3, 2);
        let take = |owner| poll(&mut begin(&turns, owner)).unwrap().unwrap();
        let first = [take(1), take(1)];
        // The third turn is reserved for other owners.
        let mut waiting = [begin(&turns, 1), begin(&turns, 1)];
        assert!(waiting.iter_mut().all(|one| poll(one).is_none()));
        let full = poll(&mut begin(&turns, 1)).unwrap().unwrap_err();
        assert_eq!(full.status, 503);
        let other = take(2);
        let mut another = begin(&turns, 3);
        assert!(poll(&mut another).is_none());
        drop(first);
        // The owner with the fewest turns comes first, even if its request is the newest.
        assert!(poll(&mut another).is_some());
        drop((other, waiting, another));
        let state = lock(&turns.state);
        assert!(state.at_work.is_empty() && state.waiting.is_empty());
    }

    #[test]
    fn a_single_owner_gets_all_turns() {
        let turns = Turns::new("grammars", 2, 1);
        let turns = [(); 3].map(|()| poll(&mut begin(&turns, 0)));
        assert_eq!(turns.map(|turn| turn.is_some()), [true, true, false]);
    }

    #[test]
    fn dropped_waiters_take_no_turn() {
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
