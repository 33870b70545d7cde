//! Connections to a server, one after the other, and the messages on them, independent of the
//! transport.

use super::RemoteOptions;
use super::endpoint::{SharedEndpoint, say_over};
use crate::environment::SessionEnvironment;
use crate::{VERSION, proto};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt};
use tonic::{Code, Status};

/// Time for which the client retries a server that refuses connections. The server may be
/// restarting, but then it has lost the session.
const REFUSED: Duration = Duration::from_secs(2);

/// Maximum number of consecutive connections that break without progress.
const MAX_IN_VAIN: u32 = 20;

/// The reason why a connection failed.
pub(crate) struct Refused {
    pub why: String,
    /// Reports if a retry can help, and if a server answered.
    pub kind: RefusalKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RefusalKind {
    /// A retry cannot help.
    Final,
    /// No server listens there.
    Nobody,
    /// Any other reason.
    Unclear,
}

/// Messages of a server on one connection.
pub(crate) type Replies = Pin<Box<dyn Stream<Item = Result<proto::Reply, Status>> + Send>>;

/// A connection that is being made.
pub(crate) type Opening<'a> = Pin<Box<dyn Future<Output = Result<Replies, Refused>> + Send + 'a>>;

/// Makes connections to one server.
pub(crate) trait LinkConnector: Send + Sync {
    /// Returns the server's address for messages.
    fn place(&self) -> &str;

    /// Makes a connection that carries these requests.
    fn open(&self, requests: mpsc::UnboundedReceiver<proto::Request>) -> Opening<'_>;
}

/// A connection that the server has accepted.
pub(super) type Link = (
    mpsc::UnboundedSender<proto::Request>,
    Replies,
    proto::Welcome,
);

/// Keeps a session alive.
pub(super) struct Links {
    pub carrier: Box<dyn LinkConnector>,
    pub options: RemoteOptions,
    pub environment: Arc<dyn SessionEnvironment>,
}

impl Links {
    /// Makes a connection for a session, or for a new one if `session` is empty.
    pub async fn link(&self, session: &[u8], seen: u64) -> Result<Link, Refused> {
        tokio::select! {
            biased;
            link = self.try_link(session, seen) => link,
            () = self.environment.sleep(self.options.connect) => Err(Refused {
                why: format!(
                    "no answer within {} s: is this the address, and does no firewall stand between?",
                    self.options.connect.as_secs_f32()
                ),
                kind: RefusalKind::Unclear,
            }),
        }
    }

    async fn try_link(&self, session: &[u8], seen: u64) -> Result<Link, Refused> {
        let (sender, requests) = mpsc::unbounded_channel();
        let _ = sender.send(proto::Request {
            seen,
            hello: Some(proto::Hello {
                version: VERSION,
                session: session.to_vec().into(),
            }),
            ..proto::Request::default()
        });
        let mut replies = self.carrier.open(requests).await?;
        let first = replies.next().await.transpose().map_err(refused)?;
        let welcome = first.and_then(|reply| reply.welcome);
        let welcome = welcome.ok_or_else(|| Refused {
            why: "it says no welcome".to_owned(),
            kind: RefusalKind::Final,
        })?;
        Ok((sender, replies, welcome))
    }

    /// Transfers requests and replies until the session ends.
    pub async fn run(self, shared: Arc<SharedEndpoint>, session: Vec<u8>, mut replies: Replies) {
        let (mut reached, mut in_vain) = (0, 0);
        loop {
            let (why, is_refused) = loop {
                match replies.next().await {
                    Some(Ok(reply)) => shared.take(reply),
                    None => break ("the server closed the connection".to_owned(), false),
                    Some(Err(status)) => {
                        // A request that the server rejects now will be rejected again.
                        let is_refused = matches!(
                            status.code(),
                            Code::InvalidArgument | Code::OutOfRange | Code::ResourceExhausted
                        );
                        break (status.message().to_owned(), is_refused);
                    }
                }
            };
            let done = {
                let mut state = shared.lock();
                if state.is_over {
                    return;
                }
                state.sender = None;
                state.done
            };
            in_vain = if done > reached { 0 } else { in_vain + 1 };
            reached = done;
            tracing::warn!("the connection to {} is lost: {why}", self.carrier.place());
            let next = if is_refused || in_vain >= MAX_IN_VAIN {
                Err(why)
            } else {
                self.reconnect(&shared, &session).await
            };
            match next {
                Ok(Some(next)) => replies = next,
                Ok(None) => return,
                Err(lost) => return shared.lose(lost),
            }
        }
    }

    /// Makes another connection for the session. Returns `None` if the session is no longer needed.
    async fn reconnect(
        &self,
        shared: &SharedEndpoint,
        session: &[u8],
    ) -> Result<Option<Replies>, String> {
        let start = self.environment.now();
        let mut pause = Duration::from_millis(20);
        loop {
            let seen = {
                let state = shared.lock();
                if state.is_over {
                    return Ok(None);
                }
                state.seen
            };
            let refused = match self.link(session, seen).await {
                Ok((sender, replies, welcome)) => {
                    let mut state = shared.lock();
                    if state.is_over {
                        say_over(&sender);
                        return Ok(None);
                    }
                    // Send everything that has not arrived again, in order, before anything new.
                    let again = state.open.iter().map(|open| &open.request);
                    for request in again.filter(|request| request.number > welcome.received) {
                        let _ = sender.send(proto::Request {
                            seen,
                            ..request.clone()
                        });
                    }
                    state.sender = Some(sender);
                    return Ok(Some(replies));
                }
                Err(refused) => refused,
            };
            let patience = match refused.kind {
                RefusalKind::Final => Duration::ZERO,
                RefusalKind::Nobody => REFUSED.min(self.options.reconnect),
                RefusalKind::Unclear => self.options.reconnect,
            };
            if self.environment.now().saturating_duration_since(start) >= patience {
                return Err(refused.why);
            }
            self.environment.sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }
}

/// Converts the status with which a server rejects a session.
pub(super) fn refused(status: Status) -> Refused {
    Refused {
        kind: match status.code() {
            Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled => {
                RefusalKind::Unclear
            }
            _ => RefusalKind::Final,
        },
        why: match status.code() {
            Code::Unauthenticated => format!(
                "{}: give --remote-token a copy of the file of tokens that the server names at its start",
                status.message()
            ),
            Code::Unimplemented => {
                "it speaks gRPC, but not this version of the protocol: update samite on both sides"
                    .to_owned()
            }
            Code::NotFound => format!(
                "{}: it was restarted, or the connection was away for too long",
                status.message()
            ),
            // The server's message has no cause on this side.
            _ => match std::error::Error::source(&status) {
                Some(cause) => broke(cause),
                None => status.message().to_owned(),
            },
        },
    }
}

/// Returns the root cause why a connection failed while it was being made.
pub(super) fn broke(error: &dyn std::error::Error) -> String {
    let first = std::iter::successors(Some(error), |error| error.source()).last();
    format!(
        "the connection broke while it was made: {}",
        first.unwrap_or(error)
    )
}
