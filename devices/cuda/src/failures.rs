//! Failure words: how kernels report a row or expert number that is out of range.
//!
//! A stream has one word on the card. A kernel that meets an invalid number skips it and writes the
//! number of its node there, the smallest one of all. The stream reads the word when it waits.

use crate::driver::Address;
use crate::gpu::OpenedCard;
use samite_core::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Contents of a word without a failure.
const NO_FAILURE: u32 = u32::MAX;

/// Nodes that can fail, by number.
#[derive(Debug)]
pub struct Fallible {
    pub first: u32,
    nodes: Vec<String>,
}

/// The failure word of a stream.
#[derive(Debug)]
pub struct Failures {
    opened: Arc<OpenedCard>,
    device: Box<str>,
    pub word: Address,
    state: Mutex<FailureState>,
    /// Held during a check, so that a second one sees the result of the first.
    checking: Mutex<()>,
}

#[derive(Debug, Default)]
struct FailureState {
    /// Next node number.
    next: u32,
    /// Work that was queued and can be queued again.
    pending: Vec<Arc<Fallible>>,
    /// Failure words of other streams whose work ran on this one, or before it.
    others: Vec<Weak<Failures>>,
}

impl Failures {
    pub fn new(device: &str, opened: &Arc<OpenedCard>) -> Result<Arc<Self>> {
        let word = opened.alloc(4, "the failure word of a stream")?;
        let failures = Failures {
            opened: Arc::clone(opened),
            device: device.into(),
            word,
            state: Mutex::default(),
            checking: Mutex::default(),
        };
        opened.write(word, &NO_FAILURE.to_le_bytes())?;
        Ok(Arc::new(failures))
    }

    fn state(&self) -> MutexGuard<'_, FailureState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Assigns numbers to `nodes`.
    pub fn number(&self, nodes: Vec<String>) -> Arc<Fallible> {
        let mut state = self.state();
        let count = nodes.len() as u32;
        // Numbers repeat only after four billion nodes, long after the first ones were reported.
        let first = match state.next.checked_add(count) {
            Some(end) if end < NO_FAILURE => state.next,
            _ => 0,
        };
        state.next = first + count;
        Arc::new(Fallible { first, nodes })
    }

    /// Registers queued work that was prepared for the stream of `owner`.
    pub fn add(self: &Arc<Self>, owner: &Arc<Failures>, work: &Arc<Fallible>) {
        if work.nodes.is_empty() {
            return;
        }
        let mut state = owner.state();
        if !state.pending.iter().any(|known| Arc::ptr_eq(known, work)) {
            state.pending.push(Arc::clone(work));
        }
        drop(state);
        self.add_other(owner);
    }

    /// Makes checks of this word also check the one of another stream, and those that it checks.
    pub fn add_other(self: &Arc<Self>, other: &Arc<Failures>) {
        if Arc::ptr_eq(self, other) {
            return;
        }
        let mut state = self.state();
        state.others.retain(|known| known.strong_count() > 0);
        let other = Arc::downgrade(other);
        if !state.others.iter().any(|known| known.ptr_eq(&other)) {
            state.others.push(other);
        }
    }

    /// Fails if work that is done met an invalid number. Each failure is reported once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], which names the node.
    pub fn check(self: &Arc<Self>) -> Result<()> {
        let mut all = vec![Arc::clone(self)];
        let mut at = 0;
        while at < all.len() {
            let others = all[at].state().others.clone();
            for other in others.iter().filter_map(Weak::upgrade) {
                if !all.iter().any(|known| Arc::ptr_eq(known, &other)) {
                    all.push(other);
                }
            }
            at += 1;
        }
        let checked = all.iter().map(|failures| failures.check_own());
        checked.fold(Ok(()), Result::and)
    }

    fn check_own(&self) -> Result<()> {
        let _one_at_a_time = self.checking.lock().unwrap_or_else(PoisonError::into_inner);
        let pending = self.state().pending.clone();
        if pending.is_empty() {
            return Ok(());
        }
        // Work that is gone was done before the word is read. Other work may still run, so it stays
        // on the list. Besides the list, only the clone here holds it.
        let is_gone = |work: &Arc<Fallible>| Arc::strong_count(work) == 2;
        let gone: Vec<_> = pending.iter().filter(|work| is_gone(work)).collect();
        let mut word = [0; 4];
        self.opened.read(self.word, &mut word)?;
        let number = u32::from_le_bytes(word);
        if number != NO_FAILURE {
            self.opened.write(self.word, &NO_FAILURE.to_le_bytes())?;
        }
        let is_left = |work: &Arc<Fallible>| !gone.iter().any(|gone| Arc::ptr_eq(gone, work));
        self.state().pending.retain(is_left);
        if number == NO_FAILURE {
            return Ok(());
        }
        let name = pending.iter().find_map(|work| {
            let index = number.checked_sub(work.first)?;
            work.nodes.get(index as usize).cloned()
        });
        Err(Error::invalid(format!(
            "{}: {}: a row or expert number is out of range",
            self.device,
            name.as_deref().unwrap_or("a node")
        )))
    }
}

impl Drop for Failures {
    fn drop(&mut self) {
        self.opened.free(self.word);
    }
}
