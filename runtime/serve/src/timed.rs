//! Time limits for clients: the head of a request must arrive in time, and responses must be read.
//!
//! A connection may wait a long time for its next request. A client that sends its head byte by
//! byte, or does not read its response, would hold a connection, memory and a model for nothing.

use crate::connections::{Connection, Wait};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// A byte stream that fails if its client is too slow.
pub struct Timed<S> {
    stream: S,
    connection: Arc<Connection>,
    times: Times,
    /// Head that is arriving: the number of the wait that it ends, and its deadline.
    coming: Option<(u64, Pin<Box<Sleep>>)>,
    /// Deadline for the client to read.
    unread: Option<Pin<Box<Sleep>>>,
}

/// Time limits of a client.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// To send the head of a request.
    pub head: Duration,
    /// To read a part of a response.
    pub read: Duration,
}

impl<S> Timed<S> {
    pub fn new(stream: S, connection: Arc<Connection>, times: Times) -> Self {
        Timed {
            stream,
            connection,
            times,
            coming: None,
            unread: None,
        }
    }

    /// Handles the result of a write. While the write is pending, the connection waits for its
    /// client.
    fn generated<T>(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            if self.unread.take().is_some()
                && matches!(self.connection.waits(), Some((_, Wait::Read)))
            {
                self.connection.work();
            }
            return outcome;
        }
        let time = self.times.read;
        if self.unread.is_none() && self.connection.waits().is_none() {
            self.connection.wait_for(Wait::Read);
        }
        let late = self
            .unread
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(time)));
        match late.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                let message = "an answer was not read in time";
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Timed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        // Bytes that arrive during a request are its body, or an early next request.
        let Some((wait, Wait::Request)) = self.connection.waits() else {
            self.coming = None;
            return read;
        };
        let is_new = self.coming.as_ref().is_none_or(|(known, _)| *known != wait);
        if is_new {
            if !matches!(read, Poll::Ready(Ok(()))) || buffer.filled().len() == before {
                self.coming = None;
                return read;
            }
            self.coming = Some((wait, Box::pin(tokio::time::sleep(self.times.head))));
        }
        if let Some((_, late)) = &mut self.coming
            && late.as_mut().poll(cx).is_ready()
        {
            let message = "the head of a request did not come in time";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)));
        }
        ready!(read)?;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Timed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.generated(cx, outcome)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(cx);
        self.generated(cx, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.generated(cx, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.generated(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connections::{Connections, InFlight};
    use std::net::{IpAddr, Ipv4Addr};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const TIME: Duration = Duration::from_millis(60);

    const TIMES: Times = Times {
        head: TIME,
        read: TIME,
    };

    fn new_connection() -> Arc<Connection> {
        let all = Arc::new(Connections::new(8));
        Arc::new(all.add(IpAddr::V4(Ipv4Addr::LOCALHOST)))
    }

    /// Sends up to `most` bytes, one at a time, until it fails. Returns the number of bytes read
    /// and the error of the reader.
    async fn drip(most: usize, connection: &Arc<Connection>) -> (usize, Option<io::ErrorKind>) {
        let (mut client, server) = tokio::io::duplex(64);
        let mut timed = Timed::new(server, Arc::clone(connection), TIMES);
        let writer = tokio::spawn(async move {
            for _ in 0..most {
                if client.write_all(b"G").await.is_err() {
                    return;
                }
                tokio::time::sleep(TIME / 4).await;
            }
        });
        let (mut count, mut byte) = (0, [0]);
        let end = loop {
            match timed.read(&mut byte).await {
                Ok(0) => break None,
                Ok(_) => count += 1,
                Err(error) => break Some(error.kind()),
            }
        };
        drop(timed);
        writer.await.unwrap();
        (count, end)
    }

    fn in_runtime<T>(future: impl Future<Output = T>) -> T {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_time().build().unwrap().block_on(future)
    }

    #[test]
    fn a_slowly_sent_head_times_out() {
        let connection = new_connection();
        let (count, end) = in_runtime(drip(100, &connection));
        assert_eq!(end, Some(io::ErrorKind::TimedOut));
        assert!((1..=5).contains(&count), "{count}");
    }

    #[test]
    fn input_during_a_response_has_no_time_limit() {
        let connection = new_connection();
        let working = InFlight::new(&connection);
        assert_eq!(in_runtime(drip(12, &connection)), (12, None));
        drop(working);
        assert!(in_runtime(drip(12, &connection)).1.is_some());
    }

    #[test]
    fn each_head_has_its_own_timeout_and_idling_has_none() {
        let connection = new_connection();
        let read = in_runtime(async {
            let (mut client, server) = tokio::io::duplex(64);
            let mut timed = Timed::new(server, Arc::clone(&connection), TIMES);
            let mut byte = [0];
            for _ in 0..3 {
                let wait = tokio::time::timeout(TIME * 2, timed.read(&mut byte)).await;
                assert!(wait.is_err(), "nothing came, and nothing is late");
                client.write_all(b"G").await.unwrap();
                timed.read_exact(&mut byte).await.unwrap();
                // The head is complete. Answering it takes a while.
                let working = InFlight::new(&connection);
                tokio::time::sleep(TIME * 2).await;
                drop(working);
            }
            client.write_all(b"G").await.unwrap();
            timed.read(&mut byte).await
        });
        assert_eq!(read.unwrap(), 1);
    }

    #[test]
    fn an_unread_response_times_out() {
        let connection = new_connection();
        let working = InFlight::new(&connection);
        let (count, end) = in_runtime(async {
            let (mut client, server) = tokio::io::duplex(4);
            let mut timed = Timed::new(server, Arc::clone(&connection), TIMES);
            // A slow reader is not late.
            let reader = tokio::spawn(async move {
                for _ in 0..6 {
                    tokio::time::sleep(TIME / 2).await;
                    client.read_u8().await.unwrap();
                }
                client
            });
            let mut count = 0;
            let end = loop {
                match timed.write_all(b"x").await {
                    Ok(()) => count += 1,
                    Err(error) => break error.kind(),
                }
            };
            assert!(matches!(connection.waits(), Some((_, Wait::Read))));
            drop(reader.await);
            (count, end)
        });
        assert_eq!((count, end), (10, io::ErrorKind::TimedOut));
        drop(working);
        assert!(matches!(connection.waits(), Some((_, Wait::Request))));
    }
}
