//! Necessary waits happen: devices are held back at the moment when a missing wait would show.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{bytes, device, f32s, read};
use samite_core::{
    CancelToken, DType, Device, DeviceKind, Graph, HostMemory, Op, StoredTensor, TensorGroup,
    TensorId, TensorRef, Usage,
};
use samite_reference::{Latch, ReferenceDevice, ReferenceOptions};
use samite_sched::{Assignments, Options, Scheduler, Watch, order::Lane, order::Work, race_check};
use std::sync::Arc;
use std::time::Duration;

/// Opens `latch` after a short time in which code without the necessary wait goes wrong.
fn open_later(latch: &Arc<Latch>) -> std::thread::JoinHandle<()> {
    let latch = Arc::clone(latch);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        latch.open();
    })
}

/// Returns an asynchronous device that is held back by `latch`.
fn held_back(name: &str, latch: &Arc<Latch>) -> Arc<dyn Device> {
    device(name, |o| {
        (o.asynchronous, o.events, o.copies) = (true, true, true);
        o.import_host = true;
        o.latch = Some(Arc::clone(latch));
    })
}

fn host() -> Arc<dyn Device> {
    device("host", |o| {
        (o.kind, o.host_memory) = (DeviceKind::Cpu, true)
    })
}

#[test]
fn inputs_are_not_overwritten_while_a_run_may_read_them() {
    let latch = Latch::new();
    let a = held_back("a", &latch);
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let y = graph.scale(x, 2.0).unwrap();
    graph.set_output(y);
    // The device itself holds the input: nothing is copied before it may be written again.
    let mut scheduler = Scheduler::new(vec![a], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.write(x, 0, &bytes(&[1.0; 4])).unwrap();
    latch.close();
    scheduler.run(&CancelToken::new()).unwrap();
    let opener = open_later(&latch);
    scheduler.write(x, 0, &bytes(&[5.0; 4])).unwrap();
    assert_eq!(read(&mut scheduler, y, 4).unwrap(), [2.0; 4]);
    opener.join().unwrap();
}

/// Returns a graph of `sum += 2 x`, with the product on the host and the sum on a device.
fn accumulation(a: &Arc<dyn Device>) -> (Graph, TensorId, Arc<StoredTensor>) {
    let sum = TensorGroup::allocate(&a.buffer_type(), Usage::Any, &[("sum", f32s(&[4]))]).unwrap();
    let sum = Arc::clone(&sum.tensors[0]);
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let double = graph.scale(x, 2.0).unwrap();
    let old = graph.stored(&sum).unwrap();
    let new = graph.add(double, old).unwrap();
    graph.cpy(new, old).unwrap();
    (graph, x, sum)
}

#[test]
fn a_watched_run_waits_for_the_previous_run() {
    let latch = Latch::new();
    let a = held_back("a", &latch);
    let (graph, x, sum) = accumulation(&a);
    let mut assignments = Assignments::new();
    assignments.set(TensorId::from_index(1), 1);
    let mut scheduler = Scheduler::new(vec![a, host()], Options::default()).unwrap();
    scheduler
        .load_with(&graph, &assignments, &CancelToken::new())
        .unwrap();
    scheduler.write(x, 0, &bytes(&[1.0; 4])).unwrap();
    latch.close();
    scheduler.run(&CancelToken::new()).unwrap();
    let opener = open_later(&latch);
    scheduler.write(x, 0, &bytes(&[10.0; 4])).unwrap();
    scheduler
        .run_watched(&CancelToken::new(), |_| true, |_, _| Ok(Watch::Continue))
        .unwrap();
    let mut out = [0; 16];
    sum.tensor().read(0, &mut out).unwrap();
    assert_eq!(out[..], bytes(&[22.0; 4]));
    opener.join().unwrap();
}

/// Returns a graph that copies an input to one stored tensor, and then reads the other one on
/// device 1.
fn write_then_read(
    written: &Arc<StoredTensor>,
    read: &Arc<StoredTensor>,
) -> (Graph, Assignments, TensorId, TensorId) {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let target = graph.stored(written).unwrap();
    graph.cpy(x, target).unwrap();
    let source = graph.stored(read).unwrap();
    let y = graph.scale(source, 3.0).unwrap();
    graph.set_output(y);
    let mut assignments = Assignments::new();
    assignments.set(y, 1);
    (graph, assignments, x, y)
}

/// Returns two devices that imported the same host memory: one writes to it, then the other reads
/// it.
fn writer_and_reader(latch: &Arc<Latch>) -> (Scheduler, TensorId, TensorId) {
    let open = Latch::new();
    let (a, b) = (held_back("a", latch), held_back("b", &open));
    let memory = HostMemory::allocate(64, "host", "shared").unwrap();
    let [written, read] = [&a, &b].map(|device| {
        let buffer = device.import_host(Arc::clone(&memory), Usage::Any).unwrap();
        StoredTensor::new("shared", buffer, 0, f32s(&[4])).unwrap()
    });
    let (graph, assignments, x, y) = write_then_read(&written, &read);
    let mut scheduler = Scheduler::new(vec![a, b, host()], Options::default()).unwrap();
    scheduler
        .load_with(&graph, &assignments, &CancelToken::new())
        .unwrap();
    (scheduler, x, y)
}

#[test]
fn devices_that_share_bytes_in_different_buffers_synchronize() {
    let latch = Latch::new();
    let (mut scheduler, x, y) = writer_and_reader(&latch);
    let plan = scheduler.current_plan().unwrap();
    let reader = plan
        .actions()
        .iter()
        .find(|action| action.lane == Lane::Device(1) && matches!(action.work, Work::Split(_)));
    assert!(!reader.unwrap().waits.is_empty(), "{plan}");
    assert_eq!(race_check::check(plan, 4), []);

    latch.close();
    scheduler.write(x, 0, &bytes(&[2.0; 4])).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    let opener = open_later(&latch);
    assert_eq!(read(&mut scheduler, y, 4).unwrap(), [6.0; 4]);
    opener.join().unwrap();
}

#[test]
fn a_slice_of_imported_memory_is_recognised_as_shared() {
    let open = Latch::new();
    let (a, b) = (held_back("a", &open), held_back("b", &open));
    let whole = HostMemory::allocate(128, "host", "whole").unwrap();
    // SAFETY: the bytes are kept alive, and nothing is running that would touch them.
    let part = unsafe {
        let start = whole.base().add(64);
        HostMemory::borrow(start, 64, true, Box::new(Arc::clone(&whole)))
    };
    // The same bytes, at different places of different buffers.
    let [written, read] = [(&a, whole, 64), (&b, part, 0)].map(|(device, memory, offset)| {
        let buffer = device.import_host(memory, Usage::Any).unwrap();
        StoredTensor::new("shared", buffer, offset, f32s(&[4])).unwrap()
    });
    let (graph, assignments, ..) = write_then_read(&written, &read);
    let scheduler = Scheduler::new(vec![a, b, host()], Options::default()).unwrap();
    let plan = scheduler.plan(&graph, &assignments).unwrap();
    assert_eq!(race_check::check(&plan, 4), [], "{plan}");
}

/// Returns a product with selected experts, whose weights lie on the host and which is offloaded to
/// a device. Another device computes the selection. Or else the weights lie on the other device.
fn offloaded_experts(uses: usize, on_host: bool) -> (Scheduler, usize) {
    let open = Latch::new();
    let chooser = held_back("chooser", &open);
    let a = device("a", |o| {
        (o.asynchronous, o.events) = (true, true);
        o.wants_offload = true;
    });
    let host = host();
    let weights = [("experts", f32s(&[4, 4, 8]))];
    let owner = if on_host { &host } else { &chooser };
    let weights = TensorGroup::allocate(&owner.buffer_type(), Usage::Weights, &weights).unwrap();
    let mut graph = Graph::new();
    let experts = graph.stored(&weights.tensors[0]).unwrap();
    let table = graph.input("table", DType::I32, [2, 4, 1, 1]).unwrap();
    let row = graph.input("row", DType::I32, [1, 1, 1, 1]).unwrap();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let chosen = graph.get_rows(table, row).unwrap();
    let mut assignments = Assignments::new();
    assignments.set(chosen, 0);
    for _ in 0..uses {
        let y = graph.mul_mat_id(experts, x, chosen).unwrap();
        assignments.set(y, 1);
        graph.set_output(y);
    }
    let mut scheduler = Scheduler::new(vec![chooser, a, host], Options::default()).unwrap();
    scheduler
        .load_with(&graph, &assignments, &CancelToken::new())
        .unwrap();
    let copies = scheduler.current_plan().unwrap().copies();
    let partial = copies.iter().filter(|copy| copy.experts.is_some()).count();
    (scheduler, partial)
}

#[test]
fn expert_copies_wait_for_the_router() {
    let (scheduler, partial) = offloaded_experts(1, true);
    assert_eq!(partial, 1);
    let plan = scheduler.current_plan().unwrap();
    let is_partial = |work| matches!(work, Work::Copy(n) if plan.copies()[n].experts.is_some());
    let copy = plan.actions().iter().find(|action| is_partial(action.work));
    let chooser = plan
        .actions()
        .iter()
        .position(|action| action.lane == Lane::Device(0) && matches!(action.work, Work::Split(_)));
    let waits = &copy.unwrap().waits;
    assert!(
        waits
            .iter()
            .any(|wait| wait.runs_ago == 0 && Some(wait.action) == chooser),
        "{plan}"
    );
    assert_eq!(race_check::check(plan, 4), []);
}

#[test]
fn reads_wait_for_all_written_operands() {
    let open = Latch::new();
    let (a, b) = (held_back("a", &open), held_back("b", &open));
    let names = ["weights", "mean", "squares"].map(|name| (name, f32s(&[4])));
    let state = TensorGroup::allocate(&a.buffer_type(), Usage::Any, &names).unwrap();
    let mut graph = Graph::new();
    let [weights, mean, squares] = [0, 1, 2].map(|i| graph.stored(&state.tensors[i]).unwrap());
    let gradient = graph.input("gradient", DType::F32, [4, 1, 1, 1]).unwrap();
    let numbers = graph.input("numbers", DType::F32, [7, 1, 1, 1]).unwrap();
    let operands = [weights, gradient, mean, squares, numbers].map(Some);
    graph.push(Op::OptStepAdamW, &operands).unwrap();
    let mut assignments = Assignments::new();
    for written in [mean, squares] {
        let copy = graph.scale(written, 2.0).unwrap();
        assignments.set(copy, 1);
        graph.set_output(copy);
    }
    let scheduler = Scheduler::new(vec![a, b, host()], Options::default()).unwrap();
    let plan = scheduler.plan(&graph, &assignments).unwrap();
    assert_eq!(race_check::check(&plan, 4), [], "{plan}");
}

#[test]
fn experts_used_twice_are_copied_completely() {
    let (_, partial) = offloaded_experts(2, true);
    assert_eq!(partial, 0);
}

#[test]
fn experts_of_another_device_are_copied_completely() {
    let (_, partial) = offloaded_experts(1, false);
    assert_eq!(partial, 0);
}

#[test]
fn node_times_of_asynchronous_devices_arrive_with_the_synchronization() {
    let latch = Latch::new();
    let a = held_back("a", &latch);
    let (graph, x, _) = accumulation(&a);
    let mut scheduler = Scheduler::new(vec![a, host()], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.write(x, 0, &bytes(&[1.0; 4])).unwrap();
    scheduler.start_trace();
    latch.close();
    scheduler.run(&CancelToken::new()).unwrap();
    let nodes = |scheduler: &Scheduler| {
        let events = scheduler.trace().unwrap().take_events();
        events.iter().filter(|event| event["cat"] == "node").count()
    };
    assert_eq!(nodes(&scheduler), 0);
    latch.open();
    scheduler.synchronize().unwrap();
    assert_eq!(nodes(&scheduler), 3);
    assert_eq!(nodes(&scheduler), 0, "they are taken once");
}

#[test]
fn copies_overlap_with_work_where_a_device_has_streams() {
    let make = |streams| {
        let device = |name: &str| {
            device(name, |o| {
                (o.asynchronous, o.events, o.copies, o.streams) = (true, true, true, streams);
            })
        };
        let devices = vec![device("a"), device("b"), host()];
        let mut graph = Graph::new();
        let mut assignments = Assignments::new();
        let mut x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
        for number in [0, 2, 1, 0, 2] {
            x = graph.push(Op::CumSum, &[Some(x)]).unwrap();
            assignments.set(x, number);
        }
        graph.set_output(x);
        let options = Options {
            copies: 2,
            ..Default::default()
        };
        let mut scheduler = Scheduler::new(devices, options).unwrap();
        scheduler
            .load_with(&graph, &assignments, &CancelToken::new())
            .unwrap();
        let first = TensorId::from_index(0);
        for run in 0..5 {
            scheduler.write(first, 0, &bytes(&[run as f32; 4])).unwrap();
            scheduler.run(&CancelToken::new()).unwrap();
        }
        let plan = scheduler.current_plan().unwrap();
        assert_eq!(race_check::check(plan, 6), [], "{plan}");
        let lanes = plan.actions().iter().map(|action| action.lane);
        let copies = lanes.filter(|lane| matches!(lane, Lane::Copies(_))).count();
        (read(&mut scheduler, x, 4).unwrap(), copies)
    };
    let ((expected, without), (same, with)) = (make(false), make(true));
    assert_eq!(same, expected);
    assert!(without == 0 && with >= 2, "{without} {with}");
}

#[test]
fn device_loss_names_the_weights_to_reload_and_others_continue() {
    let faults = samite_reference::FaultPlan::new();
    let a = device("a", |o| o.faults = Some(Arc::clone(&faults)));
    let host = host();
    let weights = common::weights(&a, "w", f32s(&[4, 4]));
    let graph_with = |weights: &Arc<StoredTensor>| {
        let mut graph = Graph::new();
        let w = graph.stored(weights).unwrap();
        let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
        let y = graph.mul_mat(w, x).unwrap();
        graph.set_output(y);
        (graph, x, y)
    };
    let mut kept = [0; 64];
    weights.tensor().read(0, &mut kept).unwrap();
    let run = |scheduler: &mut Scheduler, weights| {
        let (graph, x, y) = graph_with(weights);
        scheduler.load(&graph)?;
        scheduler.write(x, 0, &bytes(&[1.0, 2.0, 3.0, 4.0]))?;
        scheduler.run(&CancelToken::new())?;
        read(scheduler, y, 4)
    };
    let mut scheduler = Scheduler::new(vec![a, Arc::clone(&host)], Options::default()).unwrap();
    let expected = run(&mut scheduler, &weights).unwrap();

    faults.reset();
    faults.lose_from(0);
    let error = run(&mut scheduler, &weights).unwrap_err();
    assert!(
        matches!(error, samite_core::Error::DeviceLost { .. }),
        "{error}"
    );
    let error = error.to_string();
    assert!(error.contains("loaded again: 'w'"), "{error}");
    assert!(scheduler.remove_device("b").is_err());
    assert_eq!(scheduler.remove_device("a").unwrap(), ["w"]);
    let error = run(&mut scheduler, &weights).unwrap_err().to_string();
    assert!(error.contains("'w'"), "{error}");

    let again = common::weights(&host, "w", f32s(&[4, 4]));
    again.tensor().write(0, &kept).unwrap();
    assert_eq!(run(&mut scheduler, &again).unwrap(), expected);
    assert!(
        scheduler.remove_device("host").is_err(),
        "it is the last one"
    );
}

#[test]
fn devices_lost_together_are_removed_one_by_one() {
    let faults = samite_reference::FaultPlan::new();
    let lost = ["a", "b"].map(|name| {
        device(name, |o| {
            (o.faults, o.asynchronous) = (Some(Arc::clone(&faults)), name == "a")
        })
    });
    let devices = lost.into_iter().chain([host()]).collect();
    let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
    faults.lose_from(0);
    for name in ["a", "b"] {
        assert!(scheduler.remove_device(name).unwrap().is_empty());
    }
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let y = graph.unary(x, samite_core::Unary::Neg).unwrap();
    graph.set_output(y);
    scheduler.load(&graph).unwrap();
    scheduler
        .write(x, 0, &bytes(&[1.0, 2.0, 3.0, 4.0]))
        .unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    let values = read(&mut scheduler, y, 4).unwrap();
    assert_eq!(values, [-1.0, -2.0, -3.0, -4.0]);
}

/// Returns a graph like attention over `keys` cells of a cache.
fn attention(cache: &Arc<StoredTensor>, keys: usize) -> (Graph, TensorId) {
    let mut graph = Graph::new();
    let q = graph.input("q", DType::F32, [4, 1, 1, 1]).unwrap();
    let cache = graph.stored(cache).unwrap();
    let k = graph.rows(cache, 0, keys).unwrap();
    let logits = graph.mul_mat(k, q).unwrap();
    let y = graph.soft_max(logits, None, None, 1.0, 0.0).unwrap();
    graph.set_output(y);
    (graph, q)
}

#[test]
fn compiled_graphs_serve_pipeline_copies_and_growing_caches() {
    let reference = ReferenceDevice::new(ReferenceOptions {
        compiles: true,
        ..ReferenceOptions::named("a")
    });
    let a: Arc<dyn Device> = Arc::clone(&reference) as _;
    let cache = TensorGroup::allocate(&a.buffer_type(), Usage::Any, &[("k", f32s(&[4, 64]))]);
    let cache = Arc::clone(&cache.unwrap().tensors[0]);
    let options = Options {
        copies: 4,
        ..Default::default()
    };
    let mut scheduler = Scheduler::new(vec![a], options).unwrap();
    for (number, keys) in [16, 32, 48, 16].into_iter().enumerate() {
        let (graph, q) = attention(&cache, keys);
        scheduler.load(&graph).unwrap();
        scheduler.write(q, 0, &bytes(&[1.0; 4])).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        let counters = scheduler.counters();
        assert_eq!(counters.compiled, 1, "with {keys} keys");
        assert_eq!(reference.compilations(), 1, "with {keys} keys");
        assert_eq!(counters.plans, (number + 1).min(3));
    }
    // Another operation is another kind of graph.
    let (mut graph, _) = attention(&cache, 16);
    let last = TensorId::from_index(graph.len() - 1);
    let more = graph.scale(last, 2.0).unwrap();
    graph.set_output(more);
    scheduler.load(&graph).unwrap();
    assert_eq!(scheduler.counters().compiled, 2);
}

#[test]
fn later_splits_reuse_scratch_memory() {
    let a = device("a", |o| o.workspace = 4096);
    let mut graph = Graph::new();
    let mut assignments = Assignments::new();
    let mut x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    for number in [0, 1, 0, 1, 0] {
        x = graph.push(Op::CumSum, &[Some(x)]).unwrap();
        assignments.set(x, number);
    }
    graph.set_output(x);
    let scheduler = Scheduler::new(vec![a, host()], Options::default()).unwrap();
    let plan = scheduler.plan(&graph, &assignments).unwrap();
    let (name, bytes) = &plan.memory_by_type()[0];
    assert_eq!(name, "a");
    assert!((4096..2 * 4096).contains(bytes), "{plan}");
    assert_eq!(race_check::check_memory(&plan), Vec::<String>::new());
}

#[test]
fn compilation_can_be_cancelled() {
    let a = device("a", |o| o.compiles = true);
    let cache = TensorGroup::allocate(&a.buffer_type(), Usage::Any, &[("k", f32s(&[4, 64]))]);
    let (graph, _) = attention(&cache.unwrap().tensors[0], 16);
    let mut scheduler = Scheduler::new(vec![a], Options::default()).unwrap();
    let cancel = CancelToken::new();
    cancel.cancel();
    let error = scheduler.load_with(&graph, Assignments::NONE, &cancel);
    assert!(matches!(error, Err(samite_core::Error::Cancelled)));
    scheduler.load(&graph).unwrap();
}

#[test]
fn copies_to_device_memory_take_one_range_lock_at_a_time() {
    // If the source's lock were held while the target is written, a thread with the opposite copy
    // would deadlock.
    let a = device("a", |_| {});
    let size = 9 << 20;
    let layout = f32s(&[size / 16, 4]);
    let allocate = |memory| TensorGroup::allocate(&memory, Usage::Any, &[("t", layout)]).unwrap();
    let (there, here) = (allocate(a.buffer_type()), allocate(host().buffer_type()));
    let (there, here): (&TensorRef, &TensorRef) =
        (there.tensors[0].tensor(), here.tensors[0].tensor());
    let values: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
    here.write(0, &values).unwrap();
    there.copy_from(here).unwrap();
    let mut back = vec![0; size];
    there.read(0, &mut back).unwrap();
    assert!(
        back == values,
        "pieces of a large copy are not where they belong"
    );
    here.buffer.clear(0).unwrap();
    here.copy_from(there).unwrap();
    here.read(0, &mut back).unwrap();
    assert!(back == values);
}
