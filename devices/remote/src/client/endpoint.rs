//! The session with a server, over whichever connection there is.
//!
//! Callers put requests into a list and wait for replies; a thread of its own, with an asynchronous runtime, moves both. Requests stay in the
//! list until the server has done them, so that they can be sent again over another connection.

use super::RemoteOptions;
use crate::convert;
use crate::identity::{Address, Token};
use crate::proto::{self, remote_client::RemoteClient};
use crate::server::{KEPT, MOST_MESSAGE};
use crate::{VERSION, tls};
use hyper_util::rt::TokioIo;
use prost::Message;
use samite_core::{CancelToken, Error, Result};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

/// Bytes of requests that may be on their way.
const MOST_BYTES: usize = 64 << 20;

/// How often who waits looks whether it is cancelled.
const LOOK: Duration = Duration::from_millis(20);

/// How long a server that refuses connections is tried again: it may be on its way up, but then it has lost the session.
const REFUSED: Duration = Duration::from_secs(2);

/// How many connections, one after the other, may break before anything more is done.
const MOST_IN_VAIN: u32 = 20;

pub(super) struct Endpoint {
    address: Address,
    shared: Arc<Shared>,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({})", self.address.place)
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The connection, if there is one.
    sender: Option<mpsc::UnboundedSender<proto::Request>>,
    /// The last number.
    number: u64,
    /// Requests that may not be done yet.
    open: VecDeque<Open>,
    open_bytes: usize,
    done: u64,
    /// The last reply that has arrived.
    seen: u64,
    /// Requests whose reply somebody waits for.
    expected: BTreeSet<u64>,
    replies: BTreeMap<u64, proto::Reply>,
    /// Failures of requests that nobody waits for.
    failures: VecDeque<Failed>,
    /// Why there is no session any more.
    lost: Option<Box<str>>,
    /// The device is not used any more.
    is_over: bool,
}

/// A request that failed.
struct Failed {
    /// Who sent it.
    owner: u64,
    number: u64,
    failure: proto::Failure,
}

/// A request that may not be done yet.
struct Open {
    /// Who sent it.
    owner: u64,
    bytes: usize,
    request: proto::Request,
}

/// Failures of requests that nobody waits for, as many as are remembered.
const MOST_FAILURES: usize = 256;

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why there is no connection.
struct Refused {
    why: String,
    /// Whether trying again can help, and whether somebody answers at that place.
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It cannot.
    Final,
    /// Nobody listens there.
    Nobody,
    /// Anything else.
    Unclear,
}

type Link = (
    mpsc::UnboundedSender<proto::Request>,
    Streaming<proto::Reply>,
    proto::Welcome,
);

impl Endpoint {
    /// Begins a session. Returns the server's devices, too. The text of an error says what to do.
    pub fn connect(
        address: Address,
        token: Token,
        options: &RemoteOptions,
    ) -> std::result::Result<(Arc<Self>, Vec<proto::Device>), String> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        let connector = Connector {
            address: address.clone(),
            token,
            options: options.clone(),
        };
        let (sender, replies, welcome) = runtime
            .block_on(connector.link(&[], 0))
            .map_err(|refused| refused.why)?;
        let shared = Arc::new(Shared::default());
        lock(&shared).sender = Some(sender);
        let thread = std::thread::Builder::new().name("remote device".to_owned());
        let (worker, session) = (Arc::clone(&shared), welcome.session.clone());
        thread
            .spawn(move || runtime.block_on(run(&worker, &connector, &session, replies)))
            .map_err(|error| error.to_string())?;
        Ok((Arc::new(Endpoint { address, shared }), welcome.devices))
    }

    pub fn place(&self) -> &str {
        &self.address.place
    }

    fn lost(&self, device: &str, why: &str) -> Error {
        Error::DeviceLost {
            device: device.into(),
            message: format!("{}: {why}", self.address.place).into(),
        }
    }

    /// Sends commands of `owner`, and returns the request's number. With `is_awaited`, the reply must be [awaited](Endpoint::wait).
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
        let mut state = lock(&self.shared);
        loop {
            if let Some(why) = &state.lost {
                return Err(self.lost(device, why));
            }
            let is_full = state.open_bytes > 0 && state.open_bytes + bytes > MOST_BYTES
                || is_awaited && state.expected.len() >= KEPT;
            if !is_full {
                break;
            }
            let waited = self.shared.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state.number += 1;
        request.number = state.number;
        request.seen = state.seen;
        if is_awaited {
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
            // A connection that broke: it is sent again.
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
        let mut state = lock(&self.shared);
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
            state = match cancel {
                Some(_) => {
                    let waited = self.shared.changed.wait_timeout(state, LOOK);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    let waited = self.shared.changed.wait(state);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    /// Nobody waits for a reply any more. A failure of it is one of `owner`.
    pub fn abandon(&self, owner: u64, number: u64) {
        let mut state = lock(&self.shared);
        state.expected.remove(&number);
        let reply = state.replies.remove(&number);
        if let Some(failure) = reply.and_then(|reply| reply.failure) {
            state.failures.push_back(Failed {
                owner,
                number,
                failure,
            });
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Sends commands and waits for their results.
    pub fn call(&self, device: &str, commands: Vec<proto::Command>) -> Result<Vec<proto::Result>> {
        let number = self.send(device, NOBODY, commands, true)?;
        self.wait(device, number, None)
    }

    /// Whether everything up to `number` is done.
    pub fn is_done(&self, number: u64) -> bool {
        lock(&self.shared).done >= number
    }

    /// The last number.
    pub fn last(&self) -> u64 {
        lock(&self.shared).number
    }

    /// Waits until everything up to `number` is done.
    pub fn reach(&self, device: &str, number: u64) -> Result<()> {
        let mut state = lock(&self.shared);
        while state.done < number {
            if let Some(why) = &state.lost {
                return Err(self.lost(device, why));
            }
            if state.expected.range(number..).next().is_none() {
                // Nobody has asked yet.
                drop(state);
                return self.call(device, Vec::new()).map(drop);
            }
            let waited = self.shared.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// A failure of what `owner` sent up to `number`, which stays one.
    pub fn has_failed(&self, device: &str, owner: u64, number: u64) -> Result<()> {
        let state = lock(&self.shared);
        let mut failures = state.failures.iter();
        let failed = failures.find(|failed| failed.owner == owner && failed.number <= number);
        match failed {
            Some(failed) => Err(convert::error(device, failed.failure.clone())),
            None => Ok(()),
        }
    }

    /// A failure of what `owner` sent, or of what nobody in particular sent.
    pub fn failure(&self, device: &str, owner: u64) -> Result<()> {
        let mut state = lock(&self.shared);
        let mut failures = state.failures.iter();
        let at = failures.position(|failed| failed.owner == owner || failed.owner == NOBODY);
        match at.and_then(|at| state.failures.remove(at)) {
            Some(failed) => Err(convert::error(device, failed.failure)),
            None => match &state.lost {
                Some(why) => Err(self.lost(device, why)),
                None => Ok(()),
            },
        }
    }
}

/// Who sends what belongs to no stream.
pub(super) const NOBODY: u64 = 0;

impl Drop for Endpoint {
    fn drop(&mut self) {
        let mut state = lock(&self.shared);
        state.is_over = true;
        state
            .lost
            .get_or_insert_with(|| "the device is not used any more".into());
        // The stream ends when the last sender is gone, and the session with it.
        state.sender = None;
    }
}

/// Moves requests and replies until there is no session any more.
async fn run(
    shared: &Shared,
    connector: &Connector,
    session: &[u8],
    mut replies: Streaming<proto::Reply>,
) {
    let (mut reached, mut in_vain) = (0, 0);
    loop {
        let (why, is_refused) = loop {
            match replies.message().await {
                Ok(Some(reply)) => take(shared, reply),
                Ok(None) => break ("the server closed the connection".to_owned(), false),
                Err(status) => {
                    // What it refuses now, it refuses again.
                    let is_refused = matches!(
                        status.code(),
                        Code::InvalidArgument | Code::OutOfRange | Code::ResourceExhausted
                    );
                    break (status.message().to_owned(), is_refused);
                }
            }
        };
        let done = {
            let mut state = lock(shared);
            if state.is_over {
                return;
            }
            state.sender = None;
            state.done
        };
        in_vain = if done > reached { 0 } else { in_vain + 1 };
        reached = done;
        let place = &connector.address.place;
        tracing::warn!("the connection to {place} is lost: {why}");
        let next = match is_refused || in_vain >= MOST_IN_VAIN {
            true => Err(why),
            false => reconnect(shared, connector, session).await,
        };
        match next {
            Ok(Some(next)) => replies = next,
            Ok(None) => return,
            Err(lost) => {
                let mut state = lock(shared);
                state.lost = Some(lost.into());
                state.open.clear();
                drop(state);
                shared.changed.notify_all();
                return;
            }
        }
    }
}

/// Another connection for the session; `None` if it is not wanted any more.
async fn reconnect(
    shared: &Shared,
    connector: &Connector,
    session: &[u8],
) -> std::result::Result<Option<Streaming<proto::Reply>>, String> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(20);
    loop {
        let seen = {
            let state = lock(shared);
            if state.is_over {
                return Ok(None);
            }
            state.seen
        };
        let refused = match connector.link(session, seen).await {
            Ok((sender, replies, welcome)) => {
                let mut state = lock(shared);
                // What has not arrived is sent again, in its order, before anything new.
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
            Kind::Final => Duration::ZERO,
            Kind::Nobody => REFUSED.min(connector.options.reconnect),
            Kind::Unclear => connector.options.reconnect,
        };
        if start.elapsed() >= patience {
            return Err(refused.why);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

/// What a reply changes.
fn take(shared: &Shared, reply: proto::Reply) {
    let mut state = lock(shared);
    if reply.number > 0 {
        if reply.number <= state.seen {
            return;
        }
        state.seen = reply.number;
    }
    let number = reply.number;
    if state.expected.contains(&number) {
        state.replies.insert(number, reply.clone());
    } else if let Some(failure) = reply.failure {
        let mut open = state.open.iter();
        let open = open.find(|open| open.request.number == number);
        let owner = open.map_or(NOBODY, |open| open.owner);
        if state.failures.len() == MOST_FAILURES {
            state.failures.pop_front();
        }
        state.failures.push_back(Failed {
            owner,
            number,
            failure,
        });
    }
    state.done = state.done.max(reply.done);
    while let Some(open) = state.open.front()
        && open.request.number <= state.done
    {
        state.open_bytes -= open.bytes;
        state.open.pop_front();
    }
    drop(state);
    shared.changed.notify_all();
}

/// Makes connections to one server.
struct Connector {
    address: Address,
    token: Token,
    options: RemoteOptions,
}

impl Connector {
    /// A connection for a session, or for a new one if it has no name yet.
    async fn link(&self, session: &[u8], seen: u64) -> std::result::Result<Link, Refused> {
        let attempt = tokio::time::timeout(self.options.connect, self.try_link(session, seen));
        attempt.await.unwrap_or_else(|_| {
            let why = format!(
                "no answer within {} s: is this the address, and does no firewall stand between?",
                self.options.connect.as_secs_f32()
            );
            Err(Refused {
                why,
                kind: Kind::Unclear,
            })
        })
    }

    async fn try_link(&self, session: &[u8], seen: u64) -> std::result::Result<Link, Refused> {
        let place = self.address.place.as_str();
        let unreachable = |error: io::Error| Refused {
            kind: match error.kind() {
                ErrorKind::ConnectionRefused => Kind::Nobody,
                _ => Kind::Unclear,
            },
            why: format!("cannot be reached: {error}: is `samite remote-server` running there?"),
        };
        let stream = TcpStream::connect(place).await.map_err(unreachable)?;
        stream.set_nodelay(true).map_err(unreachable)?;
        let final_error = |why: String| Refused {
            why,
            kind: Kind::Final,
        };
        let config =
            tls::client(self.address.pin).map_err(|error| final_error(error.to_string()))?;
        let name = tls::server_name().map_err(|error| final_error(error.to_string()))?;
        let stream = TlsConnector::from(config).connect(name, stream).await;
        let stream = stream.map_err(|error| Refused {
            kind: match error.kind() {
                // Another key, or no TLS.
                ErrorKind::InvalidData => Kind::Final,
                _ => Kind::Unclear,
            },
            why: match error.get_ref().and_then(|inner| inner.downcast_ref()) {
                Some(rustls::Error::General(why)) => why.clone(),
                Some(rustls::Error::InvalidMessage(_)) => {
                    "it does not speak TLS: is this the port of `samite remote-server`?".to_owned()
                }
                _ => error.to_string(),
            },
        })?;
        let exported = tls::exported(stream.get_ref().1);
        let proof = self
            .token
            .proof(&exported.map_err(|error| final_error(error.to_string()))?);
        let (every, within) = self.options.keep_alive;
        let mut stream = Some(TokioIo::new(stream));
        let channel: Channel = tonic::transport::Endpoint::from_static("http://samite")
            .http2_keep_alive_interval(every)
            .keep_alive_timeout(within)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(8 << 20)
            .initial_connection_window_size(8 << 20)
            .connect_with_connector(tower::service_fn(move |_| {
                let stream = stream.take();
                std::future::ready(stream.ok_or_else(|| io::Error::from(ErrorKind::NotConnected)))
            }))
            .await
            .map_err(|error| Refused {
                why: error.to_string(),
                kind: Kind::Unclear,
            })?;
        let (sender, requests) = mpsc::unbounded_channel();
        let _ = sender.send(proto::Request {
            seen,
            hello: Some(proto::Hello {
                version: VERSION,
                session: session.to_vec().into(),
            }),
            ..proto::Request::default()
        });
        let mut request = tonic::Request::new(UnboundedReceiverStream::new(requests));
        let proof = format!("samite {proof}").parse();
        request.metadata_mut().insert(
            "authorization",
            proof.map_err(|_| final_error("a proof is no header".to_owned()))?,
        );
        let mut client = RemoteClient::new(channel).max_decoding_message_size(MOST_MESSAGE);
        let refused = |status: Status| {
            Refused {
            kind: match status.code() {
                Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled => {
                    Kind::Unclear
                }
                _ => Kind::Final,
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
                _ => status.message().to_owned(),
            },
        }
        };
        let mut replies = client.session(request).await.map_err(refused)?.into_inner();
        let first = replies.message().await.map_err(refused)?;
        let welcome = first.and_then(|reply| reply.welcome);
        let welcome = welcome.ok_or_else(|| final_error("it says no welcome".to_owned()))?;
        Ok((sender, replies, welcome))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::client::memory::command;
    use crate::{RemoteServer, RemoteServerOptions, identity};
    use samite_reference::{ReferenceDevice, ReferenceOptions};

    /// A server, and who asks it: a client with a token that keeps no rule.
    fn rogue(change: impl FnOnce(&mut RemoteServerOptions)) -> (tempfile::TempDir, Connector) {
        let folder = tempfile::tempdir().unwrap();
        let [key, tokens] = ["key", "tokens"].map(|name| folder.path().join(name));
        let mut options = RemoteServerOptions::new(key, tokens.clone());
        change(&mut options);
        let device = ReferenceDevice::new(ReferenceOptions::default());
        let server = RemoteServer::bind(&[device as _], "127.0.0.1:0", options).unwrap();
        let address = Address::parse(&server.address().unwrap()).unwrap();
        std::thread::spawn(move || server.serve());
        let token = identity::read_tokens(&tokens).unwrap().remove(0);
        let connector = Connector {
            address,
            token,
            options: RemoteOptions::default(),
        };
        (folder, connector)
    }

    fn runtime() -> tokio::runtime::Runtime {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    }

    #[test]
    fn a_message_that_is_too_long_ends_the_session() {
        let (_folder, connector) = rogue(|_| {});
        let Connector {
            address,
            token,
            options,
        } = connector;
        let (endpoint, _) = Endpoint::connect(address, token, &options).unwrap();
        let write = proto::command::Command::Write(proto::Write {
            data: vec![0; MOST_MESSAGE + 1].into(),
            ..proto::Write::default()
        });
        let error = endpoint.call("d", vec![command(write)]).unwrap_err();
        assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
        assert!(error.to_string().contains("too large"), "{error}");
    }

    #[test]
    fn numbers_that_are_wrong_end_the_connection() {
        let (_folder, connector) = rogue(|_| {});
        runtime().block_on(async {
            for number in [0, 2, u64::MAX] {
                let link = connector.link(&[], 0).await;
                let (sender, mut replies, _) = link.map_err(|refused| refused.why).unwrap();
                let request = proto::Request {
                    number,
                    confirm: true,
                    ..proto::Request::default()
                };
                sender.send(request).unwrap();
                let end = loop {
                    match replies.message().await {
                        Ok(Some(reply)) => assert_eq!(reply.number, 0),
                        other => break other,
                    }
                };
                assert_eq!(end.unwrap_err().code(), Code::InvalidArgument);
            }
        });
    }

    #[test]
    fn sessions_belong_to_their_tokens() {
        let (folder, connector) = rogue(|options| {
            let text = format!("{}\n{}\n", "11".repeat(32), "22".repeat(32));
            identity::write_secret(&options.tokens, text.as_bytes()).unwrap();
        });
        let tokens = identity::read_tokens(&folder.path().join("tokens")).unwrap();
        runtime().block_on(async {
            let link = connector.link(&[], 0).await;
            let (_sender, _replies, welcome) = link.map_err(|refused| refused.why).unwrap();
            let other = Connector {
                token: tokens[1].clone(),
                address: connector.address.clone(),
                options: connector.options.clone(),
            };
            let why = |link: std::result::Result<Link, Refused>| link.map(drop).map_err(|r| r.why);
            let refused = why(other.link(&welcome.session, 0).await).unwrap_err();
            assert!(refused.contains("no such session"), "{refused}");
            // Which is there, and ends with this connection.
            assert_eq!(why(connector.link(&welcome.session, 0).await), Ok(()));
            let refused = why(connector.link(&[1; 3], 0).await).unwrap_err();
            assert!(refused.contains("no such session"), "{refused}");
            assert_eq!(why(other.link(&[], 0).await), Ok(()));
        });
    }
}
