//! Devices of servers that speak the protocol, as devices of samite.
//!
//! - `endpoint`: the one connection to a server.
//! - `device`, `buffer`, `stream`: the contract.
//!
//! Requests without a reply are sent and not waited for: writes, graphs, what is freed. The server does everything in order, so a
//! read gets what was computed before. A graph is sent once; to compute it again takes a message of 13 bytes.

mod buffer;
mod device;
mod endpoint;
mod stream;

use device::RpcDevice;
use endpoint::Endpoint;
use samite_core::{Backend, Device, Environment, Rejected};
use std::sync::Arc;
use std::time::Duration;

/// How servers are reached.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// How long connecting may take.
    pub connect: Duration,
    /// How long a server may be silent when it has to answer: also while it computes.
    pub patience: Duration,
    /// Time and connections.
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

/// The port of servers whose address has none.
const PORT: &str = "50052";

/// The backend `rpc`: all devices of some servers, called `RPC0`, `RPC1` and so on.
#[derive(Debug)]
pub struct RpcBackend {
    devices: Vec<Arc<dyn Device>>,
    rejected: Vec<Rejected>,
}

impl RpcBackend {
    /// Connects to the servers at these addresses, such as `192.168.0.7:50052`. Those that cannot be used are [rejected](Backend::rejected).
    pub fn connect<S: AsRef<str>>(addresses: &[S], options: &ClientOptions) -> Self {
        let mut backend = RpcBackend {
            devices: Vec::new(),
            rejected: Vec::new(),
        };
        for address in addresses {
            let address = address.as_ref().trim();
            let address = match address.contains(':') {
                true => address.to_owned(),
                false => format!("{address}:{PORT}"),
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
