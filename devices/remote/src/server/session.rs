//! A session: what outlives a connection. Requests are done in their order by a thread of the session; replies are kept until the client has seen
//! them, so that each request is done exactly once although connections break.

use super::work::{Belongings, Stopper};
use crate::proto;
use prost::Message;
use samite_core::{CancelToken, Ledger};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;
use tonic::Status;

/// Replies that are kept for a client that lost its connection.
pub(crate) const KEPT: usize = 16;

/// Requests of one session that wait to be done, and their bytes. More wait in the network.
const QUEUE: (usize, usize) = (256, 64 << 20);

/// How many requests are done, and how many bytes of them, before the client is told so without asking.
const TELL_AFTER: (u64, usize) = (8, 4 << 20);

/// What a session sends on one connection.
pub(super) type Sender = mpsc::UnboundedSender<Result<proto::Reply, Status>>;

pub(super) struct Session {
    pub name: [u8; 16],
    /// Names the token: nobody else may go on with the session.
    pub owner: String,
    state: Mutex<State>,
    /// All up to this number are cancelled.
    cancelled: AtomicU64,
    running: Mutex<Option<Running>>,
    queue: mpsc::Sender<Queued>,
    room: Arc<Semaphore>,
    timers: tokio::runtime::Handle,
    /// What it has taken.
    pub memory: Arc<Ledger>,
    /// Gone when that is free.
    pub alive: Weak<()>,
    /// That it was ended although its connection could come back.
    pub ended: Notify,
}

/// A run that is under way.
struct Running {
    number: u64,
    cancel: CancelToken,
    deadline: Option<AbortHandle>,
}

#[derive(Default)]
struct State {
    /// The connection that replies go to, with its number.
    sender: Option<(u64, Sender)>,
    /// Since when there is none.
    left: Option<Instant>,
    connections: u64,
    /// Nothing is done any more.
    is_broken: bool,
    /// The last request that was taken from a connection.
    received: u64,
    done: u64,
    /// What was done since the client was told.
    untold: (u64, usize),
    kept: VecDeque<proto::Reply>,
    /// The last reply that is not kept any more although the client may not have seen it.
    dropped: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A request, and its share of the bytes that may wait.
type Queued = (proto::Request, OwnedSemaphorePermit);

/// Tells the client when the thread of a session is gone before the session: a device panicked.
struct AtEnd(Weak<Session>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        if let Some(session) = self.0.upgrade() {
            let mut state = lock(&session.state);
            state.is_broken = true;
            if let Some((_, sender)) = &state.sender {
                let why = "the server failed at a request: its log says why";
                let _ = sender.send(Err(Status::internal(why)));
            }
        }
    }
}

impl Session {
    /// A new session, with a thread that works until the session is dropped.
    pub fn start(
        name: [u8; 16],
        owner: String,
        mut belongings: Belongings,
        memory: Arc<Ledger>,
        timers: tokio::runtime::Handle,
    ) -> std::io::Result<Arc<Self>> {
        let (queue, mut requests) = mpsc::channel::<Queued>(QUEUE.0);
        let session = Arc::new(Session {
            name,
            owner,
            state: Mutex::default(),
            cancelled: AtomicU64::new(0),
            running: Mutex::default(),
            queue,
            room: Arc::new(Semaphore::new(QUEUE.1)),
            timers,
            memory,
            alive: Arc::downgrade(&belongings.alive),
            ended: Notify::new(),
        });
        let weak = Arc::downgrade(&session);
        let thread = std::thread::Builder::new().name("remote session".to_owned());
        thread.spawn(move || {
            let _end = AtEnd(Weak::clone(&weak));
            while let Some((request, room)) = requests.blocking_recv() {
                let Some(session) = weak.upgrade() else { break };
                session.work(&mut belongings, request);
                drop(room);
            }
        })?;
        Ok(session)
    }

    fn work(&self, belongings: &mut Belongings, request: proto::Request) {
        let (number, confirm) = (request.number, request.confirm);
        let bytes = request.encoded_len();
        let stopper = OfRequest {
            session: self,
            number,
        };
        let (results, failure) = belongings.run(request.commands, &stopper);
        let mut state = lock(&self.state);
        state.done = number;
        state.untold.0 += 1;
        state.untold.1 += bytes;
        if confirm || !results.is_empty() || failure.is_some() {
            let reply = proto::Reply {
                number,
                done: number,
                results,
                failure: failure.map(|failure| *failure),
                ..proto::Reply::default()
            };
            if state.kept.len() == KEPT
                && let Some(oldest) = state.kept.pop_front()
            {
                state.dropped = oldest.number;
            }
            state.kept.push_back(reply.clone());
            state.send(reply);
        } else if state.untold.0 >= TELL_AFTER.0 || state.untold.1 >= TELL_AFTER.1 {
            state.send(proto::Reply {
                done: number,
                ..proto::Reply::default()
            });
        }
    }

    /// Gives the session a connection, whose first reply `welcome` makes. The client has seen replies up to `seen`. `None` if some that it has not
    /// seen are not kept any more. An earlier connection ends. Returns the connection's number.
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
        let _ = sender.send(Ok(welcome(state.received)));
        for reply in &state.kept {
            let _ = sender.send(Ok(reply.clone()));
        }
        let done = state.done;
        let _ = sender.send(Ok(proto::Reply {
            done,
            ..proto::Reply::default()
        }));
        state.sender = Some((number, sender));
        state.left = None;
        Some(number)
    }

    /// Notes a request of a connection. Whether it is to be done; an error if it makes no sense or the connection is not the session's any more.
    pub fn receive(&self, connection: u64, request: &proto::Request) -> Result<bool, Status> {
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

    /// Has a request done, when there is room for it.
    pub async fn queue(&self, request: proto::Request) {
        let bytes = request.encoded_len().min(QUEUE.1);
        let room =
            Arc::clone(&self.room).acquire_many_owned(u32::try_from(bytes).unwrap_or(u32::MAX));
        if let Ok(room) = room.await {
            // The thread works for as long as the session lives.
            let _ = self.queue.send((request, room)).await;
        }
    }

    /// Takes a connection away. Whether it was the session's.
    pub fn detach(&self, connection: u64) -> bool {
        let mut state = lock(&self.state);
        let is_its = state
            .sender
            .as_ref()
            .is_some_and(|(now, _)| *now == connection);
        if is_its {
            state.sender = None;
            state.left = Some(Instant::now());
        }
        is_its
    }

    /// Since when it has no connection, if it had one.
    pub fn left_since(&self) -> Option<Instant> {
        lock(&self.state).left
    }

    /// Whether no connection came after this one.
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

    /// Stops what is under way, and what waits.
    pub fn end(&self) {
        self.cancel(u64::MAX);
        lock(&self.state).sender = None;
    }
}

impl State {
    fn see(&mut self, seen: u64) {
        while self.kept.front().is_some_and(|reply| reply.number <= seen) {
            self.kept.pop_front();
        }
    }

    fn send(&mut self, reply: proto::Reply) {
        self.untold = (0, 0);
        if let Some((_, sender)) = &self.sender {
            // A connection that broke: the reply is kept.
            let _ = sender.send(Ok(reply));
        }
    }
}

/// What stops runs of one request.
struct OfRequest<'a> {
    session: &'a Session,
    number: u64,
}

impl Stopper for OfRequest<'_> {
    fn begin(&self, cancel: &CancelToken, deadline: u64) {
        let deadline = (deadline > 0).then(|| {
            let cancel = cancel.clone();
            let timer = self.session.timers.spawn(async move {
                tokio::time::sleep(Duration::from_millis(deadline)).await;
                cancel.cancel();
            });
            timer.abort_handle()
        });
        let mut running = lock(&self.session.running);
        *running = Some(Running {
            number: self.number,
            cancel: cancel.clone(),
            deadline,
        });
        if self.session.cancelled.load(Ordering::SeqCst) >= self.number {
            cancel.cancel();
        }
    }

    fn end(&self) {
        let running = lock(&self.session.running).take();
        if let Some(timer) = running.and_then(|running| running.deadline) {
            timer.abort();
        }
    }
}
