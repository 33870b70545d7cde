//! The server: it accepts connections, each of which has a session and a thread of its own that moves bytes between them.
//!
//! - `session`: requests and what is done about them, without a connection.
//! - `places`: what a client's numbers of buffers and addresses stand for.
//! - `work`: graphs, bound to devices.
//! - `staged`: memory for the nodes that another device computes.

mod places;
mod session;
mod staged;
mod work;

use crate::channel::{ended, send};
use samite_core::environment::{Connection, Listener};
use samite_core::{Device, Environment, Ledger};
use session::PIECE;
pub use session::{End, Replies, Session};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// What clients may do.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Bytes of memory for all clients together.
    pub memory: Option<usize>,
    /// Bytes of memory for one client.
    pub memory_per_client: Option<usize>,
    /// Clients at the same time. More are turned away.
    pub clients: usize,
    /// Buffers of one client.
    pub buffers: usize,
    /// Tensors of one graph.
    pub tensors: usize,
    /// How long a client may be silent in the middle of a message. Between messages it may be silent for ever.
    pub patience: Duration,
    /// What computes operations that a device refuses, the first one that can: the CPU, then the reference device. Tensors are copied to
    /// it and back if it cannot use the memory that they lie in.
    pub fallbacks: Vec<Arc<dyn Device>>,
    /// Time.
    pub environment: Environment,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            memory: None,
            memory_per_client: None,
            clients: 64,
            buffers: 1 << 16,
            tensors: 1 << 17,
            patience: Duration::from_secs(10),
            fallbacks: Vec::new(),
            environment: Environment::system(),
        }
    }
}

/// Lends devices.
#[derive(Debug)]
pub struct Server {
    devices: Vec<Arc<dyn Device>>,
    options: ServerOptions,
    memory: Arc<Ledger>,
    clients: AtomicUsize,
    /// For logs.
    next: AtomicU64,
}

/// How often accepting may fail, one time after the other, before the server gives up.
const MOST_FAILURES: u32 = 100;

/// How long to wait after that failed: other connections have to end first.
const PAUSE: Duration = Duration::from_millis(50);

impl Server {
    /// A server of `devices`, which clients number in this order.
    pub fn new(devices: Vec<Arc<dyn Device>>, options: ServerOptions) -> Arc<Self> {
        Arc::new(Server {
            devices,
            memory: Ledger::new(options.memory),
            options,
            clients: AtomicUsize::new(0),
            next: AtomicU64::new(1),
        })
    }

    /// Serves whoever connects, until accepting connections fails again and again.
    ///
    /// # Errors
    /// What the system says.
    pub fn serve(self: &Arc<Self>, listener: &dyn Listener) -> io::Result<()> {
        let mut failures = 0;
        loop {
            let result = listener.accept().and_then(|connection| {
                let server = Arc::clone(self);
                let thread = samite_core::thread_builder()?.name("rpc client".to_owned());
                thread.spawn(move || server.serve_client(connection))
            });
            match result {
                Ok(_) => failures = 0,
                Err(error) if failures >= MOST_FAILURES => return Err(error),
                Err(error) => {
                    failures += 1;
                    tracing::warn!("a connection could not be accepted: {error}");
                    self.options.environment.clock.sleep(PAUSE);
                }
            }
        }
    }

    /// Serves one client until it leaves or breaks a rule.
    pub fn serve_client(self: &Arc<Self>, connection: Box<dyn Connection>) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let Some(session) = self.begin() else {
            let most = self.options.clients;
            tracing::warn!("client {number} is turned away: there are {most} already");
            return;
        };
        tracing::info!("client {number} connected");
        match self.converse(session, connection) {
            Ok(()) => tracing::info!("client {number} left"),
            Err(End::Lost(error)) => tracing::info!("client {number} is lost: {error}"),
            Err(End::Refused(reason)) => {
                tracing::warn!("the connection of client {number} is closed: {reason}");
            }
        }
    }

    /// A session for one more client, whose bytes the caller moves; `None` if there are too many clients.
    pub fn begin(self: &Arc<Self>) -> Option<Session> {
        Some(Session::new(self, Seat::take(self)?))
    }

    /// Moves bytes between a connection and its session.
    fn converse(
        &self,
        mut session: Session,
        mut connection: Box<dyn Connection>,
    ) -> Result<(), End> {
        connection.set_timeout(Some(self.options.patience))?;
        let clock = &self.options.environment.clock;
        let mut bytes = vec![0; PIECE];
        loop {
            let deadline = session.deadline();
            if deadline.is_some_and(|end| clock.now() >= end) {
                return Err(End::Lost(io::ErrorKind::TimedOut.into()));
            }
            let len = match connection.receive(&mut bytes) {
                Ok(0) if deadline.is_none() => return Ok(()),
                Ok(0) => return Err(End::Lost(ended())),
                Ok(len) => len,
                // Between messages, a client may be silent.
                Err(error) if error.kind() == io::ErrorKind::TimedOut && deadline.is_none() => {
                    continue;
                }
                Err(error) => return Err(End::Lost(error)),
            };
            session.take(&bytes[..len], &mut |reply| send(&mut *connection, reply))?;
        }
    }

    /// How many clients there are now.
    pub fn clients(&self) -> usize {
        self.clients.load(Ordering::Relaxed)
    }

    /// Bytes of memory that clients have taken.
    pub fn memory_in_use(&self) -> usize {
        self.memory.taken()
    }
}

/// One of a limited number of clients.
struct Seat(Arc<Server>);

impl Seat {
    fn take(server: &Arc<Server>) -> Option<Self> {
        let most = server.options.clients;
        let one_more = |now| (now < most).then_some(now + 1);
        let clients = &server.clients;
        let taken = clients.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        taken.is_ok().then(|| Seat(Arc::clone(server)))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::Relaxed);
    }
}
