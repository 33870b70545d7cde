//! The queue between the engine and the reader of an answer. It reports when it is full, and when
//! its reader is dropped.

use crate::event::Event;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Callback that wakes up the engine: a reader made room or was dropped.
pub type EngineWaker = Arc<dyn Fn() + Send + Sync>;

#[derive(Debug, Default)]
struct EventQueueState {
    events: VecDeque<Event>,
    /// The event of the end, which the reader gets when the engine drops its side.
    last: Option<Event>,
    waker: Option<Waker>,
    /// The reader was dropped.
    is_closed: bool,
    /// The engine sends nothing more.
    is_ended: bool,
}

struct EventChannel {
    state: Mutex<EventQueueState>,
    changed: Condvar,
    capacity: usize,
    wake_engine: EngineWaker,
}

impl EventChannel {
    fn lock(&self) -> MutexGuard<'_, EventQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventChannel")
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

/// The engine's side.
#[derive(Debug)]
pub(crate) struct EventQueue(Arc<EventChannel>);

/// The reader's side. A request whose reader is dropped is cancelled.
#[derive(Debug)]
pub struct Reader(Arc<EventChannel>);

/// Creates a queue for `capacity` events.
pub(crate) fn event_queue(capacity: usize, wake_engine: EngineWaker) -> (EventQueue, Reader) {
    let shared = Arc::new(EventChannel {
        state: Mutex::default(),
        changed: Condvar::new(),
        capacity: capacity.max(1),
        wake_engine,
    });
    (EventQueue(Arc::clone(&shared)), Reader(shared))
}

impl EventQueue {
    pub fn is_full(&self) -> bool {
        self.0.lock().events.len() >= self.0.capacity
    }

    pub fn is_closed(&self) -> bool {
        self.0.lock().is_closed
    }

    pub fn wake_engine(&self) -> EngineWaker {
        Arc::clone(&self.0.wake_engine)
    }

    /// Sends an event; there is always room for the last one, which arrives when this is dropped.
    pub fn send(&self, event: Event) {
        let mut state = self.0.lock();
        if event.is_end() {
            state.last = Some(event);
            return;
        }
        if !state.is_closed {
            state.events.push_back(event);
        }
        let waker = state.waker.take();
        drop(state);
        self.0.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for EventQueue {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_ended = true;
        if let Some(last) = state.last.take()
            && !state.is_closed
        {
            state.events.push_back(last);
        }
        let waker = state.waker.take();
        drop(state);
        self.0.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Reader {
    fn taken(&self, state: &mut EventQueueState) -> Option<Event> {
        let was_full = state.events.len() >= self.0.capacity;
        let event = state.events.pop_front()?;
        if was_full {
            (self.0.wake_engine)();
        }
        Some(event)
    }

    /// Returns the next event, if there is one.
    pub fn try_next(&mut self) -> Option<Event> {
        let mut state = self.0.lock();
        self.taken(&mut state)
    }

    /// Waits for the next event. Returns `None` after the last one.
    pub fn wait(&mut self) -> Option<Event> {
        let mut state = self.0.lock();
        loop {
            if let Some(event) = self.taken(&mut state) {
                return Some(event);
            }
            if state.is_ended {
                return None;
            }
            let waited = self.0.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Polls for the next event in an asynchronous task. Returns `None` after the last one.
    pub fn poll_next(&mut self, task: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut state = self.0.lock();
        if let Some(event) = self.taken(&mut state) {
            return Poll::Ready(Some(event));
        }
        if state.is_ended {
            return Poll::Ready(None);
        }
        state.waker = Some(task.waker().clone());
        Poll::Pending
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        let must_tell = !state.is_ended;
        state.is_closed = true;
        state.events.clear();
        drop(state);
        if must_tell {
            (self.0.wake_engine)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Counts, Failed, FailureKind, Started, Token};
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn token(id: u32) -> Event {
        Event::Token(Token {
            id,
            text: String::new(),
            probabilities: None,
        })
    }

    #[test]
    fn readers_ring_when_they_make_room_or_are_dropped() {
        let rings = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&rings);
        let wake_engine: EngineWaker = Arc::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let (event_queue, mut reader) = event_queue(2, wake_engine);
        event_queue.send(token(1));
        assert!(!event_queue.is_full());
        event_queue.send(token(2));
        assert!(event_queue.is_full());
        assert_eq!(reader.try_next(), Some(token(1)));
        assert_eq!(rings.load(Ordering::SeqCst), 1);
        assert_eq!(reader.wait(), Some(token(2)));
        assert_eq!(reader.try_next(), None);
        assert_eq!(rings.load(Ordering::SeqCst), 1);
        drop(reader);
        assert!(event_queue.is_closed());
        assert_eq!(rings.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_dropped_engine_ends_the_answer() {
        let (event_queue, mut reader) = event_queue(1, Arc::new(|| {}));
        let started = Event::Started(Started {
            slot: 0,
            prompt: 1,
            cached: 0,
            miss: None,
        });
        event_queue.send(started.clone());
        drop(event_queue);
        assert_eq!(reader.wait(), Some(started));
        assert_eq!(reader.wait(), None);
    }

    #[test]
    fn the_end_arrives_when_the_engine_drops_its_side() {
        let (event_queue, mut reader) = event_queue(1, Arc::new(|| {}));
        let end = Event::Failed(Failed {
            kind: FailureKind::Closing,
            message: String::new(),
            counts: Counts::default(),
        });
        event_queue.send(token(1));
        event_queue.send(end.clone());
        assert_eq!(reader.try_next(), Some(token(1)));
        assert_eq!(reader.try_next(), None);
        drop(event_queue);
        assert_eq!(reader.wait(), Some(end));
        assert_eq!(reader.wait(), None);
    }
}
