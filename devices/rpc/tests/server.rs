//! The server: permitted requests, and violations, which only cost the client's own connection.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

#[macro_use]
mod common;

use common::*;
use samite_core::DType;
use samite_rpc::{Server, ServerOptions};
use samite_wire::numbers::{flag, op};
use samite_wire::rpc::frame::Command;
use samite_wire::rpc::graph::LAST;
use samite_wire::rpc::message::{ASKS_SUPPORT, Request, TensorPieces};
use samite_wire::rpc::record::Record;
use samite_wire::rpc::version::Protocol;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(300);

test_with_each_protocol! {
    a_client_computes
    sizes_and_support_can_be_queried_before_allocation
    graphs_that_only_ggml_builds_are_computed
    graphs_are_cached_until_their_memory_is_freed
    attacks_cost_only_the_attackers_connection
    client_memory_is_isolated
    memory_buffers_and_clients_are_limited
    partial_messages_time_out
    commands_before_the_greeting_are_refused
    long_view_chains_terminate
    any_operation_is_computed_or_refused
    mutated_sessions_end_without_harm
}

/// Appends `y = x * x` of four numbers: x at 0, y at 64.
fn square(script: &mut Script) {
    let tensors = [
        of_graph(7, op::NONE, &[], f32s(4, 0)),
        of_graph(9, op::SQR, &[7], f32s(4, 64)),
    ];
    script.graph(&[9], &tensors);
}

fn a_client_computes(protocol: &'static Protocol) {
    let (server, address) = serve(options(protocol));
    let mut raw = Raw::connect(&address);
    assert_eq!(raw.ask(&Request::DeviceCount), 1u32.to_le_bytes());
    assert!(
        raw.number(&Request::GetAlignment { device: 0 })
            .is_power_of_two()
    );
    assert!(raw.number(&Request::GetMaxSize { device: 0 }) > 1 << 30);
    assert_eq!(raw.ask(&Request::GetDeviceMemory { device: 0 }).len(), 16);
    assert_eq!(raw.allocate(256), 1);
    assert_eq!(raw.number(&Request::BufferGetBase { buffer: 1 }), BASE);
    assert_eq!(server.memory_in_use(), 256);
    let mut script = Script::new(protocol);
    script.write(f32s(4, 0), 4, &bytes(&[2.0, 3.0, 4.0]));
    square(&mut script);
    raw.send(&script);
    assert_eq!(values(&raw.read(f32s(4, 64), 0, 16)), [0.0, 4.0, 9.0, 16.0]);
    // The same graph with other numbers.
    let mut script = Script::new(protocol);
    script.write(f32s(4, 0), 0, &bytes(&[5.0]));
    script.request(&RECOMPUTE);
    raw.send(&script);
    assert_eq!(values(&raw.read(f32s(4, 64), 0, 8)), [25.0, 4.0]);
    let from = f32s(4, 64);
    let copy = |to| Request::CopyTensor { from, to };
    assert_eq!(raw.ask(&copy(f32s(4, 128))), [1]);
    assert_eq!(values(&raw.read(f32s(4, 128), 0, 4)), [25.0]);
    let fill = Request::MemsetTensor {
        tensor: f32s(4, 128),
        offset: 4,
        size: 4,
        value: 0x3f,
    };
    raw.tell(&fill);
    assert_eq!(raw.read(f32s(4, 128), 4, 5), [0x3f, 0x3f, 0x3f, 0x3f, 0]);
    raw.tell(&Request::BufferClear {
        buffer: 1,
        value: 1,
    });
    assert_eq!(raw.read(f32s(64, 0), 0, 256), [1; 256]);
    raw.tell(&Request::InitTensor { tensor: f32s(4, 0) });
    // The hash is unknown, and no data is cached.
    let hash = Request::SetTensorHash {
        tensor: f32s(4, 0),
        offset: 0,
        hash: 1,
    };
    assert_eq!(raw.ask(&hash), [0]);
    drop(raw);
    wait(|| server.clients() == 0 && server.memory_in_use() == 0);
}

fn sizes_and_support_can_be_queried_before_allocation(protocol: &'static Protocol) {
    let lent = vec![device("lent", &["sqr", "sum"])];
    let fallbacks = vec![
        device("first", &["sum", "sqrt"]),
        device("second", &["sum"]),
    ];
    let (_server, address) = serve_devices(
        lent,
        ServerOptions {
            fallbacks,
            ..options(protocol)
        },
    );
    let mut raw = Raw::connect(&address);
    let question = |device: u32, number: u32, ne0: u32| {
        let mut sources = Box::new([Record::NONE; 10]);
        let nowhere = |record| Record {
            buffer: 0,
            data: 0,
            ..record
        };
        sources[0] = of_graph(7, op::NONE, &[], nowhere(f32s(4, 0)));
        let mut tensor = of_graph(9, number, &[7], nowhere(f32s(4, 0)));
        tensor.ne[0] = ne0;
        Request::GetAllocSize {
            device,
            tensor,
            sources,
        }
    };
    assert_eq!(raw.number(&question(0, op::SQR, 4)), 16);
    assert_eq!(raw.number(&question(0, op::NONE, 4)), 16);
    assert_eq!(raw.number(&question(0, 75, 4)), 16, "an unknown operation");
    // If the device rejects an operation, the first other device that supports it computes it, on
    // the same memory.
    assert_eq!(raw.number(&question(ASKS_SUPPORT, op::SQR, 4)), 1);
    assert_eq!(raw.number(&question(ASKS_SUPPORT, op::SQRT, 4)), 1);
    assert_eq!(raw.number(&question(ASKS_SUPPORT, op::SUM, 1)), 0);
    assert_eq!(raw.number(&question(ASKS_SUPPORT, op::SQR, 5)), 0, "shapes");
    assert_eq!(raw.allocate(256), 1);
    let mut script = Script::new(protocol);
    script.write(f32s(4, 0), 0, &bytes(&[2.0; 4]));
    let tensors = [
        of_graph(7, op::NONE, &[], f32s(4, 0)),
        of_graph(8, op::SQRT, &[7], f32s(4, 64)),
        of_graph(9, op::SQR, &[8], f32s(4, 128)),
    ];
    raw.send(script.graph(&[8, 9], &tensors));
    let results = values(&raw.read(f32s(4, 128), 0, 16));
    assert!(
        results.iter().all(|y| (y - 2.0).abs() < 1e-6),
        "{results:?}"
    );
    let sum = [
        of_graph(7, op::NONE, &[], f32s(4, 0)),
        of_graph(9, op::SUM, &[7], f32s(1, 64)),
    ];
    raw.send(raw.script().graph(&[9], &sum));
    raw.is_closed("an operation that no device has");
}

/// Sends a node with parameters, whose sources have numbers from 7 on, and returns `n` results,
/// which are at 512.
fn node(
    raw: &mut Raw,
    number: u32,
    params: &[i32],
    sources: &[Record],
    result: Record,
    n: u64,
) -> Vec<f32> {
    let ids: Vec<u64> = (7..7 + sources.len() as u64).collect();
    let mut tensors: Vec<Record> = ids
        .iter()
        .zip(sources)
        .map(|(&id, &source)| of_graph(id, op::NONE, &[], source))
        .collect();
    let mut node = of_graph(100, number, &ids, result);
    node.op_params[..params.len()].copy_from_slice(params);
    tensors.push(node);
    raw.send(raw.script().graph(&[100], &tensors));
    values(&raw.read(f32s(n as usize, 512), 0, 4 * n))
}

/// Graphs that ggml's programs build but samite does not, with values computed by hand.
fn graphs_that_only_ggml_builds_are_computed(protocol: &'static Protocol) {
    let (_server, address) = serve(options(protocol));
    let mut raw = Raw::connect(&address);
    assert_eq!(raw.allocate(1024), 1);
    let numbers: Vec<f32> = (1..=10).map(|i| i as f32).collect();
    let mut script = Script::new(protocol);
    script.write(f32s(10, 0), 0, &bytes(&numbers));
    script.write(f32s(2, 64), 0, &[0, 0, 0, 0, 1, 0, 0, 0]); // row numbers 0 and 1
    raw.send(&script);
    let f32s_at = |shape, at| tensor(DType::F32, shape, at);
    // A gated unit over rows of 5 ignores the last element: relu(1, 2) * (3, 4), relu(6, 7) * (8,
    // 9).
    let rows = f32s_at([5, 2, 1, 1], 0);
    let pairs = node(
        &mut raw,
        op::GLU,
        &[0],
        &[rows],
        f32s_at([2, 2, 1, 1], 512),
        4,
    );
    assert_eq!(pairs, [3.0, 8.0, 48.0, 63.0]);
    // The gradient of a row lookup reads as many rows as there are indices.
    let ids = tensor(DType::I32, [2, 1, 1, 1], 64);
    let gradient = f32s_at([2, 5, 1, 1], 0);
    let result = f32s_at([2, 3, 1, 1], 512);
    let sums = node(
        &mut raw,
        op::GET_ROWS_BACK,
        &[],
        &[gradient, ids],
        result,
        6,
    );
    assert_eq!(sums, [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]);
    // One element that is added to all.
    let one = f32s(1, 8);
    let sums = node(&mut raw, op::ADD1, &[], &[f32s(3, 0), one], f32s(3, 512), 3);
    assert_eq!(sums, [4.0, 5.0, 6.0]);
    // Zero rows are written.
    let nothing = f32s_at([2, 0, 1, 1], 0);
    let no_ids = tensor(DType::I64, [0, 1, 1, 1], 64);
    let into = f32s_at([2, 3, 1, 1], 512);
    let mut written = into;
    written.view_src = 9;
    let kept = node(
        &mut raw,
        op::SET_ROWS,
        &[],
        &[nothing, no_ids, into],
        written,
        3,
    );
    assert_eq!(kept, [4.0, 5.0, 6.0]);
    // A convolution of (1, 2, 3, 4) with (1, 2), as patches.
    let kernel = f32s_at([2, 1, 1, 1], 0);
    let patches = node(
        &mut raw,
        op::IM2COL,
        &[1, 0, 0, 0, 1, 0, 0],
        &[kernel, f32s(4, 0)],
        f32s_at([2, 3, 1, 1], 512),
        6,
    );
    assert_eq!(patches, [1.0, 2.0, 2.0, 3.0, 3.0, 4.0]);
    // Rolling backward by one equals rolling forward by the rest.
    let moved = node(
        &mut raw,
        op::ROLL,
        &[-1, 0, 0, 0],
        &[f32s(4, 0)],
        f32s(4, 512),
        4,
    );
    assert_eq!(moved, [2.0, 3.0, 4.0, 1.0]);
    // Source 1 replaces elements 1 and 2.
    let part = f32s(2, 32);
    let set = node(
        &mut raw,
        op::SET,
        &[16, 16, 16, 4],
        &[f32s(4, 0), part],
        f32s(4, 512),
        4,
    );
    assert_eq!(set, [1.0, 9.0, 10.0, 4.0]);
}

fn graphs_are_cached_until_their_memory_is_freed(protocol: &'static Protocol) {
    let (server, address) = serve(options(protocol));
    let mut raw = Raw::connect(&address);
    assert_eq!((raw.allocate(256), raw.allocate(64)), (1, 2));
    let mut script = Script::new(protocol);
    square(&mut script);
    script.request(&Request::FreeBuffer { buffer: 2 });
    script.request(&RECOMPUTE);
    raw.send(&script);
    assert_eq!(raw.read(f32s(4, 64), 0, 4).len(), 4);
    raw.tell(&Request::FreeBuffer { buffer: 1 });
    assert_eq!(raw.number(&Request::GetAlignment { device: 0 }) % 2, 0);
    assert_eq!(server.memory_in_use(), 0);
    raw.tell(&RECOMPUTE);
    raw.is_closed("a graph whose memory is gone");
}

/// Appends requests that a client sends after it has allocated 4096 bytes.
type Attack = Box<dyn Fn(&mut Script)>;

/// Returns the attacks, each with its name.
fn attacks(protocol: &'static Protocol) -> Vec<(&'static str, Attack)> {
    let mut all: Vec<(&'static str, Attack)> = Vec::new();
    let mut add = |name, attack: Attack| all.push((name, attack));
    let everywhere = |record: Record| {
        let get = Request::GetTensor {
            tensor: record,
            offset: 0,
            size: 4,
        };
        let fill = Request::MemsetTensor {
            tensor: record,
            offset: 0,
            size: 4,
            value: 1,
        };
        let from = Request::CopyTensor {
            from: record,
            to: f32s(4, 0),
        };
        let to = Request::CopyTensor {
            from: f32s(4, 0),
            to: record,
        };
        [get, fill, from, to, Request::InitTensor { tensor: record }]
    };
    let mut place = |name: &'static str, record: Record| {
        for request in everywhere(record) {
            add(
                name,
                Box::new(move |script| {
                    script.request(&request);
                }),
            );
        }
        add(
            name,
            Box::new(move |s| {
                s.write(record, 0, &[1; 4]);
            }),
        );
        // As an operand, and as a result.
        add(
            name,
            Box::new(move |script| {
                let tensors = [
                    of_graph(7, op::NONE, &[], record),
                    of_graph(9, op::SQR, &[7], f32s(4, 64)),
                ];
                script.graph(&[9], &tensors);
            }),
        );
        add(
            name,
            Box::new(move |script| {
                let tensors = [
                    of_graph(7, op::NONE, &[], f32s(4, 0)),
                    of_graph(9, op::SQR, &[7], record),
                ];
                script.graph(&[9], &tensors);
            }),
        );
    };
    let with = |change: &dyn Fn(&mut Record)| {
        let mut record = f32s(4, 0);
        change(&mut record);
        record
    };
    place("a type that is none", with(&|r| r.dtype = 200));
    place("a type that is no more", with(&|r| r.dtype = 4));
    place("before the buffer", with(&|r| r.data = BASE - 4));
    place("behind the buffer", with(&|r| r.data = BASE + 4096));
    place("over the end", with(&|r| r.data = BASE + 4084));
    place("an address that overflows", with(&|r| r.data = u64::MAX));
    place("an address of the process", with(&|r| r.data = 0x7fff_0000));
    place("no buffer", with(&|r| r.buffer = 0));
    place("no address", with(&|r| r.data = 0));
    place("another's buffer", with(&|r| r.buffer = 2));
    place("larger than the buffer", with(&|r| r.ne[0] = 1025));
    place(
        "a stride behind the buffer",
        with(&|r| {
            r.ne[1] = 2;
            r.nb[1] = 4096;
        }),
    );
    place(
        "bytes that wrap around",
        with(&|r| {
            r.ne = [u32::MAX, (1 << 30) + 1, 1, 1];
            r.nb = [u32::MAX, 12, 12, 12];
        }),
    );
    place("elements that overflow", with(&|r| r.ne = [u32::MAX; 4]));
    place(
        "half a block",
        with(&|r| {
            r.dtype = DType::Q4_0.id();
            r.ne[0] = 31;
        }),
    );

    let mut graph = |name: &'static str, nodes: &'static [u64], tensors: Vec<Record>| {
        add(
            name,
            Box::new(move |script| {
                script.graph(nodes, &tensors);
            }),
        );
    };
    let leaf = |id, n| of_graph(id, op::NONE, &[], f32s(n, 0));
    graph("node 0", &[0], vec![leaf(7, 4)]);
    graph("a node that is not there", &[8], vec![leaf(7, 4)]);
    let square = of_graph(9, op::SQR, &[7], f32s(4, 64));
    graph("a node twice", &[9, 9], vec![leaf(7, 4), square]);
    graph("an operand that is not there", &[9], vec![square]);
    let circle = of_graph(7, op::SQR, &[9], f32s(4, 0));
    graph("a circle", &[9], vec![circle, square]);
    let add_one = of_graph(9, op::ADD, &[7], f32s(4, 64));
    graph("too few operands", &[9], vec![leaf(7, 4), add_one]);
    let larger = of_graph(9, op::SQR, &[7], f32s(8, 64));
    graph("a result of another shape", &[9], vec![leaf(7, 4), larger]);
    // ggml's operations with function pointers, and other unsupported ones.
    for number in [4, 93, 94, 95, 96, op::COUNT, u32::MAX] {
        let node = of_graph(9, number, &[7], f32s(4, 64));
        graph(
            "an operation that is not known",
            &[9],
            vec![leaf(7, 4), node],
        );
    }
    let mut unary = of_graph(9, op::UNARY, &[7], f32s(4, 64));
    unary.op_params[0] = 1000;
    graph("a function that is none", &[9], vec![leaf(7, 4), unary]);
    // Values that are validated when they are used.
    let ids = of_graph(6, op::NONE, &[], tensor(DType::I32, [1, 1, 1, 1], 256));
    let mut rows = of_graph(9, op::GET_ROWS, &[7, 6], f32s(4, 64));
    rows.flags |= flag::OUTPUT;
    let table = of_graph(7, op::NONE, &[], tensor(DType::F32, [4, 2, 1, 1], 0));
    add(
        "a row that is not there",
        Box::new(move |script| {
            let ids_tensor = tensor(DType::I32, [1, 1, 1, 1], 256);
            script.write(ids_tensor, 0, &1_000_000i32.to_le_bytes());
            script.graph(&[9], &[table, ids, rows]);
        }),
    );
    add(
        "a graph of device 1",
        Box::new(|script| {
            script.graph_of(1, LAST, &[], &[]);
        }),
    );
    for (nodes, tensors) in [(u32::MAX, 0), (0, u32::MAX), (1 << 18, 0)] {
        add(
            "a graph that is longer than its message",
            Box::new(move |script| {
                let (least, _) = Command::GraphCompute.payload(protocol);
                let mut payload = vec![0; least as usize - 8];
                payload.extend(nodes.to_le_bytes());
                payload.extend(tensors.to_le_bytes());
                script.frame(Command::GraphCompute, least, &payload);
            }),
        );
    }
    add(
        "nothing was computed",
        Box::new(|script| {
            script.request(&RECOMPUTE);
        }),
    );

    for (offset, size) in [
        (0, 17),
        (16, 1),
        (u64::MAX, 2),
        (2, u64::MAX),
        (1 << 63, 1 << 63),
    ] {
        let tensor = f32s(4, 0);
        let get = Request::GetTensor {
            tensor,
            offset,
            size,
        };
        let fill = Request::MemsetTensor {
            tensor,
            offset,
            size,
            value: 1,
        };
        for request in [get, fill] {
            add(
                "behind the tensor",
                Box::new(move |script| {
                    script.request(&request);
                }),
            );
        }
    }
    for (offset, len) in [(0, 17), (13, 4), (u64::MAX, 2)] {
        add(
            "a write behind the tensor",
            Box::new(move |script| {
                script.write(f32s(4, 0), offset, &vec![1; len]);
            }),
        );
    }

    let (buffer, device, size) = (2, 1, 16);
    let strangers = [
        Request::BufferGetBase { buffer },
        Request::FreeBuffer { buffer },
        Request::FreeBuffer { buffer: 0 },
        Request::BufferClear { buffer, value: 1 },
        Request::AllocBuffer { device, size },
        Request::GetAlignment { device },
        Request::GetMaxSize { device },
        Request::GetDeviceMemory { device },
        Request::GraphRecompute { device, uid: LAST },
        Request::GetAllocSize {
            device,
            tensor: f32s(4, 0),
            sources: Box::new([Record::NONE; 10]),
        },
        Request::Hello,
    ];
    for request in strangers {
        add(
            "what there is not",
            Box::new(move |script| {
                script.request(&request);
            }),
        );
    }
    add(
        "freed twice",
        Box::new(|script| {
            let free = Request::FreeBuffer { buffer: 1 };
            script.request(&free).request(&free);
        }),
    );
    for &command in Command::ALL {
        for len in [1 << 63, u64::MAX, 1 << 40, 1] {
            // A write streams into its target, so its length is validated once its head was read.
            let head = vec![0; 305];
            add(
                "a length that nobody sends",
                Box::new(move |script| {
                    script.frame(command, len, &head);
                }),
            );
        }
    }
    for number in [protocol.commands, 23, 0x1c, 255] {
        add(
            "a command that is none",
            Box::new(move |script| script.0.extend([number, 0, 0, 0, 0, 0, 0, 0, 0])),
        );
    }
    all
}

fn attacks_cost_only_the_attackers_connection(protocol: &'static Protocol) {
    let (server, address) = serve(ServerOptions {
        memory: Some(1 << 20),
        patience: SHORT,
        ..options(protocol)
    });
    let mut witness = Raw::connect(&address);
    assert_eq!(witness.allocate(4096), 1);
    witness.tell(&Request::BufferClear {
        buffer: 1,
        value: 0x55,
    });
    let all = attacks(protocol);
    assert!(all.len() > 200, "{}", all.len());
    for (name, attack) in all {
        let mut raw = Raw::connect(&address);
        assert_eq!(raw.allocate(4096), 1);
        let mut script = Script::new(protocol);
        attack(&mut script);
        raw.send(&script);
        raw.is_closed(name);
        wait(|| server.clients() == 1 && server.memory_in_use() == 4096);
        // The buffer with the same number is a different one.
        assert_eq!(witness.read(f32s(1024, 0), 0, 4096), [0x55; 4096], "{name}");
    }
}

fn client_memory_is_isolated(protocol: &'static Protocol) {
    let (_server, address) = serve(options(protocol));
    let (mut a, mut b) = (Raw::connect(&address), Raw::connect(&address));
    for (raw, value) in [(&mut a, 1), (&mut b, 2)] {
        assert_eq!(raw.allocate(64), 1);
        raw.tell(&Request::BufferClear { buffer: 1, value });
    }
    assert_eq!(a.read(f32s(16, 0), 0, 64), [1; 64]);
    assert_eq!(b.read(f32s(16, 0), 0, 64), [2; 64]);
    // Freed memory is zeroed before reuse.
    b.tell(&Request::FreeBuffer { buffer: 1 });
    assert_eq!(b.allocate(64), 2, "no number is given twice");
    let again = Record {
        buffer: 2,
        ..f32s(16, 0)
    };
    assert_eq!(b.read(again, 0, 64), [0; 64]);
    assert_eq!(a.read(f32s(16, 0), 0, 64), [1; 64]);
}

fn memory_buffers_and_clients_are_limited(protocol: &'static Protocol) {
    let (server, address) = serve(ServerOptions {
        memory: Some(3000),
        memory_per_client: Some(2000),
        clients: 2,
        buffers: 3,
        ..options(protocol)
    });
    let (mut a, mut b) = (Raw::connect(&address), Raw::connect(&address));
    assert_eq!(a.number(&Request::GetMaxSize { device: 0 }), 2000);
    assert_eq!(a.allocate(u64::MAX), 0);
    assert_eq!(a.allocate(2001), 0);
    assert_eq!(a.allocate(1900), 1);
    assert_eq!(a.allocate(101), 0);
    assert_eq!(b.allocate(1101), 0, "more than there is for all");
    assert_eq!(b.allocate(10), 1);
    assert_eq!(b.allocate(10), 2);
    assert_eq!(b.allocate(10), 3);
    assert_eq!(b.allocate(10), 0, "a fourth buffer");
    let mut third = Raw::silent(&address);
    third.tell(&Request::Hello);
    third.is_closed("a third client");
    // Graphs also use memory.
    let mut script = Script::new(protocol);
    let tensors = vec![of_graph(1, op::NONE, &[], f32s(1, 0)); 10];
    a.send(script.graph(&[], &tensors));
    a.is_closed("a graph that is more than this client may take");
    wait(|| server.clients() == 1);
    assert_eq!(Raw::connect(&address).allocate(1500), 1);
}

fn partial_messages_time_out(protocol: &'static Protocol) {
    let (server, address) = serve(ServerOptions {
        patience: SHORT,
        ..options(protocol)
    });
    let mut idle = Raw::connect(&address);
    let mut halves: Vec<_> = (0..3).map(|_| Raw::connect(&address)).collect();
    halves[0]
        .0
        .write_all(&[Command::DeviceCount as u8])
        .unwrap();
    let mut script = Script::new(protocol);
    script.frame(Command::GraphCompute, 32 << 20, &[0; 12]);
    halves[1].send(&script);
    // Byte by byte, each in time.
    for _ in 0..8 {
        let _ = halves[2].0.write_all(&[0]);
        std::thread::sleep(SHORT / 4);
    }
    for half in &mut halves {
        half.is_closed("half a message");
    }
    // The timeout does not apply between messages.
    assert_eq!(idle.ask(&Request::DeviceCount).len(), 4);
    assert_eq!(server.clients(), 1);
}

fn commands_before_the_greeting_are_refused(protocol: &'static Protocol) {
    let (_server, address) = serve(options(protocol));
    for &command in Command::ALL.iter().filter(|&&c| c != Command::Hello) {
        let mut raw = Raw::silent(&address);
        raw.send(raw.script().frame(command, 0, &[]));
        raw.is_closed("no greeting");
    }
}

fn long_view_chains_terminate(protocol: &'static Protocol) {
    let (_server, address) = serve(options(protocol));
    for number in [op::VIEW, op::RESHAPE, op::SQR] {
        let mut raw = Raw::connect(&address);
        raw.allocate(64);
        let link = |id: u64| of_graph(id, number, &[id - 1], f32s(4, 0));
        let mut tensors = vec![of_graph(1, op::NONE, &[], f32s(4, 0))];
        tensors.extend((2..=100_000).map(link));
        tensors.push(of_graph(100_001, op::SQR, &[100_000], f32s(4, 0)));
        raw.send(raw.script().graph(&[100_001], &tensors));
        assert_eq!(raw.read(f32s(4, 0), 0, 4), [0; 4]);
    }
}

/// No operation with any number of operands ends the server.
fn any_operation_is_computed_or_refused(protocol: &'static Protocol) {
    let server = Server::new(vec![device("reference", &[])], options(protocol));
    for number in 0..=op::COUNT {
        for operands in 0..=10 {
            for word in [0, 1, -1] {
                let mut script = Script::new(protocol);
                script.request(&Request::Hello);
                script.request(&Request::AllocBuffer {
                    device: 0,
                    size: 4096,
                });
                let sources: Vec<u64> = vec![7; operands];
                let mut node = of_graph(9, number, &sources, f32s(4, 64));
                node.op_params = [word; 16];
                script.graph(&[9], &[of_graph(7, op::NONE, &[], f32s(4, 0)), node]);
                play(&server, &script.0);
            }
        }
    }
}

/// Plays a client that sends all of this in pieces and receives nothing.
fn play(server: &Arc<Server>, requests: &[u8]) {
    let Some(mut session) = server.begin() else {
        panic!("there is no seat for one client");
    };
    for piece in requests.chunks(1000) {
        if session.take(piece, &mut |_| Ok(())).is_err() {
            break;
        }
    }
    drop(session);
    assert_eq!((server.clients(), server.memory_in_use()), (0, 0));
}

fn mutated_sessions_end_without_harm(protocol: &'static Protocol) {
    let mut script = Script::new(protocol);
    script.request(&Request::Hello);
    for device in [0, 1] {
        script.request(&Request::GetMaxSize { device: 0 });
        script.request(&Request::AllocBuffer { device, size: 4096 });
    }
    script.write(f32s(16, 0), 0, &bytes(&[2.0; 16]));
    square(&mut script);
    let weights = tensor(DType::F32, [4, 4, 1, 1], 0);
    let tensors = [
        of_graph(5, op::NONE, &[], weights),
        of_graph(6, op::NONE, &[], f32s(4, 64)),
        of_graph(7, op::MUL_MAT, &[5, 6], f32s(4, 128)),
        of_graph(8, op::RESHAPE, &[7], tensor(DType::F32, [2, 2, 1, 1], 128)),
        of_graph(9, op::SOFT_MAX, &[8], tensor(DType::F32, [2, 2, 1, 1], 192)),
    ];
    script.graph(&[7, 8, 9], &tensors);
    script.request(&RECOMPUTE);
    let (tensor, offset, size) = (f32s(4, 192), 0, 16);
    script.request(&Request::GetTensor {
        tensor,
        offset,
        size,
    });
    script.request(&Request::CopyTensor {
        from: tensor,
        to: f32s(4, 0),
    });
    script.request(&Request::MemsetTensor {
        tensor,
        offset,
        size,
        value: 3,
    });
    if protocol.has_uids() {
        let pieces = TensorPieces {
            offset: 0,
            len: 4,
            count: 2,
            stride: 8,
        };
        script.write_pieces(tensor, pieces, &[5; 8]);
        script.request(&Request::GetTensor2d { tensor, pieces });
        script.request(&Request::CommInit {
            device: 0,
            rank: 0,
            world: 2,
            port: 0,
            host: [0; 64],
        });
        script.request(&Request::CommFree { device: 0 });
        script.graph_of(1, 77, &[7, 8, 9], &tensors);
        script.request(&Request::GraphRecompute { device: 1, uid: 77 });
    }
    script.request(&Request::FreeBuffer { buffer: 1 });
    let options = ServerOptions {
        memory: Some(1 << 16),
        ..options(protocol)
    };
    let devices = vec![device("a", &[]), device("b", &["sqr"])];
    let server: Arc<Server> = Server::new(devices, options);
    play(&server, &script.0);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as usize % below
    };
    let strange = [0u64, 1, 0x7f, 0xff, 1 << 31, u64::MAX, BASE, 1 << 63];
    for _ in 0..5000 {
        let mut bytes = script.0.clone();
        for _ in 0..=random(4) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] ^= 1 << random(8),
                1 => bytes[at] = random(256) as u8,
                2 => {
                    let number = strange[random(strange.len())].to_le_bytes();
                    let len = [1, 4, 8][random(3)].min(bytes.len() - at);
                    bytes[at..at + len].copy_from_slice(&number[..len]);
                }
                _ => {
                    let len = random(400).min(bytes.len() - at);
                    let piece: Vec<u8> = bytes[at..at + len].to_vec();
                    match random(3) {
                        0 => drop(bytes.drain(at..at + len)),
                        1 => drop(bytes.splice(at..at, piece)),
                        _ => bytes.truncate(at + 1),
                    }
                }
            }
        }
        play(&server, &bytes);
    }
}
