//! Accounting of memory that many clients of a server share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An amount of memory that can be charged and released.
#[derive(Debug)]
pub struct Ledger {
    limit: usize,
    taken: AtomicUsize,
    /// Every charge here is also charged there.
    parent: Option<Arc<Ledger>>,
}

impl Ledger {
    /// Creates a ledger of at most `limit` bytes.
    pub fn new(limit: Option<usize>) -> Arc<Self> {
        Arc::new(Ledger {
            limit: limit.unwrap_or(usize::MAX),
            taken: AtomicUsize::new(0),
            parent: None,
        })
    }

    /// Creates a part of this ledger, of at most `limit` bytes.
    pub fn part(self: &Arc<Self>, limit: Option<usize>) -> Arc<Self> {
        Arc::new(Ledger {
            limit: limit.unwrap_or(usize::MAX),
            taken: AtomicUsize::new(0),
            parent: Some(Arc::clone(self)),
        })
    }

    /// Returns the charged bytes.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// Returns the bytes left.
    pub fn left(&self) -> usize {
        let above = self.parent.as_ref().map_or(usize::MAX, |up| up.left());
        above.min(self.limit.saturating_sub(self.taken()))
    }

    /// Charges `bytes` until the result is dropped. Returns `None` if fewer are left.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Option<Charge> {
        let more = |now: usize| now.checked_add(bytes).filter(|&sum| sum <= self.limit);
        let relaxed = Ordering::Relaxed;
        self.taken.fetch_update(relaxed, relaxed, more).ok()?;
        let mut charge = Charge {
            ledger: Arc::clone(self),
            bytes,
            parent: None,
        };
        // Last, so that a charge that does not fit here never takes bytes from others, not even for
        // a moment.
        if let Some(parent) = &self.parent {
            charge.parent = Some(Box::new(parent.take(bytes)?));
        }
        Some(charge)
    }
}

/// A charge of memory. Dropping it releases the memory.
#[derive(Debug)]
pub struct Charge {
    ledger: Arc<Ledger>,
    bytes: usize,
    parent: Option<Box<Charge>>,
}

impl Charge {
    /// Charges `bytes` more. Returns false and charges nothing if fewer are left.
    pub fn grow(&mut self, bytes: usize) -> bool {
        let Some(more) = self.ledger.take(bytes) else {
            return false;
        };
        self.join(more);
        true
    }

    fn join(&mut self, mut other: Charge) {
        self.bytes += std::mem::take(&mut other.bytes);
        if let (Some(own), Some(other)) = (&mut self.parent, other.parent.take()) {
            own.join(*other);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.ledger.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_never_exceed_the_limits() {
        let all = Ledger::new(Some(100));
        let (a, b) = (all.part(Some(70)), all.part(None));
        assert!(a.take(71).is_none() && a.take(usize::MAX).is_none());
        let taken = a.take(60).unwrap();
        assert_eq!((all.taken(), a.left(), b.left()), (60, 10, 40));
        assert!(b.take(41).is_none());
        let rest = b.take(40).unwrap();
        assert_eq!((a.left(), all.left()), (0, 0));
        drop(taken);
        assert_eq!((all.taken(), b.left()), (40, 60));
        let mut taken = a.take(10).unwrap();
        assert!(taken.grow(40) && !taken.grow(11) && !taken.grow(usize::MAX));
        assert_eq!((all.taken(), a.taken()), (90, 50));
        drop(taken);
        assert_eq!((all.taken(), a.taken()), (40, 0));
        drop(rest);
        assert_eq!(all.taken(), 0);
    }
}
