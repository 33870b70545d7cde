//! Looking for seeds that fail, and for the smallest case that fails in the same way.

use crate::case::{Case, Workload};
use crate::fault::Fault;
use crate::run;
use samite_core::CancelToken;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// A case that failed, and what was wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The case.
    pub case: Case,
    /// What was wrong.
    pub what: String,
}

/// What came of many cases. The same for any number of threads, if nothing stopped the search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// How many cases were run.
    pub cases: u64,
    /// How many steps their workloads did.
    pub steps: u64,
    /// How many cases had work on several devices at once.
    pub divided: u64,
    /// How often each fault struck.
    pub faults: BTreeMap<Fault, u64>,
    /// Equal for equal runs of the same cases.
    pub hash: u64,
    /// The cases that failed, by seed.
    pub failures: Vec<Failure>,
}

impl Summary {
    fn add(&mut self, other: Summary) {
        self.cases += other.cases;
        self.steps += other.steps;
        self.divided += other.divided;
        for (fault, count) in other.faults {
            *self.faults.entry(fault).or_default() += count;
        }
        self.hash = self.hash.wrapping_add(other.hash);
        self.failures.extend(other.failures);
    }

    /// How often a fault struck.
    pub fn struck(&self, fault: Fault) -> u64 {
        self.faults.get(&fault).copied().unwrap_or(0)
    }

    /// The faults that struck less often than `least` times.
    pub fn missed(&self, least: u64) -> Vec<Fault> {
        let all = Fault::ALL.iter().copied();
        all.filter(|&fault| self.struck(fault) < least).collect()
    }
}

/// What to search through, and when to stop.
#[derive(Clone, Debug)]
pub struct Search {
    /// The seeds.
    pub seeds: Range<u64>,
    /// One workload for all; `None` for what each seed says.
    pub workload: Option<Workload>,
    /// How many cases run at once.
    pub threads: usize,
    /// Stops after so many failures.
    pub most_failures: usize,
    /// Stops the search.
    pub cancel: CancelToken,
}

impl Search {
    /// All cases of these seeds on one thread, until ten failed.
    pub fn new(seeds: Range<u64>) -> Self {
        Search {
            seeds,
            workload: None,
            threads: 1,
            most_failures: 10,
            cancel: CancelToken::new(),
        }
    }

    /// The case of a seed.
    fn case(&self, seed: u64) -> Case {
        let case = Case::new(seed);
        Case {
            workload: self.workload.unwrap_or(case.workload),
            ..case
        }
    }

    /// Runs the cases and calls `tell` with the number of those that are done.
    pub fn run(&self, tell: &(dyn Fn(u64) + Sync)) -> Summary {
        let (next, done) = (AtomicU64::new(self.seeds.start), AtomicU64::new(0));
        let total = Mutex::new(Summary::default());
        let failures = AtomicU64::new(0);
        let work = || {
            let mut mine = Summary::default();
            while !self.cancel.is_cancelled()
                && failures.load(Ordering::SeqCst) < self.most_failures as u64
            {
                let seed = next.fetch_add(1, Ordering::SeqCst);
                if seed >= self.seeds.end {
                    break;
                }
                let one = self.one(seed);
                failures.fetch_add(one.failures.len() as u64, Ordering::SeqCst);
                mine.add(one);
                tell(done.fetch_add(1, Ordering::SeqCst) + 1);
            }
            let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
            total.add(mine);
        };
        std::thread::scope(|scope| {
            for _ in 1..self.threads {
                // Without this thread, the others have more to do.
                let _ = samite_core::thread_builder()
                    .and_then(|thread| thread.spawn_scoped(scope, work));
            }
            work();
        });
        let mut total = total.into_inner().unwrap_or_else(PoisonError::into_inner);
        total.failures.sort_by_key(|failure| failure.case.seed);
        total
    }

    fn one(&self, seed: u64) -> Summary {
        let case = self.case(seed);
        let outcome = run(&case, false);
        let mut faults = BTreeMap::new();
        for strike in &outcome.strikes {
            *faults.entry(strike.fault).or_default() += 1;
        }
        Summary {
            cases: 1,
            steps: outcome.steps as u64,
            divided: u64::from(outcome.devices > 1),
            faults,
            hash: outcome.hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            failures: outcome
                .failure
                .into_iter()
                .map(|what| Failure {
                    case: case.clone(),
                    what,
                })
                .collect(),
        }
    }
}

/// The smallest case that can be found and still fails: with fewer faults, devices, steps and nodes.
pub fn shrink(failure: &Failure) -> Failure {
    let try_case = |case: Case| {
        let what = run(&case, false).failure?;
        Some(Failure { case, what })
    };
    let mut smallest = failure.clone();
    let strikes = run(&failure.case, false).strikes;
    let listed = Case {
        strikes: Some(strikes),
        ..failure.case.clone()
    };
    if let Some(same) = try_case(listed) {
        smallest = same;
    }
    loop {
        let before = smallest.case.clone();
        for at in (0..smallest.case.strikes.as_ref().map_or(0, Vec::len)).rev() {
            let mut case = smallest.case.clone();
            if let Some(strikes) = &mut case.strikes {
                strikes.remove(at);
            }
            smallest = try_case(case).unwrap_or(smallest);
        }
        type Part = fn(&mut Case) -> &mut usize;
        let parts: [(Part, usize); 3] = [
            (|case| &mut case.steps, 1),
            (|case| &mut case.devices, 0),
            (|case| &mut case.nodes, 1),
        ];
        for (part, least) in parts {
            let mut number = least;
            while number < *part(&mut smallest.case) {
                let mut case = smallest.case.clone();
                *part(&mut case) = number;
                match try_case(case) {
                    Some(smaller) => smallest = smaller,
                    None => number += 1,
                }
            }
        }
        if smallest.case == before {
            return smallest;
        }
    }
}
