//! Suite runs and their reports.

use crate::case::Case;
use crate::cases::cases;
use crate::run::{Answer, Outcome, judge};
use samite_core::Device;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Outcomes of the cases of one operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Counts {
    /// Number of passed cases.
    pub passed: usize,
    /// Number of cases that the device does not support.
    pub unsupported: usize,
    /// Number of cases with wrong results or errors.
    pub failed: usize,
    /// Largest error of a passed case.
    pub worst_nmse: f64,
    /// Reasons for unsupported cases, with their numbers.
    pub reasons: BTreeMap<String, usize>,
}

/// A case that did not pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    /// Name of the case, with `@` and the buffer type if weights were in a special layout.
    pub case: String,
    /// Reason of the failure.
    pub detail: String,
}

/// Result of a whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Name of the device.
    pub device: String,
    /// Outcomes by operation.
    pub ops: BTreeMap<String, Counts>,
    /// Failed cases.
    pub failures: Vec<Failure>,
}

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Number of this case.
    pub case: usize,
    /// Number of cases that match the filter.
    pub cases: usize,
    /// Name, as in [`Failure::case`].
    pub name: &'a str,
    /// Outcome.
    pub outcome: &'a Outcome,
}

/// Runs every case on `device` whose operation is `filter` or whose name contains it, and compares
/// with a reference device. Cases with weights run once more for each extra buffer type that
/// accepts them.
pub fn run_suite(
    device: &Arc<dyn Device>,
    filter: Option<&str>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Report {
    run_from(device, filter, 0, &mut ProgressObserver(progress))
}

/// Does what [`run_suite`] does, from case number `first` on.
pub(crate) fn run_from(
    device: &Arc<dyn Device>,
    filter: Option<&str>,
    first: usize,
    observer: &mut dyn Observer,
) -> Report {
    let wanted = |case: &Case| filter.is_none_or(|f| case.op == f || case.name.contains(f));
    let all: Vec<_> = cases().into_iter().filter(wanted).collect();
    run_all(device, &all, first, None, observer)
}

/// Observer of a run.
pub(crate) trait Observer {
    /// Is called before a case with its number, the number of cases, its operation and its name.
    fn begin(&mut self, case: usize, cases: usize, op: &str, name: &str);

    /// Is called after a case.
    fn end(&mut self, progress: Progress<'_>);
}

/// Calls a function after each case.
struct ProgressObserver<'a>(&'a mut dyn FnMut(Progress<'_>));

impl Observer for ProgressObserver<'_> {
    fn begin(&mut self, _case: usize, _cases: usize, _op: &str, _name: &str) {}

    fn end(&mut self, progress: Progress<'_>) {
        (self.0)(progress);
    }
}

/// All cases, for several devices. Caches data and the reference's results.
#[derive(Debug)]
pub struct Suite {
    cases: Vec<Case>,
    answers: Vec<Answer>,
}

impl Suite {
    /// Returns the whole suite.
    pub fn new() -> Self {
        let cases = cases();
        let answers = cases.iter().map(|_| Answer::default()).collect();
        Suite { cases, answers }
    }

    /// Does what [`run_suite`] does without a filter.
    pub fn run(&self, device: &Arc<dyn Device>) -> Report {
        let answers = Some(&*self.answers);
        run_all(
            device,
            &self.cases,
            0,
            answers,
            &mut ProgressObserver(&mut |_| {}),
        )
    }
}

impl Default for Suite {
    fn default() -> Self {
        Self::new()
    }
}

fn run_all(
    device: &Arc<dyn Device>,
    all: &[Case],
    first: usize,
    answers: Option<&[Answer]>,
    observer: &mut dyn Observer,
) -> Report {
    let reference: Arc<dyn Device> =
        ReferenceDevice::new(ReferenceOptions::named("reference-for-comparison"));
    let mut report = Report::new(device.name());
    let extra = device.extra_buffer_types();
    for (number, case) in all.iter().enumerate().skip(first) {
        let own = Answer::default();
        let answer = answers.map_or(&own, |answers| &answers[number]);
        let has_weights = case.inputs.iter().any(|input| input.weights);
        let special = extra.iter().filter(|_| has_weights).map(Some);
        for memory in [None].into_iter().chain(special) {
            let name = match memory {
                Some(memory) => &format!("{} @ {}", case.name, memory.name()),
                None => &case.name,
            };
            observer.begin(number, all.len(), case.op, name);
            let outcome = judge(device, &reference, case, answer, memory);
            // A layout that does not support this weight type is no gap in the device's support.
            if memory.is_some() && matches!(outcome, Outcome::Unsupported { .. }) {
                continue;
            }
            observer.end(Progress {
                case: number,
                cases: all.len(),
                name,
                outcome: &outcome,
            });
            report.add(case.op, name, outcome);
        }
    }
    report
}

impl Report {
    pub(crate) fn new(device: &str) -> Self {
        Report {
            device: device.to_owned(),
            ..Report::default()
        }
    }

    pub(crate) fn add(&mut self, op: &str, case: &str, outcome: Outcome) {
        let counts = self.ops.entry(op.to_owned()).or_default();
        let detail = match outcome {
            Outcome::Passed { nmse } => {
                counts.passed += 1;
                counts.worst_nmse = counts.worst_nmse.max(nmse);
                return;
            }
            Outcome::Unsupported { reason } => {
                counts.unsupported += 1;
                *counts.reasons.entry(reason).or_default() += 1;
                return;
            }
            Outcome::Failed { detail, .. } => detail,
            Outcome::Error { message } => message,
        };
        counts.failed += 1;
        self.failures.push(Failure {
            case: case.to_owned(),
            detail,
        });
    }

    /// Returns whether something ran and nothing failed. Unsupported cases are not failures.
    pub fn is_success(&self) -> bool {
        self.failures.is_empty() && self.passed() > 0
    }

    fn total(&self, count: impl Fn(&Counts) -> usize) -> usize {
        self.ops.values().map(count).sum()
    }

    /// Returns the number of cases that passed.
    pub fn passed(&self) -> usize {
        self.total(|counts| counts.passed)
    }

    /// Returns the number of cases that the device does not support.
    pub fn unsupported(&self) -> usize {
        self.total(|counts| counts.unsupported)
    }

    /// Returns the number of cases that failed.
    pub fn failed(&self) -> usize {
        self.total(|counts| counts.failed)
    }

    /// Returns the report as JSON: `device`, `ops` (by name: `passed`, `unsupported`, `failed`,
    /// `worst_nmse`, `reasons`), `failures` (`case`, `detail`).
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!(self)
    }
}

impl fmt::Display for Report {
    /// Writes a table of operations, the reasons for unsupported cases, and the failures.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<16} {:>7} {:>12} {:>7}  worst NMSE",
            self.device, "passed", "unsupported", "failed"
        )?;
        for (op, counts) in &self.ops {
            writeln!(
                f,
                "{op:<16} {:>7} {:>12} {:>7}  {:.1e}",
                counts.passed, counts.unsupported, counts.failed, counts.worst_nmse
            )?;
        }
        writeln!(
            f,
            "{:<16} {:>7} {:>12} {:>7}",
            "all",
            self.passed(),
            self.unsupported(),
            self.failed()
        )?;
        for (op, counts) in &self.ops {
            for (reason, count) in &counts.reasons {
                writeln!(f, "unsupported {op}: {reason} ({count})")?;
            }
        }
        for failure in &self.failures {
            writeln!(f, "FAILED {}: {}", failure.case, failure.detail)?;
        }
        Ok(())
    }
}
