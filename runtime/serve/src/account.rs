//! The memory that requests hold: each request has an account, and all accounts share one limit.
//!
//! What a request makes of its body (tokens, settings, answers that wait for their end) is charged
//! where it multiplies, before the memory is taken. Sizes are estimates from above.

use crate::error::{ApiError, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// The accounts of a server.
#[derive(Debug)]
pub struct Ledger {
    /// Bytes that all requests together may hold. One of them may hold half of it.
    limit: usize,
    held: AtomicUsize,
    /// Wakes those that wait for memory.
    released: Notify,
}

/// The account of a request. What it holds is released when it is dropped.
#[derive(Debug)]
pub struct Account {
    ledger: Arc<Ledger>,
    held: AtomicUsize,
}

/// A part of an account that is released when it is dropped.
#[derive(Debug)]
#[must_use]
pub struct Hold<'a> {
    account: &'a Account,
    bytes: usize,
}

impl Ledger {
    /// Creates a ledger for `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Ledger {
            limit,
            held: AtomicUsize::new(0),
            released: Notify::new(),
        }
    }

    fn release(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::SeqCst);
        self.released.notify_waiters();
    }
}

impl Account {
    /// Opens an account.
    pub fn new(ledger: &Arc<Ledger>) -> Self {
        Account {
            ledger: Arc::clone(ledger),
            held: AtomicUsize::new(0),
        }
    }

    /// Returns the bytes that the request holds.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    /// Charges `bytes` for a field.
    ///
    /// # Errors
    /// 413 if the request would hold more than one may, and 503 if all requests together would hold
    /// more than they may.
    pub fn charge(&self, field: &str, bytes: usize) -> Result<()> {
        let add = |to: &AtomicUsize, limit: usize| {
            let sum = |held: usize| held.checked_add(bytes).filter(|&sum| sum <= limit);
            to.fetch_update(Ordering::SeqCst, Ordering::SeqCst, sum)
                .is_ok()
        };
        let limit = self.ledger.limit;
        let mebibytes = |bytes: usize| bytes >> 20;
        if !add(&self.held, limit / 2) {
            let message = format!(
                "the request would take more than {} MiB of memory: make it smaller, or start the server with a larger --request-memory",
                mebibytes(limit / 2)
            );
            let mut error = ApiError::field(field, message);
            error.status = 413;
            return Err(error);
        }
        if !add(&self.ledger.held, limit) {
            self.held.fetch_sub(bytes, Ordering::SeqCst);
            let message = format!(
                "requests hold the {} MiB of memory that they may (--request-memory): try again later",
                mebibytes(limit)
            );
            return Err(ApiError::new(503, message));
        }
        Ok(())
    }

    /// Charges `bytes` for as long as the hold exists.
    ///
    /// # Errors
    /// As [`charge`](Self::charge).
    pub fn hold(&self, field: &str, bytes: usize) -> Result<Hold<'_>> {
        self.charge(field, bytes)?;
        Ok(Hold {
            account: self,
            bytes,
        })
    }

    /// Releases `bytes` that were charged.
    pub fn release(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::SeqCst);
        self.ledger.release(bytes);
    }

    /// Returns a future that ends when memory is released after this call.
    pub fn released(&self) -> Notified<'_> {
        self.ledger.released.notified()
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.ledger.release(self.held());
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.account.release(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_have_a_limit_each_and_one_together() {
        let ledger = Arc::new(Ledger::new(100));
        let [a, b, c] = [(); 3].map(|()| Account::new(&ledger));
        a.charge("x", 50).unwrap();
        let error = a.charge("prompt", 1).unwrap_err();
        assert_eq!((error.status, error.is_about("prompt")), (413, true));
        b.charge("x", 30).unwrap();
        assert_eq!(c.charge("x", 21).unwrap_err().status, 503);
        let hold = c.hold("x", 20).unwrap();
        assert_eq!(b.charge("x", 1).unwrap_err().status, 503);
        drop(hold);
        assert_eq!((a.held(), b.held(), c.held()), (50, 30, 0));
        drop(a);
        c.charge("x", 50).unwrap();
        b.release(30);
        assert_eq!(ledger.held.load(Ordering::SeqCst), 50);
        // A size from outside does not wrap around.
        assert_eq!(b.charge("x", usize::MAX).unwrap_err().status, 413);
    }
}
