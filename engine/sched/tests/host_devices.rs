//! Devices that share host memory, and devices that take work from it.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{Special, bytes, device, f32s, layers, read, weights};
use samite_core::{
    CancelToken, DType, Device, DeviceKind, Graph, HostMemory, Result, StoredTensor, Usage,
};
use samite_sched::{Assignments, Options, Plan, Reason, Scheduler};
use std::sync::Arc;

fn cpu() -> Arc<dyn Device> {
    device("cpu", |o| (o.kind, o.host_memory) = (DeviceKind::Cpu, true))
}

#[test]
fn a_preferred_device_on_the_same_memory_takes_over() {
    let cpu = cpu();
    let helper: Arc<dyn Device> = Arc::new(Helper(Arc::clone(&cpu)));
    let (graph, ..) = layers(&[&cpu]);
    let plan = Scheduler::new(vec![helper, cpu], Options::default())
        .unwrap()
        .plan(&graph, Assignments::NONE)
        .unwrap();
    let on: Vec<_> = plan
        .splits()
        .iter()
        .map(|s| (s.device, s.nodes.len(), s.copies.len()))
        .collect();
    assert_eq!(
        on,
        [(1, 1, 0), (0, 1, 0), (1, 2, 0)],
        "the product moves, and nothing is copied:\n{plan}"
    );
    assert_eq!(plan.fallbacks(), [], "nobody expects more of such a device");
    assert!(matches!(
        plan.placement().reasons[3],
        Some(Reason::Weights { .. })
    ));
}

#[test]
fn products_without_weights_are_upgraded() {
    let cpu = cpu();
    let helper: Arc<dyn Device> = Arc::new(Helper(Arc::clone(&cpu)));
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 2, 1, 1]).unwrap();
    let w = graph.stored(&weights(&cpu, "w", f32s(&[8]))).unwrap();
    let scaled = graph.mul(x, w).unwrap();
    let product = graph.mul_mat(scaled, scaled).unwrap();
    graph.set_output(product);
    let plan = Scheduler::new(vec![helper, cpu], Options::default())
        .unwrap()
        .plan(&graph, Assignments::NONE)
        .unwrap();
    assert_eq!(
        plan.placement().reasons[product.index()],
        Some(Reason::Upgraded { from: 1 })
    );
}

/// Device that takes over matrix products on host memory, like a BLAS library.
#[derive(Debug)]
struct Helper(Arc<dyn Device>);

impl Device for Helper {
    fn name(&self) -> &str {
        "helper"
    }
    fn description(&self) -> String {
        String::new()
    }
    fn kind(&self) -> DeviceKind {
        DeviceKind::Accelerator
    }
    fn buffer_type(&self) -> Arc<dyn samite_core::BufferType> {
        self.0.buffer_type()
    }
    fn supports_buffer_type(&self, buffer_type: &Arc<dyn samite_core::BufferType>) -> bool {
        self.0.supports_buffer_type(buffer_type)
    }
    fn supports(&self, node: samite_core::Node<'_>) -> samite_core::Support {
        samite_core::Support::when(
            matches!(node.op(), samite_core::Op::MulMat { .. }),
            "only products",
        )
    }
    fn open_stream(self: Arc<Self>) -> Result<Box<dyn samite_core::Stream>> {
        Arc::clone(&self.0).open_stream()
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// Host memory type that counts allocations.
#[derive(Debug, Default)]
struct Pinned(std::sync::atomic::AtomicUsize);

impl samite_core::BufferType for Pinned {
    fn name(&self) -> &str {
        "pinned"
    }
    fn alignment(&self) -> usize {
        64
    }
    fn is_host(&self) -> bool {
        true
    }
    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn samite_core::Buffer>> {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        samite_core::host_buffer_type().allocate(size, usage)
    }
}

/// A device that works on any host memory.
#[derive(Debug)]
struct AnyHost(Arc<dyn Device>);

impl Device for AnyHost {
    fn name(&self) -> &str {
        "any"
    }
    fn description(&self) -> String {
        String::new()
    }
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cpu
    }
    fn buffer_type(&self) -> Arc<dyn samite_core::BufferType> {
        self.0.buffer_type()
    }
    fn supports_buffer_type(&self, buffer_type: &Arc<dyn samite_core::BufferType>) -> bool {
        buffer_type.is_host()
    }
    fn supports(&self, node: samite_core::Node<'_>) -> samite_core::Support {
        self.0.supports(node)
    }
    fn open_stream(self: Arc<Self>) -> Result<Box<dyn samite_core::Stream>> {
        Arc::clone(&self.0).open_stream()
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[test]
fn host_results_are_placed_in_memory_that_others_copy_fast() {
    let pinned = Arc::new(Pinned::default());
    let plain = common::fast();
    let fast = Special::with_host_memory(Arc::clone(&plain), Arc::clone(&pinned) as _);
    let any: Arc<dyn Device> = Arc::new(AnyHost(cpu()));
    let (graph, x, y) = layers(&[&fast, &any]);
    let run = |devices: Vec<Arc<dyn Device>>| {
        let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
        scheduler.load(&graph).unwrap();
        let names = scheduler.current_plan().unwrap().memory_by_type();
        scheduler.write(x, 0, &bytes(&[0.7; 16])).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        let names: Vec<_> = names.into_iter().map(|(name, _)| name).collect();
        (read(&mut scheduler, y, 16).unwrap(), names)
    };
    let (result, memories) = run(vec![Arc::clone(&fast), Arc::clone(&any)]);
    assert_eq!(memories, ["fast", "pinned"]);
    assert!(pinned.0.load(std::sync::atomic::Ordering::Relaxed) > 0);
    let (expected, memories) = run(vec![plain, any]);
    assert_eq!(memories, ["fast", "host"]);
    assert_eq!(result, expected);

    // A device that works only on its own memory does not get other memory.
    let (_, memories) = run(vec![fast, cpu()]);
    assert_eq!(memories, ["fast", "host"]);
}

#[test]
fn host_weights_are_offloaded_to_a_device_that_wants_them() {
    let cpu = cpu();
    let eager = device("eager", |o| o.wants_offload = true);
    let (graph, x, y) = layers(&[&cpu, &cpu]);
    let devices = vec![eager, Arc::clone(&cpu)];
    let set = samite_sched::DeviceSet::new(devices.clone()).unwrap();
    let plan = |offload| {
        Plan::new(
            &graph,
            &set,
            Assignments::NONE,
            &Options {
                offload,
                ..Default::default()
            },
        )
        .unwrap()
    };
    assert!(matches!(
        plan(true).placement().reasons[3],
        Some(Reason::Offloaded { .. })
    ));
    assert!(matches!(
        plan(false).placement().reasons[3],
        Some(Reason::Weights { .. })
    ));
    // The caller that assigns the operation to the host decides if a device may take it over.
    let [mut strict, mut yielding] = [Assignments::new(), Assignments::new()];
    let product = graph.ids().nth(3).unwrap();
    strict.set(product, 1);
    yielding.set_unless_offloaded(product, 1);
    for (assignments, offload, taken) in [
        (&strict, true, false),
        (&yielding, false, false),
        (&yielding, true, true),
    ] {
        let options = Options {
            offload,
            ..Default::default()
        };
        let plan = Plan::new(&graph, &set, assignments, &options).unwrap();
        let reason = plan.placement().reasons[3].as_ref().unwrap();
        let offloaded = matches!(reason, Reason::Offloaded { .. });
        assert_eq!(offloaded, taken, "{reason:?}");
        assert!(offloaded || *reason == Reason::Assigned, "{reason:?}");
    }
    // Weights of devices other than the host stay there.
    let other = device("other", |_| {});
    let (of_other, ..) = layers(&[&other, &other]);
    let eager = Arc::clone(&devices[0]);
    let three = samite_sched::DeviceSet::new(vec![eager, other, Arc::clone(&cpu)]).unwrap();
    let of_other = Plan::new(&of_other, &three, Assignments::NONE, &Options::default()).unwrap();
    let reason = &of_other.placement().reasons[3];
    assert!(matches!(reason, Some(Reason::Weights { .. })), "{reason:?}");
    // Each copied weight starts a split of its own, so that its memory is reused for the next one.
    assert_eq!(plan(true).splits().len(), 3, "{}", plan(true));
    let mut results = Vec::new();
    for devices in [devices, vec![cpu]] {
        let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
        scheduler.load(&graph).unwrap();
        scheduler.write(x, 0, &bytes(&[0.7; 16])).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        results.push(read(&mut scheduler, y, 16).unwrap());
    }
    assert!(samite_sched::nmse(&results[0], &results[1]) < 1e-10);
}

#[test]
fn only_experts_in_use_are_copied() {
    let cpu = cpu();
    let eager = device("eager", |o| o.wants_offload = true);
    let experts = weights(&cpu, "experts", f32s(&[8, 4, 6]));
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 1, 3, 1]).unwrap();
    let ids = graph.input("ids", DType::I32, [2, 3, 1, 1]).unwrap();
    let w = graph.stored(&experts).unwrap();
    let y = graph.mul_mat_id(w, x, ids).unwrap();
    graph.set_output(y);
    let chosen: Vec<u8> = [1i32, 4, 4, 1, 1, 4]
        .iter()
        .flat_map(|i| i.to_le_bytes())
        .collect();
    let mut results = Vec::new();
    for devices in [vec![eager, Arc::clone(&cpu)], vec![cpu]] {
        let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
        scheduler.load(&graph).unwrap();
        let plan = scheduler.current_plan().unwrap();
        if let Some(copy) = plan.copies().iter().find(|copy| copy.from == w) {
            assert_eq!(copy.experts, Some(ids), "{plan}");
        }
        scheduler.write(x, 0, &bytes(&[0.25; 24])).unwrap();
        scheduler.write(ids, 0, &chosen).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        results.push(read(&mut scheduler, y, 24).unwrap());
    }
    assert!(samite_sched::nmse(&results[0], &results[1]) < 1e-10);
}

#[test]
fn expert_ids_stay_alive_until_the_last_expert_copy() {
    // One copy of the ids serves three products. But the ids of the experts to copy are read from
    // the original, so the host must not reuse its memory before.
    let cpu = cpu();
    let eager = device("eager", |o| o.wants_offload = true);
    let sets: Vec<_> = ["up", "gate", "down"]
        .map(|name| weights(&cpu, name, f32s(&[8, 8, 6])))
        .into();
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 1, 3, 1]).unwrap();
    let scores = graph.input("scores", DType::F32, [6, 3, 1, 1]).unwrap();
    let mut assignments = Assignments::new();
    let order = graph
        .argsort(scores, samite_core::SortOrder::Descending)
        .unwrap();
    assignments.set(order, 1);
    let ids = graph.view(order, [2, 3, 1, 1], [24, 72, 72], 0).unwrap();
    let mut value = x;
    for (number, set) in sets.iter().enumerate() {
        let w = graph.stored(set).unwrap();
        let product = graph.mul_mat_id(w, value, ids).unwrap();
        // Host work between the products, with results of the same size as the ids.
        let mut side = graph.scale(scores, number as f32 + 7.0).unwrap();
        assignments.set(side, 1);
        for _ in 0..3 {
            side = graph.cumsum(side).unwrap();
            assignments.set(side, 1);
        }
        let one = graph.sum(side).unwrap();
        assignments.set(one, 1);
        value = graph.add(product, one).unwrap();
    }
    graph.set_output(value);
    let mut results = Vec::new();
    for devices in [vec![eager, Arc::clone(&cpu)], vec![cpu]] {
        let assignments = if devices.len() == 2 {
            assignments.clone()
        } else {
            Assignments::new()
        };
        let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
        scheduler
            .load_with(&graph, &assignments, &CancelToken::new())
            .unwrap();
        let plan = scheduler.current_plan().unwrap();
        assert_eq!(
            samite_sched::race_check::check_memory(plan),
            Vec::<String>::new()
        );
        if plan.devices().len() == 2 {
            let partial = plan
                .copies()
                .iter()
                .filter(|copy| copy.experts == Some(ids));
            assert_eq!(partial.count(), 3, "{plan}");
        }
        let chosen: Vec<f32> = (0..18).map(|i| ((i * 7) % 11) as f32 / 50.0).collect();
        scheduler.write(x, 0, &bytes(&[0.25; 24])).unwrap();
        scheduler.write(scores, 0, &bytes(&chosen)).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        results.push(read(&mut scheduler, value, 48).unwrap());
    }
    assert!(samite_sched::nmse(&results[0], &results[1]) < 1e-10);
}

#[test]
fn refused_writes_to_read_only_memory_name_the_tensor() {
    let owner = Arc::new([0u64; 8]);
    let base = std::ptr::NonNull::from(&*owner).cast();
    // SAFETY: the numbers are never written to, and the second reference keeps them alive.
    let memory = unsafe { HostMemory::borrow(base, 64, false, Box::new(Arc::clone(&owner))) };
    let buffer = samite_core::host_buffer(memory, Usage::Any);
    let mapped = StoredTensor::new("mapped", buffer, 0, f32s(&[8, 2])).unwrap();
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 2, 1, 1]).unwrap();
    let mapped = graph.stored(&mapped).unwrap();
    graph.cpy(x, mapped).unwrap();
    let error = Scheduler::new(vec![cpu()], Options::default())
        .unwrap()
        .plan(&graph, Assignments::NONE)
        .unwrap_err()
        .to_string();
    assert!(error.contains("'mapped' is in read-only memory"), "{error}");
}
