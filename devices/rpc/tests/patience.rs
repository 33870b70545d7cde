//! Timeouts of the server, and fair sharing of its connection slots among clients.
#![allow(clippy::unwrap_used)]

#[macro_use]
mod common;

use common::*;
use samite_core::environment::{
    Clock, Connection, ConnectionHandle, Instant, Listener, Network, SystemNetwork,
};
use samite_core::{
    Device, DeviceWrapper, Environment, PlacedGraph, Prepared, Result, RunControl, Stream,
    WrappedDevice,
};
use samite_rpc::{Server, ServerOptions};
use samite_wire::numbers::op;
use samite_wire::rpc::message::Request;
use samite_wire::rpc::version::Protocol;
use std::io;
use std::io::Read;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

test_with_each_protocol! {
    a_graph_stops_when_its_client_disconnects
    the_server_survives_accept_errors
    silent_clients_do_not_block_other_clients
    a_greeting_has_a_time_limit
    an_address_with_many_idle_clients_loses_one_to_another_address
    an_unread_reply_closes_the_connection
}

const SHORT: Duration = Duration::from_millis(200);

/// A device whose graphs run until they are cancelled.
struct Endless {
    inner: Arc<dyn Device>,
    /// Number of runs started.
    runs: Arc<AtomicUsize>,
}

struct EndlessStream {
    inner: Box<dyn Stream>,
    runs: Arc<AtomicUsize>,
}

impl DeviceWrapper for Endless {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    fn open_stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(EndlessStream {
            inner: Arc::clone(&self.inner).open_stream()?,
            runs: Arc::clone(&self.runs),
        }))
    }
}

impl Stream for EndlessStream {
    fn device(&self) -> &dyn Device {
        self.inner.device()
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        self.inner.prepare(work)
    }

    fn run(&mut self, _: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        self.runs.fetch_add(1, Ordering::Relaxed);
        loop {
            control.cancel.check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
}

fn a_graph_stops_when_its_client_disconnects(protocol: &'static Protocol) {
    let runs = Arc::new(AtomicUsize::new(0));
    let endless: Arc<dyn Device> = Arc::new(WrappedDevice(Endless {
        inner: device("endless", &[]),
        runs: Arc::clone(&runs),
    }));
    let (server, address) = serve_devices(vec![endless], options(protocol));
    // Requests that the client sent after the graph are no longer read.
    for requests_behind in [0, 1000] {
        let mut raw = Raw::connect(&address);
        assert_eq!(raw.allocate(256), 1);
        let mut script = Script::new(protocol);
        let tensors = [
            of_graph(7, op::NONE, &[], f32s(4, 0)),
            of_graph(9, op::SQR, &[7], f32s(4, 64)),
        ];
        script.graph(&[9], &tensors);
        for _ in 0..requests_behind {
            script.request(&Request::DeviceCount);
        }
        let before = runs.load(Ordering::Relaxed);
        raw.send(&script);
        wait(|| runs.load(Ordering::Relaxed) > before);
        assert_eq!(server.clients(), 1);
        drop(raw);
        wait(|| server.clients() == 0 && server.memory_in_use() == 0);
    }
}

/// A clock that does not sleep.
#[derive(Debug)]
struct Sleepless;

impl Clock for Sleepless {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep(&self, _: Duration) {}
}

/// Rejects connections at first, and assigns a distinct address to each connection.
#[derive(Debug)]
struct Scripted {
    inner: Box<dyn Listener>,
    failures: AtomicUsize,
    peers: Mutex<Vec<IpAddr>>,
}

#[derive(Debug)]
struct From(Box<dyn Connection>, Option<IpAddr>);

impl Listener for Scripted {
    fn address(&self) -> io::Result<String> {
        self.inner.address()
    }

    fn accept(&self) -> io::Result<Box<dyn Connection>> {
        let relaxed = Ordering::Relaxed;
        let left = self
            .failures
            .fetch_update(relaxed, relaxed, |n| n.checked_sub(1));
        if left.is_ok() {
            return Err(io::Error::other("too many open files"));
        }
        let connection = self.inner.accept()?;
        let peer = self.peers.lock().unwrap().pop();
        Ok(Box::new(From(connection, peer)))
    }
}

impl Connection for From {
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.receive(buffer)
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.set_timeout(timeout)
    }

    fn peer(&self) -> Option<IpAddr> {
        self.1.or_else(|| self.0.peer())
    }

    fn handle(&self) -> Option<Arc<dyn ConnectionHandle>> {
        self.0.handle()
    }
}

fn serve_scripted(failures: usize, hosts: &[u8], options: ServerOptions) -> (Arc<Server>, String) {
    let peers = hosts
        .iter()
        .rev()
        .map(|&host| IpAddr::from([10, 0, 0, host]));
    let listener = Scripted {
        inner: SystemNetwork.listen("127.0.0.1:0").unwrap(),
        failures: AtomicUsize::new(failures),
        peers: Mutex::new(peers.collect()),
    };
    let address = listener.address().unwrap();
    let server = Server::new(vec![device("reference", &[])], options);
    let serving = Arc::clone(&server);
    std::thread::spawn(move || serving.serve(&listener));
    (server, address)
}

fn the_server_survives_accept_errors(protocol: &'static Protocol) {
    let mut environment = Environment::system();
    environment.clock = Arc::new(Sleepless);
    let options = ServerOptions {
        environment,
        ..options(protocol)
    };
    let (_server, address) = serve_scripted(1000, &[], options);
    let mut raw = Raw::connect(&address);
    assert_eq!(raw.ask(&Request::DeviceCount).len(), 4);
}

fn silent_clients_do_not_block_other_clients(protocol: &'static Protocol) {
    // No timeout ends them.
    let (server, address) = serve(ServerOptions {
        clients: 3,
        greeting: LONG,
        ..options(protocol)
    });
    let mut silent: Vec<_> = (0..9).map(|_| Raw::silent(&address)).collect();
    let mut clients: Vec<_> = (0..3).map(|_| Raw::connect(&address)).collect();
    for raw in &mut silent {
        raw.is_closed("a silent client");
    }
    // Clients that have greeted stay connected, although all come from the same address.
    let mut fourth = Raw::silent(&address);
    fourth.tell(&Request::Hello);
    fourth.is_closed("a fourth client");
    for client in &mut clients {
        assert_eq!(client.ask(&Request::DeviceCount).len(), 4);
    }
    assert_eq!(server.clients(), 3);
}

fn a_greeting_has_a_time_limit(protocol: &'static Protocol) {
    let (server, address) = serve(ServerOptions {
        greeting: SHORT,
        ..options(protocol)
    });
    let mut silent = Raw::silent(&address);
    silent.is_closed("no greeting");
    let mut slow = Raw::silent(&address);
    let mut script = Script::new(protocol);
    script.request(&Request::Hello);
    script.0.truncate(4);
    slow.send(&script);
    slow.is_closed("half a greeting");
    wait(|| server.clients() == 0);
}

fn an_address_with_many_idle_clients_loses_one_to_another_address(protocol: &'static Protocol) {
    let (_server, address) = serve_scripted(
        0,
        &[1, 1, 1, 2, 1, 3],
        ServerOptions {
            clients: 4,
            ..options(protocol)
        },
    );
    let mut all: Vec<_> = (0..4).map(|_| Raw::connect(&address)).collect();
    assert_eq!(all[0].allocate(16), 1);
    let mut same = Raw::silent(&address);
    same.tell(&Request::Hello);
    same.is_closed("one more of the address with the most");
    let other = Raw::connect(&address);
    all[1].is_closed("the oldest one that did nothing");
    all.remove(1);
    all.push(other);
    for raw in &mut all {
        assert_eq!(raw.ask(&Request::DeviceCount).len(), 4);
    }
}

fn an_unread_reply_closes_the_connection(protocol: &'static Protocol) {
    const SIZE: u64 = 64 << 20;
    let (server, address) = serve(ServerOptions {
        patience: SHORT,
        ..options(protocol)
    });
    let mut raw = Raw::connect(&address);
    assert_eq!(raw.allocate(SIZE), 1);
    raw.tell(&Request::GetTensor {
        tensor: f32s(SIZE as usize / 4, 0),
        offset: 0,
        size: SIZE,
    });
    wait(|| server.clients() == 0 && server.memory_in_use() == 0);
    let mut rest = Vec::new();
    let _ = raw.0.read_to_end(&mut rest);
    assert!((rest.len() as u64) < SIZE);
}
