//! Decisions and execution of the scheduler, on small graphs over reference devices.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{bytes, device, f32s, fast, host, layers, read, roomy, weights};
use samite_core::{
    CancelToken, DType, Device, DeviceKind, Error, Graph, Op, StoredTensor, TensorGroup, TensorId,
    Usage,
};
use samite_sched::{Assignments, Fallback, Options, Plan, Reason, Scheduler, Watch, race_check};
use samite_testing::ticking;
use std::sync::Arc;
use std::time::Duration;

fn run_layers(owners: &[usize], devices: Vec<Arc<dyn Device>>, options: Options) -> Vec<Vec<f32>> {
    let owners: Vec<_> = owners.iter().map(|&i| &devices[i]).collect();
    let (graph, x, y) = layers(&owners);
    let mut scheduler = Scheduler::new(devices.clone(), options).unwrap();
    scheduler.load(&graph).unwrap();
    assert_eq!(race_check::check(scheduler.current_plan().unwrap(), 10), []);
    assert_eq!(
        race_check::check_memory(scheduler.current_plan().unwrap()),
        Vec::<String>::new()
    );
    (0..6)
        .map(|run| {
            scheduler
                .write(x, 0, &bytes(&[run as f32 - 2.5; 16]))
                .unwrap();
            scheduler.run(&CancelToken::new()).unwrap();
            read(&mut scheduler, y, 16).unwrap()
        })
        .collect()
}

#[test]
fn any_split_gives_the_same_result() {
    let one = run_layers(&[0; 4], vec![host()], Options::default());
    assert!(one[0] != one[1] && one[0].iter().all(|v| v.is_finite()));
    for boundary in 0..=4 {
        let owners: Vec<_> = (0..4).map(|layer| usize::from(layer >= boundary)).collect();
        for asynchronous in [false, true] {
            for events in [false, true] {
                for copies in [1, 2, 4] {
                    let first = device("first", |o| {
                        (o.asynchronous, o.events, o.copies) = (asynchronous, events, events)
                    });
                    let second = device("second", |o| {
                        (o.asynchronous, o.events) = (asynchronous, events)
                    });
                    let options = Options {
                        copies,
                        ..Default::default()
                    };
                    assert_eq!(
                        run_layers(&owners, vec![first, second, host()], options),
                        one,
                        "{owners:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_plan_explains_a_split_over_two_devices() {
    let (fast, host) = (fast(), host());
    let (graph, ..) = layers(&[&fast, &host]);
    let scheduler = Scheduler::new(vec![fast, host], Options::default()).unwrap();
    let plan = scheduler.plan(&graph, Assignments::NONE).unwrap();
    let expected = "\
8 operations in 2 splits on fast, host; 128 B copied per run
copies through the host, because no device makes them: 2 (128 B)
split 0 on fast: 4 operations, 1 tensor (64 B) copied in
    copy %0 none 'x' (64 B, through the host)
    %2 rms_norm: next to %3
    %3 mul_mat: weights 'w0' are there
    %4 silu … %5 add 'layer-0': next to %3
split 1 on host: 4 operations, 1 tensor (64 B) copied in
    copy %5 add 'layer-0' (64 B, through the host)
    %7 rms_norm: copies 64 bytes less there
    %8 mul_mat: weights 'w1' are there
    %9 silu … %10 add 'layer-1': next to %8
";
    assert!(plan.to_string().starts_with(expected), "{plan}");
    let json = plan.to_json();
    assert_eq!(json["splits"][1]["device"], "host");
    assert_eq!(json["bytes_copied"], 128);
    let svg = plan.to_svg();
    assert!(
        svg.contains("split 1 on host: 4 operations") && svg.matches("class=\"copy\"").count() == 2
    );
}

/// Places a sum whose operands are products on the host and whose user is a product on the fast
/// device. Returns its device, the reason of its copies, and the total bytes copied.
fn place_sum(
    host: Arc<dyn Device>,
    change: impl FnOnce(&mut Graph, [TensorId; 3], &dyn Fn(&mut Graph, TensorId)) -> TensorId,
) -> (String, Option<Reason>, usize) {
    let fast = fast();
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 2, 1, 1]).unwrap();
    let products = ["a", "b", "c"].map(|name| {
        let w = graph.stored(&weights(&host, name, f32s(&[8, 8]))).unwrap();
        graph.mul_mat(w, x).unwrap()
    });
    let use_on_fast = |graph: &mut Graph, result: TensorId| {
        let w = graph.stored(&weights(&fast, "d", f32s(&[8, 8]))).unwrap();
        let used = graph.mul_mat(w, result).unwrap();
        graph.set_output(used);
    };
    let sum = change(&mut graph, products, &use_on_fast);
    let devices = vec![Arc::clone(&fast), host];
    let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.write(x, 0, &bytes(&[0.5; 16])).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    let plan = scheduler.current_plan().unwrap();
    let placement = plan.placement();
    let device = placement.devices[sum.index()].unwrap();
    for id in graph.ids().filter(|&id| graph.memory_of(id) == sum) {
        assert_eq!(placement.devices[id.index()], Some(device));
    }
    let reason = placement.reasons[sum.index()].clone();
    let name = plan.devices().get(device).name().to_owned();
    (name, reason, plan.bytes_copied())
}

#[test]
fn a_sum_follows_its_operands_if_that_saves_copies() {
    let nearer = |saved| Some(Reason::Nearer { saved });
    let placed = place_sum(host(), |graph, [a, b, _], use_on_fast| {
        let sum = graph.add(a, b).unwrap();
        use_on_fast(graph, sum);
        sum
    });
    assert_eq!(placed, ("host".to_owned(), nearer(64), 64));
    // It is copied once, however many nodes use it.
    let placed = place_sum(host(), |graph, [a, b, _], use_on_fast| {
        let sum = graph.add(a, b).unwrap();
        use_on_fast(graph, sum);
        use_on_fast(graph, sum);
        sum
    });
    assert_eq!(placed, ("host".to_owned(), nearer(64), 64));
    // A sum of a sum follows it.
    let placed = place_sum(host(), |graph, [a, b, c], use_on_fast| {
        let first = graph.add(a, b).unwrap();
        let sum = graph.add(first, c).unwrap();
        use_on_fast(graph, sum);
        sum
    });
    assert_eq!(placed, ("host".to_owned(), nearer(64), 64));
    // Views move with it.
    let placed = place_sum(host(), |graph, [a, b, _], use_on_fast| {
        let sum = graph.add(a, b).unwrap();
        let view = graph.reshape(sum, [8, 1, 2, 1]).unwrap();
        use_on_fast(graph, view);
        sum
    });
    assert_eq!(placed, ("host".to_owned(), nearer(64), 64));
}

#[test]
fn a_sum_stays_with_its_consumer_without_a_gain() {
    // A tensor that is used twice is also copied only once.
    let placed = place_sum(host(), |graph, [a, ..], use_on_fast| {
        let sum = graph.add(a, a).unwrap();
        use_on_fast(graph, sum);
        sum
    });
    assert_eq!((&*placed.0, placed.2), ("fast", 64));
    // One of the operands is copied in any case.
    for is_viewed in [false, true] {
        let placed = place_sum(host(), |graph, [a, b, _], use_on_fast| {
            use_on_fast(graph, a);
            let sum = graph.add(a, b).unwrap();
            let used = if is_viewed {
                graph.reshape(sum, [8, 1, 2, 1]).unwrap()
            } else {
                sum
            };
            use_on_fast(graph, used);
            sum
        });
        assert_eq!((&*placed.0, placed.2), ("fast", 128), "viewed: {is_viewed}");
    }
    // Outputs stay on their device.
    let placed = place_sum(host(), |graph, [a, b, _], use_on_fast| {
        let sum = graph.add(a, b).unwrap();
        graph.set_output(sum);
        use_on_fast(graph, sum);
        sum
    });
    assert_eq!((&*placed.0, placed.2), ("fast", 128));
    // The device of the operands does not support the addition.
    let weak = device("host", |options| {
        (options.kind, options.without_ops) = (samite_core::DeviceKind::Cpu, vec!["add".into()]);
    });
    let placed = place_sum(weak, |graph, [a, b, _], use_on_fast| {
        let sum = graph.add(a, b).unwrap();
        use_on_fast(graph, sum);
        sum
    });
    assert_eq!((&*placed.0, placed.2), ("fast", 128));
}

#[test]
fn alternating_reasons_are_counted() {
    let (fast, host) = (fast(), host());
    let (graph, ..) = layers(&[&fast, &fast, &fast, &host]);
    let scheduler = Scheduler::new(vec![fast, host], Options::default()).unwrap();
    let plan = scheduler.plan(&graph, Assignments::NONE).unwrap();
    let expected = "\
16 operations in 2 splits on fast, host; 128 B copied per run
copies through the host, because no device makes them: 2 (128 B)
split 0 on fast: 12 operations, 1 tensor (64 B) copied in
    copy %0 none 'x' (64 B, through the host)
    %2 rms_norm … %15 add 'layer-2': 9 next to others, 3 where their weights are
split 1 on host: 4 operations, 1 tensor (64 B) copied in
";
    assert!(plan.to_string().starts_with(expected), "{plan}");
}

#[test]
fn known_topologies_reuse_plan_and_memory() {
    let host = host();
    let build = || layers(&[&host, &host]);
    let w = weights(&host, "w", f32s(&[8, 8]));
    let graph_of = |rows: usize| {
        let mut g = Graph::new();
        let x = g.input("x", DType::F32, [8, rows, 1, 1]).unwrap();
        let w = g.stored(&w).unwrap();
        let y = g.mul_mat(w, x).unwrap();
        g.set_output(y);
        g
    };
    let mut scheduler = Scheduler::new(vec![Arc::clone(&host)], Options::default()).unwrap();
    scheduler.reserve(&graph_of(16), Assignments::NONE).unwrap();
    scheduler.load(&graph_of(16)).unwrap();
    scheduler.load(&graph_of(1)).unwrap();
    let before = scheduler.counters();
    for _ in 0..5 {
        scheduler.load(&graph_of(1)).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        scheduler.load(&graph_of(16)).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
    }
    let after = scheduler.counters();
    assert_eq!(
        (after.plans, after.buffers, after.prepared),
        (before.plans, before.buffers, before.prepared)
    );
    assert_eq!(after.runs, before.runs + 10);
    // Another weight is another topology.
    scheduler.load(&build().0).unwrap();
    assert_eq!(scheduler.counters().plans, after.plans + 1);
}

#[test]
fn reserved_memory_is_exact() {
    let host = host();
    let (graph, ..) = layers(&[&host, &host]);
    let mut scheduler = Scheduler::new(vec![host], Options::default()).unwrap();
    let planned = scheduler
        .plan(&graph, Assignments::NONE)
        .unwrap()
        .memory_by_type();
    assert_eq!(scheduler.buffer_sizes()[0].1, 0);
    scheduler.load(&graph).unwrap();
    assert_eq!(scheduler.buffer_sizes(), planned);
}

#[test]
fn unsupported_operations_fall_back_with_a_reason() {
    let weak = device("weak", |o| o.without_ops = vec!["silu".into()]);
    let host = host();
    let (graph, ..) = layers(&[&weak]);
    let plan = |fallback| {
        let options = Options {
            fallback,
            ..Default::default()
        };
        let set = samite_sched::DeviceSet::new(vec![Arc::clone(&weak), Arc::clone(&host)]).unwrap();
        Plan::new(&graph, &set, Assignments::NONE, &options)
    };
    let allowed = plan(Fallback::Warn).unwrap();
    assert_eq!(allowed.fallbacks().len(), 1);
    assert!(
        allowed
            .to_string()
            .contains("fallback: %4 silu runs on host; weak:"),
        "{allowed}"
    );
    let denied = plan(Fallback::Deny).unwrap_err().to_string();
    assert!(
        denied.contains("silu") && denied.contains("denied"),
        "{denied}"
    );
}

#[test]
fn a_product_refused_by_its_weight_device_falls_back() {
    // No neighbour is on that device, only the weights.
    let weak = device("weak", |o| o.without_ops = vec!["mul_mat".into()]);
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 2, 1, 1]).unwrap();
    let w = graph.stored(&weights(&weak, "w", f32s(&[8, 8]))).unwrap();
    let y = graph.mul_mat(w, x).unwrap();
    graph.set_output(y);
    let set = samite_sched::DeviceSet::new(vec![weak, host()]).unwrap();
    let plan = |fallback| {
        let options = Options {
            fallback,
            ..Default::default()
        };
        Plan::new(&graph, &set, Assignments::NONE, &options)
    };
    assert_eq!(plan(Fallback::Allow).unwrap().fallbacks().len(), 1);
    assert!(
        plan(Fallback::Deny)
            .unwrap_err()
            .to_string()
            .contains("mul_mat")
    );
}

#[test]
fn an_operation_without_a_device_is_an_error_with_all_reasons() {
    let a = device("a", |o| o.without_ops = vec!["silu".into()]);
    let b = device("b", |o| o.without_ops = vec!["silu".into()]);
    let (graph, ..) = layers(&[&a]);
    let error = Scheduler::new(vec![a, b], Options::default())
        .unwrap()
        .load(&graph)
        .unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, Error::Placement(_)) && text.contains("a: ") && text.contains("b: "),
        "{text}"
    );
}

#[test]
fn memory_of_an_absent_device_is_named() {
    let (fast, host) = (fast(), host());
    let (graph, ..) = layers(&[&fast]);
    let error = Scheduler::new(vec![host], Options::default())
        .unwrap()
        .load(&graph)
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "tensor 'w0' is in memory 'fast', which none of the devices (host) can use: add the device that owns it"
    );
}

#[test]
fn assignments_are_followed_or_refused() {
    let (fast, host) = (
        device("fast", |o| o.without_ops = vec!["add".into()]),
        host(),
    );
    let (graph, _, y) = layers(&[&host, &host]);
    let scheduler = Scheduler::new(vec![fast, host], Options::default()).unwrap();
    let silu = TensorId::from_index(4);
    let mut assignments = Assignments::new();
    assignments.set(silu, 0);
    let plan = scheduler.plan(&graph, &assignments).unwrap();
    assert_eq!(plan.placement().devices[silu.index()], Some(0));
    assert_eq!(
        plan.placement().reasons[silu.index()],
        Some(Reason::Assigned)
    );
    assignments.set(y, 0);
    let error = scheduler
        .plan(&graph, &assignments)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("'layer-1'") && error.contains("fast"),
        "{error}"
    );
    let mut wrong = Assignments::new();
    wrong.set(TensorId::from_index(999), 0);
    assert!(scheduler.plan(&graph, &wrong).is_err());
}

#[test]
fn buffers_are_split_at_the_size_limit() {
    let small = device("small", |o| o.max_buffer_size = 256);
    let mut graph = Graph::new();
    let inputs: Vec<_> = (0..6)
        .map(|_| graph.input("x", DType::F32, [40, 1, 1, 1]).unwrap())
        .collect();
    let sum = inputs
        .iter()
        .copied()
        .reduce(|a, b| graph.add(a, b).unwrap())
        .unwrap();
    graph.set_output(sum);
    let mut scheduler = Scheduler::new(vec![Arc::clone(&small)], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    let plan = scheduler.current_plan().unwrap();
    assert!(
        plan.memory().chunks[0].len() >= 6
            && plan.memory().chunks[0].iter().all(|&chunk| chunk <= 256)
    );
    for (i, &x) in inputs.iter().enumerate() {
        scheduler.write(x, 0, &bytes(&[i as f32; 40])).unwrap();
    }
    scheduler.run(&CancelToken::new()).unwrap();
    assert_eq!(read(&mut scheduler, sum, 40).unwrap(), [15.0; 40]);
    let mut large = Graph::new();
    let x = large.input("large", DType::F32, [65, 1, 1, 1]).unwrap();
    let y = large.sqr(x).unwrap();
    large.set_output(y);
    let error = scheduler.load(&large).unwrap_err().to_string();
    assert!(
        error.contains("'large'") && error.contains("256"),
        "{error}"
    );
    // The scheduler still works.
    scheduler.load(&graph).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
}

#[test]
fn out_of_memory_names_the_device_and_leaves_the_scheduler_usable() {
    let limited = device("limited", |o| o.memory_limit = Some(4096));
    let mut scheduler = Scheduler::new(vec![limited], Options::default()).unwrap();
    let graph_of = |n: usize| {
        let mut g = Graph::new();
        let x = g.input("x", DType::F32, [n, 1, 1, 1]).unwrap();
        let y = g.sqr(x).unwrap();
        g.set_output(y);
        g
    };
    match scheduler.load(&graph_of(4096)).unwrap_err() {
        Error::OutOfMemory {
            device,
            asked,
            free,
            ..
        } => {
            assert_eq!((&*device, free), ("limited", Some(4096)));
            assert!(asked >= 2 * 4096 * 4);
        }
        other => panic!("{other}"),
    }
    assert!(
        scheduler
            .run(&CancelToken::new())
            .unwrap_err()
            .to_string()
            .contains("no graph is loaded")
    );
    scheduler.load(&graph_of(64)).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
}

#[test]
fn watchers_see_nodes_and_can_stop() {
    let (fast, host) = (fast(), host());
    let (graph, x, y) = layers(&[&fast, &host]);
    let mut scheduler = Scheduler::new(vec![fast, host], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.write(x, 0, &bytes(&[0.5; 16])).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    let plain = read(&mut scheduler, y, 16).unwrap();
    let mut seen = Vec::new();
    let wants = |id: TensorId| [3, 5, 10].contains(&id.index());
    scheduler
        .run_watched(&CancelToken::new(), wants, |id, place| {
            let mut value = vec![0; place.layout().bytes()];
            place.read(0, &mut value)?;
            seen.push((id.index(), value));
            Ok(Watch::Continue)
        })
        .unwrap();
    assert_eq!(
        seen.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
        [3, 5, 10]
    );
    assert_eq!(seen[2].1, bytes(&plain));
    let stopped = scheduler.run_watched(&CancelToken::new(), wants, |id, _| {
        Ok(if id.index() == 5 {
            Watch::Stop
        } else {
            Watch::Continue
        })
    });
    assert!(matches!(stopped, Err(Error::Stopped)), "and not cancelled");
    scheduler.run(&CancelToken::new()).unwrap();
    assert_eq!(read(&mut scheduler, y, 16).unwrap(), plain);
    let cancel = CancelToken::new();
    let cancelled = scheduler.run_watched(&cancel, wants, |_, _| {
        cancel.cancel();
        Ok(Watch::Continue)
    });
    assert!(matches!(cancelled, Err(Error::Cancelled)));
    let failed = scheduler.run_watched(&CancelToken::new(), wants, |_, _| {
        Err(Error::invalid("the disk is full"))
    });
    assert!(failed.unwrap_err().to_string().contains("disk is full"));
    scheduler.run(&CancelToken::new()).unwrap();
    assert_eq!(read(&mut scheduler, y, 16).unwrap(), plain);
}

#[test]
fn repeated_watched_runs_prepare_nothing_new() {
    for copies in [1, 2] {
        let devices = vec![fast(), host()];
        let (graph, x, _) = layers(&[&devices[0], &devices[1]]);
        let options = Options {
            copies,
            ..Options::default()
        };
        let mut scheduler = Scheduler::new(devices, options).unwrap();
        scheduler.load(&graph).unwrap();
        let mut watched = |of_four: usize| {
            let before = scheduler.counters();
            for _ in 0..copies {
                scheduler.write(x, 0, &bytes(&[0.5; 16])).unwrap();
                scheduler
                    .run_watched(
                        &CancelToken::new(),
                        |id| id.index().is_multiple_of(of_four),
                        |_, _| Ok(Watch::Continue),
                    )
                    .unwrap();
            }
            let after = scheduler.counters();
            assert_eq!(after.plans, before.plans);
            assert_eq!(after.runs, before.runs + copies);
            (after.prepared - before.prepared) / copies
        };
        // Nodes 2, 3, 4, 5 and 7, 8, 9, 10. Those up to 4 run together, and the rest of each split.
        assert_eq!([watched(4), watched(4)], [4, 0], "{copies} copies");
        assert_eq!([watched(1), watched(1), watched(4)], [8, 0, 4]);
    }
}

#[test]
fn views_are_observed_after_the_node_they_view() {
    let host = host();
    let cache = TensorGroup::allocate(&host.buffer_type(), Usage::Any, &[("cache", f32s(&[4, 3]))]);
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let at = graph.input("at", DType::I32, [1, 1, 1, 1]).unwrap();
    let leaf = graph.stored(&cache.unwrap().tensors[0]).unwrap();
    let unseen = graph.rows(leaf, 0, 1).unwrap();
    let square = graph.sqr(x).unwrap();
    let turned = graph.reshape(square, [1, 4, 1, 1]).unwrap();
    let written = graph.set_rows(square, at, leaf).unwrap();
    let rows = graph.rows(written, 1, 2).unwrap();
    let of_input = graph.reshape(x, [2, 2, 1, 1]).unwrap();
    let sum = graph.sum_rows(rows).unwrap();
    let product = graph.mul(turned, turned).unwrap();
    let other = graph.mul(of_input, of_input).unwrap();
    let last = graph.sqr(unseen).unwrap();
    for id in [sum, product, other, last] {
        graph.set_output(id);
    }
    let mut scheduler = Scheduler::new(vec![host], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler
        .write(x, 0, &bytes(&[1.0, 2.0, 3.0, 4.0]))
        .unwrap();
    scheduler.write(at, 0, &2i32.to_le_bytes()).unwrap();
    let mut seen = Vec::new();
    scheduler
        .run_watched(
            &CancelToken::new(),
            |id| graph.tensor(id).op.is_view(),
            |id, place| {
                let mut value = vec![0; place.layout().bytes()];
                place.read(0, &mut value)?;
                seen.push((id, value));
                Ok(Watch::Continue)
            },
        )
        .unwrap();
    let squares = [1.0, 4.0, 9.0, 16.0];
    let rows_written = [[0.0; 4], squares].concat();
    assert_eq!(
        seen,
        [(turned, bytes(&squares)), (rows, bytes(&rows_written))]
    );
}

#[test]
fn a_paused_run_advances_on_request() {
    let devices = vec![fast(), host()];
    let (graph, x, y) = layers(&[&devices[0], &devices[1]]);
    let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.write(x, 0, &bytes(&[0.5; 16])).unwrap();
    let cancel = CancelToken::new();
    let mut run = scheduler.watch(&cancel, |id| id.index() == 5).unwrap();
    let (id, place) = run.advance().unwrap().unwrap();
    assert_eq!(id.index(), 5);
    // The rest of the run reads what is written there.
    place.write(0, &bytes(&[0.0; 16])).unwrap();
    assert!(run.advance().unwrap().is_none());
    assert!(run.advance().unwrap().is_none());
    assert_eq!(scheduler.counters().runs, 1);
    assert_eq!(read(&mut scheduler, y, 16).unwrap(), [0.0; 16]);
    // Dropping a watched run early is harmless.
    drop(scheduler.watch(&cancel, |_| true).unwrap().advance());
    scheduler.run(&cancel).unwrap();
    assert_ne!(read(&mut scheduler, y, 16).unwrap(), [0.0; 16]);
}

#[test]
fn watched_runs_leave_traces() {
    let (fast, host) = (fast(), host());
    let (graph, ..) = layers(&[&fast, &host]);
    let mut scheduler = Scheduler::new(vec![fast, host], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.start_trace();
    scheduler
        .run_watched(
            &CancelToken::new(),
            |id| id.index() == 4,
            |_, _| Ok(Watch::Continue),
        )
        .unwrap();
    let events = scheduler.trace().unwrap().take_events();
    let of = |category: &str| events.iter().filter(|e| e["cat"] == category).count();
    assert_eq!((of("node"), of("copy")), (8, 2));
    // A span for each piece.
    let pieces = events.iter().filter(|event| event["cat"] == "split");
    let nodes: Vec<_> = pieces
        .map(|e| e["args"]["nodes"].as_u64().unwrap())
        .collect();
    assert_eq!(nodes, [3, 1, 4]);
}

/// Returns a graph whose nodes take a while: `count` consecutive squares.
fn squares(count: usize, elements: usize) -> (Graph, TensorId, TensorId) {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [elements, 1, 1, 1]).unwrap();
    let mut y = x;
    for _ in 0..count {
        y = graph.sqr(y).unwrap();
    }
    graph.set_output(y);
    (graph, x, y)
}

#[test]
fn watchers_see_finished_results_of_asynchronous_devices() {
    let slow = device("slow", |o| (o.asynchronous, o.events) = (true, true));
    let elements = 1 << 18;
    let (graph, x, y) = squares(2, elements);
    let mut scheduler = Scheduler::new(vec![slow], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    for value in [2.0f32, 3.0] {
        let values = bytes(&vec![value; elements]);
        scheduler.write(x, 0, &values).unwrap();
        let mut last = vec![0; 4];
        let see = |_, place: &samite_core::TensorRef| {
            place.read((elements - 1) * 4, &mut last)?;
            Ok(Watch::Continue)
        };
        scheduler
            .run_watched(&CancelToken::new(), |id| id == y, see)
            .unwrap();
        assert_eq!(last, bytes(&[value.powi(4)]));
    }
}

#[test]
fn node_spans_of_one_device_do_not_overlap() {
    let slow = device("slow", |o| (o.asynchronous, o.events) = (true, true));
    let (graph, ..) = squares(3, 1 << 18);
    let mut scheduler = Scheduler::new(vec![slow], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.start_trace();
    // The second is issued while the first is still running.
    for _ in 0..2 {
        scheduler.run(&CancelToken::new()).unwrap();
    }
    scheduler.synchronize().unwrap();
    let events = scheduler.trace().unwrap().take_events();
    let nodes = events.iter().filter(|event| event["cat"] == "node");
    let span = |event: &serde_json::Value| ["ts", "dur"].map(|key| event[key].as_f64().unwrap());
    let mut spans: Vec<_> = nodes.map(span).collect();
    assert_eq!(spans.len(), 6);
    spans.sort_by(|a, b| a[0].total_cmp(&b[0]));
    for pair in spans.windows(2) {
        let [start, took] = pair[0];
        assert!(start + took <= pair[1][0] + 0.01, "{spans:?}");
    }
}

#[test]
fn cancelled_runs_leave_the_scheduler_usable() {
    let (fast, host) = (
        device("fast", |o| (o.asynchronous, o.events) = (true, true)),
        host(),
    );
    let (graph, x, y) = layers(&[&fast, &host]);
    let mut scheduler = Scheduler::new(
        vec![fast, host],
        Options {
            copies: 2,
            ..Default::default()
        },
    )
    .unwrap();
    scheduler.load(&graph).unwrap();
    let cancel = CancelToken::new();
    let mut results = Vec::new();
    for round in 0..4 {
        scheduler.write(x, 0, &bytes(&[0.5; 16])).unwrap();
        cancel.cancel();
        assert!(matches!(scheduler.run(&cancel), Err(Error::Cancelled)));
        cancel.reset();
        scheduler
            .write(x, 0, &bytes(&[(round % 2) as f32; 16]))
            .unwrap();
        scheduler.run(&cancel).unwrap();
        results.push(read(&mut scheduler, y, 16).unwrap());
    }
    assert!(results[0] == results[2] && results[1] == results[3] && results[0] != results[1]);
}

#[test]
fn only_output_values_can_be_read() {
    let host = host();
    let (graph, ..) = layers(&[&host]);
    let mut scheduler = Scheduler::new(vec![host], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    let error = scheduler
        .read(TensorId::from_index(3), 0, &mut [0; 4])
        .unwrap_err()
        .to_string();
    assert!(error.contains("set_output"), "{error}");
    assert!(
        scheduler
            .read(TensorId::from_index(99), 0, &mut [0; 4])
            .is_err()
    );
    assert!(
        scheduler
            .write(TensorId::from_index(3), 0, &[0; 4])
            .is_err()
    );
    assert!(
        scheduler
            .write(TensorId::from_index(0), 61, &[0; 4])
            .is_err()
    );
}

#[test]
fn trace_times_come_from_the_environment_clock() {
    let devices = vec![host()];
    let (graph, x, _) = layers(&[&devices[0]; 2]);
    let mut options = Options::default();
    options.environment.clock = ticking(Duration::from_millis(1));
    let mut scheduler = Scheduler::new(devices.clone(), options).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.start_trace();
    let splits = [0, 1].map(|_| {
        scheduler.write(x, 0, &bytes(&[1.0; 16])).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        let events = scheduler.trace().unwrap().take_events();
        let split = events.into_iter().find(|event| event["cat"] == "split");
        let split = split.unwrap();
        (
            split["ts"].as_f64().unwrap(),
            split["dur"].as_f64().unwrap(),
        )
    });
    // Clock reads: the recording starts; a split starts, its nodes are observed, it ends; the next
    // split starts.
    assert_eq!(splits, [(1000.0, 2000.0), (4000.0, 2000.0)]);
}

#[test]
fn traces_show_nodes_copies_and_splits() {
    let (fast, host) = (fast(), host());
    let (graph, ..) = layers(&[&fast, &host]);
    let mut scheduler = Scheduler::new(vec![fast, host], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    scheduler.start_trace();
    scheduler.run(&CancelToken::new()).unwrap();
    let trace = scheduler.finish_trace().unwrap();
    let json = trace.into_json();
    let events = json["traceEvents"].as_array().unwrap();
    let count = |category: &str| events.iter().filter(|e| e["cat"] == category).count();
    assert_eq!((count("node"), count("split"), count("copy")), (8, 2, 2));
    assert!(
        events
            .iter()
            .filter(|e| e["ph"] == "X")
            .all(|e| e["dur"].as_f64().unwrap() >= 0.0)
    );
    scheduler.run(&CancelToken::new()).unwrap();
    assert!(scheduler.finish_trace().is_none());
}

#[test]
fn caches_written_on_one_device_are_copied_again_for_another() {
    check_cache_is_copied_again(|graph, cache| vec![graph.stored(cache).unwrap(); 3]);
}

#[test]
fn caches_may_appear_as_several_leaves() {
    check_cache_is_copied_again(|graph, cache| {
        (0..3).map(|_| graph.stored(cache).unwrap()).collect()
    });
}

/// Checks that the reader's copy of the cache is made after each write, not once.
fn check_cache_is_copied_again(leaves: impl Fn(&mut Graph, &Arc<StoredTensor>) -> Vec<TensorId>) {
    let (fast, host) = (fast(), host());
    let cache = TensorGroup::allocate(&host.buffer_type(), Usage::Any, &[("cache", f32s(&[4, 3]))])
        .unwrap();
    let mut graph = Graph::new();
    let leaves = leaves(&mut graph, &cache.tensors[0]);
    let row = graph.input("row", DType::F32, [4, 1, 1, 1]).unwrap();
    let at = graph.input("at", DType::I32, [1, 1, 1, 1]).unwrap();
    let at2 = graph.input("at2", DType::I32, [1, 1, 1, 1]).unwrap();
    let mut assignments = Assignments::new();
    let mut sums = Vec::new();
    for (index, destination) in [(at, leaves[0]), (at2, leaves[1])] {
        graph.set_rows(row, index, destination).unwrap();
        let sum = graph.sum_rows(leaves[2]).unwrap();
        assignments.set(sum, 0);
        graph.set_output(sum);
        sums.push(sum);
    }
    let mut scheduler = Scheduler::new(vec![fast, host], Options::default()).unwrap();
    scheduler
        .load_with(&graph, &assignments, &CancelToken::new())
        .unwrap();
    scheduler
        .write(row, 0, &bytes(&[1.0, 2.0, 3.0, 4.0]))
        .unwrap();
    scheduler.write(at, 0, &2i32.to_le_bytes()).unwrap();
    scheduler.write(at2, 0, &0i32.to_le_bytes()).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    assert_eq!(read(&mut scheduler, sums[0], 3).unwrap(), [0.0, 0.0, 10.0]);
    assert_eq!(read(&mut scheduler, sums[1], 3).unwrap(), [10.0, 0.0, 10.0]);
}

#[test]
fn reserving_more_unloads_instead_of_leaving_a_broken_graph() {
    let host = host();
    let mut scheduler = Scheduler::new(vec![Arc::clone(&host)], Options::default()).unwrap();
    let graph_of = |n: usize| {
        let mut g = Graph::new();
        let x = g.input("x", DType::F32, [n, 1, 1, 1]).unwrap();
        let y = g.sqr(x).unwrap();
        g.set_output(y);
        (g, x, y)
    };
    let (graph, x, y) = graph_of(4);
    scheduler.load(&graph).unwrap();
    scheduler
        .reserve(&graph_of(4096).0, Assignments::NONE)
        .unwrap();
    for error in [
        scheduler.run(&CancelToken::new()).unwrap_err(),
        scheduler.write(x, 0, &[0; 16]).unwrap_err(),
        scheduler.read(y, 0, &mut [0; 16]).unwrap_err(),
    ] {
        assert!(error.to_string().contains("no graph is loaded"), "{error}");
    }
    scheduler.load(&graph).unwrap();
    scheduler.write(x, 0, &bytes(&[3.0; 4])).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    assert_eq!(read(&mut scheduler, y, 4).unwrap(), [9.0; 4]);
    // A smaller graph changes nothing.
    scheduler
        .reserve(&graph_of(64).0, Assignments::NONE)
        .unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
}

#[test]
fn reads_wait_for_output_writes_of_other_devices() {
    // Two devices share one memory: the leaf belongs to the first, and the second does the last
    // write.
    let shared = |name: &str| {
        device(name, |o| {
            (o.asynchronous, o.events, o.host_memory) = (true, true, true)
        })
    };
    let devices = vec![shared("a"), shared("b"), host()];
    let mut graph = Graph::new();
    let n = 1 << 16;
    let x = graph.input("x", DType::F32, [n, 1, 1, 1]).unwrap();
    let scratch = graph.leaf("scratch", DType::F32, [n, 1, 1, 1]).unwrap();
    graph.set_output(scratch);
    let first = graph.cpy(x, scratch).unwrap();
    let mut assignments = Assignments::new();
    assignments.set(scratch, 0);
    assignments.set(first, 0);
    let mut value = x;
    for _ in 0..20 {
        value = graph.sqr(value).unwrap();
        assignments.set(value, 1);
    }
    let last = graph.cpy(value, scratch).unwrap();
    assignments.set(last, 1);
    let mut scheduler = Scheduler::new(devices, Options::default()).unwrap();
    scheduler
        .load_with(&graph, &assignments, &CancelToken::new())
        .unwrap();
    assert_eq!(race_check::check(scheduler.current_plan().unwrap(), 4), []);
    scheduler.write(x, 0, &bytes(&vec![-1.0; n])).unwrap();
    for _ in 0..3 {
        scheduler.run(&CancelToken::new()).unwrap();
        let value = read(&mut scheduler, scratch, n).unwrap();
        assert!(value.iter().all(|&v| v == 1.0));
    }
}

#[test]
fn assigned_writes_are_followed_or_refused() {
    let (fast, host) = (fast(), host());
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let scratch = graph.leaf("scratch", DType::F32, [4, 1, 1, 1]).unwrap();
    let written = graph.cpy(x, scratch).unwrap();
    graph.set_name(written, "written");
    graph.set_output(written);
    let mut assignments = Assignments::new();
    assignments.set(written, 0);
    let scheduler = Scheduler::new(vec![fast, host], Options::default()).unwrap();
    let plan = scheduler.plan(&graph, &assignments).unwrap();
    assert_eq!(plan.placement().devices[written.index()], Some(0));
    assignments.set(scratch, 1);
    let error = scheduler
        .plan(&graph, &assignments)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("'written'") && error.contains("assigned to fast") && error.contains("host"),
        "{error}"
    );
}

#[test]
fn graphs_with_views_caches_and_outputs_are_copied() {
    let (a, b) = (fast(), device("b", |o| o.alignment = 256));
    let cache = TensorGroup::allocate(&a.buffer_type(), Usage::Any, &[("cache", f32s(&[8, 4]))]);
    let cache = cache.unwrap();
    let start: Vec<f32> = (0..32).map(|i| i as f32).collect();
    cache.tensors[0].tensor().write(0, &bytes(&start)).unwrap();
    let w = weights(&a, "w", f32s(&[8, 8]));
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 1, 1, 1]).unwrap();
    let at = graph.input("at", DType::I32, [1, 1, 1, 1]).unwrap();
    let w = graph.stored(&w).unwrap();
    let cache_leaf = graph.stored(&cache.tensors[0]).unwrap();
    let scratch = graph.leaf("scratch", DType::F32, [8, 1, 1, 1]).unwrap();
    let product = graph.mul_mat(w, x).unwrap();
    let kept = graph.cpy(product, scratch).unwrap();
    let written = graph.set_rows(kept, at, cache_leaf).unwrap();
    let last_rows = graph.rows(written, 2, 2).unwrap();
    let turned = graph.transpose(last_rows).unwrap();
    let columns = graph.cont(turned).unwrap();
    graph.set_output(columns);
    graph.set_output(last_rows);

    let copy = samite_sched::compare::copy_graph(&graph, &*b).unwrap();
    assert_eq!(copy.graph.to_string(), graph.to_string());
    assert!(copy.stored.tensors.iter().all(|stored| {
        samite_core::same_buffer_type(stored.tensor().buffer.buffer_type(), &b.buffer_type())
    }));
    let run = |device: Arc<dyn Device>, graph: &Graph| {
        let mut scheduler = Scheduler::new(vec![device], Options::default()).unwrap();
        scheduler.load(graph).unwrap();
        scheduler.write(x, 0, &bytes(&[0.5; 8])).unwrap();
        scheduler.write(at, 0, &3i32.to_le_bytes()).unwrap();
        scheduler.run(&CancelToken::new()).unwrap();
        [last_rows, columns].map(|id| read(&mut scheduler, id, 16).unwrap())
    };
    let expected = run(a, &graph);
    assert_eq!(expected[0][..8], start[16..24]);
    assert_ne!(expected[0][8..], start[24..]);
    assert_eq!(run(b, &copy.graph), expected);
    // The copy has its own caches, created before either graph ran.
    let mut original = vec![0; 128];
    cache.tensors[0].tensor().read(0, &mut original).unwrap();
    assert_eq!(original[96..], bytes(&expected[0][8..])[..]);
}

#[test]
fn unwritable_stored_tensors_are_reported() {
    let (a, b) = (fast(), device("b", |_| {}));
    let cache = TensorGroup::allocate(&b.buffer_type(), Usage::Any, &[("cache", f32s(&[4]))]);
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let target = graph.stored(&cache.unwrap().tensors[0]).unwrap();
    let written = graph.cpy(x, target).unwrap();
    let mut assignments = Assignments::new();
    assignments.set(written, 0);
    let scheduler = Scheduler::new(vec![a, b], Options::default()).unwrap();
    let error = scheduler
        .plan(&graph, &assignments)
        .unwrap_err()
        .to_string();
    assert!(error.contains("cannot write to 'cache' in b"), "{error}");
    let plan = scheduler.plan(&graph, Assignments::NONE).unwrap();
    assert_eq!(plan.placement().devices[written.index()], Some(1));
}

#[test]
fn result_sizes_include_the_requested_extra_memory() {
    const MORE: usize = 1000;
    let device = roomy(host(), |op| if matches!(op, Op::Sqr) { MORE } else { 0 });
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 1, 1, 1]).unwrap();
    let scaled = graph.scale(x, 2.0).unwrap();
    let square = graph.sqr(scaled).unwrap();
    let y = graph.scale(square, 0.5).unwrap();
    let z = graph.add(y, x).unwrap();
    graph.set_output(z);
    let mut scheduler = Scheduler::new(vec![device], Options::default()).unwrap();
    let plan = scheduler.plan(&graph, Assignments::NONE).unwrap();
    let size = |id: TensorId| {
        let blocks = plan.memory().tensors[id.index()].as_ref().unwrap();
        blocks.get(0).size
    };
    assert!(size(scaled) < MORE, "it is no square");
    // Not in the memory of its operand, which is smaller. But the next node may reuse the memory of
    // the square.
    assert!(size(square) >= 32 + MORE);
    assert_eq!((size(y), plan.memory().in_place), (size(square), 2));
    assert_eq!(race_check::check_memory(&plan), Vec::<String>::new());
    scheduler.load(&graph).unwrap();
    scheduler.write(x, 0, &bytes(&[3.0; 8])).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    assert_eq!(read(&mut scheduler, z, 8).unwrap(), [21.0; 8]);
}

#[test]
fn copies_through_the_host_are_reported() {
    let explained = |copies: bool| {
        let [a, b] = ["a", "b"].map(|name| device(name, |o| o.copies = copies));
        // Reference devices copy between their own memory and the host's.
        let last = device("host", |o| {
            (o.kind, o.host_memory) = (DeviceKind::Cpu, true)
        });
        let (graph, ..) = layers(&[&a, &b, &last]);
        let scheduler = Scheduler::new(vec![a, b, last], Options::default()).unwrap();
        let plan = scheduler.plan(&graph, Assignments::NONE).unwrap();
        assert!(plan.copies().len() >= 3, "{plan}");
        let json = plan.to_json();
        assert_eq!(
            json["through_host"].as_array().unwrap().len(),
            plan.detours().count()
        );
        (plan.detours().count(), plan.to_string())
    };
    for copies in [false, true] {
        // From `a` to `b`. Copies from and to host memory have one end there.
        let (count, text) = explained(copies);
        assert_eq!(count, 1, "{text}");
        assert!(
            text.contains("\ncopies through the host, because no device makes them: 1 (64 B)\n"),
            "{text}"
        );
        assert_eq!(text.matches(", through the host)").count(), 1, "{text}");
    }
}
