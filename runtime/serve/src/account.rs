//! Memory accounting: each request has an account, and all accounts share one limit. If there are
//! several owners, none gets all of it.
//!
//! The server charges what it derives from a body (tokens, settings, buffered answers) at the point
//! where it multiplies, before it allocates. Sizes are upper estimates.

use crate::app::lock;
use crate::error::{ApiError, Result};
use samite_core::{Charge, Ledger};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// The accounts of a server.
#[derive(Debug)]
pub struct Accounts {
    /// Bytes that all requests together may hold. One request may hold half of it.
    limit: usize,
    ledger: Arc<Ledger>,
    /// Ledgers of the owners that have requests.
    owners: Mutex<BTreeMap<u64, Weak<Ledger>>>,
    /// Wakes requests that wait for memory.
    released: Notify,
}

/// The account of a request. Dropping it releases all charges.
#[derive(Debug)]
pub struct RequestAccount {
    accounts: Arc<Accounts>,
    owner: u64,
    /// Ledger of all requests of the owner.
    of_owner: Arc<Ledger>,
    own: Arc<Ledger>,
    charge: Mutex<Option<Charge>>,
}

impl Accounts {
    /// Creates accounts with a limit of `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Accounts {
            limit,
            ledger: Ledger::new(Some(limit)),
            owners: Mutex::default(),
            released: Notify::new(),
        }
    }

    /// Returns the bytes that one owner may hold: all, or three quarters if there are several
    /// owners.
    fn share(&self, owner: u64) -> usize {
        if owner == 0 {
            self.limit
        } else {
            self.limit - self.limit / 4
        }
    }

    /// Returns the ledger of an owner, which all its requests share.
    fn ledger(&self, owner: u64) -> Arc<Ledger> {
        let mut owners = lock(&self.owners);
        if let Some(ledger) = owners.get(&owner).and_then(Weak::upgrade) {
            return ledger;
        }
        owners.retain(|_, ledger| ledger.strong_count() > 0);
        let ledger = self.ledger.part(Some(self.share(owner)));
        owners.insert(owner, Arc::downgrade(&ledger));
        ledger
    }
}

impl RequestAccount {
    /// Opens an account for a request of `owner`; 0 if there is one owner.
    pub fn new(accounts: &Arc<Accounts>, owner: u64) -> Self {
        let of_owner = accounts.ledger(owner);
        let own = of_owner.part(Some(accounts.limit / 2));
        RequestAccount {
            charge: Mutex::new(own.take(0)),
            accounts: Arc::clone(accounts),
            owner,
            of_owner,
            own,
        }
    }

    /// Opens another account of the same owner.
    pub fn another(&self) -> Self {
        RequestAccount::new(&self.accounts, self.owner)
    }

    /// Returns the owner of the request; 0 if there is one owner.
    pub fn owner(&self) -> u64 {
        self.owner
    }

    /// Returns the number of bytes that the request holds.
    pub fn held(&self) -> usize {
        self.own.taken()
    }

    /// Charges `bytes` for a field.
    ///
    /// # Errors
    /// Returns status 413 if the request would exceed its share of the limit, and 503 if the
    /// requests of its owner or all requests together would exceed theirs.
    pub fn charge(&self, field: &str, bytes: usize) -> Result<()> {
        let mut charge = lock(&self.charge);
        if charge.as_mut().is_some_and(|charge| charge.grow(bytes)) {
            return Ok(());
        }
        Err(self.refusal(field, bytes))
    }

    /// Charges `bytes` until the result is dropped.
    ///
    /// # Errors
    /// Returns the errors of [`charge`](Self::charge).
    pub fn hold(&self, field: &str, bytes: usize) -> Result<Charge> {
        let charge = self.own.take(bytes);
        charge.ok_or_else(|| self.refusal(field, bytes))
    }

    /// Returns the reason why `bytes` more cannot be charged.
    fn refusal(&self, field: &str, bytes: usize) -> ApiError {
        let limit = self.accounts.limit;
        let mebibytes = |bytes: usize| bytes >> 20;
        if bytes > (limit / 2).saturating_sub(self.held()) {
            let message = format!(
                "the request would take more than {} MiB of memory: make it smaller, or start the server with a larger --request-memory",
                mebibytes(limit / 2)
            );
            let mut error = ApiError::field(field, message);
            error.status = 413;
            return error;
        }
        let (whose, limit) = if self.is_share_full(bytes) {
            ("requests of this key", self.accounts.share(self.owner))
        } else {
            ("requests", limit)
        };
        let message = format!(
            "{whose} hold the {} MiB of memory that they may (--request-memory): try again later",
            mebibytes(limit)
        );
        ApiError::new(503, message)
    }

    /// Returns whether `bytes` more would exceed the share of the owner, if there are several.
    pub fn is_share_full(&self, bytes: usize) -> bool {
        let sum = self.of_owner.taken().saturating_add(bytes);
        self.owner != 0 && sum > self.accounts.share(self.owner)
    }

    /// Returns a future that completes when another account is closed after this call.
    pub fn released(&self) -> Notified<'_> {
        self.accounts.released.notified()
    }
}

impl Drop for RequestAccount {
    fn drop(&mut self) {
        drop(lock(&self.charge).take());
        self.accounts.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_have_individual_and_shared_limits() {
        let accounts = Arc::new(Accounts::new(100));
        let [a, b, c] = [(); 3].map(|()| RequestAccount::new(&accounts, 0));
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
        assert_eq!(accounts.ledger.taken(), 80);
        // A size from a request must not overflow.
        assert_eq!(b.charge("x", usize::MAX).unwrap_err().status, 413);
    }

    #[test]
    fn an_owner_leaves_memory_for_others() {
        let accounts = Arc::new(Accounts::new(100));
        let [a, b, other] = [1, 1, 2].map(|owner| RequestAccount::new(&accounts, owner));
        a.charge("x", 50).unwrap();
        let refused = b.charge("x", 26).unwrap_err();
        assert_eq!(refused.status, 503);
        assert!(refused.message.starts_with("requests of this key hold"));
        assert!(b.is_share_full(26) && !b.is_share_full(25));
        b.charge("x", 25).unwrap();
        other.charge("x", 25).unwrap();
        let refused = other.charge("x", 1).unwrap_err();
        assert!(refused.message.starts_with("requests hold"));
        assert!(!other.is_share_full(1));
        drop((a, b));
        other.charge("x", 25).unwrap();
        assert_eq!(lock(&accounts.owners).len(), 2);
        drop(other);
        let _third = RequestAccount::new(&accounts, 3);
        assert_eq!(lock(&accounts.owners).len(), 1);
    }
}
