//! The server.
//!
//! - `guard`: a connection until its client is authenticated.
//! - `host`: all sessions.
//! - `session`: state that outlives a connection: requests, replies, continuation.
//! - `work`: memory and graphs of a session, and execution of commands.
//! - `siblings`: sessions that make room for others.
//! - `store`: chunks of weights on disk.
//!
//! Connections are tasks of a small asynchronous runtime that does no computation, so keep-alive
//! messages are answered in time. Each session computes on its own thread. Only this file and
//! `guard` use network connections and threads; the other modules take them from
//! [outside](crate::environment).

mod guard;
mod host;
mod session;
mod siblings;
mod store;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod work;

use crate::environment::System;
use crate::identity::{self, ClientToken};
use crate::proto::remote_server::{Remote, RemoteServer as Service};
use crate::{proto, tls};
use guard::{Guarded, Leave, Peer};
pub(crate) use host::Host;
use rustls::ServerConfig;
use samite_core::Device;
use samite_core::environment::{ConnectionHandle, Seats, Stage, Throttle};
pub use session::Worker;
pub(crate) use session::{KEPT, UNDER_WAY};
use std::collections::HashMap;
use std::fmt;
use std::io::{Error, ErrorKind, Result};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
pub(crate) use store::LONGEST;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
pub(crate) use work::MAX_RESULTS;

/// Maximum bytes of a message.
pub(crate) const MAX_MESSAGE: usize = 16 << 20;

/// Maximum bytes of the headers, which authenticate the client. The server reads nothing else
/// before.
const MAX_HEADERS: u32 = 4096;

/// Number of wrong proofs per machine that are answered at once. Further ones are delayed by
/// [`DELAY`] each.
const PATIENT: u32 = 3;

/// Delay of the answer to a further wrong proof.
const DELAY: Duration = Duration::from_secs(1);

/// Maximum number of machines with wrong proofs to remember.
const MAX_UNKNOWN: usize = 1024;

/// Pause after a failed accept: other connections must end first.
const PAUSE: Duration = Duration::from_millis(50);

/// Minimum time between two warnings of one kind.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Bytes of memory for threads and small allocations.
const ROOM: usize = 16 << 20;

/// Access and quotas of a server.
#[derive(Clone, Debug)]
pub struct RemoteServerOptions {
    /// File of the server's key. Created if it does not exist.
    pub key: PathBuf,
    /// File of the clients' tokens. Created with one token if it does not exist.
    pub tokens: PathBuf,
    /// Folder for chunks of weights.
    pub store: Option<PathBuf>,
    /// Maximum bytes of these chunks.
    pub store_bytes: u64,
    /// Maximum bytes of memory for all sessions together.
    pub memory: Option<usize>,
    /// Maximum bytes of memory per session.
    pub memory_per_session: Option<usize>,
    /// Maximum number of connections. If it is reached, one without a session [makes
    /// room](samite_core::environment::Seats), or the new connection is rejected.
    pub connections: usize,
    /// Maximum number of sessions.
    pub sessions: usize,
    /// Maximum number of sessions per token.
    pub sessions_per_token: usize,
    /// Maximum number of buffers per session.
    pub buffers: usize,
    /// Maximum number of graphs per session.
    pub graphs: usize,
    /// Maximum number of tensors per graph.
    pub tensors: usize,
    /// Maximum number of queued requests per session, and their bytes. Further requests wait in the
    /// network.
    pub waiting: (usize, usize),
    /// Time limit for a client to authenticate.
    pub handshake: Duration,
    /// Time that a session lives without a connection.
    pub absence: Duration,
    /// Keep-alive interval, and the time limit for the answer.
    pub keep_alive: (Duration, Duration),
}

impl RemoteServerOptions {
    /// Returns the default options with these files.
    pub fn new(key: PathBuf, tokens: PathBuf) -> Self {
        RemoteServerOptions {
            key,
            tokens,
            store: None,
            store_bytes: 32 << 30,
            memory: None,
            memory_per_session: None,
            connections: 256,
            sessions: 64,
            sessions_per_token: 16,
            buffers: 1 << 16,
            graphs: 1 << 12,
            tensors: 1 << 17,
            waiting: (256, 64 << 20),
            handshake: Duration::from_secs(5),
            absence: Duration::from_secs(60),
            keep_alive: (Duration::from_secs(2), Duration::from_secs(10)),
        }
    }
}

/// A server that shares devices over the network with clients that have a token.
pub struct RemoteServer {
    shared: Arc<RemoteServerState>,
    acceptor: TlsAcceptor,
    pin: identity::Pin,
    runtime: tokio::runtime::Runtime,
    listener: std::net::TcpListener,
}

impl fmt::Debug for RemoteServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteServer({:?})", self.listener)
    }
}

struct RemoteServerState {
    host: Arc<Host>,
    tokens: Vec<ClientToken>,
    strangers: Mutex<HashMap<IpAddr, u32>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RemoteServer {
    /// Creates a server of `devices` that listens at `place`, such as `127.0.0.1:50053`; port 0
    /// means any free port.
    ///
    /// # Errors
    /// Returns an error that names the file if key, tokens or store cannot be used, or the system's
    /// error if the address cannot be bound.
    pub fn bind(
        devices: &[Arc<dyn Device>],
        place: &str,
        options: RemoteServerOptions,
    ) -> Result<Self> {
        let (config, pin): (Arc<ServerConfig>, _) = tls::server(&options.key)?;
        let tokens = identity::tokens_or_new(&options.tokens)?;
        let listener = std::net::TcpListener::bind(place)?;
        listener.set_nonblocking(true)?;
        // tokio panics if it cannot start a thread.
        samite_core::ask_for_memory(ROOM, "the threads of the server")
            .map_err(|error| Error::new(ErrorKind::OutOfMemory, error.to_string()))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("remote network")
            .enable_all()
            .build()?;
        let environment = Arc::new(System(runtime.handle().clone()));
        let shared = RemoteServerState {
            host: Host::new(devices, options, environment)?,
            tokens,
            strangers: Mutex::default(),
        };
        Ok(RemoteServer {
            shared: Arc::new(shared),
            acceptor: TlsAcceptor::from(config),
            pin,
            runtime,
            listener,
        })
    }

    /// Returns the address for clients, which includes the hash of the server's key.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn address(&self) -> Result<String> {
        let place = self.listener.local_addr()?;
        Ok(identity::address(&place.to_string(), self.pin))
    }

    /// Returns the bytes of memory that clients have allocated.
    pub fn memory_in_use(&self) -> usize {
        self.shared.host.memory.taken()
    }

    /// Returns the bytes of all requests so far.
    pub fn received(&self) -> u64 {
        self.shared.host.received.load(Ordering::Relaxed)
    }

    /// Returns the number of sessions, including those without a connection.
    pub fn sessions(&self) -> usize {
        self.shared.host.sessions()
    }

    /// Serves the clients that connect. If accepting fails, for example because too many files are
    /// open, the server pauses and continues.
    ///
    /// # Errors
    /// Returns an error if the system refuses the listener or the server fails.
    pub fn serve(&self) -> Result<()> {
        let listener = self.listener.try_clone()?;
        self.runtime.block_on(async {
            let listener = TcpListener::from_std(listener)?;
            let (accepted, incoming) = mpsc::channel(16);
            let (every, within) = self.shared.host.options.keep_alive;
            let service = Service::from_arc(Arc::new(Connections(Arc::clone(&self.shared))))
                .max_decoding_message_size(MAX_MESSAGE);
            let serving = tonic::transport::Server::builder()
                .http2_max_header_list_size(MAX_HEADERS)
                .max_concurrent_streams(2)
                .http2_keepalive_interval(Some(every))
                .http2_keepalive_timeout(Some(within))
                .initial_stream_window_size(1 << 20)
                .initial_connection_window_size(1 << 20)
                .serve_with_incoming(service, ReceiverStream::new(incoming));
            tokio::select! {
                served = serving => served.map_err(Error::other),
                () = self.accept(listener, accepted) => Ok(()),
            }
        })
    }

    /// Accepts connections forever.
    async fn accept(&self, listener: TcpListener, accepted: mpsc::Sender<Result<Guarded>>) {
        let options = &self.shared.host.options;
        let (most, patience) = (options.connections, options.handshake);
        let seats = Seats::new(most);
        let [failures, refusals] = [(); 2].map(|()| Throttle::new(WARNING_INTERVAL));
        loop {
            let (stream, address) = match listener.accept().await {
                Ok(connection) => connection,
                Err(error) => {
                    if let Some(skipped) = failures.pass(Instant::now()) {
                        tracing::warn!(
                            "a connection could not be accepted: {error} ({skipped} more since the last warning)"
                        );
                    }
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let leave = Arc::new(Leave::default());
            let handle = Arc::clone(&leave) as Arc<dyn ConnectionHandle>;
            let Some(seat) = seats.take(Some(address.ip()), Some(handle)) else {
                if let Some(skipped) = refusals.pass(Instant::now()) {
                    tracing::warn!(
                        "{address} is turned away: there are {most} connections already ({skipped} more since the last warning)"
                    );
                }
                continue;
            };
            let (acceptor, accepted) = (self.acceptor.clone(), accepted.clone());
            tokio::spawn(async move {
                let shake = tokio::time::timeout(patience, handshake(acceptor, stream));
                let shaken = tokio::select! {
                    shaken = shake => shaken,
                    () = leave.asked() => return tracing::info!("{address} makes room"),
                };
                match shaken {
                    Ok(Ok((stream, exported))) => {
                        let peer = Peer {
                            address,
                            exported,
                            is_authenticated: Arc::default(),
                            seat: Arc::new(seat),
                        };
                        let guarded = Guarded::new(stream, peer, patience, leave);
                        let _ = accepted.send(Ok(guarded)).await;
                    }
                    Ok(Err(error)) => tracing::info!("{address} speaks no TLS: {error}"),
                    Err(_) => tracing::info!("{address} is too slow"),
                }
            });
        }
    }
}

async fn handshake(
    acceptor: TlsAcceptor,
    stream: TcpStream,
) -> Result<(
    tokio_rustls::server::TlsStream<TcpStream>,
    identity::Exported,
)> {
    stream.set_nodelay(true)?;
    let stream = acceptor.accept(stream).await?;
    let exported = tls::exported(stream.get_ref().1)?;
    Ok((stream, exported))
}

/// Handles the calls on connections.
struct Connections(Arc<RemoteServerState>);

impl RemoteServerState {
    /// Returns the token of a client.
    async fn known<T>(&self, request: &Request<T>) -> std::result::Result<&ClientToken, Status> {
        let peer = request.extensions().get::<Peer>();
        let peer = peer.ok_or_else(|| Status::internal("a connection without TLS"))?;
        let proof = request.metadata().get("authorization");
        let proof = proof.and_then(|proof| proof.to_str().ok());
        let proof = proof.and_then(|proof| identity::unhex(proof.strip_prefix("samite ")?));
        // Try all tokens, whichever matches, so that the time reveals nothing.
        let fitting = proof.and_then(|proof| {
            let tried = self
                .tokens
                .iter()
                .map(|token| (token, token.made(&proof, &peer.exported)));
            tried.fold(
                None,
                |found, (token, fits)| if fits { Some(token) } else { found },
            )
        });
        if let Some(token) = fitting {
            peer.is_authenticated.store(true, Ordering::Release);
            peer.seat.set_stage(Stage::Idle);
            return Ok(token);
        }
        let failures = {
            let mut strangers = lock(&self.strangers);
            if strangers.len() >= MAX_UNKNOWN {
                strangers.clear();
            }
            let failures = strangers.entry(peer.address.ip()).or_default();
            *failures = failures.saturating_add(1);
            *failures
        };
        tracing::warn!("{} has no token of this server", peer.address);
        if failures > PATIENT {
            tokio::time::sleep(DELAY).await;
        }
        Err(Status::unauthenticated(
            "the server does not know the token",
        ))
    }
}

#[tonic::async_trait]
impl Remote for Connections {
    type SessionStream = ReceiverStream<std::result::Result<proto::Reply, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<proto::Request>>,
    ) -> std::result::Result<Response<Self::SessionStream>, Status> {
        let shared = &self.0;
        let token = shared.known(&request).await?;
        let seat = request.extensions().get::<Peer>();
        let seat = seat.map(|peer| Arc::clone(&peer.seat));
        let replies = shared.host.serve(&token.name, request.into_inner()).await?;
        if let Some(seat) = seat {
            seat.set_stage(Stage::Busy);
        }
        Ok(Response::new(ReceiverStream::new(replies)))
    }
}
