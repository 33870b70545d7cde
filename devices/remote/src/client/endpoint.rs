//! A session with a server, from the point of view of the server's devices.
//!
//! Callers put requests into a list and wait for replies; [a task](super::link) transfers both.
//! Requests stay in the list until the server has completed them, so that they can be sent again
//! over another connection.

use crate::convert;
use crate::proto;
use crate::server::{KEPT, UNDER_WAY};
use prost::Message;
use samite_core::{CancelToken, Error, Result};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// Maximum bytes of requests in flight.
const MAX_BYTES: usize = 64 << 20;

/// Interval at which a waiting caller checks for cancellation.
const LOOK: Duration = Duration::from_millis(20);

/// Runs other work while a caller waits, until something has happened or at most for the given
/// time.
pub type IdleTask = Box<dyn Fn(Option<Duration>) + Send + Sync>;

pub(super) struct Endpoint {
    place: String,
    shared: Arc<SharedEndpoint>,
    /// Number of IDs assigned to objects at the server.
    things: AtomicU64,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({})", self.place)
    }
}

/// State that callers share with the task that transfers messages.
#[derive(Default)]
pub(super) struct SharedEndpoint {
    state: Mutex<EndpointState>,
    changed: Condvar,
    /// Runs other work, if all callers share one thread.
    meanwhile: Option<IdleTask>,
}

#[derive(Default)]
pub(super) struct EndpointState {
    /// Sends requests over the current connection, if there is one.
    pub sender: Option<mpsc::UnboundedSender<proto::Request>>,
    /// Number of the last request.
    number: u64,
    /// Requests that may not be complete.
    pub open: VecDeque<Open>,
    open_bytes: usize,
    pub done: u64,
    /// Number of the last reply received.
    pub seen: u64,
    /// Requests without a reply. The server keeps that many replies in case the connection is lost.
    unseen: BTreeSet<u64>,
    /// Requests with a caller that waits for the reply.
    expected: BTreeSet<u64>,
    replies: BTreeMap<u64, proto::Reply>,
    /// First unreported failure of each sender's requests that no caller waits for.
    failures: BTreeMap<u64, FailedRequest>,
    /// Reason why the session ended.
    pub lost: Option<Box<str>>,
    /// Set if the device is no longer used.
    pub is_over: bool,
}

/// A failed request.
struct FailedRequest {
    number: u64,
    failure: proto::Failure,
}

/// A request that may not be complete.
pub(super) struct Open {
    /// Sender of the request.
    owner: u64,
    bytes: usize,
    pub request: proto::Request,
}

impl EndpointState {
    /// Records the failure of a request that no caller waits for.
    fn fail(&mut self, owner: u64, number: u64, failure: proto::Failure) {
        let known = self.failures.get(&owner);
        if known.is_none_or(|first| first.number > number) {
            self.failures
                .insert(owner, FailedRequest { number, failure });
        }
    }
}

impl SharedEndpoint {
    pub fn new(meanwhile: Option<IdleTask>) -> Arc<Self> {
        Arc::new(SharedEndpoint {
            meanwhile,
            ..SharedEndpoint::default()
        })
    }

    pub fn lock(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the state may have changed, at most for `most`.
    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, EndpointState>,
        most: Option<Duration>,
    ) -> MutexGuard<'a, EndpointState> {
        match (&self.meanwhile, most) {
            (Some(meanwhile), most) => {
                drop(state);
                meanwhile(most);
                self.lock()
            }
            (None, Some(most)) => {
                let waited = self.changed.wait_timeout(state, most);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            (None, None) => {
                let waited = self.changed.wait(state);
                waited.unwrap_or_else(PoisonError::into_inner)
            }
        }
    }

    /// Ends the session.
    pub fn lose(&self, why: String) {
        let mut state = self.lock();
        state.lost = Some(why.into());
        state.open.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// Processes a reply.
    pub fn take(&self, reply: proto::Reply) {
        let mut state = self.lock();
        if reply.number > 0 {
            if reply.number <= state.seen {
                return;
            }
            state.seen = reply.number;
            state.unseen = state.unseen.split_off(&(reply.number + 1));
        }
        let number = reply.number;
        if state.expected.contains(&number) {
            state.replies.insert(number, reply.clone());
        } else if let Some(failure) = reply.failure {
            let mut open = state.open.iter();
            let open = open.find(|open| open.request.number == number);
            let owner = open.map_or(NOBODY, |open| open.owner);
            state.fail(owner, number, failure);
        }
        state.done = state.done.max(reply.done);
        while let Some(open) = state.open.front()
            && open.request.number <= state.done
        {
            state.open_bytes -= open.bytes;
            state.open.pop_front();
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl Endpoint {
    pub fn new(place: &str, shared: Arc<SharedEndpoint>) -> Arc<Self> {
        Arc::new(Endpoint {
            place: place.to_owned(),
            shared,
            things: AtomicU64::new(NOBODY),
        })
    }

    pub fn place(&self) -> &str {
        &self.place
    }

    /// Returns a new ID for an object at the server.
    pub fn next(&self) -> u64 {
        self.things.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn lost(&self, device: &str, why: &str) -> Error {
        Error::DeviceLost {
            device: device.into(),
            message: format!("{}: {why}", self.place).into(),
        }
    }

    /// Sends commands of `owner` and returns the request's number. If `is_awaited`, the caller must
    /// [wait](Endpoint::wait) for the reply.
    pub fn send(
        &self,
        device: &str,
        owner: u64,
        commands: Vec<proto::Command>,
        is_awaited: bool,
    ) -> Result<u64> {
        let mut request = proto::Request {
            commands,
            confirm: is_awaited,
            ..proto::Request::default()
        };
        let bytes = request.encoded_len();
        let mut state = self.shared.lock();
        loop {
            if let Some(why) = &state.lost {
                return Err(self.lost(device, why));
            }
            let is_full = state.open_bytes > 0 && state.open_bytes + bytes > MAX_BYTES
                || is_awaited && state.unseen.len() >= KEPT
                || state.number - state.done >= UNDER_WAY as u64;
            if !is_full {
                break;
            }
            state = self.shared.wait(state, None);
        }
        state.number += 1;
        request.number = state.number;
        request.seen = state.seen;
        if is_awaited {
            state.unseen.insert(request.number);
            state.expected.insert(request.number);
        }
        let number = request.number;
        state.open_bytes += bytes;
        state.open.push_back(Open {
            owner,
            bytes,
            request: request.clone(),
        });
        if let Some(sender) = &state.sender {
            // If the connection is broken, the request is sent again.
            let _ = sender.send(request);
        }
        Ok(number)
    }

    /// Waits for a reply. `cancel` stops the request.
    pub fn wait(
        &self,
        device: &str,
        number: u64,
        cancel: Option<&CancelToken>,
    ) -> Result<Vec<proto::Result>> {
        let mut is_cancelled = false;
        let mut state = self.shared.lock();
        loop {
            if let Some(reply) = state.replies.remove(&number) {
                state.expected.remove(&number);
                drop(state);
                self.shared.changed.notify_all();
                return match reply.failure {
                    Some(failure) => Err(convert::error(device, failure)),
                    None => Ok(reply.results),
                };
            }
            if let Some(why) = &state.lost {
                return Err(self.lost(device, why));
            }
            if !is_cancelled && cancel.is_some_and(CancelToken::is_cancelled) {
                is_cancelled = true;
                if let Some(sender) = &state.sender {
                    let _ = sender.send(proto::Request {
                        cancel: number,
                        seen: state.seen,
                        ..proto::Request::default()
                    });
                }
            }
            state = self.shared.wait(state, cancel.map(|_| LOOK));
        }
    }

    /// Stops waiting for a reply. If its request fails, the failure belongs to `owner`.
    pub fn abandon(&self, owner: u64, number: u64) {
        let mut state = self.shared.lock();
        state.expected.remove(&number);
        let reply = state.replies.remove(&number);
        if let Some(failure) = reply.and_then(|reply| reply.failure) {
            state.fail(owner, number, failure);
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Sends commands and waits for their results.
    pub fn call(&self, device: &str, commands: Vec<proto::Command>) -> Result<Vec<proto::Result>> {
        let number = self.send(device, NOBODY, commands, true)?;
        self.wait(device, number, None)
    }

    /// Returns whether all requests up to `number` are complete.
    pub fn is_done(&self, number: u64) -> bool {
        self.shared.lock().done >= number
    }

    /// Returns the number of the last request.
    pub fn last(&self) -> u64 {
        self.shared.lock().number
    }

    /// Waits until all requests up to `number` are complete.
    pub fn reach(&self, device: &str, number: u64) -> Result<()> {
        let mut state = self.shared.lock();
        while state.done < number {
            if let Some(why) = &state.lost {
                return Err(self.lost(device, why));
            }
            if state.unseen.range(number..).next().is_none() {
                // The server reports completion only on request.
                drop(state);
                return self.call(device, Vec::new()).map(drop);
            }
            state = self.shared.wait(state, None);
        }
        Ok(())
    }

    /// Checks the requests of `owner` up to `number`.
    ///
    /// # Errors
    /// Returns their first failure, without clearing it. An earlier failure of a request without a
    /// stream takes precedence as the cause.
    pub fn check(&self, device: &str, owner: u64, number: u64) -> Result<()> {
        let state = self.shared.lock();
        let own = state.failures.get(&owner);
        let Some(own) = own.filter(|failed| failed.number <= number) else {
            return Ok(());
        };
        let before = state.failures.get(&NOBODY);
        let first = before.filter(|failed| failed.number < own.number);
        Err(convert::error(device, first.unwrap_or(own).failure.clone()))
    }

    /// Returns and clears the first failure of requests of `owner`, or of requests without a
    /// stream. Later failures may be consequences, so they are cleared as well.
    pub fn failure(&self, device: &str, owner: u64) -> Result<()> {
        let mut state = self.shared.lock();
        let own = [owner, NOBODY].map(|owner| state.failures.remove(&owner));
        let first = own.into_iter().flatten().min_by_key(|failed| failed.number);
        match first {
            Some(failed) => Err(convert::error(device, failed.failure)),
            None => match &state.lost {
                Some(why) => Err(self.lost(device, why)),
                None => Ok(()),
            },
        }
    }
}

/// Sender of requests that belong to no stream.
pub(super) const NOBODY: u64 = 0;

impl Drop for Endpoint {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_over = true;
        state
            .lost
            .get_or_insert_with(|| "the device is not used any more".into());
        if let Some(sender) = state.sender.take() {
            say_over(&sender);
        }
    }
}

/// Tells the server that the client no longer needs the session.
pub(super) fn say_over(sender: &mpsc::UnboundedSender<proto::Request>) {
    let _ = sender.send(proto::Request {
        over: true,
        ..proto::Request::default()
    });
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Returns an endpoint whose replies arrive one by one when a caller waits, and the number of
    /// waits.
    fn answered_late() -> (Arc<Endpoint>, Arc<AtomicU64>) {
        let waits = Arc::new(AtomicU64::new(0));
        let shared = Arc::new_cyclic(|shared: &std::sync::Weak<SharedEndpoint>| {
            let (shared, waits) = (shared.clone(), Arc::clone(&waits));
            let meanwhile = move |_| {
                let number = waits.fetch_add(1, Ordering::Relaxed) + 1;
                shared.upgrade().unwrap().take(proto::Reply {
                    number,
                    done: number,
                    ..proto::Reply::default()
                });
            };
            SharedEndpoint {
                meanwhile: Some(Box::new(meanwhile)),
                ..SharedEndpoint::default()
            }
        });
        (Endpoint::new("server", shared), waits)
    }

    #[test]
    fn replies_in_flight_are_limited() {
        let (endpoint, waits) = answered_late();
        let send = || endpoint.send("d", 1, Vec::new(), true).unwrap();
        for _ in 0..KEPT {
            // The server sends the reply even if no caller waits for it.
            endpoint.abandon(1, send());
        }
        assert_eq!(waits.load(Ordering::Relaxed), 0);
        send();
        assert_eq!(waits.load(Ordering::Relaxed), 1);
        send();
        assert_eq!(waits.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn unconfirmed_requests_in_flight_are_limited() {
        let (endpoint, waits) = answered_late();
        for _ in 0..UNDER_WAY {
            endpoint.send("d", 1, Vec::new(), false).unwrap();
        }
        assert_eq!(waits.load(Ordering::Relaxed), 0);
        endpoint.send("d", 1, Vec::new(), false).unwrap();
        assert_eq!(waits.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn the_first_failure_of_each_owner_is_reported() {
        let shared = SharedEndpoint::new(None);
        let endpoint = Endpoint::new("server", Arc::clone(&shared));
        let fail = |owner, text: &str| {
            let number = endpoint.send("d", owner, Vec::new(), false).unwrap();
            shared.take(proto::Reply {
                number,
                done: number,
                failure: Some(proto::Failure {
                    text: text.to_owned(),
                    ..proto::Failure::default()
                }),
                ..proto::Reply::default()
            });
            number
        };
        let first = fail(1, "first");
        for _ in 0..2000 {
            fail(2, "other");
            fail(1, "later");
        }
        let told = |result: Result<()>| result.unwrap_err().to_string();
        assert!(told(endpoint.check("d", 1, first)).contains("first"));
        assert!(endpoint.check("d", 2, first).is_ok());
        assert!(told(endpoint.failure("d", 1)).contains("first"));
        assert!(endpoint.failure("d", 1).is_ok());
        assert!(told(endpoint.failure("d", 2)).contains("other"));
        let before = fail(NOBODY, "before");
        let last = fail(2, "after");
        assert!(told(endpoint.check("d", 2, last)).contains("before"));
        assert!(endpoint.check("d", 2, before).is_ok());
        assert!(told(endpoint.failure("d", 2)).contains("before"));
        assert!(endpoint.failure("d", 2).is_ok());
    }
}
