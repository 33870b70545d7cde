//! A server on the loopback interface, and a client that sends arbitrary requests.
#![allow(dead_code, clippy::unwrap_used)] // each test uses only some

use samite_core::environment::{Network, SystemNetwork};
use samite_core::{DType, Device, Layout};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_rpc::{Server, ServerOptions};
use samite_wire::numbers::{V27, flag};
use samite_wire::rpc::frame::Command;
use samite_wire::rpc::graph::{GraphMessage, LAST};
use samite_wire::rpc::message::{Greeting, Request, TensorPieces};
use samite_wire::rpc::record::Record;
use samite_wire::rpc::version::{Protocol, V8};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs each of these functions as a test, with each protocol that the server speaks.
macro_rules! test_with_each_protocol {
    ($($name:ident)*) => {
        mod v7 {
            $(#[test]
            fn $name() {
                super::$name(&samite_wire::rpc::version::V7);
            })*
        }

        mod v8 {
            $(#[test]
            fn $name() {
                super::$name(&samite_wire::rpc::version::V8);
            })*
        }
    };
}

pub const LONG: Duration = Duration::from_secs(600);

/// Address of a client's first buffer, whose number is 1.
pub const BASE: u64 = 1 << 40;

/// Creates a reference device in host memory.
pub fn device(name: &str, without: &[&str]) -> Arc<dyn Device> {
    ReferenceDevice::new(ReferenceOptions {
        name: name.into(),
        host_memory: true,
        without_ops: without.iter().map(|&op| op.into()).collect(),
        ..ReferenceOptions::default()
    })
}

/// Starts a server for this device; also returns its address.
pub fn serve(options: ServerOptions) -> (Arc<Server>, String) {
    serve_devices(vec![device("reference", &[])], options)
}

pub fn serve_devices(
    devices: Vec<Arc<dyn Device>>,
    options: ServerOptions,
) -> (Arc<Server>, String) {
    let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
    let address = listener.address().unwrap();
    let server = Server::new(devices, options);
    let serving = Arc::clone(&server);
    std::thread::spawn(move || serving.serve(&*listener));
    (server, address)
}

/// Waits until a state is reached.
#[track_caller]
pub fn wait(is_reached: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_reached() {
        assert!(start.elapsed() < LONG, "it does not come to that");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the default options with this protocol.
pub fn options(protocol: &'static Protocol) -> ServerOptions {
    ServerOptions {
        protocol,
        ..ServerOptions::default()
    }
}

/// Computes the last graph again.
pub const RECOMPUTE: Request = Request::GraphRecompute {
    device: 0,
    uid: LAST,
};

/// Requests as bytes.
#[derive(Clone)]
pub struct Script(pub Vec<u8>, pub &'static Protocol);

impl Script {
    pub fn new(protocol: &'static Protocol) -> Self {
        Script(Vec::new(), protocol)
    }

    pub fn frame(&mut self, command: Command, len: u64, payload: &[u8]) -> &mut Self {
        self.0.extend(command.header(len));
        self.0.extend(payload);
        self
    }

    pub fn request(&mut self, request: &Request) -> &mut Self {
        let payload = request.payload(self.1);
        self.frame(request.command(), payload.len() as u64, &payload)
    }

    pub fn write(&mut self, tensor: Record, offset: u64, data: &[u8]) -> &mut Self {
        let request = Request::SetTensor {
            tensor,
            cache: false,
            offset,
        };
        let mut payload = request.payload(self.1);
        payload.extend(data);
        self.frame(Command::SetTensor, payload.len() as u64, &payload)
    }

    pub fn write_pieces(&mut self, tensor: Record, pieces: TensorPieces, data: &[u8]) -> &mut Self {
        let mut payload = Request::SetTensor2d { tensor, pieces }.payload(self.1);
        payload.extend(data);
        self.frame(Command::SetTensor2d, payload.len() as u64, &payload)
    }

    pub fn graph(&mut self, nodes: &[u64], tensors: &[Record]) -> &mut Self {
        self.graph_of(0, LAST, nodes, tensors)
    }

    /// Appends a graph with a uid. Its operations have the numbers of the newest release.
    pub fn graph_of(
        &mut self,
        device: u32,
        uid: u64,
        nodes: &[u64],
        tensors: &[Record],
    ) -> &mut Self {
        let lower = |record: &Record| Record {
            op: self.1.numbers.number_of(record.op).unwrap_or(record.op),
            ..*record
        };
        let tensors: Vec<_> = tensors.iter().map(lower).collect();
        let payload = GraphMessage::write(self.1, device, uid, nodes, &tensors);
        self.frame(Command::GraphCompute, payload.len() as u64, &payload)
    }
}

/// A client connection, and the server's protocol as soon as that is known.
pub struct Raw(pub TcpStream, pub &'static Protocol);

impl Raw {
    /// Connects without a greeting.
    pub fn silent(address: &str) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_nodelay(true).unwrap();
        Raw(stream, &V8)
    }

    pub fn connect(address: &str) -> Self {
        let mut raw = Raw::silent(address);
        let greeting = raw.ask(&Request::Hello);
        assert_eq!(greeting.len(), 28);
        assert!(greeting[4..].iter().all(|&byte| byte == 0));
        let version = Greeting::read(&greeting).unwrap().version;
        raw.1 = Protocol::for_version(version).unwrap();
        raw
    }

    /// Returns an empty list of requests.
    pub fn script(&self) -> Script {
        Script::new(self.1)
    }

    pub fn send(&mut self, script: &Script) {
        // The server may already have closed the connection, which tests notice when they read.
        let _ = self.0.write_all(&script.0);
    }

    pub fn tell(&mut self, request: &Request) {
        self.send(self.script().request(request));
    }

    pub fn ask(&mut self, request: &Request) -> Vec<u8> {
        self.tell(request);
        self.reply()
    }

    pub fn number(&mut self, request: &Request) -> u64 {
        let reply = self.ask(request);
        u64::from_le_bytes(reply[..8].try_into().unwrap())
    }

    pub fn reply(&mut self) -> Vec<u8> {
        let mut len = [0; 8];
        self.0.read_exact(&mut len).unwrap();
        let mut reply = vec![0; u64::from_le_bytes(len) as usize];
        self.0.read_exact(&mut reply).unwrap();
        reply
    }

    /// Waits until the server has closed the connection; fails if it sends something or keeps
    /// waiting.
    pub fn is_closed(&mut self, what: &str) {
        match self.0.read(&mut [0]) {
            Ok(0) => {}
            Ok(_) => panic!("{what}: the server answers"),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("{what}: the server does not close: {error}"),
        }
    }

    pub fn allocate(&mut self, size: u64) -> u64 {
        self.number(&Request::AllocBuffer { device: 0, size })
    }

    pub fn read(&mut self, tensor: Record, offset: u64, size: u64) -> Vec<u8> {
        self.ask(&Request::GetTensor {
            tensor,
            offset,
            size,
        })
    }
}

/// Returns a tensor at a byte offset in the first buffer.
pub fn tensor(dtype: DType, shape: [usize; 4], at: u64) -> Record {
    let layout = Layout::contiguous(dtype, shape).unwrap();
    let mut record =
        Record::from_description(&samite_wire::export::bare(&layout).unwrap(), &V27).unwrap();
    (record.buffer, record.data) = (1, BASE + at);
    record.set_name("t");
    record
}

/// Returns `n` numbers at a byte offset in the first buffer.
pub fn f32s(n: usize, at: u64) -> Record {
    tensor(DType::F32, [n, 1, 1, 1], at)
}

/// Returns a tensor of a graph.
pub fn of_graph(id: u64, op: u32, sources: &[u64], record: Record) -> Record {
    let mut record = Record {
        id,
        op,
        use_count: 0,
        ..record
    };
    if op != 0 {
        record.flags = flag::COMPUTE;
    }
    record.src[..sources.len()].copy_from_slice(sources);
    record
}

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn values(bytes: &[u8]) -> Vec<f32> {
    let (values, _) = bytes.as_chunks();
    values
        .iter()
        .map(|value| f32::from_le_bytes(*value))
        .collect()
}
