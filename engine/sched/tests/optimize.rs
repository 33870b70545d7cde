//! Requests of devices about the order of nodes and about memory: valid ones are followed, invalid
//! ones refused.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{Special, bytes, host, read};
use samite_core::{CancelToken, DType, Graph, KeepAlive, TensorId};
use samite_sched::{Assignments, DeviceSet, Options, Plan, Scheduler, race_check};

/// `x -> a -> view of a -> b -> c -> d`, where every result could reuse the memory of the one
/// before the last.
struct Chain {
    graph: Graph,
    x: TensorId,
    nodes: [TensorId; 4],
    view: TensorId,
}

fn chain() -> Chain {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 4, 1, 1]).unwrap();
    let a = graph.cumsum(x).unwrap();
    let view = graph.view(a, [4, 2, 1, 1], [16, 64, 64], 32).unwrap();
    let b = graph.cumsum(view).unwrap();
    let c = graph.cumsum(b).unwrap();
    let d = graph.cumsum(c).unwrap();
    graph.set_output(d);
    Chain {
        graph,
        x,
        nodes: [a, b, c, d],
        view,
    }
}

fn plan_with(graph: &Graph, kept: Vec<KeepAlive>) -> samite_core::Result<Plan> {
    let device = Special::optimizing(host(), move |_, _| kept.clone());
    let devices = DeviceSet::new(vec![device]).unwrap();
    Plan::new(graph, &devices, Assignments::NONE, &Options::default())
}

#[test]
fn tensors_to_preserve_are_not_overwritten() {
    let Chain {
        graph,
        nodes: [a, b, c, d],
        view,
        ..
    } = chain();
    // Returns whether two results share bytes.
    let overlaps = |plan: &Plan, one: TensorId, other: TensorId| {
        let block = |id: TensorId| plan.memory().tensors[id.index()].as_ref().unwrap().get(0);
        let (one, other) = (block(one), block(other));
        one.chunk == other.chunk
            && one.offset < other.offset + other.size
            && other.offset < one.offset + one.size
    };
    let plain = plan_with(&graph, Vec::new()).unwrap();
    assert!(overlaps(&plain, a, c), "{plain}");
    // Keeping a view keeps the viewed memory.
    for tensor in [a, view] {
        for (until, free_for) in [(c, Some(d)), (d, None)] {
            let plan = plan_with(&graph, vec![KeepAlive { tensor, until }]).unwrap();
            assert_eq!(race_check::check_memory(&plan), Vec::<String>::new());
            for node in [b, c, d] {
                assert_eq!(
                    overlaps(&plan, a, node),
                    free_for == Some(node),
                    "{a} until {until}, {node}"
                );
            }
            let kept = &plan.to_json()["splits"][0]["kept"][0];
            assert_eq!(kept["tensor"], tensor.index());
        }
    }
    // Every request gives a valid plan: for the node itself, an unused tensor, an input, a node
    // before it exists.
    for tensor in graph.ids() {
        for until in [a, b, c, d] {
            let twice = vec![KeepAlive { tensor, until }; 2];
            let plan = plan_with(&graph, twice).unwrap();
            assert_eq!(race_check::check_memory(&plan), Vec::<String>::new());
            assert_eq!(race_check::check(&plan, 3), []);
        }
    }
}

#[test]
fn preserved_tensors_prevent_in_place_results() {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 4, 1, 1]).unwrap();
    let a = graph.sqr(x).unwrap();
    let b = graph.sqr(a).unwrap();
    let c = graph.sqr(b).unwrap();
    graph.set_output(c);
    let in_place = |kept| plan_with(&graph, kept).unwrap().memory().in_place;
    let keep = |tensor, until| vec![KeepAlive { tensor, until }];
    assert_eq!(in_place(Vec::new()), 2);
    assert_eq!(in_place(keep(a, b)), 1);
    assert_eq!(in_place(keep(a, c)), 1);
    assert_eq!(in_place(keep(b, c)), 1);
    assert_eq!(in_place(keep(x, c)), 2, "inputs are kept anyway");
}

#[test]
fn an_equivalent_node_order_is_followed() {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [4, 1, 1, 1]).unwrap();
    let a = graph.sqr(x).unwrap();
    let b = graph.cumsum(x).unwrap();
    let y = graph.add(a, b).unwrap();
    graph.set_output(y);
    let device = Special::optimizing(host(), move |_, nodes| {
        nodes.swap(0, 1);
        Vec::new()
    });
    let mut scheduler = Scheduler::new(vec![device], Options::default()).unwrap();
    scheduler.load(&graph).unwrap();
    let plan = scheduler.current_plan().unwrap();
    assert_eq!(plan.splits()[0].nodes, [b, a, y]);
    scheduler
        .write(x, 0, &bytes(&[1.0, 2.0, 3.0, 4.0]))
        .unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    assert_eq!(read(&mut scheduler, y, 4).unwrap(), [2.0, 7.0, 15.0, 26.0]);
}

#[test]
fn invalid_optimizations_are_errors_that_name_device_and_node() {
    let Chain {
        graph,
        x,
        nodes: [a, b, c, d],
        ..
    } = chain();
    let outside = TensorId::from_index(99);
    let orders = [
        (vec![b, a, c, d], "before a node that it depends on"),
        (
            vec![a, a, c, d],
            "4 nodes, 3 of them different, instead of 4",
        ),
        (vec![a, b, c, x], "is not in the new order"),
        (vec![a, b, c, outside], "is not in the new order"),
    ];
    for (order, reason) in orders {
        let device = Special::optimizing(host(), move |_, nodes| {
            nodes.copy_from_slice(&order);
            Vec::new()
        });
        let mut scheduler = Scheduler::new(vec![device], Options::default()).unwrap();
        let error = scheduler.load(&graph).unwrap_err().to_string();
        assert!(
            error.starts_with("host: its optimize() is wrong") && error.contains(reason),
            "{error}"
        );
    }
    for (tensor, until) in [(a, x), (a, outside), (outside, d)] {
        let error = plan_with(&graph, vec![KeepAlive { tensor, until }]).unwrap_err();
        let expected = format!("{tensor} cannot be kept until {until}");
        assert!(error.to_string().contains(&expected), "{error}");
    }
}
