//! A session: the state that outlives a connection. A [`Worker`] executes requests in order.
//! Replies are kept until the client has seen them, so each request is executed exactly once even
//! if connections break.

use super::work::{SessionResources, Stopper};
use crate::environment::SessionEnvironment;
use crate::proto;
use prost::Message;
use samite_core::{CancelToken, Ledger};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tonic::Status;

/// Number of requested replies to keep for a client that lost its connection. They may be large.
pub(crate) const KEPT: usize = 16;

/// Maximum number of requests that a client may have in flight without a confirmation. Each may
/// fail, and its failure is kept.
pub(crate) const UNDER_WAY: usize = 1024;

/// Number of completed requests, and their bytes, after which the server confirms them unasked.
const TELL_AFTER: (u64, usize) = (8, 4 << 20);

/// Maximum number of replies queued in one connection: more than are kept.
pub(super) const MAX_WAITING_REPLIES: usize = 4 * UNDER_WAY;

/// Maximum bytes of a reply that does not count against the limit if the client did not request it:
/// a failure, or the answer to a chunk of weights.
const MAX_SMALL_REPLY: usize = 16 << 10;

/// Sends the messages of a session on one connection.
pub(super) type Sender = mpsc::Sender<Result<proto::Reply, Status>>;

pub(super) struct Session {
    pub name: [u8; 16],
    /// Name of the token. Only its holder may continue the session.
    pub owner: String,
    state: Mutex<SessionState>,
    /// Held while a request is accepted.
    turn: tokio::sync::Mutex<()>,
    /// Requests up to this number are cancelled.
    cancelled: AtomicU64,
    running: Mutex<Option<ActiveRun>>,
    queue: mpsc::Sender<Queued>,
    room: Arc<Semaphore>,
    /// Maximum bytes of queued requests.
    most: usize,
    environment: Arc<dyn SessionEnvironment>,
    /// Memory that the session has allocated.
    pub memory: Arc<Ledger>,
    /// Expires when that memory is free.
    pub alive: Weak<()>,
    /// Notifies that the session was ended although its connection could return.
    pub ended: Notify,
}

/// A run in progress.
struct ActiveRun {
    number: u64,
    cancel: CancelToken,
    /// Dropped when the run ends, which stops its timer.
    _deadline: Option<oneshot::Sender<()>>,
}

#[derive(Default)]
struct SessionState {
    /// Connection for replies, and its number.
    sender: Option<(u64, Sender)>,
    /// Start of the time without a connection.
    left: Option<Instant>,
    connections: u64,
    /// Set if the session executes no more requests.
    is_broken: bool,
    /// Number of the last request received from a connection.
    received: u64,
    done: u64,
    /// Requests completed since the last confirmation, and their bytes.
    untold: (u64, usize),
    /// Numbers of replies that count against the limit, until the client has seen them.
    unseen: VecDeque<u64>,
    /// Kept replies, and whether the client requested them.
    kept: VecDeque<(proto::Reply, bool)>,
    /// Number of the last dropped reply, which the client may not have seen.
    dropped: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A request, and its share of the bytes that may be queued.
type Queued = (proto::Request, OwnedSemaphorePermit);

/// Notifies the client if the worker ends before the session: a device panicked.
struct EndNotifier(Weak<Session>);

impl Drop for EndNotifier {
    fn drop(&mut self) {
        if let Some(session) = self.0.upgrade() {
            let mut state = lock(&session.state);
            state.is_broken = true;
            if let Some((_, sender)) = &state.sender {
                let why = "the server failed at a request: its log says why";
                let _ = sender.try_send(Err(Status::internal(why)));
            }
        }
    }
}

/// Executes the requests of a session in order.
pub struct Worker {
    session: Weak<Session>,
    requests: mpsc::Receiver<Queued>,
    belongings: SessionResources,
    _end: EndNotifier,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({} waiting)", self.requests.len())
    }
}

impl Worker {
    /// Executes all requests until the session ends.
    pub fn run(mut self) {
        while let Some(queued) = self.requests.blocking_recv() {
            if !self.work(queued) {
                break;
            }
        }
    }

    /// Returns whether a request is queued.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Returns whether the session is over and its resources must be released.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.session.strong_count() == 0
    }

    /// Executes the next request, if one is queued.
    pub fn step(&mut self) {
        if let Ok(queued) = self.requests.try_recv() {
            self.work(queued);
        }
    }

    /// Executes a request. Returns whether the session still exists.
    fn work(&mut self, (request, room): Queued) -> bool {
        let session = self.session.upgrade();
        if let Some(session) = &session {
            session.work(&mut self.belongings, request);
        }
        drop(room);
        session.is_some()
    }
}

impl Session {
    /// Creates a session and its worker.
    pub fn new(
        name: [u8; 16],
        owner: String,
        belongings: SessionResources,
        memory: Arc<Ledger>,
        waiting: (usize, usize),
        environment: Arc<dyn SessionEnvironment>,
    ) -> (Arc<Self>, Worker) {
        let (queue, requests) = mpsc::channel(waiting.0);
        let session = Arc::new(Session {
            name,
            owner,
            state: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            cancelled: AtomicU64::new(0),
            running: Mutex::default(),
            queue,
            room: Arc::new(Semaphore::new(waiting.1)),
            most: waiting.1,
            environment,
            memory,
            alive: Arc::downgrade(&belongings.alive),
            ended: Notify::new(),
        });
        let worker = Worker {
            session: Arc::downgrade(&session),
            requests,
            belongings,
            _end: EndNotifier(Arc::downgrade(&session)),
        };
        (session, worker)
    }

    fn work(&self, belongings: &mut SessionResources, request: proto::Request) {
        let (number, confirm) = (request.number, request.confirm);
        let bytes = request.encoded_len();
        let stopper = OfRequest {
            session: self,
            number,
        };
        if lock(&self.state).is_broken {
            return;
        }
        let (results, failure) = belongings.run(request.commands, &stopper);
        let mut state = lock(&self.state);
        state.done = number;
        state.untold.0 += 1;
        state.untold.1 += bytes;
        if confirm || !results.is_empty() || failure.is_some() {
            let is_awaited = confirm || !results.is_empty();
            let reply = proto::Reply {
                number,
                done: number,
                results,
                failure: failure.map(|failure| *failure),
                ..proto::Reply::default()
            };
            state.count(&reply, confirm);
            state.keep(reply.clone(), is_awaited);
            state.send(reply);
        } else if state.untold.0 >= TELL_AFTER.0 || state.untold.1 >= TELL_AFTER.1 {
            state.send(proto::Reply {
                done: number,
                ..proto::Reply::default()
            });
        }
    }

    /// Attaches a connection, whose first reply `welcome` makes, and ends an earlier connection.
    /// The client has seen replies up to `seen`. Returns the connection's number, or `None` if
    /// unseen replies have been dropped.
    pub fn attach(
        &self,
        sender: Sender,
        seen: u64,
        welcome: impl FnOnce(u64) -> proto::Reply,
    ) -> Option<u64> {
        let mut state = lock(&self.state);
        if state.dropped > seen || state.is_broken {
            return None;
        }
        state.see(seen);
        state.connections += 1;
        let number = state.connections;
        let _ = sender.try_send(Ok(welcome(state.received)));
        for (reply, _) in &state.kept {
            let _ = sender.try_send(Ok(reply.clone()));
        }
        let done = state.done;
        let _ = sender.try_send(Ok(proto::Reply {
            done,
            ..proto::Reply::default()
        }));
        state.sender = Some((number, sender));
        state.left = None;
        Some(number)
    }

    /// Accepts a request of a connection. Queues it after all earlier ones, once there is room.
    ///
    /// # Errors
    /// Returns an error if the request is invalid or the connection no longer belongs to the
    /// session.
    pub async fn take(&self, connection: u64, request: proto::Request) -> Result<(), Status> {
        if request.cancel > 0 {
            return self.receive(connection, &request).map(drop);
        }
        // A connection that was lost meanwhile may still wait for room.
        let _turn = self.turn.lock().await;
        if self.receive(connection, &request)? {
            self.queue(request).await;
        }
        Ok(())
    }

    /// Records a request of a connection. Returns whether it must be executed.
    fn receive(&self, connection: u64, request: &proto::Request) -> Result<bool, Status> {
        let mut state = lock(&self.state);
        if state
            .sender
            .as_ref()
            .is_none_or(|(now, _)| *now != connection)
        {
            return Err(Status::aborted(
                "the session goes on over another connection",
            ));
        }
        if state.is_broken {
            return Err(Status::resource_exhausted(
                "the session has ended: its client does not read replies",
            ));
        }
        state.see(request.seen);
        if request.cancel > 0 {
            drop(state);
            self.cancel(request.cancel);
            return Ok(false);
        }
        if request.number != state.received + 1 {
            return Err(Status::invalid_argument(format!(
                "request {} came behind {}",
                request.number, state.received
            )));
        }
        state.received = request.number;
        Ok(true)
    }

    /// Queues a request once there is room for it.
    async fn queue(&self, request: proto::Request) {
        let bytes = request.encoded_len().min(self.most);
        let room =
            Arc::clone(&self.room).acquire_many_owned(u32::try_from(bytes).unwrap_or(u32::MAX));
        if let Ok(room) = room.await {
            // The worker lives as long as the session.
            let _ = self.queue.send((request, room)).await;
        }
    }

    /// Detaches a connection. Returns whether it belonged to the session.
    pub fn detach(&self, connection: u64) -> bool {
        let mut state = lock(&self.state);
        let is_its = state
            .sender
            .as_ref()
            .is_some_and(|(now, _)| *now == connection);
        if is_its {
            state.sender = None;
            state.left = Some(self.environment.now());
        }
        is_its
    }

    /// Returns the start of the time without a connection, if there was one before.
    pub fn left_since(&self) -> Option<Instant> {
        lock(&self.state).left
    }

    /// Returns whether no connection came after this one.
    pub fn is_left_since(&self, connection: u64) -> bool {
        let state = lock(&self.state);
        state.sender.is_none() && state.connections == connection
    }

    fn cancel(&self, number: u64) {
        self.cancelled.fetch_max(number, Ordering::SeqCst);
        if let Some(running) = &*lock(&self.running)
            && running.number <= number
        {
            running.cancel.cancel();
        }
    }

    /// Stops the current run and the queued requests.
    pub fn end(&self) {
        self.cancel(u64::MAX);
        lock(&self.state).sender = None;
    }
}

impl SessionState {
    fn see(&mut self, seen: u64) {
        while self.unseen.pop_front_if(|number| *number <= seen).is_some() {}
        while let Some((reply, _)) = self.kept.front()
            && reply.number <= seen
        {
            self.kept.pop_front();
        }
    }

    /// Counts a reply against the limit of unseen replies. A client that exceeds it loses its
    /// session, because its replies would fill the server's memory.
    fn count(&mut self, reply: &proto::Reply, confirm: bool) {
        if confirm || reply.encoded_len() > MAX_SMALL_REPLY {
            self.unseen.push_back(reply.number);
            self.is_broken |= self.unseen.len() > KEPT;
        }
    }

    /// Keeps a reply. A client within the limits has seen all replies that are dropped for it.
    fn keep(&mut self, reply: proto::Reply, is_awaited: bool) {
        self.kept.push_back((reply, is_awaited));
        let asked = self
            .kept
            .iter()
            .filter(|(_, is_awaited)| *is_awaited)
            .count();
        let gone = if asked > KEPT {
            self.kept.iter().position(|(_, is_awaited)| *is_awaited)
        } else {
            (self.kept.len() > UNDER_WAY).then_some(0)
        };
        if let Some((oldest, _)) = gone.and_then(|at| self.kept.remove(at)) {
            self.dropped = self.dropped.max(oldest.number);
        }
    }

    fn send(&mut self, reply: proto::Reply) {
        self.untold = (0, 0);
        if let Some((_, sender)) = &self.sender {
            match sender.try_send(Ok(reply)) {
                Err(TrySendError::Full(_)) => self.is_broken = true,
                // If the connection is broken, the reply is kept.
                Ok(()) | Err(TrySendError::Closed(_)) => {}
            }
        }
    }
}

/// Stops the runs of one request.
struct OfRequest<'a> {
    session: &'a Session,
    number: u64,
}

impl Stopper for OfRequest<'_> {
    fn begin(&self, cancel: &CancelToken, deadline: u64) {
        let environment = &self.session.environment;
        let deadline = (deadline > 0).then(|| {
            let (run, is_over) = oneshot::channel();
            let sleep = environment.sleep(Duration::from_millis(deadline));
            let cancel = cancel.clone();
            environment.spawn(Box::pin(async move {
                tokio::select! {
                    biased;
                    _ = is_over => {}
                    () = sleep => cancel.cancel(),
                }
            }));
            run
        });
        let mut running = lock(&self.session.running);
        *running = Some(ActiveRun {
            number: self.number,
            cancel: cancel.clone(),
            _deadline: deadline,
        });
        if self.session.cancelled.load(Ordering::SeqCst) >= self.number {
            cancel.cancel();
        }
    }

    fn end(&self) {
        lock(&self.session.running).take();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::belongings;
    use super::*;
    use crate::environment::System;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    /// Returns a session with these queue limits, its worker, and the runtime that both need.
    fn session(waiting: (usize, usize)) -> (tokio::runtime::Runtime, Arc<Session>, Worker) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.build().unwrap();
        let memory = Ledger::new(None);
        let (session, worker) = Session::new(
            [0; 16],
            "x".to_owned(),
            belongings(&memory),
            Arc::clone(&memory),
            waiting,
            Arc::new(System(runtime.handle().clone())),
        );
        (runtime, session, worker)
    }

    #[test]
    fn a_new_connection_does_not_overtake_a_queued_request() {
        let (_runtime, session, mut worker) = session((8, 4));
        let attach = || {
            let (sender, _) = mpsc::channel(MAX_WAITING_REPLIES);
            session.attach(sender, 0, |_| proto::Reply::default())
        };
        let request = |number, confirm| proto::Request {
            number,
            confirm,
            ..proto::Request::default()
        };
        let mut context = Context::from_waker(Waker::noop());
        let old = attach().unwrap();
        // Takes all the room.
        let first = pin!(session.take(old, request(1, true)));
        assert!(first.poll(&mut context).is_ready());
        let mut second = pin!(session.take(old, request(2, false)));
        assert!(second.as_mut().poll(&mut context).is_pending());
        let new = attach().unwrap();
        let mut third = pin!(session.take(new, request(3, false)));
        assert!(third.as_mut().poll(&mut context).is_pending());
        // Now both have room, and the later one comes first.
        worker.step();
        let is_first = third.as_mut().poll(&mut context).is_ready();
        assert!(!is_first, "request 3 is taken before request 2");
        assert!(second.as_mut().poll(&mut context).is_ready());
        assert!(third.as_mut().poll(&mut context).is_ready());
        for number in [2, 3] {
            worker.step();
            assert_eq!(lock(&session.state).done, number);
        }
    }

    /// A client sends requests without taking replies, which would fill the server's memory.
    #[test]
    fn too_many_unacknowledged_replies_end_the_session() {
        let (_runtime, session, mut worker) = session((8, 1 << 20));
        let (sender, mut replies) = mpsc::channel(MAX_WAITING_REPLIES);
        let connection = session.attach(sender, 0, |_| proto::Reply::default());
        let mut ask = |number, seen, confirm| {
            let memory = proto::command::Command::MemoryOf(0);
            let request = proto::Request {
                number,
                seen,
                confirm,
                commands: vec![proto::Command {
                    command: Some(memory),
                }],
                ..proto::Request::default()
            };
            let mut context = Context::from_waker(Waker::noop());
            let taken = pin!(session.take(connection.unwrap(), request)).poll(&mut context);
            worker.step();
            taken
        };
        let most = KEPT as u64;
        for number in 1..=2 * most {
            let seen = number.saturating_sub(most);
            assert!(matches!(ask(number, seen, true), Poll::Ready(Ok(()))));
        }
        // Small unrequested replies do not count.
        for number in 2 * most + 1..=4 * most {
            assert!(matches!(ask(number, most, false), Poll::Ready(Ok(()))));
        }
        assert!(matches!(ask(4 * most + 1, most, true), Poll::Ready(Ok(()))));
        match ask(4 * most + 2, most, true) {
            Poll::Ready(Err(status)) => {
                assert_eq!(status.code(), tonic::Code::ResourceExhausted);
            }
            other => panic!("{other:?}"),
        }
        let mut sent = 0;
        while replies.try_recv().is_ok() {
            sent += 1;
        }
        assert!(sent <= 4 * KEPT + 3, "{sent}");
    }

    /// A client continues to write while its connection is lost, and all of it fails.
    #[test]
    fn unawaited_failures_are_retained() {
        let (_runtime, session, mut worker) = session((UNDER_WAY + 1, 1 << 20));
        let attach = |seen| {
            let (sender, receiver) = mpsc::channel(MAX_WAITING_REPLIES);
            let number = session.attach(sender, seen, |_| proto::Reply::default());
            (number, receiver)
        };
        let (connection, _) = attach(0);
        let mut number = 0;
        let mut write = |count| {
            let mut context = Context::from_waker(Waker::noop());
            for _ in 0..count {
                number += 1;
                let run = proto::Run {
                    graph: 77, // does not exist
                    deadline: 0,
                };
                let request = proto::Request {
                    number,
                    commands: vec![proto::Command {
                        command: Some(proto::command::Command::Run(run)),
                    }],
                    ..proto::Request::default()
                };
                let taken = pin!(session.take(connection.unwrap(), request)).poll(&mut context);
                assert!(matches!(taken, Poll::Ready(Ok(()))));
                worker.step();
            }
        };
        write(UNDER_WAY);
        let (connection, mut replies) = attach(0);
        assert!(connection.is_some(), "the session has ended");
        let mut failed = Vec::new();
        while let Ok(reply) = replies.try_recv() {
            let reply = reply.unwrap();
            failed.extend(reply.failure.map(|_| reply.number));
        }
        assert!(failed.into_iter().eq(1..=UNDER_WAY as u64));
    }
}
