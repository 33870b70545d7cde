//! Operations that a device rejects fall back to another device, even if it cannot use the memory
//! of the tensors.

#[macro_use]
mod common;

use common::*;
use samite_core::{DType, Device};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_rpc::{Server, ServerOptions};
use samite_wire::numbers::op;
use samite_wire::rpc::message::{ASKS_SUPPORT, Request};
use samite_wire::rpc::record::Record;
use samite_wire::rpc::version::Protocol;
use std::sync::Arc;

test_with_each_protocol! {
    tensors_are_copied_to_the_fallback_device_and_back
    the_first_capable_fallback_is_used
    fallback_memory_counts_towards_the_client_quota
}

/// Starts a server for a device with its own memory and a queue, which rejects some operations.
fn far(
    protocol: &'static Protocol,
    without: &[&str],
    memory: Option<usize>,
) -> (Arc<Server>, String) {
    let lent: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions {
        name: "lent".into(),
        asynchronous: true,
        without_ops: without.iter().map(|&op| op.into()).collect(),
        ..ReferenceOptions::default()
    });
    let options = ServerOptions {
        fallbacks: vec![device("first", &["sum"]), device("second", &[])],
        memory_per_client: memory,
        ..options(protocol)
    };
    serve_devices(vec![lent], options)
}

/// Builds a graph: the square roots `y` of four adjacent numbers `x`, and their squares, one after
/// the other. It then writes `y` to a row of the matrix at 512, and takes the square roots of the
/// matrix, which does not refer to the write.
fn graph(protocol: &'static Protocol) -> Script {
    let matrix = tensor(DType::F32, [4, 3, 1, 1], 512);
    let written = Record {
        view_src: 2,
        ..of_graph(10, op::SET_ROWS, &[8, 1, 2], matrix)
    };
    let tensors = [
        of_graph(7, op::NONE, &[], f32s(4, 0)),
        of_graph(1, op::NONE, &[], tensor(DType::I64, [1, 1, 1, 1], 64)),
        of_graph(2, op::NONE, &[], matrix),
        of_graph(8, op::SQRT, &[7], f32s(4, 16)),
        of_graph(9, op::SQR, &[8], f32s(4, 32)),
        written,
        of_graph(11, op::SQRT, &[2], tensor(DType::F32, [4, 3, 1, 1], 768)),
    ];
    let mut script = Script::new(protocol);
    script.graph(&[8, 9, 10, 11], &tensors);
    script
}

/// Reads the first 12 numbers, and those of the matrix.
fn all(raw: &mut Raw) -> (Vec<f32>, Vec<f32>) {
    let first = values(&raw.read(f32s(12, 0), 0, 48));
    (first, values(&raw.read(f32s(12, 512), 0, 48)))
}

fn tensors_are_copied_to_the_fallback_device_and_back(protocol: &'static Protocol) {
    for without in [
        vec!["sqrt", "set_rows"],
        vec!["sqr"],
        vec!["set_rows"],
        vec![],
    ] {
        let (_server, address) = far(protocol, &without, None);
        let mut raw = Raw::connect(&address);
        assert_eq!(raw.allocate(1024), 1);
        let mut script = Script::new(protocol);
        script.write(f32s(4, 0), 0, &bytes(&[1.0, 4.0, 9.0, 16.0]));
        script.write(f32s(2, 64), 0, &2u64.to_le_bytes());
        script.write(f32s(12, 512), 0, &bytes(&[7.0; 12]));
        raw.send(&script);
        raw.send(&graph(protocol));
        let (first, matrix) = all(&mut raw);
        assert_eq!(first[..4], [1.0, 4.0, 9.0, 16.0], "without {without:?}");
        assert_eq!(first[4..8], [1.0, 2.0, 3.0, 4.0], "without {without:?}");
        assert_eq!(first[8..], [1.0, 4.0, 9.0, 16.0], "without {without:?}");
        assert_eq!(matrix[..8], [7.0; 8], "without {without:?}");
        assert_eq!(matrix[8..], [1.0, 2.0, 3.0, 4.0], "without {without:?}");
        // The same graph with another number, row and matrix.
        let mut script = Script::new(protocol);
        script.write(f32s(4, 0), 8, &bytes(&[25.0]));
        script.write(f32s(2, 64), 0, &0u64.to_le_bytes());
        script.write(f32s(12, 512), 16, &bytes(&[6.0]));
        script.request(&RECOMPUTE);
        raw.send(&script);
        let (first, matrix) = all(&mut raw);
        assert_eq!(first[4..8], [1.0, 2.0, 5.0, 4.0], "without {without:?}");
        assert_eq!(first[8..], [1.0, 4.0, 25.0, 16.0], "without {without:?}");
        assert_eq!(matrix[..4], [1.0, 2.0, 5.0, 4.0], "without {without:?}");
        assert_eq!(matrix[4..8], [6.0, 7.0, 7.0, 7.0], "without {without:?}");
        let roots: Vec<f32> = matrix.iter().map(|x| x.sqrt()).collect();
        let found = values(&raw.read(f32s(12, 768), 0, 48));
        assert_eq!(found, roots, "without {without:?}");
    }
}

fn the_first_capable_fallback_is_used(protocol: &'static Protocol) {
    let (_server, address) = far(protocol, &["sum", "sqr"], None);
    let mut raw = Raw::connect(&address);
    let mut sources = Box::new([Record::NONE; 10]);
    sources[0] = of_graph(7, op::NONE, &[], f32s(4, 0));
    for (number, n) in [(op::SQR, 4), (op::SUM, 1)] {
        let question = Request::GetAllocSize {
            device: ASKS_SUPPORT,
            tensor: of_graph(9, number, &[7], f32s(n, 0)),
            sources: sources.clone(),
        };
        // A client that queries support has other devices, so the server reports only support
        // without copies.
        assert_eq!(raw.number(&question), 0);
    }
    assert_eq!(raw.allocate(256), 1);
    let mut script = Script::new(protocol);
    script.write(f32s(4, 0), 0, &bytes(&[1.0, 2.0, 3.0, 4.0]));
    let tensors = [
        of_graph(7, op::NONE, &[], f32s(4, 0)),
        of_graph(8, op::SQR, &[7], f32s(4, 0)), // in place
        of_graph(9, op::SUM, &[8], f32s(1, 128)),
    ];
    script.graph(&[8, 9], &tensors);
    raw.send(&script);
    assert_eq!(values(&raw.read(f32s(1, 128), 0, 4)), [30.0]);
    assert_eq!(values(&raw.read(f32s(4, 0), 0, 16)), [1.0, 4.0, 9.0, 16.0]);
}

/// Memory on the other device counts: here, half a MiB each for the operand and the result.
fn fallback_memory_counts_towards_the_client_quota(protocol: &'static Protocol) {
    let (mib, n) = (1 << 20, 1 << 17);
    for (memory, is_enough) in [(mib + (64 << 10), false), (3 * mib, true)] {
        let (_server, address) = far(protocol, &["sqrt"], Some(memory));
        let mut raw = Raw::connect(&address);
        assert_eq!(raw.allocate(mib as u64), 1);
        let result = f32s(n, mib as u64 / 2);
        let tensors = [
            of_graph(7, op::NONE, &[], f32s(n, 0)),
            of_graph(8, op::SQRT, &[7], result),
        ];
        raw.send(Script::new(protocol).write(f32s(n, 0), 0, &bytes(&[4.0])));
        raw.send(Script::new(protocol).graph(&[8], &tensors));
        if is_enough {
            assert_eq!(values(&raw.read(result, 0, 8)), [2.0, 0.0])
        } else {
            raw.is_closed("memory beyond the client's")
        }
    }
}
