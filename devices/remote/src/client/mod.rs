//! Devices of servers, as devices of samite.
//!
//! - `endpoint`: the session with a server.
//! - `device`, `memory`, `stream`: the contract.

mod device;
mod endpoint;
mod memory;
mod stream;

use crate::identity::{self, Address};
use crate::proto;
use device::RemoteDevice;
use endpoint::Endpoint;
use samite_core::{Backend, Device, Rejected};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How servers are reached.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// File with the token. By default, `remote-token` in the [folder for settings](crate::settings_folder).
    pub token: Option<PathBuf>,
    /// How long making a connection may take.
    pub connect: Duration,
    /// For how long a lost connection is made anew before the device counts as lost.
    pub reconnect: Duration,
    /// How long a run may take; for ever by default.
    pub deadline: Option<Duration>,
    /// How often the other side is asked whether it lives, and how long it may take to answer.
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

/// The backend `remote`: all devices of some servers, called `remote0`, `remote1` and so on.
#[derive(Debug)]
pub struct RemoteBackend {
    devices: Vec<Arc<dyn Device>>,
    rejected: Vec<Rejected>,
}

impl RemoteBackend {
    /// Connects to the servers with these addresses, such as `samite://192.168.0.7:50053#5d41…`. Those that cannot be used are
    /// [rejected](Backend::rejected).
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

    /// Whether a server can be used now.
    ///
    /// # Errors
    /// Why not, and what to do.
    pub fn check(address: &str, options: &RemoteOptions) -> Result<(), String> {
        session(address, options).map(drop)
    }

    fn open(&self, address: &str, options: &RemoteOptions) -> Result<Vec<Arc<dyn Device>>, String> {
        let (endpoint, described) = session(address, options)?;
        let first = self.devices.len();
        let devices = (0u32..).zip(described).map(|(number, described)| {
            let name = format!("remote{}", first + number as usize);
            let endpoint = Arc::clone(&endpoint);
            let device = RemoteDevice::new(endpoint, number, name, described, options.deadline)?;
            Ok(device as Arc<dyn Device>)
        });
        devices.collect()
    }
}

/// A new session with a server, and the server's devices.
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
    Endpoint::connect(address, token, options)
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
