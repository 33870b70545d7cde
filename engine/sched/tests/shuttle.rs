//! The scheduler with real threads, in many interleavings. With `--cfg shuttle`,
//! [shuttle](https://docs.rs/shuttle) decides which thread continues whenever one waits, wakes
//! another, takes a lock, sends or receives. The threads are those of the streams of asynchronous
//! devices, and those of the callers.
//!
//! A failure prints a seed. `SHUTTLE_RANDOM_SEED` sets the seed of the first interleaving, and
//! `SAMITE_SCHEDULES` the number of interleavings in each test.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{bytes, device, f32s, layers, read};
use samite_core::{
    CancelToken, DType, Device, DeviceKind, Error, Graph, Result, StoredTensor, TensorGroup,
    TensorId, Usage,
};
use samite_reference::{FaultPlan, ReferenceDevice, ReferenceOptions};
use samite_sched::{Options, Scheduler};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner, thread};
use std::sync::{Arc, OnceLock};

/// Number of interleavings of each kind in a test.
const SCHEDULES: usize = 5000;

/// Calls `test` in many interleavings of threads. In some, any thread may continue at each step. In
/// others, one thread continues as long as it can, with few exceptions.
fn in_many_orders(test: fn()) {
    let asked = std::env::var("SAMITE_SCHEDULES").ok();
    let schedules = asked.map_or(SCHEDULES, |number| number.parse().unwrap());
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    // No test takes that many steps, unless it never ends.
    config.max_steps = MaxSteps::FailAfter(1_000_000);
    Runner::new(RandomScheduler::new_from_seed(1, schedules), config.clone()).run(test);
    Runner::new(PctScheduler::new_from_seed(2, 3, schedules), config).run(test);
}

fn one_in(count: usize) -> bool {
    thread_rng().gen_range(0..count) == 0
}

/// Returns two asynchronous devices with a random choice of events, copies and several streams, and
/// a third device that may be a host.
fn devices(faults: Option<&Arc<FaultPlan>>) -> Vec<Arc<dyn Device>> {
    let any = |options: &mut ReferenceOptions| {
        options.asynchronous = true;
        options.events = !one_in(3);
        options.copies = !one_in(3);
        options.streams = one_in(2);
        options.faults = faults.cloned();
    };
    let (first, second) = (device("first", any), device("second", any));
    let third = device("third", |options| {
        any(options);
        options.kind = DeviceKind::Cpu;
        (options.asynchronous, options.host_memory) = (one_in(2), one_in(2));
    });
    vec![first, second, third]
}

/// Returns a graph with layers on each of the devices, its input and its output.
fn graph(devices: &[Arc<dyn Device>]) -> (Graph, TensorId, TensorId) {
    let [first, second, third] = [0, 1, 2].map(|number| &devices[number % devices.len()]);
    layers(&[first, second, third, first])
}

fn scheduler(devices: &[Arc<dyn Device>]) -> Result<Scheduler> {
    let options = Options {
        copies: thread_rng().gen_range(1..4),
        ..Options::default()
    };
    Scheduler::new(devices.to_vec(), options)
}

const RUNS: usize = 3;

fn input(run: usize) -> Vec<u8> {
    let values: Vec<f32> = (0..16).map(|i| (i + 3 * run) as f32 / 8.0).collect();
    bytes(&values)
}

/// Makes several overlapping runs, and returns the results of some of them.
fn work(
    scheduler: &mut Scheduler,
    (graph, x, y): &(Graph, TensorId, TensorId),
    reads: [bool; RUNS],
) -> Result<Vec<Option<Vec<f32>>>> {
    scheduler.load(graph)?;
    let mut results = Vec::new();
    for (run, reads) in reads.into_iter().enumerate() {
        scheduler.write(*x, 0, &input(run))?;
        scheduler.run(&CancelToken::new())?;
        results.push(reads.then(|| read(scheduler, *y, 16)).transpose()?);
    }
    scheduler.synchronize()?;
    Ok(results)
}

/// Returns the results of a single synchronous device.
fn expected() -> &'static [Vec<f32>] {
    static EXPECTED: OnceLock<Vec<Vec<f32>>> = OnceLock::new();
    EXPECTED.get_or_init(|| {
        let alone = [device("alone", |_| {})];
        let mut scheduler = Scheduler::new(alone.to_vec(), Options::default()).unwrap();
        let results = work(&mut scheduler, &graph(&alone), [true; RUNS]).unwrap();
        results.into_iter().flatten().collect()
    })
}

/// Checks that results equal those of a single device.
fn check(results: Vec<Option<Vec<f32>>>) {
    assert_eq!(results.len(), RUNS);
    for (result, expected) in results.iter().zip(expected()) {
        assert!(result.as_ref().is_none_or(|result| result == expected));
    }
}

#[test]
fn results_match_one_device() {
    in_many_orders(|| {
        let devices = devices(None);
        let graph = graph(&devices);
        let mut scheduler = scheduler(&devices).unwrap();
        check(work(&mut scheduler, &graph, [one_in(2), one_in(2), true]).unwrap());
    });
}

#[test]
fn results_are_correct_again_after_a_fault() {
    in_many_orders(|| {
        let faults = FaultPlan::new();
        let devices = devices(Some(&faults));
        let graph = graph(&devices);
        let mut scheduler = scheduler(&devices).unwrap();
        scheduler.load(&graph.0).unwrap();
        faults.reset();
        let call = thread_rng().gen_range(0..60);
        if one_in(2) {
            faults.fail_at(call)
        } else {
            faults.fail_from(call)
        }
        match work(&mut scheduler, &graph, [true; RUNS]) {
            Ok(results) => check(results),
            Err(error) => assert!(error.to_string().contains("injected fault"), "{error}"),
        }
        faults.reset();
        check(work(&mut scheduler, &graph, [true; RUNS]).unwrap());
    });
}

#[test]
fn remaining_devices_continue_after_a_loss() {
    in_many_orders(|| {
        let faults = FaultPlan::new();
        let mut devices = devices(None);
        devices[0] = device("first", |options| {
            (options.asynchronous, options.events) = (true, one_in(2));
            options.faults = Some(Arc::clone(&faults));
        });
        let whole = graph(&devices);
        let mut scheduler = scheduler(&devices).unwrap();
        scheduler.load(&whole.0).unwrap();
        faults.reset();
        faults.lose_from(thread_rng().gen_range(0..12));
        let error = work(&mut scheduler, &whole, [true; RUNS]).unwrap_err();
        assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
        scheduler.remove_device("first").unwrap();
        let others = graph(&devices[1..]);
        // Another order of the owners of layers: only the weights' names matter.
        check(work(&mut scheduler, &others, [true; RUNS]).unwrap());
    });
}

/// Returns a graph of `sum += x` on a device, which shows how often it ran.
fn accumulation(device: &Arc<dyn Device>) -> (Graph, TensorId, Arc<StoredTensor>) {
    let memory = device.buffer_type();
    let sum = TensorGroup::allocate(&memory, Usage::Any, &[("sum", f32s(&[4]))]).unwrap();
    let sum = Arc::clone(&sum.tensors[0]);
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let old = graph.stored(&sum).unwrap();
    let new = graph.add(old, x).unwrap();
    graph.cpy(new, old).unwrap();
    (graph, x, sum)
}

fn value(sum: &StoredTensor) -> f32 {
    let mut out = [0; 4];
    sum.tensor().read(0, &mut out).unwrap();
    f32::from_le_bytes(out)
}

#[test]
fn dropping_a_scheduler_ends_its_work_and_frees_its_memory() {
    in_many_orders(|| {
        let first = ReferenceDevice::new(ReferenceOptions {
            asynchronous: true,
            events: one_in(2),
            copies: one_in(2),
            streams: one_in(2),
            memory_limit: Some(1 << 20),
            ..ReferenceOptions::named("first")
        });
        let device: Arc<dyn Device> = first;
        let (graph, x, sum) = accumulation(&device);
        let free = device.memory().free;
        let host = common::host();
        let mut scheduler = scheduler(&[Arc::clone(&device), host]).unwrap();
        scheduler.load(&graph).unwrap();
        for run in 1..4 {
            scheduler.write(x, 0, &bytes(&[run as f32; 4])).unwrap();
            scheduler.run(&CancelToken::new()).unwrap();
        }
        drop(scheduler);
        assert_eq!(device.memory().free, free, "memory of plans is left");
        assert_eq!(value(&sum), 6.0);
    });
}

#[test]
fn two_schedulers_share_devices_and_weights() {
    in_many_orders(|| {
        let devices = devices(None);
        let graph = Arc::new(graph(&devices));
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (devices, graph) = (devices.clone(), Arc::clone(&graph));
                thread::spawn(move || {
                    let mut scheduler = scheduler(&devices).unwrap();
                    check(work(&mut scheduler, &graph, [true; RUNS]).unwrap());
                })
            })
            .collect();
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

#[test]
fn two_schedulers_write_to_the_same_memory() {
    in_many_orders(|| {
        let device = device("first", |options| {
            (options.asynchronous, options.events) = (true, one_in(2));
        });
        let memory = device.buffer_type();
        let shared = TensorGroup::allocate(&memory, Usage::Any, &[("shared", f32s(&[4]))]).unwrap();
        let threads: Vec<_> = [1.0, 2.0]
            .into_iter()
            .map(|value| {
                let mut graph = Graph::new();
                let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
                let target = graph.stored(&shared.tensors[0]).unwrap();
                graph.cpy(x, target).unwrap();
                let y = graph.scale(target, 1.0).unwrap();
                graph.set_output(y);
                let device = Arc::clone(&device);
                thread::spawn(move || {
                    let mut scheduler = scheduler(&[device]).unwrap();
                    scheduler.load(&graph).unwrap();
                    scheduler.write(x, 0, &bytes(&[value; 4])).unwrap();
                    scheduler.run(&CancelToken::new()).unwrap();
                    let result = read(&mut scheduler, y, 4).unwrap();
                    assert!(result.iter().all(|value| [1.0, 2.0].contains(value)));
                })
            })
            .collect();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_cancelled_run_does_not_affect_the_next() {
    in_many_orders(|| {
        let devices = devices(None);
        let graph = graph(&devices);
        let mut scheduler = scheduler(&devices).unwrap();
        scheduler.load(&graph.0).unwrap();
        scheduler.write(graph.1, 0, &input(0)).unwrap();
        let cancel = CancelToken::new();
        let canceller = thread::spawn({
            let cancel = cancel.clone();
            move || cancel.cancel()
        });
        let result = scheduler
            .run(&cancel)
            .and_then(|()| read(&mut scheduler, graph.2, 16));
        match result {
            Ok(result) => assert_eq!(result, expected()[0]),
            Err(error) => assert!(matches!(error, Error::Cancelled), "{error}"),
        }
        canceller.join().unwrap();
        check(work(&mut scheduler, &graph, [true; RUNS]).unwrap());
    });
}
