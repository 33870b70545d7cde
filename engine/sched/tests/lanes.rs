//! Lanes of actions, and absence of unnecessary waits.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{bytes, device, f32s, read};
use samite_core::{
    CancelToken, DType, Device, DeviceKind, Graph, HostMemory, Op, StoredTensor, Usage,
};
use samite_sched::order::{Lane, Work};
use samite_sched::{Assignments, Options, Plan, Scheduler, race_check};
use std::sync::Arc;

fn asynchronous(name: &str, streams: bool) -> Arc<dyn Device> {
    device(name, |o| {
        (o.asynchronous, o.events, o.copies, o.import_host) = (true, true, true, true);
        o.streams = streams;
    })
}

#[test]
fn devices_can_have_copy_streams() {
    let run = |streams| {
        // Streams can copy only from and to host memory.
        let host = device("host", |o| {
            (o.kind, o.host_memory) = (DeviceKind::Cpu, true)
        });
        let [a, c] = ["a", "c"].map(|name| asynchronous(name, streams));
        let devices = [a, host, c];
        let mut graph = Graph::new();
        let mut assignments = Assignments::new();
        let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
        let mut y = x;
        for number in [0, 1, 2, 1, 2, 0] {
            y = graph.push(Op::CumSum, &[Some(y)]).unwrap();
            assignments.set(y, number);
        }
        graph.set_output(y);
        let mut scheduler = Scheduler::new(devices.to_vec(), Options::default()).unwrap();
        scheduler
            .load_with(&graph, &assignments, &CancelToken::new())
            .unwrap();
        scheduler.write(x, 0, &bytes(&[1.0; 4])).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        let result = read(&mut scheduler, y, 4).unwrap();
        let plan = scheduler.current_plan().unwrap();
        assert_eq!(race_check::check(plan, 4), [], "{plan}");
        let last = Lane::Copies(2);
        let copies = plan.actions().iter().filter(|a| a.lane == last).count();
        (result, copies)
    };
    let ((expected, none), (same, some)) = (run(false), run(true));
    assert_eq!(same, expected);
    assert!(none == 0 && some > 0, "{none} copies, {some} with streams");
}

/// Returns whether the split of device 1 waits for device 0.
fn waits(plan: &Plan) -> bool {
    let actions = plan.actions();
    let reader = actions
        .iter()
        .find(|a| a.lane == Lane::Device(1) && matches!(a.work, Work::Split(_)));
    let waits = &reader.unwrap().waits;
    waits
        .iter()
        .any(|wait| actions[wait.action].lane == Lane::Device(0))
}

#[test]
fn memory_between_two_results_causes_no_wait() {
    let [a, b] = ["a", "b"].map(|name| asynchronous(name, false));
    let memory = HostMemory::allocate(192, "host", "shared").unwrap();
    let part = |device: &Arc<dyn Device>, number: usize| {
        let buffer = device.import_host(Arc::clone(&memory), Usage::Any).unwrap();
        StoredTensor::new("part", buffer, 64 * number, f32s(&[16])).unwrap()
    };
    // Device 0 writes parts 0 and 2, device 1 reads one of the parts.
    let plan = |read: usize| {
        let mut graph = Graph::new();
        let mut assignments = Assignments::new();
        let x = graph.input("x", DType::F32, [16, 1, 1, 1]).unwrap();
        for number in [0, 2] {
            let target = graph.stored(&part(&a, number)).unwrap();
            let written = graph.cpy(x, target).unwrap();
            assignments.set(written, 0);
        }
        let source = graph.stored(&part(&b, read)).unwrap();
        let y = graph.scale(source, 3.0).unwrap();
        assignments.set(y, 1);
        graph.set_output(y);
        let devices = vec![Arc::clone(&a), Arc::clone(&b)];
        let scheduler = Scheduler::new(devices, Options::default()).unwrap();
        scheduler.plan(&graph, &assignments).unwrap()
    };
    let (first, between, last) = (plan(0), plan(1), plan(2));
    assert!(waits(&first) && waits(&last), "{first}\n{last}");
    assert!(!waits(&between), "{between}");
}
