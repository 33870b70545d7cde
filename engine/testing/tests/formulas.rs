//! Known answers for single operations, from PyTorch and from papers, made by
//! `fixtures/formulas.py`.
//!
//! The reference and the CPU share one formula per operation, so neither can judge the other.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod subject;

use samite_core::formula::is_formula;
use samite_core::{DType, Glu, Op, OpKind, Shape, Unary};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use subject::{Subject, devices, numbers};

/// Largest error of an element, relative to the largest element of the expected result.
///
/// Rounding a result to F32 costs 2^-24, which is 6e-8. `upscale` costs more, because it computes
/// positions in F32 as ggml does: three roundings move a position below 16 by up to 3e-6, and the
/// result by as much of the distance between two neighbors. Sums of products are exact in F32 for
/// the numbers of the fixture.
const TOLERANCE: f64 = 4e-6;

/// Kinds that have cases although their devices do not share a formula.
const OTHERS: [OpKind; 9] = [
    OpKind::CrossEntropyLoss,
    OpKind::CumSum,
    OpKind::GatedDeltaNet,
    OpKind::L2Norm,
    OpKind::Norm,
    OpKind::Pad,
    OpKind::RmsNorm,
    OpKind::SsmConv,
    OpKind::SsmScan,
];

#[derive(Deserialize)]
struct Fixture {
    cases: Vec<Case>,
}

/// One operation with its sources and its result.
#[derive(Deserialize)]
struct Case {
    /// The library that computed the result.
    judge: String,
    op: Op,
    sources: Vec<Option<Source>>,
    dtype: String,
    shape: Shape,
    values: Value,
}

#[derive(Deserialize)]
struct Source {
    dtype: String,
    shape: Shape,
    values: Value,
}

impl Case {
    /// Builds the graph, whose last node is the operation.
    fn subject(&self) -> Subject {
        let mut subject = Subject::default();
        let sources: Vec<_> = self
            .sources
            .iter()
            .map(|source| {
                let source = source.as_ref()?;
                let dtype = DType::from_name(&source.dtype).unwrap();
                subject.input(dtype, source.shape, &source.values)
            })
            .collect();
        subject.graph.push(self.op, &sources).unwrap();
        subject
    }
}

fn cases() -> Vec<Case> {
    let fixture: Fixture = serde_json::from_str(include_str!("fixtures/formulas.json")).unwrap();
    fixture.cases
}

/// Describes the first element that is not close to the expected one.
fn difference(got: &[f64], expected: &[f64]) -> Option<String> {
    if got.len() != expected.len() {
        let (got, expected) = (got.len(), expected.len());
        return Some(format!("{got} elements instead of {expected}"));
    }
    let finite = expected.iter().filter(|x| x.is_finite());
    let largest = finite.fold(0.0, |largest: f64, x| largest.max(x.abs()));
    let is_close = |a: f64, b: f64| a == b || (a - b).abs() <= TOLERANCE * largest;
    let mut pairs = got.iter().zip(expected);
    let at = pairs.position(|(&a, &b)| !is_close(a, b))?;
    Some(format!(
        "element {at} is {} instead of {}",
        got[at], expected[at]
    ))
}

#[test]
fn operations_give_known_answers() {
    let devices = devices();
    let mut problems = Vec::new();
    for (number, case) in cases().iter().enumerate() {
        let subject = case.subject();
        let layout = subject.graph.tensors().last().unwrap().layout;
        assert_eq!(
            (layout.dtype().name(), layout.shape()),
            (&*case.dtype, case.shape),
            "case {number}, {}",
            case.op
        );
        let expected = numbers(&case.values);
        // The CPU has kernels of its own for the others, with limits that the suite knows.
        let count = if is_formula(case.op.kind()) {
            devices.len()
        } else {
            1
        };
        for device in &devices[..count] {
            if let Some(difference) = difference(&subject.run(device), &expected) {
                let (op, device, judge) = (case.op, device.name(), &case.judge);
                problems.push(format!(
                    "case {number}, {op} on {device}, by {judge}: {difference}"
                ));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn every_formula_has_a_case() {
    let known: BTreeSet<&str> = cases().iter().map(|case| case.op.name()).collect();
    let formulas = OpKind::ALL.into_iter().filter(|&kind| is_formula(kind));
    let missing: Vec<&str> = formulas
        .chain(OTHERS)
        .map(OpKind::name)
        .chain(Unary::ALL.map(Unary::name))
        .chain(Glu::ALL.map(Glu::name))
        .filter(|name| !known.contains(name))
        .collect();
    assert!(
        missing.is_empty(),
        "without a case in fixtures/formulas.py: {missing:?}"
    );
}
