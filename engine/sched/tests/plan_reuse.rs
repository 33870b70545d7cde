//! Graphs share a plan if they have the same operations, bit by bit.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{bytes, host, read};
use samite_core::{CancelToken, DType, Graph, TensorId};
use samite_sched::{Options, Scheduler};

/// Returns a graph of `1 / value`.
fn reciprocal_of(value: f32) -> (Graph, TensorId, TensorId) {
    let mut g = Graph::new();
    let one = g.input("one", DType::F32, [1, 1, 1, 1]).unwrap();
    let value = g.fill(one, value).unwrap();
    let y = g.div(one, value).unwrap();
    g.set_output(y);
    (g, one, y)
}

fn run(scheduler: &mut Scheduler, value: f32) -> f32 {
    let (graph, one, y) = reciprocal_of(value);
    scheduler.load(&graph).unwrap();
    scheduler.write(one, 0, &bytes(&[1.0])).unwrap();
    scheduler.run(&CancelToken::new()).unwrap();
    read(scheduler, y, 1).unwrap()[0]
}

#[test]
fn positive_and_negative_zero_have_separate_plans() {
    let mut scheduler = Scheduler::new(vec![host()], Options::default()).unwrap();
    assert_eq!(run(&mut scheduler, 0.0), f32::INFINITY);
    assert_eq!(run(&mut scheduler, -0.0), f32::NEG_INFINITY);
    assert_eq!(run(&mut scheduler, 0.0), f32::INFINITY);
    assert_eq!(scheduler.counters().plans, 2);
}

#[test]
fn a_nan_parameter_equals_itself() {
    let mut scheduler = Scheduler::new(vec![host()], Options::default()).unwrap();
    for _ in 0..3 {
        assert!(run(&mut scheduler, f32::NAN).is_nan());
    }
    assert_eq!(scheduler.counters().plans, 1);
}
