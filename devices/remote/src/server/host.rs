//! All sessions of a server, independent of the transport: starts, continues and ends them.

use super::session::{MAX_WAITING_REPLIES, Session, Worker};
use super::siblings::Siblings;
use super::store::Store;
use super::work::{SessionLimits, SessionResources, SharedDevice};
use super::{RemoteServerOptions, lock};
use crate::environment::SessionEnvironment;
use crate::{VERSION, proto};
use prost::Message;
use samite_core::{Device, Ledger, Selection};
use std::collections::BTreeMap;
use std::io::Result;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

/// Messages of a server on one connection.
pub(crate) type Replies = mpsc::Receiver<std::result::Result<proto::Reply, Status>>;

pub(super) type Sessions = BTreeMap<[u8; 16], Arc<Session>>;

pub(crate) struct Host {
    devices: Arc<[SharedDevice]>,
    described: Vec<proto::Device>,
    pub(super) options: RemoteServerOptions,
    store: Option<Arc<Store>>,
    pub memory: Arc<Ledger>,
    pub(super) sessions: Mutex<Sessions>,
    pub(super) received: AtomicU64,
    pub(super) environment: Arc<dyn SessionEnvironment>,
    /// Number of sessions that were ended to make room for others.
    made_room: AtomicU64,
}

impl Host {
    /// Creates a host without sessions.
    pub fn new(
        devices: &[Arc<dyn Device>],
        options: RemoteServerOptions,
        environment: Arc<dyn SessionEnvironment>,
    ) -> Result<Arc<Self>> {
        let store = match &options.store {
            Some(folder) => Some(Arc::new(Store::open(folder, options.store_bytes)?)),
            None => None,
        };
        let devices: Arc<[SharedDevice]> = devices.iter().map(SharedDevice::new).collect();
        Ok(Arc::new(Host {
            described: devices.iter().map(describe).collect(),
            devices,
            memory: Ledger::new(options.memory),
            options,
            store,
            sessions: Mutex::default(),
            received: AtomicU64::new(0),
            environment,
            made_room: AtomicU64::new(0),
        }))
    }

    /// Returns the number of sessions.
    pub fn sessions(&self) -> usize {
        lock(&self.sessions).len()
    }

    /// Returns the number of sessions that were ended to make room for others.
    pub fn made_room(&self) -> u64 {
        self.made_room.load(Ordering::Relaxed)
    }

    /// Serves a connection of a client that has proved to hold the token `owner`. Returns the
    /// messages to send to the client; a task processes the requests.
    pub async fn serve<S>(
        self: &Arc<Self>,
        owner: &str,
        mut requests: S,
    ) -> std::result::Result<Replies, Status>
    where
        S: Stream<Item = std::result::Result<proto::Request, Status>> + Send + Unpin + 'static,
    {
        let first = tokio::select! {
            biased;
            first = requests.next() => first.transpose()?.unwrap_or_default(),
            () = self.environment.sleep(self.options.handshake) => {
                return Err(Status::deadline_exceeded("no first request came"));
            }
        };
        let hello = first
            .hello
            .ok_or_else(|| Status::invalid_argument("the first request says no hello"))?;
        if hello.version != VERSION {
            return Err(Status::failed_precondition(format!(
                "this server speaks version {VERSION} of the protocol, and the client version {}: update the older one",
                hello.version
            )));
        }
        let session = self.session(&hello, owner)?;
        let (sender, replies) = mpsc::channel(MAX_WAITING_REPLIES);
        let welcome = |received| proto::Reply {
            welcome: Some(proto::Welcome {
                version: VERSION,
                session: session.name.to_vec().into(),
                received,
                devices: self.described.clone(),
            }),
            ..proto::Reply::default()
        };
        let connection = session.attach(sender.clone(), first.seen, welcome);
        let connection =
            connection.ok_or_else(|| Status::not_found("replies were missed and are gone"))?;
        let host = Arc::clone(self);
        self.environment.spawn(Box::pin(
            host.pass_on(session, connection, requests, sender),
        ));
        Ok(replies)
    }

    /// Returns the session that a client continues, or a new one.
    fn session(
        self: &Arc<Self>,
        hello: &proto::Hello,
        owner: &str,
    ) -> std::result::Result<Arc<Session>, Status> {
        let mut sessions = lock(&self.sessions);
        if !hello.session.is_empty() {
            let name = <[u8; 16]>::try_from(&*hello.session).ok();
            let known = name.and_then(|name| sessions.get(&name));
            return known
                .filter(|session| session.owner == owner)
                .map(Arc::clone)
                .ok_or_else(|| Status::not_found("there is no such session any more"));
        }
        let (all, most) = (self.options.sessions, self.options.sessions_per_token);
        let count = |sessions: &Sessions| {
            let own = sessions.values().filter(|s| s.owner == owner);
            own.count()
        };
        while (count(&sessions) >= most || sessions.len() >= all)
            && self.end_orphan(&mut sessions, owner, None).is_some()
        {}
        if count(&sessions) >= most {
            return Err(Status::resource_exhausted(format!(
                "this token has {most} sessions already, which is the server's quota: end one, or use another token"
            )));
        }
        if sessions.len() >= all {
            return Err(Status::resource_exhausted(format!(
                "the server has {all} sessions already, which is its quota"
            )));
        }
        let (session, worker) = self
            .begin(owner)
            .map_err(|error| Status::internal(error.to_string()))?;
        let working = self.environment.work(worker);
        working.map_err(|error| Status::internal(error.to_string()))?;
        sessions.insert(session.name, Arc::clone(&session));
        tracing::info!("a session of token {owner} begins");
        Ok(session)
    }

    fn begin(self: &Arc<Self>, owner: &str) -> Result<(Arc<Session>, Worker)> {
        let (mut name, mut nonce) = ([0; 16], [0; 32]);
        self.environment.random(&mut name)?;
        self.environment.random(&mut nonce)?;
        let memory = self.memory.part(self.options.memory_per_session);
        let belongings = SessionResources::new(
            Arc::clone(&self.devices),
            Arc::clone(&memory),
            SessionLimits {
                buffers: self.options.buffers,
                graphs: self.options.graphs,
                tensors: self.options.tensors,
            },
            self.store.clone(),
            Siblings {
                host: Arc::downgrade(self),
                owner: owner.to_owned(),
                own: name,
            },
            nonce,
        );
        let environment = Arc::clone(&self.environment);
        Ok(Session::new(
            name,
            owner.to_owned(),
            belongings,
            memory,
            self.options.waiting,
            environment,
        ))
    }

    /// Ends the session of a token, other than `spared`, that has been without a connection for the
    /// longest time, if there is one.
    pub(super) fn end_orphan(
        &self,
        sessions: &mut Sessions,
        owner: &str,
        spared: Option<[u8; 16]>,
    ) -> Option<Arc<Session>> {
        let orphans = sessions
            .values()
            .filter(|session| session.owner == owner && Some(session.name) != spared);
        let orphans = orphans.filter_map(|session| Some((session.left_since()?, session.name)));
        let (_, name) = orphans.min()?;
        let session = sessions.remove(&name)?;
        session.end();
        session.ended.notify_waiters();
        self.made_room.fetch_add(1, Ordering::Relaxed);
        tracing::info!("a session of token {owner} without a connection makes room");
        Some(session)
    }

    /// Forwards the requests of one connection.
    async fn pass_on<S>(
        self: Arc<Self>,
        session: Arc<Session>,
        connection: u64,
        mut requests: S,
        sender: super::session::Sender,
    ) where
        S: Stream<Item = std::result::Result<proto::Request, Status>> + Send + Unpin,
    {
        let is_over = loop {
            match requests.next().await {
                Some(Ok(request)) if request.over => break true,
                Some(Ok(request)) => {
                    let bytes = request.encoded_len() as u64;
                    self.received.fetch_add(bytes, Ordering::Relaxed);
                    if let Err(status) = session.take(connection, request).await {
                        let _ = sender.try_send(Err(status));
                        break false;
                    }
                }
                // The client stopped making this connection. It may make another one.
                None => break false,
                Some(Err(error)) => {
                    tracing::info!("a connection is lost: {error}");
                    // The client may still be there, and have sent an unreadable message.
                    let _ = sender.try_send(Err(error));
                    break false;
                }
            }
        };
        if !session.detach(connection) {
            return;
        }
        if !is_over {
            // Another connection may continue the session.
            drop((requests, sender));
            tokio::select! {
                biased;
                () = session.ended.notified() => return,
                () = self.environment.sleep(self.options.absence) => {}
            }
            if !session.is_left_since(connection) {
                return;
            }
        }
        session.end();
        lock(&self.sessions).remove(&session.name);
        tracing::info!("a session of token {} is over", session.owner);
    }
}

fn describe(lent: &SharedDevice) -> proto::Device {
    let memories = lent.memories.iter().map(|memory| proto::Memory {
        name: memory.name().to_owned(),
        alignment: memory.alignment() as u64,
        max_size: memory.max_size() as u64,
        row_group: memory.row_group().unwrap_or(0) as u64,
    });
    proto::Device {
        name: lent.device.name().to_owned(),
        description: lent.device.description(),
        memories: memories.collect(),
        selects: lent.device.selection() >= Selection::Exact,
    }
}
