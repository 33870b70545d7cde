//! The connection to a server. The first failure is kept, and everything fails at once from then
//! on.

use super::ClientOptions;
use crate::channel::Channel;
use samite_core::{Error, Result};
use samite_wire::rpc::cache::GraphCache;
use samite_wire::rpc::frame::Command;
use samite_wire::rpc::message::{Greeting, Request, TensorPieces};
use samite_wire::rpc::record::Record;
use samite_wire::rpc::version::{Protocol, V8};
use std::collections::HashMap;
use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of devices that a server may report.
const MAX_DEVICES: u32 = 256;

/// Maximum bytes of data per message. Upstream's server keeps a whole message in memory.
pub(super) const PIECE: usize = 16 << 20;

/// Maximum number of questions in flight. With more, both sides could block on sending while the
/// network is full in both directions.
const BATCH: usize = 16;

pub(super) struct Endpoint {
    address: String,
    link: Mutex<RpcConnection>,
    /// True if the server can report what its devices support.
    pub answers_support: bool,
    /// Protocol that the server speaks.
    pub protocol: &'static Protocol,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({})", self.address)
    }
}

/// The connection.
pub(super) struct RpcConnection {
    channel: std::result::Result<Channel, Box<str>>,
    protocol: &'static Protocol,
    /// Graphs that each device has.
    cached: HashMap<u32, GraphCache<()>>,
    /// Set if a request was sent whose success is unknown.
    unconfirmed: bool,
}

impl RpcConnection {
    fn channel(&mut self) -> io::Result<&mut Channel> {
        let lost = |_: &mut Box<str>| io::Error::from(ErrorKind::NotConnected);
        self.channel.as_mut().map_err(lost)
    }

    /// Sends a request that has no reply, or whose reply is received later.
    pub fn tell(&mut self, request: &Request) -> io::Result<()> {
        let payload = request.payload(self.protocol);
        self.send(request.command(), &payload, &[])
    }

    /// Sends a message whose payload is `head` followed by `data`.
    pub fn send(&mut self, command: Command, head: &[u8], data: &[u8]) -> io::Result<()> {
        let mut message = command.header((head.len() + data.len()) as u64).to_vec();
        message.extend(head);
        self.unconfirmed = true;
        let channel = self.channel()?;
        // Send small data in a single write.
        if data.len() <= 4096 {
            message.extend(data);
            return channel.send(&message);
        }
        channel.send(&message)?;
        channel.send(data)
    }

    /// Receives a reply of `out.len()` bytes.
    pub fn receive(&mut self, out: &mut [u8]) -> io::Result<()> {
        let channel = self.channel()?;
        let mut len = [0; 8];
        channel.receive(&mut len)?;
        let len = u64::from_le_bytes(len);
        if len != out.len() as u64 {
            let text = format!("a reply has {len} bytes instead of {}", out.len());
            return Err(io::Error::new(ErrorKind::InvalidData, text));
        }
        channel.receive(out)?;
        self.unconfirmed = false;
        Ok(())
    }

    /// Sends a request and waits for its reply of `N` bytes.
    pub fn ask<const N: usize>(&mut self, request: &Request) -> io::Result<[u8; N]> {
        let mut reply = [0; N];
        self.tell(request)?;
        self.receive(&mut reply)?;
        Ok(reply)
    }

    /// Writes to a tensor.
    pub fn write(&mut self, tensor: Record, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut at = offset;
        for piece in data.chunks(PIECE) {
            let request = Request::SetTensor {
                tensor,
                cache: false,
                offset: at,
            };
            self.send(Command::SetTensor, &request.payload(self.protocol), piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Writes pieces of a tensor.
    pub fn write_pieces(
        &mut self,
        tensor: Record,
        pieces: TensorPieces,
        data: &[u8],
    ) -> io::Result<()> {
        let request = Request::SetTensor2d { tensor, pieces };
        self.send(Command::SetTensor2d, &request.payload(self.protocol), data)
    }

    /// Computes a graph of `tensors` tensors, whose message is only sent if the server does not
    /// have the graph.
    pub fn compute(
        &mut self,
        device: u32,
        uid: u64,
        tensors: usize,
        message: &[u8],
    ) -> io::Result<()> {
        let new = || GraphCache::new(self.protocol);
        let cached = self.cached.entry(device).or_insert_with(new);
        if cached.get(uid).is_some() {
            return self.tell(&Request::GraphRecompute { device, uid });
        }
        cached.make_room(uid, tensors);
        cached.insert(uid, tensors, ());
        self.send(Command::GraphCompute, message, &[])
    }

    /// Frees a buffer. Upstream's server then drops all graphs.
    pub fn free(&mut self, buffer: u64) -> io::Result<()> {
        for cached in self.cached.values_mut() {
            cached.drop_if(|()| true);
        }
        self.tell(&Request::FreeBuffer { buffer })
    }
}

impl Endpoint {
    /// Connects, and asks for the number of devices.
    pub fn connect(address: &str, options: &ClientOptions) -> Result<(Arc<Self>, u32)> {
        let failed = |error: io::Error| Error::io(format!("cannot use {address}"), error);
        let environment = &options.environment;
        let connection = environment.network.connect(address, options.connect);
        let channel = connection
            .and_then(|connection| {
                let clock = Arc::clone(&environment.clock);
                Channel::new(connection, clock, options.patience)
            })
            .map_err(failed)?;
        let mut link = RpcConnection {
            channel: Ok(channel),
            // All protocols have the same greeting.
            protocol: &V8,
            cached: HashMap::new(),
            unconfirmed: false,
        };
        let mut reply = vec![0; Greeting::len(&V8)];
        link.tell(&Request::Hello)
            .and_then(|()| link.receive(&mut reply))
            .map_err(failed)?;
        let unknown = |reason: samite_wire::UnsupportedConversion| {
            failed(io::Error::new(ErrorKind::Unsupported, reason.into_owned()))
        };
        let greeting = Greeting::read(&reply).map_err(unknown)?;
        link.protocol = Protocol::for_version(greeting.version).map_err(unknown)?;
        let count = link.ask(&Request::DeviceCount).map_err(failed)?;
        let count = u32::from_le_bytes(count).min(MAX_DEVICES);
        let protocol = link.protocol;
        let endpoint = Endpoint {
            address: address.to_owned(),
            link: Mutex::new(link),
            answers_support: greeting.answers_support,
            protocol,
        };
        Ok((Arc::new(endpoint), count))
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Runs `act` on the connection. A failure ends the connection.
    pub fn with<T>(
        &self,
        device: &str,
        act: impl FnOnce(&mut RpcConnection) -> io::Result<T>,
    ) -> Result<T> {
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = |message: &str| Error::DeviceLost {
            device: device.into(),
            message: message.into(),
        };
        if let Err(reason) = &link.channel {
            return Err(lost(reason));
        }
        act(&mut link).map_err(|error| {
            let what = match error.kind() {
                ErrorKind::UnexpectedEof => {
                    "the server closed the connection; its log may say why".to_owned()
                }
                ErrorKind::TimedOut => "the server does not answer".to_owned(),
                _ => error.to_string(),
            };
            let reason = format!("{}: {what}", self.address);
            let error = lost(&reason);
            link.channel = Err(reason.into());
            error
        })
    }

    /// Sends several questions, and reads the replies of `N` bytes.
    pub fn ask_all<const N: usize>(
        &self,
        device: &str,
        requests: &[Request],
    ) -> Result<Vec<[u8; N]>> {
        let mut replies = Vec::with_capacity(requests.len());
        for batch in requests.chunks(BATCH) {
            self.with(device, |link| {
                batch.iter().try_for_each(|request| link.tell(request))?;
                for _ in batch {
                    let mut reply = [0; N];
                    link.receive(&mut reply)?;
                    replies.push(reply);
                }
                Ok(())
            })?;
        }
        Ok(replies)
    }

    /// Asks for a number.
    pub fn number(&self, device: &str, request: &Request) -> Result<u64> {
        let reply = self.with(device, |link| link.ask(request))?;
        Ok(u64::from_le_bytes(reply))
    }

    /// Waits until all requests are complete.
    pub fn confirm(&self, device: &str, number: u32) -> Result<()> {
        self.with(device, |link| {
            if link.unconfirmed {
                link.ask::<8>(&Request::GetAlignment { device: number })?;
            }
            Ok(())
        })
    }
}
