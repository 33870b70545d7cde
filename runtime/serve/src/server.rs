//! Listens, accepts connections, and drains at shutdown.

use crate::account::RequestAccount;
use crate::connections::{Connection, Connections, InFlight};
use crate::hub::Hub;
use crate::route::handle;
use crate::timed::{Timed, Times};
use crate::tls::Tls;
use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use samite_core::CancelToken;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, JoinSet};

/// Maximum bytes of a request head, and of one read.
const HEAD_BYTES: usize = 64 << 10;

/// Time that a connection may wait for its next request.
const WAITING_TIME: Duration = Duration::from_secs(75);

/// Time between checks for models to unload and engines that have ended.
const LOOK: Duration = Duration::from_millis(500);

/// Time that a new connection may wait for its first request at shutdown.
const FIRST_REQUEST: Duration = Duration::from_millis(500);

/// Time for streams to send their final error at shutdown.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Idle time after which a thread for blocking work ends: effectively never. If memory is short, a
/// replacement might not start, and tokio panics if no thread is left.
const BLOCKING_WAIT: Duration = Duration::from_secs(u32::MAX as u64);

/// Bytes of memory that a server needs for its threads and for small allocations, besides its
/// models. The standard library aborts if a small allocation fails, so [`serve`] checks in advance
/// that this much is free.
pub const ROOM: usize = 32 << 20;

/// Returns a function that lowers the priority of its thread below that of the caller, which the
/// engine's threads have, so that a flood of large requests does not slow generation. It does
/// nothing on systems where the threads of a process share one priority.
#[cfg(target_os = "linux")]
fn lower_priority() -> impl Fn() + Send + Sync + 'static {
    use rustix::process::{getpriority_process, setpriority_process};
    // Not relative to the thread: threads inherit the priority of the one that starts them.
    let nice = getpriority_process(None).map(|nice| (nice + 5).min(19));
    move || {
        // Fails only where a policy forbids it; then the thread keeps its priority.
        let _ = nice.and_then(|nice| setpriority_process(None, nice));
    }
}

#[cfg(not(target_os = "linux"))]
fn lower_priority() -> impl Fn() + Send + Sync + 'static {
    || ()
}

/// Serves until `stop` is cancelled, then finishes the requests in flight. Calls `ready` with the
/// addresses. Raises the limit of open files to its maximum.
///
/// # Errors
/// Returns an error if memory is short, an address cannot be bound, or a certificate is invalid.
pub fn serve(hub: Arc<Hub>, stop: &CancelToken, ready: impl FnOnce(&[String])) -> io::Result<()> {
    samite_core::ask_for_memory(ROOM, "the threads and requests of the server")
        .map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error.to_string()))?;
    hub.loader.start()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .thread_keep_alive(BLOCKING_WAIT)
        .enable_all()
        .thread_name("http")
        .on_thread_start(lower_priority())
        .build()?;
    // Start one thread for blocking work now.
    let result = runtime.block_on(async {
        let _ = tokio::task::spawn_blocking(|| ()).await;
        run(hub, stop, ready).await
    });
    // Do not wait for work that still blocks, such as compiling a grammar.
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

/// State that all connections share.
struct ServerContext {
    hub: Arc<Hub>,
    connections: Arc<Connections>,
    tls: Option<Tls>,
    stopped: watch::Receiver<bool>,
}

async fn run(hub: Arc<Hub>, stop: &CancelToken, ready: impl FnOnce(&[String])) -> io::Result<()> {
    let options = &hub.options;
    let tls = match &options.tls {
        Some(files) => Some(Tls::new(files)?),
        None => None,
    };
    if let Some(transfers) = &hub.transfers {
        transfers.listen().await?;
    }
    let mut listeners = Vec::new();
    for host in &options.hosts {
        let host = host.trim().trim_start_matches('[').trim_end_matches(']');
        let listener = TcpListener::bind((host, options.port)).await;
        listeners.push(listener.map_err(|error| {
            let place = format!("{host}:{}", options.port);
            io::Error::new(error.kind(), format!("cannot listen at {place}: {error}"))
        })?);
    }
    let addresses = listeners.iter().map(TcpListener::local_addr);
    let addresses = addresses.collect::<io::Result<Vec<_>>>()?;
    ready(
        &addresses
            .iter()
            .map(SocketAddr::to_string)
            .collect::<Vec<_>>(),
    );
    let (sender, stopped) = watch::channel(false);
    let shared = Arc::new(ServerContext {
        hub: Arc::clone(&hub),
        connections: Arc::new(Connections::allowed(
            options.connections,
            options.request_memory,
        )),
        tls,
        stopped,
    });
    let tasks = listeners.into_iter();
    let mut tasks: Vec<JoinHandle<()>> = tasks
        .map(|listener| tokio::spawn(listen(listener, Arc::clone(&shared))))
        .collect();
    let stopping = Arc::new(Notify::new());
    let notified = Arc::downgrade(&stopping);
    stop.on_cancel(move || {
        if let Some(stopping) = notified.upgrade() {
            stopping.notify_one();
        }
    });
    while !stop.is_cancelled() && !hub.is_broken() {
        hub.tend().await;
        tokio::select! {
            () = stopping.notified() => {}
            () = tokio::time::sleep(LOOK) => {}
        }
    }
    let has_ended = hub.is_broken();
    hub.is_draining.store(true, Ordering::SeqCst);
    hub.events.close();
    hub.downloads.cancel_all();
    let _ = sender.send(true);
    let handles = || hub.loaded().filter_map(|app| app.handle.clone());
    handles().for_each(|handle| handle.close());
    let time = Duration::from_secs(options.drain_seconds);
    if tokio::time::timeout(time, join(&mut tasks)).await.is_err() {
        tracing::warn!("requests that take too long are ended");
        handles().for_each(|handle| handle.end());
        // Each stream sends the reason why it ends.
        let _ = tokio::time::timeout(LAST_WORDS, join(&mut tasks)).await;
    }
    handles().for_each(|handle| handle.end());
    if has_ended {
        Err(io::Error::other("the engine has ended"))
    } else {
        Ok(())
    }
}

async fn join(tasks: &mut Vec<JoinHandle<()>>) {
    while let Some(task) = tasks.last_mut() {
        let _ = task.await;
        tasks.pop();
    }
}

/// Accepts connections. At shutdown, waits for the requests in flight and meanwhile rejects new
/// ones with that reason.
async fn listen(listener: TcpListener, shared: Arc<ServerContext>) {
    let mut tasks = JoinSet::new();
    let mut end = shared.stopped.clone();
    let mut told = pin!(async move {
        let _ = end.wait_for(|stopped| *stopped).await;
    });
    let mut is_late = false;
    while !(is_late && tasks.is_empty()) {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    let _ = stream.set_nodelay(true);
                    let shared = Arc::clone(&shared);
                    let mut place = shared.connections.add(peer.ip());
                    place.local_address = stream.local_addr().ok().map(|address| address.ip());
                    let place = Arc::new(place);
                    let taken = taken(stream, place, shared, is_late);
                    // Do not wait for connections that arrive after the shutdown began.
                    if is_late {
                        tokio::spawn(taken);
                    } else {
                        tasks.spawn(taken);
                    }
                }
                // For example, too many open files: close connections that wait for a request.
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be taken");
                    shared.connections.make_room();
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            () = told.as_mut(), if !is_late => is_late = true,
            Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
        }
    }
}

/// Body of a response. The connection counts as at work until it is written.
struct TrackedBody {
    body: Body,
    #[expect(dead_code, reason = "it is there to be dropped")]
    at_work: InFlight,
    #[expect(dead_code, reason = "it is there to be dropped")]
    account: Option<Arc<RequestAccount>>,
}

impl hyper::body::Body for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Serves a connection, with TLS if it is enabled, until it must close.
async fn taken(
    stream: TcpStream,
    place: Arc<Connection>,
    shared: Arc<ServerContext>,
    is_late: bool,
) {
    let answered = async {
        let Some(tls) = &shared.tls else {
            return connection(stream, &place, &shared, is_late).await;
        };
        let time = Duration::from_secs(shared.hub.options.head_seconds);
        let encrypted = async {
            tokio::select! {
                encrypted = tls.accept(stream) => Some(encrypted),
                () = tokio::time::sleep(time) => None,
                () = place.leave.notified() => None,
            }
        };
        match encrypted.await {
            Some(Ok(stream)) => connection(stream, &place, &shared, is_late).await,
            Some(Err(error)) => {
                tracing::debug!(%error, "a connection was not encrypted as it should be");
            }
            None => tracing::debug!("a connection was not encrypted in time"),
        }
    };
    tokio::select! {
        () = answered => {}
        () = place.cut.notified() => tracing::debug!("a client that is late makes room"),
    }
}

/// Serves a connection.
async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    place: &Arc<Connection>,
    shared: &Arc<ServerContext>,
    is_late: bool,
) {
    let hub = Arc::clone(&shared.hub);
    let working = Arc::clone(place);
    let had_request = Arc::new(AtomicBool::new(false));
    let has_request = Arc::clone(&had_request);
    let service = service_fn(move |request| {
        has_request.store(true, Ordering::Relaxed);
        let hub = Arc::clone(&hub);
        let peer = Arc::clone(&working);
        let at_work = InFlight::new(&working);
        async move {
            let mut response = handle(hub, &peer, request).await;
            let account = response.extensions_mut().remove();
            Ok::<_, Infallible>(response.map(|body| TrackedBody {
                body,
                at_work,
                account,
            }))
        }
    });
    let options = &shared.hub.options;
    let times = Times {
        head: Duration::from_secs(options.head_seconds),
        read: Duration::from_secs(options.write_seconds),
    };
    let stream = Timed::new(stream, Arc::clone(place), times);
    let mut builder = http1::Builder::new();
    // Clients of llama-server expect this capitalization.
    builder.title_case_headers(true);
    builder
        .timer(TokioTimer::new())
        .max_buf_size(HEAD_BYTES)
        .header_read_timeout(WAITING_TIME)
        .keep_alive(!is_late);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut stopped = shared.stopped.clone();
    let told = async move {
        let end = async {
            let _ = stopped.wait_for(|stopped| *stopped).await;
            // The first request of a new connection may be on its way.
            if !had_request.load(Ordering::Relaxed) {
                tokio::time::sleep(FIRST_REQUEST).await;
            }
        };
        tokio::select! {
            () = end, if !is_late => {}
            () = place.leave.notified() => {}
        }
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = told => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended");
    }
}
