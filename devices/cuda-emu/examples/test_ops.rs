//! Runs the conformance suite on an emulated card, with weights in all of its memory types.
//!
//! Usage: `test_ops [--card N] [--part I/N] [--verbose] [OPERATION]...`
//!
//! With `--part`, every Nth case runs, from case I on.
//!
//! After a fault, which makes a card unusable, the suite goes on with a new one.

#![allow(clippy::unwrap_used)] // an example for developers

use samite_core::{Backend, Device};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::{Case, Outcome, cases, run_case, run_case_in};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Numbers of cases.
#[derive(Default)]
struct Tally {
    passed: usize,
    unsupported: usize,
    failed: usize,
}

/// An emulated card, replaced after a fault.
struct Card {
    index: usize,
    device: Arc<dyn Device>,
    reference: Arc<dyn Device>,
    reasons: BTreeMap<String, usize>,
}

impl Card {
    fn new(index: usize) -> Self {
        Card {
            index,
            device: open(index),
            reference: ReferenceDevice::new(ReferenceOptions::default()),
            reasons: BTreeMap::new(),
        }
    }

    /// Runs a case with weights in ordinary memory, then in each special memory type.
    fn run(&mut self, case: &Case, is_verbose: bool, tally: &mut Tally) {
        let outcome = run_case(&self.device, &self.reference, case);
        self.judge(&case.name, outcome, is_verbose, tally);
        let has_weights = case.inputs.iter().any(|input| input.weights);
        let special = self.device.extra_buffer_types().len();
        for index in (0..special).filter(|_| has_weights) {
            let memory = &self.device.extra_buffer_types()[index];
            let outcome = run_case_in(&self.device, &self.reference, case, memory);
            if !matches!(outcome, Outcome::Unsupported { .. }) {
                let name = format!("{} @{}", case.name, memory.name());
                self.judge(&name, outcome, is_verbose, tally);
            }
        }
    }

    fn judge(&mut self, name: &str, outcome: Outcome, is_verbose: bool, tally: &mut Tally) {
        match &outcome {
            Outcome::Passed { .. } => tally.passed += 1,
            Outcome::Unsupported { reason } => {
                tally.unsupported += 1;
                *self.reasons.entry(reason.clone()).or_default() += 1;
            }
            outcome => {
                tally.failed += 1;
                println!("{name}: {outcome:?}");
                if matches!(outcome, Outcome::Error { .. }) {
                    self.device = open(self.index);
                }
                return;
            }
        }
        if is_verbose {
            println!("{name}: {outcome:?}");
        }
    }
}

fn open(index: usize) -> Arc<dyn Device> {
    Arc::clone(&samite_cuda_emu::backend().devices()[index])
}

fn main() {
    let (mut index, mut is_verbose, mut operations) = (0, false, Vec::new());
    let (mut first, mut step) = (0, 1);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--card" => index = arguments.next().unwrap().parse().unwrap(),
            "--part" => {
                let part = arguments.next().unwrap();
                let (index, count) = part.split_once('/').unwrap();
                (first, step) = (index.parse().unwrap(), count.parse().unwrap());
            }
            "--verbose" => is_verbose = true,
            _ => operations.push(argument),
        }
    }
    let mut card = Card::new(index);
    let mut tallies: BTreeMap<&str, Tally> = BTreeMap::new();
    let start = Instant::now();
    let cases = cases();
    for case in cases.iter().skip(first).step_by(step) {
        if operations.is_empty() || operations.iter().any(|name| name == case.op) {
            card.run(case, is_verbose, tallies.entry(case.op).or_default());
        }
    }
    if is_verbose {
        for (reason, count) in &card.reasons {
            println!("{count} unsupported: {reason}");
        }
    }
    let mut all = Tally::default();
    for (op, tally) in &tallies {
        if !operations.is_empty() || is_verbose {
            println!("{op}: {}", text(tally));
        }
        all.passed += tally.passed;
        all.unsupported += tally.unsupported;
        all.failed += tally.failed;
    }
    let took = start.elapsed().as_secs_f64();
    println!("all on card {index}: {} in {took:.0} s", text(&all));
    std::process::exit(i32::from(all.failed > 0));
}

fn text(tally: &Tally) -> String {
    format!(
        "{} passed, {} unsupported, {} failed",
        tally.passed, tally.unsupported, tally.failed
    )
}
