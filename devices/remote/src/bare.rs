//! Both sides of a session without TLS, gRPC and threads, for simulations. The simulation carries
//! the messages and schedules both sides.

use crate::client::{LinkConnector, Opening, RefusalKind, Refused};
use crate::server::{Host, MAX_MESSAGE};
use crate::{RemoteOptions, RemoteServerOptions, client, proto};
use prost::Message;
use samite_core::Device;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

pub use crate::client::IdleTask;
pub use crate::environment::{BoxedTask, SessionEnvironment};
pub use crate::server::Worker;

/// Messages of `samite.proto`.
pub mod messages {
    pub use crate::proto::*;
}

/// The reason why a connection ends, as a gRPC status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcStatus {
    /// gRPC status code.
    pub code: i32,
    /// Message for users.
    pub text: String,
}

impl From<Status> for GrpcStatus {
    fn from(status: Status) -> Self {
        GrpcStatus {
            code: status.code() as i32,
            text: status.message().to_owned(),
        }
    }
}

impl From<GrpcStatus> for Status {
    fn from(refusal: GrpcStatus) -> Self {
        Status::new(refusal.code.into(), refusal.text)
    }
}

/// Messages of one side, in order. The side ends the stream intentionally if it ends without an
/// error.
pub type Messages = Pin<Box<dyn Stream<Item = Result<Vec<u8>, GrpcStatus>> + Send>>;

/// The reason why a connection cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreachable {
    /// No server listens there.
    Nobody,
    /// Any other, possibly temporary reason.
    Lost,
}

/// A connection that is being made.
pub type Connecting = Pin<Box<dyn Future<Output = Result<Messages, Unreachable>> + Send>>;

/// Connects a client to its server.
pub trait Wire: Send + Sync {
    /// Makes a connection that carries these messages. Returns the server's messages.
    fn connect(&self, messages: Messages) -> Connecting;
}

struct Wired(Box<dyn Wire>);

impl LinkConnector for Wired {
    fn place(&self) -> &str {
        "wire"
    }

    fn open(&self, requests: UnboundedReceiver<proto::Request>) -> Opening<'_> {
        let requests = UnboundedReceiverStream::new(requests);
        let connecting = self.0.connect(Box::pin(
            requests.map(|request| Ok(request.encode_to_vec())),
        ));
        Box::pin(async move {
            match connecting.await {
                Ok(replies) => Ok(Box::pin(replies.map(decoded)) as _),
                Err(why) => Err(Refused {
                    why: format!("cannot be reached: {why:?}"),
                    kind: match why {
                        Unreachable::Nobody => RefusalKind::Nobody,
                        Unreachable::Lost => RefusalKind::Unclear,
                    },
                }),
            }
        })
    }
}

fn decoded<M: Message + Default>(bytes: Result<Vec<u8>, GrpcStatus>) -> Result<M, Status> {
    let bytes = bytes.map_err(Status::from)?;
    if bytes.len() > MAX_MESSAGE {
        return Err(Status::out_of_range("a message is too large"));
    }
    M::decode(&*bytes).map_err(|error| Status::internal(error.to_string()))
}

/// Starts a session and returns the server's devices. Waiting callers call `meanwhile`.
///
/// # Errors
/// Returns the reason why no session could start.
pub fn connect(
    wire: Box<dyn Wire>,
    options: &RemoteOptions,
    environment: Arc<dyn SessionEnvironment>,
    meanwhile: IdleTask,
) -> Result<Vec<Arc<dyn Device>>, String> {
    client::connect_over(Box::new(Wired(wire)), options, environment, meanwhile)
}

/// A server without network connections.
pub struct BareServer(Arc<Host>);

impl fmt::Debug for BareServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BareServer({} sessions)", self.sessions())
    }
}

impl BareServer {
    /// Creates a server of `devices`. The key and token files are not used: the caller identifies
    /// each client.
    ///
    /// # Errors
    /// Returns an error that names the store if it cannot be used.
    pub fn new(
        devices: &[Arc<dyn Device>],
        options: RemoteServerOptions,
        environment: Arc<dyn SessionEnvironment>,
    ) -> io::Result<Self> {
        Host::new(devices, options, environment).map(BareServer)
    }

    /// Serves a connection of a client that has proved to hold the token `owner`. Returns the
    /// server's messages.
    pub fn serve(
        &self,
        owner: &str,
        messages: Messages,
    ) -> impl Future<Output = Result<Messages, GrpcStatus>> + Send + use<> {
        let (host, owner) = (Arc::clone(&self.0), owner.to_owned());
        async move {
            let replies = host.serve(&owner, messages.map(decoded)).await?;
            let replies = ReceiverStream::new(replies).map(|reply| match reply {
                Ok(reply) => Ok(reply.encode_to_vec()),
                Err(status) => Err(status.into()),
            });
            Ok(Box::pin(replies) as _)
        }
    }

    /// Returns the number of sessions, including those without a connection.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.0.sessions()
    }

    /// Returns the bytes of memory that clients have allocated.
    #[must_use]
    pub fn memory_in_use(&self) -> usize {
        self.0.memory.taken()
    }

    /// Returns the number of sessions that were ended to make room for others.
    #[must_use]
    pub fn made_room(&self) -> u64 {
        self.0.made_room()
    }
}
