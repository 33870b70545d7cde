//! The device apart from its kernels: memory, streams, events, faults.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Case, as_f32s, f32s};
use samite_core::{
    CancelToken, DType, Device, DeviceKind, Error, Graph, HostMemory, Layout, PlacedGraph,
    RunControl, RunObserver, StoredTensor, Stream, TensorGroup, TensorId, TensorRef, Usage,
    host_buffer_type,
};
use samite_reference::{FaultPlan, Latch, ReferenceDevice, ReferenceOptions};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn row(len: usize) -> Layout {
    Layout::contiguous(DType::F32, [len, 1, 1, 1]).unwrap()
}

fn tensor(device: &dyn Device, len: usize) -> TensorRef {
    let group =
        TensorGroup::allocate(&device.buffer_type(), Usage::Any, &[("t", row(len))]).unwrap();
    group.tensors[0].tensor().clone()
}

fn host_tensor(len: usize) -> TensorRef {
    let buffer = host_buffer_type().allocate(4 * len, Usage::Any).unwrap();
    StoredTensor::new("host", buffer, 0, row(len))
        .unwrap()
        .tensor()
        .clone()
}

fn values(tensor: &TensorRef) -> Vec<f32> {
    let mut bytes = vec![0; tensor.layout().bytes()];
    tensor.read(0, &mut bytes).unwrap();
    as_f32s(&bytes)
}

/// Builds `y = (x + x)²`.
fn sample() -> (Case, TensorId) {
    let mut c = Case::default();
    let x = c.f32(&[3], &[1.0, 2.0, 3.0]);
    let twice = c.graph.add(x, x).unwrap();
    let y = c.graph.sqr(twice).unwrap();
    (c, y)
}

fn asynchronous() -> Arc<ReferenceDevice> {
    ReferenceDevice::new(ReferenceOptions {
        asynchronous: true,
        events: true,
        copies: true,
        ..ReferenceOptions::default()
    })
}

#[test]
fn device_memory_is_private() {
    let device = ReferenceDevice::new(ReferenceOptions::default());
    let other = ReferenceDevice::new(ReferenceOptions::named("reference1"));
    let (a, b, c) = (tensor(&*device, 2), tensor(&*device, 2), tensor(&*other, 2));
    assert!(a.buffer.host().is_none());
    assert!(device.supports_buffer_type(a.buffer.buffer_type()));
    assert!(!device.supports_buffer_type(c.buffer.buffer_type()));
    assert!(!device.supports_buffer_type(&host_buffer_type()));
    a.write(0, &f32s(&[1.0, 2.0])).unwrap();
    assert!(b.buffer.copy_from(b.slot, &a).unwrap());
    assert!(!c.buffer.copy_from(c.slot, &a).unwrap());
    c.copy_from(&b).unwrap();
    assert_eq!(values(&c), [1.0, 2.0]);
}

#[test]
fn the_memory_limit_counts_live_buffers() {
    let device = ReferenceDevice::new(ReferenceOptions {
        memory_limit: Some(100),
        max_buffer_size: 80,
        ..ReferenceOptions::default()
    });
    let memory = device.buffer_type();
    let first = memory.allocate(60, Usage::Any).unwrap();
    assert_eq!(device.memory().free, Some(40));
    match memory.allocate(50, Usage::Any) {
        Err(Error::OutOfMemory {
            asked: 50,
            free: Some(40),
            ..
        }) => {}
        other => panic!("{other:?}"),
    }
    drop(first);
    assert!(matches!(
        memory.allocate(90, Usage::Any),
        Err(Error::OutOfMemory { .. })
    ));
    assert_eq!(device.memory().free, Some(100));
    memory.allocate(80, Usage::Any).unwrap();
}

#[test]
fn imported_memory_is_shared() {
    let device = ReferenceDevice::new(ReferenceOptions {
        import_host: true,
        ..ReferenceOptions::default()
    });
    let memory = HostMemory::allocate(8, "test", "x").unwrap();
    let buffer = device
        .import_host(Arc::clone(&memory), Usage::Weights)
        .unwrap();
    assert!(device.supports_buffer_type(buffer.buffer_type()));
    memory.write(0, &f32s(&[5.0, 6.0])).unwrap();
    let x = StoredTensor::new("x", buffer, 0, row(2)).unwrap();
    assert_eq!(values(x.tensor()), [5.0, 6.0]);
    let without = ReferenceDevice::new(ReferenceOptions::default());
    assert!(without.import_host(memory, Usage::Any).is_err());
}

#[test]
fn options_change_kind_support_and_offload() {
    let device = ReferenceDevice::new(ReferenceOptions {
        kind: DeviceKind::Cpu,
        without_ops: vec!["sqr".into(), "silu".into()],
        wants_offload: true,
        host_memory: true,
        ..ReferenceOptions::default()
    });
    let (mut c, y) = sample();
    let reason = device.supports(c.graph.node(y));
    assert_eq!(reason, samite_core::Support::no("it was made without sqr"));
    assert!(
        c.run_on(&device, y)
            .unwrap_err()
            .to_string()
            .contains("does not support sqr")
    );
    let product = c.graph.mul_mat(y, y).unwrap();
    assert!(device.wants_offload(c.graph.node(product)));
    assert!(!device.wants_offload(c.graph.node(y)));
    assert!(device.buffer_type().is_host());
    assert_eq!(device.kind(), DeviceKind::Cpu);
    assert!(device.create_event().is_err());
}

#[test]
fn asynchronous_and_host_memory_devices_compute_the_same() {
    let on_host = ReferenceDevice::new(ReferenceOptions {
        host_memory: true,
        ..ReferenceOptions::default()
    });
    let (c, y) = sample();
    let expected = c.run(y);
    assert_eq!(as_f32s(&expected), [4.0, 16.0, 36.0]);
    assert_eq!(c.run_on(&asynchronous(), y).unwrap(), expected);
    assert_eq!(c.run_on(&on_host, y).unwrap(), expected);
}

#[test]
fn streams_copy_and_wait_for_each_other() {
    let device = asynchronous();
    let mut first = Arc::clone(&device).open_stream().unwrap();
    let mut second = Arc::clone(&device).open_stream().unwrap();
    let event = device.create_event().unwrap();
    let (source, middle, end) = (host_tensor(4), tensor(&*device, 4), host_tensor(4));
    for round in 0..50 {
        let data = [round as f32; 4];
        first.write(&source, 0, &f32s(&data)).unwrap();
        first.copy(&source, &middle).unwrap();
        first.record(&*event).unwrap();
        second.wait(&*event).unwrap();
        second.copy(&middle, &end).unwrap();
        second.synchronize().unwrap();
        assert_eq!(values(&end), data);
        event.synchronize().unwrap();
    }
    let foreign = ReferenceDevice::new(ReferenceOptions {
        events: true,
        ..ReferenceOptions::named("other")
    });
    assert!(first.record(&*foreign.create_event().unwrap()).is_err());
    second.wait(&*foreign.create_event().unwrap()).unwrap();
    assert!(first.copy(&source, &tensor(&*foreign, 4)).is_err());
}

#[test]
fn queued_failures_are_reported_once_per_waiter() {
    let device = asynchronous();
    let mut first = Arc::clone(&device).open_stream().unwrap();
    let mut second = Arc::clone(&device).open_stream().unwrap();
    let event = device.create_event().unwrap();
    let (a, b) = (tensor(&*device, 1), tensor(&*device, 1));
    a.write(0, &f32s(&[7.0])).unwrap();
    first.write(&a, 100, &[0]).unwrap();
    // The copy after the failed write is skipped, and every waiter receives the failure.
    first.copy(&a, &b).unwrap();
    first.record(&*event).unwrap();
    second.wait(&*event).unwrap();
    let told =
        |result: samite_core::Result<()>| result.unwrap_err().to_string().contains("bytes 100..+1");
    assert!(told(second.synchronize()));
    assert!(told(event.synchronize()));
    assert!(told(first.synchronize()));
    assert_eq!(values(&b), [0.0]);
    first.synchronize().unwrap();
    first.copy(&a, &b).unwrap();
    first.synchronize().unwrap();
    assert_eq!(values(&b), [7.0]);
}

#[test]
fn every_call_can_be_made_to_fail() {
    for asynchronous in [false, true] {
        let faults = FaultPlan::new();
        let device = ReferenceDevice::new(ReferenceOptions {
            asynchronous,
            faults: Some(Arc::clone(&faults)),
            ..ReferenceOptions::default()
        });
        let (c, y) = sample();
        let expected = c.run_on(&device, y).unwrap();
        let calls = faults.calls();
        assert!(calls >= 8, "{calls} calls");
        for call in 0..calls {
            faults.reset();
            faults.fail_at(call);
            let error = c.run_on(&device, y).unwrap_err().to_string();
            assert!(
                error.contains(&format!("injected fault: call {call},")),
                "{error}"
            );
        }
        faults.reset();
        faults.fail_from(3);
        assert!(c.run_on(&device, y).is_err());
        assert!(c.run_on(&device, y).is_err());
        faults.reset();
        assert_eq!(c.run_on(&device, y).unwrap(), expected);
    }
}

#[derive(Default)]
struct Watch {
    ran: Mutex<Vec<TensorId>>,
    stop_after: Option<(usize, CancelToken)>,
}

impl RunObserver for Watch {
    fn ran(&self, node: TensorId, start: Duration, took: Duration) {
        assert!(start + took < Duration::from_secs(3600));
        let mut ran = self.ran.lock().unwrap();
        ran.push(node);
        if let Some((count, cancel)) = &self.stop_after
            && ran.len() == *count
        {
            cancel.cancel();
        }
    }
}

fn run_watched(
    graph: &Graph,
    places: &[Option<TensorRef>],
    device: &Arc<ReferenceDevice>,
    watch: &Arc<Watch>,
) -> samite_core::Result<()> {
    let nodes: Vec<_> = graph.ids().collect();
    let mut stream = Arc::clone(device).open_stream()?;
    let mut prepared = stream.prepare(PlacedGraph {
        graph,
        nodes: &nodes,
        places,
        workspace: None,
        compiled: None,
    })?;
    let cancel = watch
        .stop_after
        .as_ref()
        .map(|(_, cancel)| cancel.clone())
        .unwrap_or_default();
    let observer: Arc<dyn RunObserver> = Arc::clone(watch) as _;
    stream.run(
        &mut *prepared,
        RunControl {
            cancel: &cancel,
            observer: Some(&observer),
        },
    )?;
    stream.synchronize()
}

#[test]
fn observers_see_nodes_and_cancellation_stops_between_them() {
    let device = ReferenceDevice::new(ReferenceOptions::default());
    let (c, y) = sample();
    let places = c.place(&device).unwrap();
    let watch = Arc::new(Watch::default());
    run_watched(&c.graph, &places, &device, &watch).unwrap();
    assert_eq!(*watch.ran.lock().unwrap(), [TensorId::from_index(1), y]);

    let watch = Arc::new(Watch {
        stop_after: Some((1, CancelToken::new())),
        ..Watch::default()
    });
    let result = run_watched(&c.graph, &places, &device, &watch);
    assert!(matches!(result, Err(Error::Cancelled)));
    assert_eq!(watch.ran.lock().unwrap().len(), 1);
}

#[test]
fn cancellation_reaches_queued_work() {
    let device = asynchronous();
    let (c, _) = sample();
    let places = c.place(&device).unwrap();
    let nodes: Vec<_> = c.graph.ids().collect();
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let placed = PlacedGraph {
        graph: &c.graph,
        nodes: &nodes,
        places: &places,
        workspace: None,
        compiled: None,
    };
    let mut prepared = stream.prepare(placed).unwrap();
    let cancel = CancelToken::new();
    cancel.cancel();
    stream
        .run(
            &mut *prepared,
            RunControl {
                cancel: &cancel,
                observer: None,
            },
        )
        .unwrap();
    assert!(matches!(stream.synchronize(), Err(Error::Cancelled)));
    stream.synchronize().unwrap();
}

#[test]
fn runs_with_wrong_memory_are_refused() {
    let device = ReferenceDevice::new(ReferenceOptions::default());
    let other = ReferenceDevice::new(ReferenceOptions::named("reference1"));
    let (c, y) = sample();
    let refused = |places: &[Option<TensorRef>]| {
        run_watched(&c.graph, places, &device, &Arc::default())
            .unwrap_err()
            .to_string()
    };
    assert!(refused(&c.place(&other).unwrap()).contains("which reference cannot use"));
    let mut places = c.place(&device).unwrap();
    let place = places[y.index()].as_mut().unwrap();
    place.slot.layout = row(2);
    assert!(refused(&places).contains("f32 [3] in the graph but f32 [2] in memory"));
    places[y.index()] = None;
    assert!(refused(&places).contains("has no place"));

    let places = c.place(&device).unwrap();
    let nodes: Vec<_> = c.graph.ids().collect();
    let placed = PlacedGraph {
        graph: &c.graph,
        nodes: &nodes,
        places: &places,
        workspace: None,
        compiled: None,
    };
    let mut mine: Box<dyn Stream> = Arc::clone(&device).open_stream().unwrap();
    let mut prepared = mine.prepare(placed).unwrap();
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: None,
    };
    let error = other
        .open_stream()
        .unwrap()
        .run(&mut *prepared, control)
        .unwrap_err();
    assert!(error.to_string().contains("another device"));
}

#[test]
fn results_may_share_operand_memory() {
    let device = ReferenceDevice::new(ReferenceOptions::default());
    let (c, y) = sample();
    let mut places = c.place(&device).unwrap();
    let x = places[0].clone();
    places.iter_mut().for_each(|place| place.clone_from(&x));
    run_watched(&c.graph, &places, &device, &Arc::default()).unwrap();
    assert_eq!(
        values(places[y.index()].as_ref().unwrap()),
        [4.0, 16.0, 36.0]
    );
}

#[test]
fn a_copy_locks_host_memory_for_its_whole_duration() {
    let latch = Latch::new();
    let device = ReferenceDevice::new(ReferenceOptions {
        asynchronous: true,
        copies: true,
        latch: Some(Arc::clone(&latch)),
        ..ReferenceOptions::default()
    });
    let (from, to) = (host_tensor(2), tensor(&*device, 2));
    from.write(0, &[1f32, 2.0].map(f32::to_le_bytes).concat())
        .unwrap();
    let mut stream = device.open_stream().unwrap();
    latch.close();
    stream.copy(&from, &to).unwrap();
    // Queued work has not started: earlier operations may still happen before it.
    from.write(4, &3f32.to_le_bytes()).unwrap();
    latch.let_pass(1);
    latch.wait_until_held();
    assert_eq!(values(&from), [1.0, 3.0]);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            from.write(0, &9f32.to_le_bytes()).unwrap();
            assert!(ended.load(Ordering::SeqCst), "written while it was copied");
        });
        std::thread::sleep(Duration::from_millis(20));
        ended.store(true, Ordering::SeqCst);
        latch.open();
    });
    stream.synchronize().unwrap();
    assert_eq!(values(&to), [1.0, 3.0]);
    assert_eq!(values(&from), [9.0, 3.0]);
}

#[test]
fn waits_use_the_event_point_at_call_time() {
    let latch = Latch::new();
    let held = ReferenceDevice::new(ReferenceOptions {
        asynchronous: true,
        events: true,
        latch: Some(Arc::clone(&latch)),
        ..ReferenceOptions::default()
    });
    let (t, event) = (tensor(&*held, 1), held.create_event().unwrap());
    let mut first = held.open_stream().unwrap();
    let mut second = asynchronous().open_stream().unwrap();
    latch.close();
    first.write(&t, 0, &f32s(&[1.0])).unwrap();
    first.record(&*event).unwrap();
    second.wait(&*event).unwrap();
    // The event is recorded again while its first point is awaited.
    first.write(&t, 0, &f32s(&[2.0])).unwrap();
    first.record(&*event).unwrap();
    latch.let_pass(1);
    let (done, is_done) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || done.send(second.synchronize()));
    let waited = is_done.recv_timeout(Duration::from_secs(600));
    let seen = values(&t);
    // Whatever happened, release everything that the latch holds.
    latch.open();
    waiter.join().unwrap().unwrap();
    waited.expect("it waits for the second point").unwrap();
    assert_eq!(seen, [1.0]);
    event.synchronize().unwrap();
    assert_eq!(values(&t), [2.0]);
}

#[test]
fn refused_kernel_memory_is_an_error() {
    // Four elements that represent more than the address space.
    let mut c = Case::default();
    let few = c.counting([4, 1, 1, 1]);
    let huge = c.graph.view(few, [4, 1 << 22, 1 << 22, 4], [0; 3], 0);
    let total = c.graph.sum(huge.unwrap()).unwrap();
    c.graph.set_name(total, "total");
    for float64 in [false, true] {
        let device = ReferenceDevice::new(ReferenceOptions {
            float64,
            ..ReferenceOptions::default()
        });
        let error = c.run_on(&device, total).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains("sum 'total'"), "{error}");
    }
}
