//! Support queries, and work that is compiled once and prepared for several placements.

use super::bench::{Bench, Check, N, Named, control, ensure, pattern, read, skip};
use samite_core::{CancelToken, DType, Graph, Op, PlacedGraph, TensorId};
use std::sync::Arc;

pub(super) const CHECKS: &[Named] = &[
    ("answers in bulk", answers_in_bulk),
    ("prepared work runs again", prepared_work_runs_again),
    ("compiled work is shared", compiled_work_is_shared),
];

fn answers_in_bulk(bench: &Bench) -> Check {
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [N, N, 1, 1])?;
    for op in [Op::Sqr, Op::CumSum, Op::Transpose, Op::SumRows] {
        graph.push(op, &[Some(x)])?;
    }
    graph.mul_mat(x, x)?;
    let ids: Vec<_> = graph
        .ids()
        .filter(|&id| graph.tensor(id).is_computed())
        .collect();
    let together = bench.device.supports_each(&graph, &ids);
    let answers = ids.iter().map(|&id| bench.device.supports(graph.node(id)));
    ensure(
        answers.eq(together),
        "answers given together are others than one by one",
    )?;
    let supported: Vec<_> = ids
        .into_iter()
        .filter(|&id| bench.device.supports(graph.node(id)).is_yes())
        .collect();
    let parts: Vec<&[TensorId]> = supported.chunks(1).chain([&supported[..]]).collect();
    let mut expected = Vec::new();
    for part in &parts {
        expected.push(bench.device.workspace(&graph, part)?);
    }
    ensure(
        bench.device.workspaces(&graph, &parts)? == expected,
        "workspaces asked for together are others than one by one",
    )
}

fn prepared_work_runs_again(bench: &Bench) -> Check {
    let work = bench.work()?;
    let mut stream = bench.stream()?;
    let mut prepared = stream.prepare(work.placed())?;
    for seed in 0..3 {
        stream.write(work.place(work.x), 0, &pattern(seed))?;
        stream.run(&mut *prepared, control(&CancelToken::new()))?;
        stream.synchronize()?;
        ensure(
            read(work.place(work.y))? == bench.result_of(&pattern(seed))?,
            format!("run {seed} differs"),
        )?;
    }
    Ok(())
}

fn compiled_work_is_shared(bench: &Bench) -> Check {
    let (work, other) = (bench.work()?, bench.work()?);
    let (graph, cancel) = (&work.graph, CancelToken::new());
    let device = &bench.device;
    let Some(compiled) = device.compile(graph, &work.nodes, None, &cancel)? else {
        return skip("it has nothing to compile");
    };
    let again = device.compile(graph, &work.nodes, Some(&compiled), &cancel)?;
    ensure(
        again.is_some_and(|again| Arc::ptr_eq(&again, &compiled)),
        "the same nodes are compiled again",
    )?;
    let mut results = Vec::new();
    for work in [&work, &other] {
        let mut stream = bench.stream()?;
        let mut prepared = stream.prepare(PlacedGraph {
            compiled: Some(&compiled),
            ..work.placed()
        })?;
        stream.write(work.place(work.x), 0, &pattern(7))?;
        stream.run(&mut *prepared, control(&cancel))?;
        stream.synchronize()?;
        results.push(read(work.place(work.y))?);
    }
    let expected = bench.result_of(&pattern(7))?;
    ensure(
        results.iter().all(|result| *result == expected),
        "compiled work gives other results",
    )
}
