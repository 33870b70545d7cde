//! Differences between the protocols: operation numbers, commands, pieces of tensors, cached
//! graphs, and the client that speaks both.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

#[macro_use]
mod common;

use common::*;
use samite_core::environment::{Connection, Listener, Network, SystemNetwork};
use samite_core::{
    Backend, CancelToken, DType, Device, Environment, Graph, Layout, PlacedGraph, Prepared, Rows,
    RunControl, Stream, TensorGroup, Usage,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_rpc::{ClientOptions, End, RpcBackend, Server, ServerOptions};
use samite_wire::numbers::op;
use samite_wire::rpc::frame::{Command, HEADER};
use samite_wire::rpc::graph::{GraphMessage, LAST};
use samite_wire::rpc::message::{Request, TensorPieces};
use samite_wire::rpc::record::Record;
use samite_wire::rpc::version::{Protocol, V7, V8};
use std::sync::{Arc, Mutex};
use std::time::Duration;

test_with_each_protocol! {
    a_client_sends_rows_and_graphs
    false_versions_of_commands_are_refused
}

fn pieces(offset: u64, len: u64, count: u64, stride: u64) -> TensorPieces {
    TensorPieces {
        offset,
        len,
        count,
        stride,
    }
}

fn recompute(device: u32, uid: u64) -> Request {
    Request::GraphRecompute { device, uid }
}

/// Appends `y = x * x` of four numbers: x at 0, y at `to`.
fn square(script: &mut Script, device: u32, uid: u64, to: u64) {
    let tensors = [
        of_graph(7, op::NONE, &[], f32s(4, 0)),
        of_graph(9, op::SQR, &[7], f32s(4, to)),
    ];
    script.graph_of(device, uid, &[9], &tensors);
}

/// GLU is operation 100 of ggml 0.25 and 101 of 0.27, which has another operation 100.
#[test]
fn operations_have_the_numbers_of_the_protocol() {
    for (protocol, number) in [(&V7, 100), (&V8, 101)] {
        let (_server, address) = serve(options(protocol));
        for sent in [100, 101] {
            let mut raw = Raw::connect(&address);
            assert_eq!(raw.allocate(256), 1);
            let mut script = raw.script();
            script.write(f32s(4, 0), 0, &bytes(&[1.0, 2.0, 3.0, 4.0]));
            let tensors = [
                of_graph(7, op::NONE, &[], f32s(4, 0)),
                of_graph(9, sent, &[7], f32s(2, 64)),
            ];
            let payload = GraphMessage::write(protocol, 0, LAST, &[9], &tensors);
            script.frame(Command::GraphCompute, payload.len() as u64, &payload);
            raw.send(&script);
            if sent == number {
                assert_eq!(values(&raw.read(f32s(2, 64), 0, 8)), [3.0, 8.0]);
            } else {
                raw.is_closed("an operation of another protocol");
            }
        }
    }
}

/// A command that the protocol lacks, or with the length of another protocol.
fn false_versions_of_commands_are_refused(protocol: &'static Protocol) {
    let other = if *protocol == V7 { &V8 } else { &V7 };
    let (server, address) = serve(ServerOptions {
        patience: Duration::from_millis(300),
        ..options(protocol)
    });
    for &command in Command::ALL {
        let (least, most) = command.payload(other);
        let is_same = command.payload(protocol) == (least, most);
        let is_known = (command as u8) < protocol.commands;
        // Zeros are a graph of either protocol.
        let is_either = [Command::Hello, Command::GraphCompute].contains(&command);
        if is_either || (is_same && is_known) {
            continue;
        }
        let mut raw = Raw::connect(&address);
        assert_eq!(raw.allocate(256), 1);
        let mut script = raw.script();
        square(&mut script, 0, LAST, 64);
        script.frame(command, least, &vec![0; least as usize]);
        raw.send(&script);
        raw.is_closed("a command of another protocol");
    }
    wait(|| server.clients() == 0 && server.memory_in_use() == 0);
}

#[test]
fn pieces_are_written_and_read() {
    let (server, address) = serve(options(&V8));
    let mut raw = Raw::connect(&address);
    assert_eq!(raw.allocate(4096), 1);
    let all = f32s(1024, 0);
    let tensor = f32s(16, 256);
    let mut script = raw.script();
    script.write_pieces(tensor, pieces(4, 8, 3, 20), &(1..=24).collect::<Vec<u8>>());
    raw.send(&script);
    let mut wanted = [0; 4096];
    for (row, column) in (0..3).flat_map(|row| (0..8).map(move |column| (row, column))) {
        wanted[256 + 4 + 20 * row + column] = (1 + 8 * row + column) as u8;
    }
    assert_eq!(raw.read(all, 0, 4096), wanted);
    let get = |pieces| Request::GetTensor2d { tensor, pieces };
    let row = |first: u8| (first..first + 8).collect::<Vec<u8>>();
    assert_eq!(
        raw.ask(&get(pieces(4, 8, 3, 20))),
        [row(1), row(9), row(17)].concat()
    );
    assert_eq!(
        raw.ask(&get(pieces(24, 8, 2, 20))),
        [row(9), row(17)].concat()
    );
    assert_eq!(raw.ask(&get(pieces(5, 3, 1, u64::MAX))), [2, 3, 4]);
    // Messages that arrive byte by byte, and in pieces that begin and end within a row.
    for size in [1, 7, 13] {
        let mut session = server.begin().unwrap();
        let mut script = Script::new(&V8);
        script.request(&Request::Hello);
        script.request(&Request::AllocBuffer {
            device: 0,
            size: 4096,
        });
        script.write_pieces(tensor, pieces(4, 8, 3, 20), &(1..=24).collect::<Vec<u8>>());
        script.request(&Request::GetTensor {
            tensor: all,
            offset: 0,
            size: 4096,
        });
        let mut replies = Vec::new();
        for piece in script.0.chunks(size) {
            session
                .take(piece, &mut |reply| {
                    replies.extend(reply);
                    Ok(())
                })
                .unwrap();
        }
        assert!(replies.ends_with(&wanted), "{size}");
    }
}

/// Rows of more than a megabyte, and many rows of less, are transferred in several steps.
#[test]
fn long_pieces_are_written_and_read() {
    let (_server, address) = serve(options(&V8));
    let mut raw = Raw::connect(&address);
    let size = 8 << 20;
    assert_eq!(raw.allocate(size), 1);
    let tensor = f32s(size as usize / 4, 0);
    for (len, count, stride) in [
        (3 << 20, 2, 4 << 20),
        (700_001, 5, 900_001),
        (3, 500_000, 5),
    ] {
        let data: Vec<u8> = (0..len * count).map(|i| (i % 251) as u8).collect();
        let mut script = raw.script();
        script.request(&Request::BufferClear {
            buffer: 1,
            value: 255,
        });
        let pieces = pieces(9, len, count, stride);
        script.write_pieces(tensor, pieces, &data);
        raw.send(&script);
        assert!(
            raw.ask(&Request::GetTensor2d { tensor, pieces }) == data,
            "{len}"
        );
        let all = raw.read(tensor, 0, size);
        let mut wanted = vec![255; size as usize];
        for (row, data) in data.chunks(len as usize).enumerate() {
            let start = 9 + row * stride as usize;
            wanted[start..start + data.len()].copy_from_slice(data);
        }
        assert!(all == wanted, "{len}");
    }
}

#[test]
fn pieces_outside_of_a_tensor_are_refused() {
    let (server, address) = serve(ServerOptions {
        patience: Duration::from_millis(300),
        ..options(&V8)
    });
    let mut other = Raw::connect(&address);
    assert_eq!(other.allocate(256), 1);
    let max = u64::MAX;
    let attacks = [
        pieces(0, 4, 5, 16),
        pieces(1, 16, 4, 16),
        pieces(64, 1, 1, 1),
        pieces(65, 1, 1, 1),
        pieces(0, 65, 1, 65),
        pieces(max, 4, 2, 16),
        pieces(max - 3, 4, 1, 4),
        pieces(0, max, 1, 0),
        pieces(0, 1, max, 1),
        pieces(0, 1, 2, max),
        pieces(0, 2, (1 << 63) + 1, 2),
        pieces(0, 1 << 32, 1 << 32, 1 << 32),
        pieces(4, 4, 1 << 62, 4),
        // None, and some that repeat a few bytes without end.
        pieces(0, 0, 4, 4),
        pieces(0, 4, 0, 4),
        pieces(0, 4, 1 << 50, 0),
        pieces(0, 4, 2, 3),
    ];
    for pieces in attacks {
        let len = pieces.len.wrapping_mul(pieces.count).min(1 << 16);
        for is_write in [false, true] {
            let mut raw = Raw::connect(&address);
            assert_eq!(raw.allocate(256), 1);
            let tensor = f32s(16, 64);
            let mut script = raw.script();
            if is_write {
                script.write_pieces(tensor, pieces, &vec![1; len as usize]);
            } else {
                script.request(&Request::GetTensor2d { tensor, pieces });
            }
            raw.send(&script);
            raw.is_closed(&format!("{pieces:?}"));
        }
    }
    // More or less data than the pieces have.
    for len in [0, 15, 17, 32] {
        let mut session = server.begin().unwrap();
        let mut script = Script::new(&V8);
        script.request(&Request::Hello);
        script.request(&Request::AllocBuffer {
            device: 0,
            size: 256,
        });
        script.write_pieces(f32s(16, 64), pieces(0, 4, 4, 8), &vec![1; len]);
        match session.take(&script.0, &mut |_| Ok(())) {
            Err(End::Refused(reason)) => assert!(reason.contains(&format!("{len} bytes for"))),
            other => panic!("{len}: {other:?}"),
        }
    }
    assert_eq!(other.read(f32s(64, 0), 0, 256), [0; 256]);
    wait(|| server.clients() == 1 && server.memory_in_use() == 256);
}

#[test]
fn graphs_are_cached_by_uid() {
    let lent = vec![device("a", &[]), device("b", &[])];
    let (_server, address) = serve_devices(lent, options(&V8));
    // Two graphs that write to different places, on the first device, and one on the second.
    let begin = |raw: &mut Raw| {
        assert_eq!((raw.allocate(256), raw.allocate(64)), (1, 2));
        let mut script = raw.script();
        script.write(f32s(4, 0), 0, &bytes(&[2.0; 4]));
        square(&mut script, 0, 5, 64);
        square(&mut script, 0, 6, 80);
        square(&mut script, 1, 5, 96);
        script.write(f32s(4, 0), 0, &bytes(&[3.0; 4]));
        raw.send(&script);
    };
    let found = |raw: &mut Raw| [64, 80, 96].map(|at| values(&raw.read(f32s(1, at), 0, 4))[0]);
    let mut raw = Raw::connect(&address);
    begin(&mut raw);
    assert_eq!(found(&mut raw), [4.0, 4.0, 4.0]);
    raw.tell(&recompute(0, 5));
    assert_eq!(found(&mut raw), [9.0, 4.0, 4.0]);
    raw.tell(&recompute(0, 6));
    assert_eq!(found(&mut raw), [9.0, 9.0, 4.0]);
    raw.tell(&recompute(1, 5));
    assert_eq!(found(&mut raw), [9.0, 9.0, 9.0]);
    // A graph replaces another one with its uid.
    let mut script = raw.script();
    square(&mut script, 0, 5, 112);
    script.write(f32s(4, 0), 0, &bytes(&[4.0; 4]));
    script.request(&Request::FreeBuffer { buffer: 2 });
    script.request(&recompute(0, 5));
    raw.send(&script);
    assert_eq!(found(&mut raw), [9.0, 9.0, 9.0]);
    assert_eq!(values(&raw.read(f32s(1, 112), 0, 4)), [16.0]);
    // Graphs that are not cached.
    for refused in [
        recompute(1, 6),
        recompute(0, 7),
        recompute(0, 0),
        recompute(2, 5),
    ] {
        let mut raw = Raw::connect(&address);
        begin(&mut raw);
        let mut script = raw.script();
        square(&mut script, 0, 0, 64);
        script.request(&refused);
        raw.send(&script);
        raw.is_closed("a graph that is not cached");
    }
    raw.tell(&Request::FreeBuffer { buffer: 1 });
    raw.tell(&recompute(0, 6));
    raw.is_closed("a graph whose memory is gone");
}

/// The cache is cleared when upstream's clients clear their lists, although some of its graphs were
/// dropped with their memory.
#[test]
fn the_1025th_graph_clears_the_cache() {
    let (_server, address) = serve(options(&V8));
    let last = |is_freed: bool| {
        let mut raw = Raw::connect(&address);
        assert_eq!(raw.allocate(256), 1);
        let mut script = raw.script();
        if is_freed {
            (1..=100).for_each(|uid| square(&mut script, 0, uid, 64));
            script.request(&Request::FreeBuffer { buffer: 1 });
            script.request(&Request::AllocBuffer {
                device: 0,
                size: 256,
            });
            raw.send(&script);
            assert_eq!(raw.reply()[..8], 2u64.to_le_bytes());
        }
        let mut script = raw.script();
        let second = |record: Record| Record {
            buffer: if is_freed { 2 } else { 1 },
            ..record
        };
        let first = if is_freed { 101 } else { 1 };
        for uid in first..=1024 {
            let tensors = [
                of_graph(7, op::NONE, &[], second(f32s(4, 0))),
                of_graph(9, op::SQR, &[7], second(f32s(4, 64))),
            ];
            script.graph_of(0, uid, &[9], &tensors);
        }
        // A graph without a uid is not cached.
        script.graph_of(0, 0, &[], &[]);
        script.request(&recompute(0, 512));
        script.request(&Request::DeviceCount);
        raw.send(&script);
        assert_eq!(raw.reply(), 1u32.to_le_bytes());
        let mut script = raw.script();
        let tensors = [
            of_graph(7, op::NONE, &[], second(f32s(4, 0))),
            of_graph(9, op::SQR, &[7], second(f32s(4, 64))),
        ];
        script.graph_of(0, 1025, &[9], &tensors);
        script.request(&recompute(0, 1025));
        script.request(&Request::DeviceCount);
        raw.send(&script);
        assert_eq!(raw.reply(), 1u32.to_le_bytes());
        raw
    };
    for is_freed in [false, true] {
        let mut raw = last(is_freed);
        raw.tell(&recompute(0, 512));
        raw.is_closed("a graph of the cleared cache");
    }
}

/// A graph that needs the memory of cached graphs gets it.
#[test]
fn cached_graphs_make_room_for_a_new_one() {
    let lent: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions {
        name: "lent".into(),
        asynchronous: true,
        without_ops: vec!["sqr".into()],
        ..ReferenceOptions::default()
    });
    // Each graph copies two tensors to the fallback.
    let (server, address) = serve_devices(
        vec![lent],
        ServerOptions {
            fallbacks: vec![device("fallback", &[])],
            memory_per_client: Some(20_000),
            ..options(&V8)
        },
    );
    let mut raw = Raw::connect(&address);
    assert_eq!(raw.allocate(8192), 1);
    let copied = |script: &mut Script, uid| {
        let tensors = [
            of_graph(7, op::NONE, &[], f32s(512, 0)),
            of_graph(9, op::SQR, &[7], f32s(512, 4096)),
        ];
        script.graph_of(0, uid, &[9], &tensors);
    };
    let mut script = raw.script();
    script.write(f32s(512, 0), 0, &bytes(&[3.0; 512]));
    (1..=9).for_each(|uid| copied(&mut script, uid));
    script.request(&recompute(0, 9));
    raw.send(&script);
    assert_eq!(values(&raw.read(f32s(512, 4096), 0, 2048)), [9.0; 512]);
    assert!(server.memory_in_use() <= 20_000);
    raw.tell(&recompute(0, 1));
    raw.is_closed("a graph that made room");
    wait(|| server.memory_in_use() == 0);
}

/// Devices of samite's server cannot be connected with those of another server.
#[test]
fn devices_are_not_connected_with_other_servers() {
    let (_server, address) = serve(options(&V8));
    let init = |device, rank, world| Request::CommInit {
        device,
        rank,
        world,
        port: 51052,
        host: [b'a'; 64],
    };
    let mut raw = Raw::connect(&address);
    for (device, rank, world) in [(0, 0, 2), (0, 1, 2), (7, 0, 2), (0, 5, 9)] {
        assert_eq!(raw.ask(&init(device, rank, world)), [0]);
    }
    raw.tell(&Request::CommFree { device: 0 });
    assert_eq!(raw.ask(&Request::DeviceCount), 1u32.to_le_bytes());
    assert_eq!(raw.allocate(256), 1);
    let tensor = f32s(4, 0);
    raw.tell(&Request::CommAllReduce { device: 0, tensor });
    raw.is_closed("a sum without another server");
    let mut raw = Raw::connect(&address);
    raw.tell(&Request::CommFree { device: 1 });
    raw.is_closed("a device that is not there");
}

/// A network that records what is sent.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Vec<u8>>>);

#[derive(Debug)]
struct Recorded(Box<dyn Connection>, Recorder);

impl Network for Recorder {
    fn connect(&self, address: &str, timeout: Duration) -> std::io::Result<Box<dyn Connection>> {
        let connection = SystemNetwork.connect(address, timeout)?;
        Ok(Box::new(Recorded(connection, self.clone())))
    }

    fn listen(&self, address: &str) -> std::io::Result<Box<dyn Listener>> {
        SystemNetwork.listen(address)
    }
}

impl Connection for Recorded {
    fn send(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let len = self.0.send(bytes)?;
        self.1.0.lock().unwrap().extend(&bytes[..len]);
        Ok(len)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.receive(buffer)
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> std::io::Result<()> {
        self.0.set_timeout(timeout)
    }
}

impl Recorder {
    /// Returns the commands since the last call.
    fn commands(&self) -> Vec<Command> {
        let bytes = std::mem::take(&mut *self.0.lock().unwrap());
        let (mut commands, mut rest) = (Vec::new(), &bytes[..]);
        while let Some((header, payload)) = rest.split_first_chunk::<HEADER>() {
            commands.push(Command::from_number(header[0]).unwrap());
            let len = u64::from_le_bytes(header[1..].try_into().unwrap());
            rest = &payload[len as usize..];
        }
        commands
    }
}

/// Prepares `y = x * x`.
fn prepare(stream: &mut dyn Stream, group: &TensorGroup) -> Box<dyn Prepared> {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [1000, 5, 1, 1]).unwrap();
    let y = graph.sqr(x).unwrap();
    let places: Vec<_> = group
        .tensors
        .iter()
        .map(|t| Some(t.tensor().clone()))
        .collect();
    let work = PlacedGraph {
        graph: &graph,
        nodes: &[y],
        places: &places,
        workspace: None,
        compiled: None,
    };
    stream.prepare(work).unwrap()
}

fn a_client_sends_rows_and_graphs(protocol: &'static Protocol) {
    let (_server, address): (Arc<Server>, String) = serve(options(protocol));
    let recorder = Recorder::default();
    let client = ClientOptions {
        environment: Environment {
            network: Arc::new(recorder.clone()),
            ..Environment::system()
        },
        ..ClientOptions::default()
    };
    let backend = RpcBackend::connect(&[&address], &client);
    assert_eq!(backend.rejected(), []);
    let device = Arc::clone(&backend.devices()[0]);
    let layout = Layout::contiguous(DType::F32, [1000, 5, 1, 1]).unwrap();
    let allocate = || {
        let tensors = [("x", layout), ("y", layout)];
        TensorGroup::allocate(&device.buffer_type(), Usage::Any, &tensors).unwrap()
    };
    let group = allocate();
    let (x, y) = (group.tensors[0].tensor(), group.tensors[1].tensor());
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    // The middle of each row, from rows with 4 bytes between them.
    let rows = Rows {
        offset: 400,
        len: 800,
        count: 5,
        stride: 4000,
        host_stride: 804,
    };
    let data: Vec<u8> = (0..804 * 5).map(|i| (i % 253) as u8).collect();
    recorder.commands();
    stream.write_rows(x, rows, &data).unwrap();
    let mut all = vec![0; 20_000];
    stream.read(x, 0, &mut all).unwrap();
    let is_new = *protocol == V8;
    let wanted = if is_new {
        vec![Command::SetTensor2d, Command::GetTensor]
    } else {
        [vec![Command::SetTensor; 5], vec![Command::GetTensor]].concat()
    };
    assert_eq!(recorder.commands(), wanted);
    for row in 0..5 {
        let there = &all[4000 * row..][..4000];
        assert_eq!(there[400..1200], data[804 * row..][..800]);
        assert!(
            there[..400]
                .iter()
                .chain(&there[1200..])
                .all(|&byte| byte == 0)
        );
    }
    let mut again = vec![7; 804 * 5];
    stream.read_rows(x, rows, &mut again).unwrap();
    let count = if is_new { 1 } else { 5 };
    let command = if is_new {
        Command::GetTensor2d
    } else {
        Command::GetTensor
    };
    assert_eq!(recorder.commands(), vec![command; count]);
    for (again, data) in again.chunks(804).zip(data.chunks(804)) {
        assert_eq!(again[..800], data[..800]);
        assert_eq!(again[800..], [7; 4], "not written");
    }
    // Rows that overlap, and a single one, are ordinary reads.
    for (count, stride) in [(2, 4), (1, 4000)] {
        let rows = Rows {
            count,
            stride,
            ..rows
        };
        stream.read_rows(x, rows, &mut again).unwrap();
        assert_eq!(recorder.commands(), vec![Command::GetTensor; count]);
    }
    // Two graphs take turns.
    let other = allocate();
    let mut graphs = [prepare(&mut *stream, &group), prepare(&mut *stream, &other)];
    stream.write(x, 0, &bytes(&[3.0; 5000])).unwrap();
    recorder.commands();
    let cancel = CancelToken::new();
    let control = RunControl {
        cancel: &cancel,
        observer: None,
    };
    let mut run = |number: usize| stream.run(&mut *graphs[number], control).unwrap();
    [0, 1, 1, 0].into_iter().for_each(&mut run);
    let (new, known) = (Command::GraphCompute, Command::GraphRecompute);
    let wanted = [new, new, known, if is_new { known } else { new }];
    assert_eq!(recorder.commands(), wanted);
    // Upstream's server drops all graphs when memory is freed.
    drop(allocate());
    recorder.commands();
    [0, 0].into_iter().for_each(&mut run);
    assert_eq!(recorder.commands(), [new, known]);
    let mut out = [0; 4];
    y.read(4996 * 4, &mut out).unwrap();
    assert_eq!(values(&out), [9.0]);
}
