//! A single-threaded executor that draws at random which ready task runs next.

use samite_remote::bare::BoxedTask;
use samite_testing::Rng;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// Owner of a task; the task ends with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The client with this number.
    Client(usize),
    Server,
}

/// Set when a task is ready.
struct ReadyFlag(AtomicBool);

impl Wake for ReadyFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct TaskEntry {
    side: Side,
    /// `None` while it runs.
    task: Option<BoxedTask>,
    flag: Arc<ReadyFlag>,
}

struct ExecutorState {
    rng: Rng,
    count: u64,
    all: BTreeMap<u64, TaskEntry>,
}

pub(crate) struct Tasks(Mutex<ExecutorState>);

impl Tasks {
    pub fn new(seed: u64) -> Self {
        Tasks(Mutex::new(ExecutorState {
            rng: Rng::new(seed),
            count: 0,
            all: BTreeMap::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, ExecutorState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn spawn(&self, side: Side, task: BoxedTask) {
        let mut state = self.lock();
        state.count += 1;
        let entry = TaskEntry {
            side,
            task: Some(task),
            flag: Arc::new(ReadyFlag(AtomicBool::new(true))),
        };
        let number = state.count;
        state.all.insert(number, entry);
    }

    /// Runs tasks until all of them wait.
    pub fn go_on(&self) {
        while let Some((number, mut task, flag)) = self.next() {
            let waker = Waker::from(flag);
            let polled = task.as_mut().poll(&mut Context::from_waker(&waker));
            let mut state = self.lock();
            match polled {
                Poll::Ready(()) => drop(state.all.remove(&number)),
                // The entry is gone if its side ended meanwhile.
                Poll::Pending => {
                    if let Some(entry) = state.all.get_mut(&number) {
                        entry.task = Some(task);
                        continue;
                    }
                }
            }
            drop(state);
        }
    }

    fn next(&self) -> Option<(u64, BoxedTask, Arc<ReadyFlag>)> {
        let mut state = self.lock();
        let state = &mut *state;
        let ready = state.all.iter().filter(|(_, entry)| entry.task.is_some());
        let ready = ready.filter(|(_, entry)| entry.flag.0.load(Ordering::SeqCst));
        let ready: Vec<u64> = ready.map(|(&number, _)| number).collect();
        if ready.is_empty() {
            return None;
        }
        let number = ready[state.rng.below(ready.len())];
        let entry = state.all.get_mut(&number)?;
        entry.flag.0.store(false, Ordering::SeqCst);
        Some((number, entry.task.take()?, Arc::clone(&entry.flag)))
    }

    /// Ends all tasks of a side, as when its process is killed.
    pub fn end(&self, side: Side) {
        let mut state = self.lock();
        let numbers = state.all.iter().filter(|(_, entry)| entry.side == side);
        let numbers: Vec<u64> = numbers.map(|(&number, _)| number).collect();
        let ended: Vec<_> = numbers.iter().map(|n| state.all.remove(n)).collect();
        drop(state);
        // Drop the tasks and their resources only after releasing the lock.
        drop(ended);
    }
}
