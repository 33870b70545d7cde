//! Both sides of a session without TLS, gRPC, and threads of their own: for simulations, which carry the messages and say who goes on when.

use crate::client::{Carrier, Kind, Opening, Refused};
use crate::server::{Host, MOST_MESSAGE};
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

pub use crate::client::Meanwhile;
pub use crate::outside::{Outside, Task};
pub use crate::server::Worker;

/// The messages of `samite.proto`.
pub mod messages {
    pub use crate::proto::*;
}

/// Why a connection ends, as gRPC says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// A code of gRPC.
    pub code: i32,
    /// What it says to people.
    pub text: String,
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Refusal {
            code: status.code() as i32,
            text: status.message().to_owned(),
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Status::new(refusal.code.into(), refusal.text)
    }
}

/// Messages of one side, in their order. An end without an error is one that the side wanted.
pub type Messages = Pin<Box<dyn Stream<Item = Result<Vec<u8>, Refusal>> + Send>>;

/// Why a connection is not made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreachable {
    /// Nobody listens there.
    Nobody,
    /// Anything else that may pass.
    Lost,
}

/// What becomes of a connection that is being made.
pub type Connecting = Pin<Box<dyn Future<Output = Result<Messages, Unreachable>> + Send>>;

/// How a client reaches its server.
pub trait Wire: Send + Sync {
    /// Makes a connection that carries these messages. It has what the server says.
    fn connect(&self, messages: Messages) -> Connecting;
}

struct Wired(Box<dyn Wire>);

impl Carrier for Wired {
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
                        Unreachable::Nobody => Kind::Nobody,
                        Unreachable::Lost => Kind::Unclear,
                    },
                }),
            }
        })
    }
}

fn decoded<M: Message + Default>(bytes: Result<Vec<u8>, Refusal>) -> Result<M, Status> {
    let bytes = bytes.map_err(Status::from)?;
    if bytes.len() > MOST_MESSAGE {
        return Err(Status::out_of_range("a message is too large"));
    }
    M::decode(&*bytes).map_err(|error| Status::internal(error.to_string()))
}

/// Begins a session and returns the server's devices. Whoever waits calls `meanwhile`.
///
/// # Errors
/// Why there is no session.
pub fn connect(
    wire: Box<dyn Wire>,
    options: &RemoteOptions,
    outside: Arc<dyn Outside>,
    meanwhile: Meanwhile,
) -> Result<Vec<Arc<dyn Device>>, String> {
    client::connect_over(Box::new(Wired(wire)), options, outside, meanwhile)
}

/// A server without connections of its own.
pub struct BareServer(Arc<Host>);

impl fmt::Debug for BareServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BareServer({} sessions)", self.sessions())
    }
}

impl BareServer {
    /// A server of `devices`. Files of key and tokens are not used: callers say who a client is.
    ///
    /// # Errors
    /// If the store cannot be used, naming it.
    pub fn new(
        devices: &[Arc<dyn Device>],
        options: RemoteServerOptions,
        outside: Arc<dyn Outside>,
    ) -> io::Result<Self> {
        Host::new(devices, options, outside).map(BareServer)
    }

    /// Serves a connection of somebody who has proved to have the token `owner`. It has what the server says.
    pub fn serve(
        &self,
        owner: &str,
        messages: Messages,
    ) -> impl Future<Output = Result<Messages, Refusal>> + Send + use<> {
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

    /// Sessions there are now, those without a connection among them.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.0.sessions()
    }

    /// Bytes of memory that clients have taken.
    #[must_use]
    pub fn memory_in_use(&self) -> usize {
        self.0.memory.taken()
    }

    /// How many sessions were ended because another one needed the room.
    #[must_use]
    pub fn made_room(&self) -> u64 {
        self.0.made_room()
    }
}
