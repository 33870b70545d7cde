//! Known attacks that crashed or leaked data from servers of this protocol, one test per kind, with
//! the original reports. Each must cost the attacker the connection or its request; another client
//! must not be affected.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

#[macro_use]
mod common;

use common::*;
use samite_core::DType;
use samite_rpc::{End, Server, ServerOptions};
use samite_wire::numbers::op;
use samite_wire::rpc::frame::Command;
use samite_wire::rpc::message::Request;
use samite_wire::rpc::record::Record;
use samite_wire::rpc::version::Protocol;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Buffer size in bytes of the attacker and of the other client.
const SIZE: u64 = 4096;

/// A server with another client's connection.
struct Target {
    server: Arc<Server>,
    address: String,
    other: Raw,
}

impl Target {
    fn with(options: ServerOptions) -> Self {
        let (server, address) = serve(ServerOptions {
            memory: Some(1 << 20),
            patience: Duration::from_millis(300),
            ..options
        });
        let mut other = Raw::connect(&address);
        assert_eq!(other.allocate(SIZE), 1);
        other.tell(&Request::BufferClear {
            buffer: 1,
            value: 0x5a,
        });
        Target {
            server,
            address,
            other,
        }
    }

    fn attacker(&self) -> Raw {
        let mut raw = Raw::connect(&self.address);
        assert_eq!(raw.allocate(SIZE), 1);
        raw
    }

    /// Checks that the attack closes its connection.
    fn costs(&mut self, what: &str, attack: impl FnOnce(&mut Script)) {
        let mut raw = self.attacker();
        let mut script = raw.script();
        attack(&mut script);
        raw.send(&script);
        raw.is_closed(what);
        self.is_well(what);
    }

    /// Checks that the other client's memory is unchanged and that it can compute.
    fn is_well(&mut self, what: &str) {
        let all = f32s(SIZE as usize / 4, 0);
        assert_eq!(
            self.other.read(all, 0, SIZE),
            [0x5a; SIZE as usize],
            "{what}"
        );
        let mut script = self.other.script();
        let tensors = [
            of_graph(7, op::NONE, &[], f32s(4, 0)),
            of_graph(9, op::SQR, &[7], f32s(4, 64)),
        ];
        script.graph(&[9], &tensors);
        self.other.send(&script);
        let x = f32::from_ne_bytes([0x5a; 4]);
        let found = values(&self.other.read(f32s(4, 64), 0, 16));
        assert_eq!(found, [x * x; 4], "{what}");
        self.other.tell(&Request::MemsetTensor {
            tensor: f32s(4, 64),
            offset: 0,
            size: 16,
            value: 0x5a,
        });
        // The attacker's memory is freed.
        let start = Instant::now();
        while self.server.memory_in_use() != SIZE as usize || self.server.clients() != 1 {
            assert!(start.elapsed() < LONG, "{what}: memory is not given back");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

test_with_each_protocol! {
    invalid_types_and_addresses
    tensors_without_a_buffer_reach_no_memory
    copies_into_smaller_tensors_are_refused
    rows_with_partial_blocks
    sizes_that_overflow
    tensors_with_excessive_repetition
    a_graph_rerun_after_its_memory_is_freed
    operations_with_function_pointers
    operations_with_mismatched_shapes_and_parameters
    out_of_range_row_indices
    unknown_nodes_sources_and_operations
    duplicate_nodes
    a_chain_of_200_000_sources
    absurd_message_lengths
    accesses_beyond_a_tensor
    hashed_data_is_not_shared_between_clients
    slow_clients_and_floods
}

fn leaf(id: u64, record: Record) -> Record {
    of_graph(id, op::NONE, &[], record)
}

fn get(tensor: Record) -> Request {
    Request::GetTensor {
        tensor,
        offset: 0,
        size: 4,
    }
}

/// CVE-2024-42477, CVE-2024-42478, CVE-2024-42479.
fn invalid_types_and_addresses(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    for dtype in [4, 5, 36, 200, u32::MAX] {
        let record = Record {
            dtype,
            ..f32s(4, 0)
        };
        target.costs("a type", |s| {
            s.request(&get(record));
        });
        target.costs("a type", |s| {
            s.write(record, 0, &[1; 4]);
        });
    }
    for data in [
        0,
        1,
        0x7fff_0000_0000,
        BASE - 4,
        BASE + SIZE,
        BASE + SIZE - 8,
        u64::MAX - 3,
    ] {
        let record = Record { data, ..f32s(4, 0) };
        target.costs("an address to read from", |s| {
            s.request(&get(record));
        });
        target.costs("an address to write to", |s| {
            s.write(record, 0, &[1; 16]);
        });
        target.costs("an address to compute with", |s| {
            let square = of_graph(9, op::SQR, &[7], f32s(4, 64));
            s.graph(&[9], &[leaf(7, record), square]);
        });
    }
}

/// CVE-2026-34159, llama.cpp #20908.
fn tensors_without_a_buffer_reach_no_memory(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    for data in [0, BASE, 0x7fff_0000_0000] {
        let record = Record {
            buffer: 0,
            data,
            ..f32s(4, 0)
        };
        target.costs("no buffer", |s| {
            s.request(&get(record));
        });
        target.costs("no buffer", |s| {
            s.write(record, 0, &[1; 4]);
        });
        target.costs("a leaf without a place", |s| {
            let square = of_graph(9, op::SQR, &[7], f32s(4, 64));
            s.graph(&[9], &[leaf(7, record), square]);
        });
        target.costs("a result without a place", |s| {
            let square = of_graph(9, op::SQR, &[7], record);
            s.graph(&[9], &[leaf(7, f32s(4, 0)), square]);
        });
    }
}

/// ggml #1103.
fn copies_into_smaller_tensors_are_refused(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    let from = f32s(64, 0);
    for to in [f32s(4, 64), tensor(DType::F16, [64, 1, 1, 1], 512)] {
        let mut raw = target.attacker();
        raw.tell(&Request::BufferClear {
            buffer: 1,
            value: 3,
        });
        raw.tell(&Request::MemsetTensor {
            tensor: from,
            offset: 0,
            size: 256,
            value: 4,
        });
        assert_eq!(raw.ask(&Request::CopyTensor { from, to }), [0]);
        let rest = f32s(1024 - 64, 256);
        assert_eq!(raw.read(rest, 0, SIZE - 256), [3; SIZE as usize - 256]);
        drop(raw);
        target.is_well("a copy");
    }
    let to = f32s(64, SIZE - 64);
    target.costs("a copy over the end", |s| {
        s.request(&Request::CopyTensor { from, to });
    });
}

/// llama.cpp #25288.
fn rows_with_partial_blocks(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    for ne0 in [1, 31, 33] {
        let record = Record {
            dtype: DType::Q4_0.id(),
            ne: [ne0, 1, 1, 1],
            ..f32s(4, 0)
        };
        target.costs("half a block", |s| {
            s.request(&Request::InitTensor { tensor: record });
        });
        target.costs("half a block", |s| {
            s.request(&get(record));
        });
        target.costs("half a block", |s| {
            s.graph(
                &[9],
                &[leaf(7, record), of_graph(9, op::SQR, &[7], f32s(4, 64))],
            );
        });
    }
}

/// CVE-2026-33298 is of this kind; llama.cpp #26912 for the strides of extents of 1.
fn sizes_that_overflow(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    for (ne, nb) in [
        ([u32::MAX, (1 << 30) + 1, 1, 1], [u32::MAX, 12, 12, 12]),
        ([u32::MAX; 4], [4; 4]),
        ([1 << 31, 1 << 31, 4, 1], [4, 4, 4, 4]),
        ([4, 2, 1, 1], [4, u32::MAX, 16, 16]),
        ([4, 1, 2, 1], [4, 16, 1 << 31, 16]),
    ] {
        let record = Record {
            ne,
            nb,
            ..f32s(4, 0)
        };
        target.costs("a size", |s| {
            s.request(&get(record));
        });
        target.costs("a size", |s| {
            s.write(record, 0, &[1; 4]);
        });
        target.costs("a size", |s| {
            s.graph(
                &[9],
                &[leaf(7, record), of_graph(9, op::SQR, &[7], f32s(4, 64))],
            );
        });
    }
}

/// A graph of 700 bytes that would run for years: strides of 0 repeat a few bytes.
fn tensors_with_excessive_repetition(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    let repeated = |ne, nb| Record {
        ne,
        nb,
        ..f32s(4, 0)
    };
    for record in [
        repeated([1 << 25, 1 << 25, 1, 1], [0; 4]),
        repeated([4, 1 << 20, 1 << 20, 1 << 10], [4, 0, 0, 0]),
        repeated([1 << 25, 1 << 4, 1, 1], [0; 4]),
        // Empty, but with many rows.
        repeated([0, 1 << 25, 1 << 25, 1], [4; 4]),
        repeated([1 << 25, 1 << 25, 0, 1], [0; 4]),
    ] {
        target.costs("elements to compute with", |s| {
            let sum = of_graph(9, op::SUM, &[7], f32s(1, 64));
            s.graph(&[9], &[leaf(7, record), sum]);
        });
        target.costs("a view", |s| {
            let mut view = of_graph(8, op::VIEW, &[7], record);
            view.view_src = 7;
            let sum = of_graph(9, op::SUM, &[8], f32s(1, 64));
            s.graph(&[8, 9], &[leaf(7, f32s(4, 0)), view, sum]);
        });
    }
    let many = repeated([1 << 25, 1 << 25, 1, 1], [0; 4]);
    target.costs("elements to copy", |s| {
        s.request(&Request::CopyTensor {
            from: many,
            to: many,
        });
    });
    // The error names the tensor.
    let mut script = Script::new(protocol);
    script.request(&Request::Hello);
    script.request(&Request::AllocBuffer {
        device: 0,
        size: SIZE,
    });
    let mut named = leaf(7, many);
    named.set_name("endless");
    let sum = of_graph(9, op::SUM, &[7], f32s(1, 64));
    script.graph(&[9], &[named, sum]);
    let mut session = target.server.begin().unwrap();
    match session.take(&script.0, &mut |_| Ok(())) {
        Err(End::Refused(reason)) => assert!(
            reason.contains("'endless'") && reason.contains("repeats its memory"),
            "{reason}"
        ),
        other => panic!("{other:?}"),
    }
    drop(session);
    // Overlapping views are allowed, and so is one row for every row of another tensor.
    let mut raw = target.attacker();
    let mut script = Script::new(protocol);
    script.write(f32s(8, 0), 0, &bytes(&[1.0; 8]));
    for (record, at) in [
        (repeated([4, 5, 1, 1], [4, 4, 20, 20]), 64),
        (repeated([8, 1000, 1, 1], [4, 0, 0, 0]), 68),
    ] {
        let sum = of_graph(9, op::SUM, &[7], f32s(1, at));
        script.graph(&[9], &[leaf(7, record), sum]);
    }
    raw.send(&script);
    assert_eq!(values(&raw.read(f32s(2, 64), 0, 8)), [20.0, 8000.0]);
    drop(raw);
    target.is_well("repeated memory");
}

/// GHSA-2phh-px2f-2qmx.
fn a_graph_rerun_after_its_memory_is_freed(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    let mut raw = target.attacker();
    let mut script = Script::new(protocol);
    let square = of_graph(9, op::SQR, &[7], f32s(4, 64));
    script.graph(&[9], &[leaf(7, f32s(4, 0)), square]);
    raw.send(&script);
    raw.tell(&Request::FreeBuffer { buffer: 1 });
    // Possibly at the same address as the first one.
    assert_eq!(raw.allocate(SIZE), 2);
    raw.tell(&RECOMPUTE);
    raw.is_closed("memory that is gone");
    target.is_well("memory that is gone");
}

/// llama.cpp #25289: operations with function pointers.
fn operations_with_function_pointers(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    for number in [
        op::MAP_CUSTOM1,
        op::MAP_CUSTOM2,
        op::MAP_CUSTOM3,
        op::CUSTOM,
    ] {
        target.costs("a function", |s| {
            let mut node = of_graph(9, number, &[7], f32s(4, 64));
            node.op_params = [0x4141_4141; 16];
            s.graph(&[9], &[leaf(7, f32s(4, 0)), node]);
        });
    }
}

/// llama.cpp #25764, #25704, #26825, #26912, #25542.
fn operations_with_mismatched_shapes_and_parameters(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    let matrix = |rows, at| tensor(DType::F32, [4, rows, 1, 1], at);
    let numbers = |n, at| tensor(DType::I32, [n, 1, 1, 1], at);
    // SET and ACC, which have their own strides and offset. None of these strides are valid here.
    for number in [33, 5] {
        for params in [
            [u32::MAX; 5],
            [16, 16, 16, 1 << 30, 0],
            [1 << 31, 1 << 31, 16, 0, 0],
        ] {
            target.costs("strides", |s| {
                let mut node = of_graph(9, number, &[7, 8], f32s(4, 128));
                for (word, value) in node.op_params.iter_mut().zip(params) {
                    *word = value as i32;
                }
                s.graph(&[9], &[leaf(7, f32s(4, 0)), leaf(8, f32s(4, 64)), node]);
            });
        }
    }
    // More rows than indices, other widths, indices of another type.
    for (table, ids, result) in [
        (matrix(2, 0), numbers(1, 256), matrix(3, 512)),
        (matrix(2, 0), numbers(1, 256), f32s(5, 512)),
        (matrix(2, 0), f32s(1, 256), f32s(4, 512)),
    ] {
        target.costs("rows", |s| {
            let node = of_graph(9, op::GET_ROWS, &[7, 8], result);
            s.graph(&[9], &[leaf(7, table), leaf(8, ids), node]);
        });
        target.costs("rows", |s| {
            let node = of_graph(9, op::SET_ROWS, &[7, 8, 6], result);
            s.graph(&[9], &[leaf(6, result), leaf(7, table), leaf(8, ids), node]);
        });
    }
    // A state with other numbers of heads and snapshots than its operands.
    for snapshots in [0, -1, 7, i32::MAX] {
        target.costs("snapshots", |s| {
            let mut node = of_graph(9, op::GATED_DELTA_NET, &[1, 2, 3, 4, 5, 6], f32s(64, 1024));
            node.op_params[0] = snapshots;
            let sources = [1, 2, 3, 4, 5, 6].map(|id| leaf(id, f32s(4, 64 * id)));
            s.graph(&[9], &[&sources[..], &[node]].concat());
        });
    }
}

/// llama.cpp #25765.
fn out_of_range_row_indices(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    let table = tensor(DType::F32, [4, 2, 1, 1], 0);
    for number in [2i32, 1_000_000, -1, i32::MIN] {
        let ids = tensor(DType::I32, [1, 1, 1, 1], 256);
        target.costs("a row to read", |s| {
            s.write(ids, 0, &number.to_le_bytes());
            let node = of_graph(9, op::GET_ROWS, &[7, 8], f32s(4, 512));
            s.graph(&[9], &[leaf(7, table), leaf(8, ids), node]);
            s.request(&get(f32s(4, 512)));
        });
        let ids = tensor(DType::I64, [1, 1, 1, 1], 256);
        target.costs("a row to write", |s| {
            s.write(ids, 0, &i64::from(number).to_le_bytes());
            let node = of_graph(9, op::SET_ROWS, &[7, 8, 6], table);
            s.graph(
                &[9],
                &[leaf(6, table), leaf(7, f32s(4, 512)), leaf(8, ids), node],
            );
            s.request(&get(table));
        });
    }
}

/// Crashes upstream's server.
fn unknown_nodes_sources_and_operations(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    let square = of_graph(9, op::SQR, &[7], f32s(4, 64));
    target.costs("node 0", |s| {
        s.graph(&[0], &[leaf(7, f32s(4, 0))]);
    });
    target.costs("no such node", |s| {
        s.graph(&[8], &[leaf(7, f32s(4, 0))]);
    });
    target.costs("no such source", |s| {
        s.graph(&[9], &[square]);
    });
    for number in [op::COUNT, op::COUNT + 1, 1 << 20, u32::MAX] {
        target.costs("no such operation", |s| {
            let node = of_graph(9, number, &[7], f32s(4, 64));
            s.graph(&[9], &[leaf(7, f32s(4, 0)), node]);
        });
    }
}

/// Makes upstream's server write before the start of its use counts.
fn duplicate_nodes(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    let tensors = [leaf(7, f32s(4, 0)), of_graph(9, op::SQR, &[7], f32s(4, 64))];
    target.costs("twice to run", |s| {
        s.graph(&[9, 9], &tensors);
    });
    let twice = [tensors[0], tensors[1], tensors[1]];
    target.costs("twice in the list", |s| {
        s.graph(&[9], &twice);
    });
}

/// Overflows the stack of upstream's server.
fn a_chain_of_200_000_sources(protocol: &'static Protocol) {
    let mut target = Target::with(ServerOptions {
        tensors: 1 << 18,
        ..options(protocol)
    });
    target.costs("a circle of many", |s| {
        let mut tensors: Vec<_> = (2..=1000)
            .map(|id| of_graph(id, op::SQR, &[id - 1], f32s(4, 0)))
            .collect();
        tensors.push(of_graph(1, op::SQR, &[1000], f32s(4, 0)));
        s.graph(&[1000], &tensors);
    });
    // A chain is valid: it is either computed, or exceeds the client's limits.
    let mut raw = target.attacker();
    let mut tensors = vec![leaf(1, f32s(4, 0))];
    tensors.extend((2..=200_000).map(|id| of_graph(id, op::VIEW, &[id - 1], f32s(4, 0))));
    raw.send(Script::new(protocol).graph(&[200_000], &tensors));
    raw.is_closed("a chain that is more than the quota");
    target.is_well("a long chain");
}

/// Ends upstream's server with an exception.
fn absurd_message_lengths(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    for &command in Command::ALL {
        for len in [1 << 63, u64::MAX, (1 << 26) + (1 << 20)] {
            target.costs("a length", |s| {
                s.frame(command, len, &[0; 305]);
            });
        }
    }
}

/// Writes, reads and views beyond a tensor: upstream's server aborts.
fn accesses_beyond_a_tensor(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    for (offset, size) in [(0u64, 17u64), (13, 4), (u64::MAX, 2), (1 << 63, 1 << 63)] {
        let tensor = f32s(4, 0);
        target.costs("a read", |s| {
            s.request(&Request::GetTensor {
                tensor,
                offset,
                size,
            });
        });
        target.costs("a fill", |s| {
            s.request(&Request::MemsetTensor {
                tensor,
                offset,
                size,
                value: 1,
            });
        });
        target.costs("a write", |s| {
            s.write(tensor, offset, &vec![1; size.min(64) as usize]);
        });
    }
    let view = |shape, offset: u64| {
        let mut view = of_graph(9, op::VIEW, &[7], f32s(shape, 0));
        view.data = BASE.wrapping_add(offset);
        (view.view_src, view.view_offs) = (7, offset);
        view.op_params[0] = offset as i32;
        view.op_params[1] = (offset >> 32) as i32;
        let square = of_graph(10, op::SQR, &[9], f32s(shape.min(4), 1024));
        [leaf(7, f32s(4, 0)), view, square]
    };
    for (shape, offset) in [
        (1025, 0),
        (4, SIZE - 8),
        (4, SIZE),
        (4, u64::MAX - 3),
        (4, 1 << 40),
    ] {
        target.costs("a view", |s| {
            s.graph(&[9, 10], &view(shape, offset));
        });
    }
    // The client may read within its own buffer.
    let mut raw = target.attacker();
    raw.send(Script::new(protocol).graph(&[9, 10], &view(4, 64)));
    assert_eq!(raw.read(f32s(4, 1024), 0, 16), [0; 16]);
    drop(raw);
    target.is_well("a view within");
}

/// Upstream caches one client's data under a 64-bit hash for all others.
fn hashed_data_is_not_shared_between_clients(protocol: &'static Protocol) {
    let mut target = Target::with(options(protocol));
    let mut raw = target.attacker();
    let mut script = Script::new(protocol);
    let mut payload = Request::SetTensor {
        tensor: f32s(4, 0),
        cache: true,
        offset: 0,
    }
    .payload(protocol);
    payload.extend([7; 16]);
    script.frame(Command::SetTensor, payload.len() as u64, &payload);
    raw.send(&script);
    assert_eq!(raw.read(f32s(4, 0), 0, 16), [7; 16]);
    // FNV-1a of these bytes, which upstream's clients send.
    let hash = [7u8; 16]
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
    for client in [&mut raw, &mut target.other] {
        let ask = Request::SetTensorHash {
            tensor: f32s(4, 64),
            offset: 0,
            hash,
        };
        assert_eq!(client.ask(&ask), [0]);
    }
    drop(raw);
    target.is_well("a hash");
}

/// The protocol has no authentication; llama.cpp #13061.
fn slow_clients_and_floods(protocol: &'static Protocol) {
    let mut target = Target::with(ServerOptions {
        memory_per_client: Some(64 << 10),
        buffers: 8,
        clients: 12,
        ..options(protocol)
    });
    // Half a message, then single bytes.
    let mut slow: Vec<_> = (0..4).map(|_| target.attacker()).collect();
    for raw in &mut slow {
        raw.0.write_all(&[Command::DeviceCount as u8, 0]).unwrap();
    }
    for raw in &mut slow {
        raw.is_closed("half a message");
    }
    target.is_well("slow clients");
    // Memory and buffers up to the quota, but no more.
    let mut raw = target.attacker();
    let taken = (0..100).filter(|_| raw.allocate(1024) != 0).count();
    assert_eq!(taken, 7);
    assert_eq!(raw.allocate(u64::MAX), 0);
    drop(raw);
    target.is_well("a flood of buffers");
    // More connections than allowed: existing ones continue.
    let flood: Vec<_> = (0..40).map(|_| Raw::silent(&target.address)).collect();
    assert_eq!(target.other.ask(&Request::DeviceCount), 1u32.to_le_bytes());
    drop(flood);
    target.is_well("a flood of connections");
}
