//! Devices of servers that speak the protocol, as devices of samite.
//!
//! - `endpoint`: the connection to a server.
//! - `device`, `buffer`, `stream`: the traits of `samite-core`.
//!
//! Requests without a reply are not waited for: writes, graphs, frees. The server executes
//! everything in order, so a read returns the result of the preceding computation. A graph is sent
//! once; computing it again takes a message of 13 bytes, or 21 with protocol 8.

mod buffer;
mod device;
mod endpoint;
mod stream;

use device::RpcDevice;
use endpoint::Endpoint;
use samite_core::{Backend, Device, Environment, Rejected};
use std::sync::Arc;
use std::time::Duration;

/// Options for connections to servers.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Time limit for connecting.
    pub connect: Duration,
    /// Time that a server may be silent before a reply, including while it computes.
    pub patience: Duration,
    /// Source of time and connections.
    pub environment: Environment,
}

impl Default for ClientOptions {
    fn default() -> Self {
        ClientOptions {
            connect: Duration::from_secs(5),
            patience: Duration::from_secs(300),
            environment: Environment::system(),
        }
    }
}

/// Default port of servers.
const PORT: &str = "50052";

/// The `rpc` backend: all devices of some servers, called `RPC0`, `RPC1` and so on.
#[derive(Debug)]
pub struct RpcBackend {
    devices: Vec<Arc<dyn Device>>,
    rejected: Vec<Rejected>,
}

impl RpcBackend {
    /// Connects to the servers at these addresses, such as `192.168.0.7:50052`. Servers that cannot
    /// be used are [rejected](Backend::rejected).
    pub fn connect<S: AsRef<str>>(addresses: &[S], options: &ClientOptions) -> Self {
        let mut backend = RpcBackend {
            devices: Vec::new(),
            rejected: Vec::new(),
        };
        for address in addresses {
            let address = address.as_ref().trim();
            let address = if address.contains(':') {
                address.to_owned()
            } else {
                format!("{address}:{PORT}")
            };
            let found = Endpoint::connect(&address, options).and_then(|(endpoint, count)| {
                let first = backend.devices.len();
                let devices = (0..count).map(|number| {
                    let name = format!("RPC{}", first + number as usize);
                    let device = RpcDevice::open(Arc::clone(&endpoint), number, name)?;
                    Ok(device as Arc<dyn Device>)
                });
                devices.collect::<samite_core::Result<Vec<_>>>()
            });
            match found {
                Ok(devices) => backend.devices.extend(devices),
                Err(error) => {
                    tracing::warn!("the server {address} is not used: {error}");
                    backend.rejected.push(Rejected {
                        what: address,
                        why: error.to_string(),
                        named: true,
                    });
                }
            }
        }
        backend
    }
}

impl Backend for RpcBackend {
    fn name(&self) -> &str {
        "rpc"
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    fn rejected(&self) -> Vec<Rejected> {
        self.rejected.clone()
    }
}
