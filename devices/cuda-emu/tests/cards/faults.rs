//! Drivers that fail, and work that fails: errors, and the state afterwards.

use super::work::{control, outputs, placed, places};
use super::{TestCard, card, with_driver};
use samite_core::{CancelToken, DType, Error, Graph, Result, Stream, TensorGroup, Usage};
use samite_cuda::driver::DriverErrorKind;
use samite_cuda_emu::EmulatedDriver;
use std::sync::Arc;

fn computed(card: &TestCard, seed: u64) -> Result<Vec<Vec<f32>>> {
    Ok(outputs(&[Arc::clone(&card.device)], seed, (1, 3))?.unwrap())
}

/// Driver calls of dropping a scheduler.
const DROPPING: u64 = 6;

/// Every driver call fails once: those that open the card, on a new one each, and those that
/// compute.
#[test]
fn every_call_may_fail() {
    let opened = card(0);
    let seed = 3;
    let expected = computed(&opened, seed).unwrap();
    let opening = opened.card.calls();
    assert_eq!(computed(&opened, seed).unwrap(), expected);
    let computing = opened.card.calls() - opening;
    assert!(opening > 20 && computing > 20, "{opening}, {computing}");
    let fails = |card: &TestCard, call: u64, last: u64| {
        card.card.fail_call(call, DriverErrorKind::Other);
        let outcome = computed(card, seed);
        card.card.fail_call(0, DriverErrorKind::Other);
        match outcome {
            Err(Error::Device { device, message }) => {
                let names = &*device == "cuda-emu0" && message.contains("injected fault");
                assert!(names, "call {call}: {device}: {message}");
            }
            Err(error) => panic!("call {call}: {error:?}"),
            // Without the amount of free memory, the scheduler tries. Without a graph, launches
            // are queued. Waits while everything is dropped cannot report.
            Ok(found) => {
                let name = card.card.failed_call().unwrap();
                let is_optional = ["cuMemGetInfo", "cuGraphInstantiateWithFlags"].contains(&&*name);
                let is_quiet = is_optional || call + DROPPING > last;
                assert!(is_quiet, "call {call} of {last}, {name}: no error");
                assert_eq!(found, expected);
            }
        }
        // The device continues as if nothing had happened.
        assert_eq!(computed(card, seed).unwrap(), expected, "call {call}");
    };
    for call in 1..=computing {
        fails(&opened, call, computing);
    }
    for call in 1..=opening - computing {
        let new = card(0);
        new.card.fail_call(call, DriverErrorKind::Other);
        let error = computed(&new, seed).unwrap_err();
        assert!(error.to_string().contains("injected fault"), "{error}");
    }
}

/// After a fault of a kernel, every call fails with the fault's message.
#[test]
fn every_call_on_a_lost_device_reports_the_loss() {
    let lost = card(0);
    let expected = computed(&lost, 3).unwrap();
    for call in [1, 5, 20] {
        let card = card(0);
        assert_eq!(computed(&card, 3).unwrap(), expected);
        let mut stream = Arc::clone(&card.device).open_stream().unwrap();
        let group = TensorGroup::allocate(
            &card.device.buffer_type(),
            Usage::Any,
            &[(
                "",
                samite_core::Layout::contiguous(DType::F32, [4, 1, 1, 1]).unwrap(),
            )],
        );
        let tensor = group.unwrap().tensors[0].tensor().clone();
        card.card.fail_call(call, DriverErrorKind::Lost);
        let is_lost = |result: Result<()>| {
            assert!(
                matches!(result, Err(Error::DeviceLost { .. })),
                "{result:?}"
            );
        };
        is_lost(computed(&card, 3).map(drop));
        is_lost(computed(&card, 3).map(drop));
        is_lost(stream.synchronize());
        is_lost(stream.write(&tensor, 0, &[0; 4]));
        is_lost(tensor.read(0, &mut [0; 4]));
        is_lost(Arc::clone(&card.device).open_stream().map(drop));
        is_lost(card.device.create_event().map(drop));
    }
}

#[test]
fn too_little_memory_is_an_error() {
    let card = with_driver(EmulatedDriver::new(1 << 20), 0);
    let memory = card.device.buffer_type();
    let error = memory.allocate(1 << 21, Usage::Any).unwrap_err();
    assert!(
        matches!(error, Error::OutOfMemory { asked, free: Some(free), .. }
            if asked == 1 << 21 && free <= 1 << 20),
        "{error:?}"
    );
    memory.allocate(1 << 10, Usage::Any).unwrap();
}

/// An invalid row number in work that another stream prepared is reported by the stream that ran
/// it.
#[test]
fn errors_are_reported_by_the_stream_that_ran_the_work() {
    let card = card(1);
    let device = &card.device;
    let mut graph = Graph::new();
    let table = graph.leaf("table", DType::F32, [4, 3, 1, 1]).unwrap();
    let numbers = graph.input("numbers", DType::I32, [2, 1, 1, 1]).unwrap();
    let rows = graph.get_rows(table, numbers).unwrap();
    graph.set_name(rows, "looked up");
    let places = places(device, &graph);
    let open = || -> Box<dyn Stream> { Arc::clone(device).open_stream().unwrap() };
    let (mut first, mut second) = (open(), open());
    let nodes = [rows];
    let mut prepared = first.prepare(placed(&graph, &nodes, &places)).unwrap();
    let numbers = places[numbers.index()].as_ref().unwrap();
    numbers.write(0, bytemuck::cast_slice(&[1i32, 3])).unwrap();
    let cancel = CancelToken::new();
    // As launches, then as a graph.
    for _ in 0..3 {
        second.run(&mut *prepared, control(&cancel)).unwrap();
        let error = second.synchronize().unwrap_err().to_string();
        assert!(error.contains("'looked up'"), "{error}");
        // It was reported once.
        second.synchronize().unwrap();
        first.synchronize().unwrap();
    }
}

#[test]
fn many_plan_changes_take_no_more_memory() {
    let card = card(0);
    let device = &card.device;
    let mut stream = Arc::clone(device).open_stream().unwrap();
    let cancel = CancelToken::new();
    let mut change = |number: usize| {
        let mut graph = Graph::new();
        let n = 1 + number % 50;
        let x = graph.input("x", DType::F32, [64, n, 1, 1]).unwrap();
        let y = graph.rms_norm(x, 1e-5).unwrap();
        let nodes = [y];
        let places = places(device, &graph);
        let mut prepared = stream.prepare(placed(&graph, &nodes, &places)).unwrap();
        for _ in 0..3 {
            stream.run(&mut *prepared, control(&cancel)).unwrap();
        }
        stream.synchronize().unwrap();
    };
    change(0);
    let allocated = card.card.allocated();
    (0..2000).for_each(&mut change);
    assert_eq!(card.card.allocated(), allocated);
}

/// A wait for good work must not hide the failure of work that was queued after it.
#[test]
fn failures_behind_an_event_are_reported() {
    let card = card(0);
    let device = &card.device;
    let mut graph = Graph::new();
    let table = graph.leaf("table", DType::F32, [4, 3, 1, 1]).unwrap();
    let numbers = graph.input("numbers", DType::I32, [2, 1, 1, 1]).unwrap();
    let rows = graph.get_rows(table, numbers).unwrap();
    let places = places(device, &graph);
    let mut stream = Arc::clone(device).open_stream().unwrap();
    let nodes = [rows];
    let mut prepared = stream.prepare(placed(&graph, &nodes, &places)).unwrap();
    let numbers = places[numbers.index()].as_ref().unwrap();
    let cancel = CancelToken::new();
    let event = device.create_event().unwrap();
    for _ in 0..3 {
        stream
            .write(numbers, 0, bytemuck::cast_slice(&[1i32, 2]))
            .unwrap();
        stream.run(&mut *prepared, control(&cancel)).unwrap();
        stream.record(&*event).unwrap();
        stream
            .write(numbers, 0, bytemuck::cast_slice(&[1i32, 3]))
            .unwrap();
        stream.run(&mut *prepared, control(&cancel)).unwrap();
        event.synchronize().unwrap();
        let error = stream.synchronize().unwrap_err().to_string();
        assert!(error.contains("out of range"), "{error}");
        stream.synchronize().unwrap();
    }
}

/// A product with packed weights and no columns writes nothing.
#[test]
fn packed_products_without_columns_touch_nothing() {
    let card = card(0);
    let device = &card.device;
    let mut graph = Graph::new();
    let w = graph.leaf("w", DType::Q4_0, [64, 32, 1, 1]).unwrap();
    let x = graph.input("x", DType::F32, [64, 0, 1, 1]).unwrap();
    let y = graph.mul_mat(w, x).unwrap();
    let mut places = places(device, &graph);
    let packed = &device.extra_buffer_types()[0];
    let wanted = [("w", graph.tensor(w).layout)];
    let group = TensorGroup::allocate(packed, Usage::Weights, &wanted).unwrap();
    places[w.index()] = Some(group.tensors[0].tensor().clone());
    let mut stream = Arc::clone(device).open_stream().unwrap();
    let nodes = [y];
    let mut prepared = stream.prepare(placed(&graph, &nodes, &places)).unwrap();
    let launched = card.card.instructions();
    let cancel = CancelToken::new();
    stream.run(&mut *prepared, control(&cancel)).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(card.card.instructions(), launched);
}
