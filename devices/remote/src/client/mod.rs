//! Devices of servers as devices of samite.
//!
//! - `endpoint`: the session with a server, for its users.
//! - `link`: the connections of a session, one after the other; `connector` makes them.
//! - `device`, `memory`, `stream`: the traits of `samite-core`.

mod connector;
mod device;
mod endpoint;
mod link;
mod memory;
mod stream;

use crate::environment::SessionEnvironment;
use crate::identity::{self, Address};
use crate::proto;
use device::RemoteDevice;
use endpoint::Endpoint;
pub use endpoint::IdleTask;
use endpoint::SharedEndpoint;
use link::Links;
pub(crate) use link::{LinkConnector, Opening, RefusalKind, Refused};
use samite_core::{Backend, Device, Rejected};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Options for connections to servers.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// File with the token. The default is `remote-token` in the [folder for
    /// settings](crate::settings_folder).
    pub token: Option<PathBuf>,
    /// Time limit for making a connection.
    pub connect: Duration,
    /// Time for which a lost connection is retried before the device counts as lost.
    pub reconnect: Duration,
    /// Time limit of a run; `None` for no limit.
    pub deadline: Option<Duration>,
    /// Keep-alive interval, and the time limit for the answer.
    pub keep_alive: (Duration, Duration),
}

impl Default for RemoteOptions {
    fn default() -> Self {
        RemoteOptions {
            token: None,
            connect: Duration::from_secs(5),
            reconnect: Duration::from_secs(60),
            deadline: None,
            keep_alive: (Duration::from_secs(2), Duration::from_secs(10)),
        }
    }
}

/// The `remote` backend: all devices of some servers, called `remote0`, `remote1` and so on.
#[derive(Debug)]
pub struct RemoteBackend {
    devices: Vec<Arc<dyn Device>>,
    rejected: Vec<Rejected>,
}

impl RemoteBackend {
    /// Connects to the servers with these addresses, such as `samite://192.168.0.7:50053#5d41…`.
    /// Servers that cannot be used are [rejected](Backend::rejected).
    pub fn connect<S: AsRef<str>>(addresses: &[S], options: &RemoteOptions) -> Self {
        let mut backend = RemoteBackend {
            devices: Vec::new(),
            rejected: Vec::new(),
        };
        for address in addresses {
            let address = address.as_ref().trim();
            match backend.open(address, options) {
                Ok(devices) => backend.devices.extend(devices),
                Err(why) => {
                    tracing::warn!("the server {address} is not used: {why}");
                    backend.rejected.push(Rejected {
                        what: address.to_owned(),
                        why,
                        named: true,
                    });
                }
            }
        }
        backend
    }

    /// Checks that a server can be used now.
    ///
    /// # Errors
    /// Returns the reason and the remedy if it cannot.
    pub fn check(address: &str, options: &RemoteOptions) -> Result<(), String> {
        session(address, options).map(drop)
    }

    fn open(&self, address: &str, options: &RemoteOptions) -> Result<Vec<Arc<dyn Device>>, String> {
        let (endpoint, described) = session(address, options)?;
        devices(&endpoint, described, self.devices.len(), options)
    }
}

/// Creates the devices of a server, numbered from `first` on.
fn devices(
    endpoint: &Arc<Endpoint>,
    described: Vec<proto::Device>,
    first: usize,
    options: &RemoteOptions,
) -> Result<Vec<Arc<dyn Device>>, String> {
    let devices = (0u32..).zip(described).map(|(number, described)| {
        let name = format!("remote{}", first + number as usize);
        let endpoint = Arc::clone(endpoint);
        let device = RemoteDevice::new(endpoint, number, name, described, options.deadline)?;
        Ok(device as Arc<dyn Device>)
    });
    devices.collect()
}

/// Starts a session over connections that `carrier` makes. A task keeps it alive. Waiting callers
/// call `meanwhile`.
pub(crate) fn connect_over(
    carrier: Box<dyn LinkConnector>,
    options: &RemoteOptions,
    environment: Arc<dyn SessionEnvironment>,
    meanwhile: IdleTask,
) -> Result<Vec<Arc<dyn Device>>, String> {
    let place = carrier.place().to_owned();
    let meanwhile = Arc::new(meanwhile);
    let others = Arc::clone(&meanwhile);
    let shared = SharedEndpoint::new(Some(Box::new(move |most| others(most))));
    let begun = Arc::new(Mutex::new(None));
    let lock =
        |begun: &Mutex<Option<_>>| begun.lock().unwrap_or_else(PoisonError::into_inner).take();
    let links = Links {
        carrier,
        options: options.clone(),
        environment: Arc::clone(&environment),
    };
    let (worker, tell) = (Arc::clone(&shared), Arc::clone(&begun));
    let told = move |begin| *tell.lock().unwrap_or_else(PoisonError::into_inner) = Some(begin);
    environment.spawn(Box::pin(async move {
        match links.link(&[], 0).await {
            Ok((sender, replies, welcome)) => {
                worker.lock().sender = Some(sender);
                told(Ok(welcome.devices));
                links.run(worker, welcome.session.to_vec(), replies).await;
            }
            Err(refused) => told(Err(refused.why)),
        }
    }));
    let described = loop {
        if let Some(begun) = lock(&begun) {
            break begun?;
        }
        meanwhile(None);
    };
    devices(&Endpoint::new(&place, shared), described, 0, options)
}

/// Starts a session with a server and returns the server's devices.
fn session(
    address: &str,
    options: &RemoteOptions,
) -> Result<(Arc<Endpoint>, Vec<proto::Device>), String> {
    let address = Address::parse(address)?;
    let token = options.token.clone().or_else(|| {
        let folder = identity::settings_folder()?;
        Some(folder.join(identity::TOKEN_FILE))
    });
    let token = token.ok_or("there is no token: name its file with --remote-token")?;
    let tokens = identity::read_tokens(&token).map_err(|error| {
        format!("no token: {error}: give --remote-token a copy of the file of tokens that the server names at its start")
    })?;
    let token = tokens.into_iter().next().ok_or("there is no token")?;
    connector::connect(address, token, options)
}

impl Backend for RemoteBackend {
    fn name(&self) -> &str {
        "remote"
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    fn rejected(&self) -> Vec<Rejected> {
        self.rejected.clone()
    }
}
