//! The server. It accepts connections; each has a session, and a thread that transfers bytes
//! between them.
//!
//! - `session`: executes requests, independent of a connection.
//! - `places`: resolves a client's buffer numbers and addresses.
//! - `work`: graphs, bound to devices.
//! - `staged`: memory for nodes that another device computes.

mod places;
mod session;
mod staged;
mod work;

use crate::channel::{allowance, ended, send};
use samite_core::environment::{
    Clock, Connection, ConnectionHandle, Listener, Seat, Seats, Throttle,
};
use samite_core::{CancelToken, Device, Environment, Ledger};
use samite_wire::rpc::version::{Protocol, V8};
use session::PIECE;
pub use session::{End, ReplySink, RpcSession};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Protocol, and quotas and time limits of clients.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Protocol to speak. Clients accept only their own, and do not announce it.
    pub protocol: &'static Protocol,
    /// Maximum bytes of memory for all clients together.
    pub memory: Option<usize>,
    /// Maximum bytes of memory per client.
    pub memory_per_client: Option<usize>,
    /// Maximum number of clients. If it is reached, an idle one [makes
    /// room](samite_core::environment::Seats), or the new connection is rejected.
    pub clients: usize,
    /// Maximum number of buffers per client.
    pub buffers: usize,
    /// Maximum number of tensors per graph.
    pub tensors: usize,
    /// Time limit for the greeting, from when the connection is accepted.
    pub greeting: Duration,
    /// Maximum silence of a client in the middle of a message, or with a reply to read. Between
    /// messages there is no limit.
    pub patience: Duration,
    /// Fallbacks for operations that a device does not support, in order: the CPU, then the
    /// reference device. Tensors are copied to a fallback and back if it cannot use their memory.
    pub fallbacks: Vec<Arc<dyn Device>>,
    /// Source of time.
    pub environment: Environment,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            protocol: &V8,
            memory: None,
            memory_per_client: None,
            clients: 64,
            buffers: 1 << 16,
            tensors: 1 << 17,
            greeting: Duration::from_secs(10),
            patience: Duration::from_secs(10),
            fallbacks: Vec::new(),
            environment: Environment::system(),
        }
    }
}

/// A server that shares devices.
#[derive(Debug)]
pub struct Server {
    devices: Vec<Arc<dyn Device>>,
    options: ServerOptions,
    memory: Arc<Ledger>,
    seats: Arc<Seats>,
    /// Number of the next connection, for logs.
    next: AtomicU64,
    /// Limits warnings about failures to accept.
    failures: Throttle,
    /// Limits warnings about rejected clients.
    refusals: Throttle,
}

/// Pause after a failed accept: other connections must end first.
const PAUSE: Duration = Duration::from_millis(50);

/// Minimum time between two warnings of one kind.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Interval at which a client's connection is checked while its graph runs.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

impl Server {
    /// Creates a server of `devices`. Clients number them in this order.
    pub fn new(devices: Vec<Arc<dyn Device>>, options: ServerOptions) -> Arc<Self> {
        Arc::new(Server {
            devices,
            memory: Ledger::new(options.memory),
            seats: Seats::new(options.clients),
            options,
            next: AtomicU64::new(1),
            failures: Throttle::new(WARNING_INTERVAL),
            refusals: Throttle::new(WARNING_INTERVAL),
        })
    }

    /// Serves the clients that connect. If accepting fails, for example because too many files are
    /// open, the server pauses and continues.
    pub fn serve(self: &Arc<Self>, listener: &dyn Listener) -> ! {
        let clock = &self.options.environment.clock;
        loop {
            let result = listener.accept().and_then(|connection| {
                let Some((number, seat)) = self.seat(&*connection) else {
                    return Ok(());
                };
                let server = Arc::clone(self);
                let thread = samite_core::thread_builder()?.name("rpc client".to_owned());
                let talk = move || server.talk(number, seat, connection);
                thread.spawn(talk).map(drop)
            });
            if let Err(error) = result {
                if let Some(skipped) = self.failures.pass(clock.now()) {
                    tracing::warn!(
                        "a connection could not be accepted: {error} ({skipped} more since the last warning)"
                    );
                }
                clock.sleep(PAUSE);
            }
        }
    }

    /// Serves one client until it disconnects or breaks a rule.
    pub fn serve_client(self: &Arc<Self>, connection: Box<dyn Connection>) {
        if let Some((number, seat)) = self.seat(&*connection) {
            self.talk(number, seat, connection);
        }
    }

    /// Takes a seat for a connection. Logs a warning and returns `None` if none is free.
    fn seat(&self, connection: &dyn Connection) -> Option<(u64, Seat)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let seat = self.seats.take(connection.peer(), connection.handle());
        if seat.is_none()
            && let Some(skipped) = self.refusals.pass(self.options.environment.clock.now())
        {
            let most = self.options.clients;
            tracing::warn!(
                "client {number} is turned away: there are {most} already ({skipped} more since the last warning)"
            );
        }
        Some((number, seat?))
    }

    fn talk(self: &Arc<Self>, number: u64, seat: Seat, connection: Box<dyn Connection>) {
        tracing::info!("client {number} connected");
        let clock = Arc::clone(&self.options.environment.clock);
        let cancel = match connection.handle() {
            Some(handle) => cancelled_by_leaving(handle, clock),
            None => CancelToken::new(),
        };
        match self.converse(RpcSession::new(self, seat, cancel), connection) {
            Ok(()) => tracing::info!("client {number} left"),
            Err(End::Lost(error)) => tracing::info!("client {number} is lost: {error}"),
            Err(End::Refused(reason)) => {
                tracing::warn!("the connection of client {number} is closed: {reason}");
            }
        }
    }

    /// Creates a session for another client; the caller transfers the bytes. Returns `None` if
    /// there are too many clients.
    pub fn begin(self: &Arc<Self>) -> Option<RpcSession> {
        let seat = self.seats.take(None, None)?;
        Some(RpcSession::new(self, seat, CancelToken::new()))
    }

    /// Transfers bytes between a connection and its session.
    fn converse(
        &self,
        mut session: RpcSession,
        mut connection: Box<dyn Connection>,
    ) -> Result<(), End> {
        let ServerOptions {
            greeting,
            patience,
            environment,
            ..
        } = &self.options;
        let clock = &environment.clock;
        let mut bytes = vec![0; PIECE];
        let mut timeout = None;
        loop {
            let deadline = session.deadline();
            if deadline.is_some_and(|end| clock.now() >= end) {
                return Err(End::Lost(io::ErrorKind::TimedOut.into()));
            }
            let wanted = if session.is_greeted() {
                patience
            } else {
                greeting
            };
            if timeout.replace(wanted) != Some(wanted) {
                connection.set_timeout(Some(*wanted))?;
            }
            let len = match connection.receive(&mut bytes) {
                Ok(0) if session.is_between_messages() => return Ok(()),
                Ok(0) => return Err(End::Lost(ended())),
                Ok(len) => len,
                // Between messages, a client may be silent.
                Err(error) if error.kind() == io::ErrorKind::TimedOut && deadline.is_none() => {
                    continue;
                }
                Err(error) => return Err(End::Lost(error)),
            };
            session.take(&bytes[..len], &mut |reply| {
                let end = clock.now().checked_add(allowance(*patience, reply.len()));
                send(&mut *connection, reply, &**clock, end)
            })?;
        }
    }

    /// Returns the number of clients.
    pub fn clients(&self) -> usize {
        self.seats.taken()
    }

    /// Returns the bytes of memory that clients have allocated.
    pub fn memory_in_use(&self) -> usize {
        self.memory.taken()
    }
}

/// Returns a token that is cancelled when the client disconnects. The work that polls the token
/// checks the connection, so this needs no extra thread.
fn cancelled_by_leaving(handle: Arc<dyn ConnectionHandle>, clock: Arc<dyn Clock>) -> CancelToken {
    let next_look = Mutex::new(clock.now());
    CancelToken::asking(move || {
        let now = clock.now();
        // Another thread may be checking.
        let Ok(mut next_look) = next_look.try_lock() else {
            return false;
        };
        if now < *next_look {
            return false;
        }
        *next_look = now + LOOK_INTERVAL;
        handle.has_left()
    })
}
