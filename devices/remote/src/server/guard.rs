//! A connection that must authenticate in time.

use crate::identity::Exported;
use samite_core::environment::{ConnectionHandle, Seat};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Sleep;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

/// Peer of a connection.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub address: SocketAddr,
    pub exported: Exported,
    /// Set once the client has proved that it has a token.
    pub is_authenticated: Arc<AtomicBool>,
    pub seat: Arc<Seat>,
}

/// Tells a connection to close, because another one needs its seat.
#[derive(Debug, Default)]
pub(super) struct Leave(Notify);

impl Leave {
    /// Waits until the connection must close.
    pub async fn asked(&self) {
        self.0.notified().await;
    }
}

impl ConnectionHandle for Leave {
    /// HTTP/2 notices by itself.
    fn has_left(&self) -> bool {
        false
    }

    fn shut_down(&self) {
        self.0.notify_one();
    }
}

/// A TLS connection that ends if the client does not authenticate before a deadline.
pub(super) struct Guarded {
    stream: TlsStream<TcpStream>,
    peer: Peer,
    /// Deadline; `None` once the client is authenticated.
    time: Option<Pin<Box<Sleep>>>,
    /// Completes when the connection must make room for another one.
    leaving: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Guarded {
    pub fn new(
        stream: TlsStream<TcpStream>,
        peer: Peer,
        patience: Duration,
        leave: Arc<Leave>,
    ) -> Self {
        Guarded {
            stream,
            peer,
            time: Some(Box::pin(tokio::time::sleep(patience))),
            leaving: Box::pin(async move { leave.asked().await }),
        }
    }
}

impl Connected for Guarded {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.time.is_some() && self.peer.is_authenticated.load(Ordering::Acquire) {
            self.time = None;
        }
        if self.leaving.as_mut().poll(context).is_ready() {
            // A completed future must not be polled again.
            self.leaving = Box::pin(std::future::pending());
            return Poll::Ready(Err(ErrorKind::ConnectionAborted.into()));
        }
        if let Some(time) = &mut self.time
            && time.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
