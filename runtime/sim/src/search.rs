//! Searches for failing seeds, and minimizes failures.

use crate::case::{SimCase, Workload};
use crate::fault::Fault;
use crate::run;
use samite_core::CancelToken;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// A failed case, with its error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaseFailure {
    /// The failed case.
    pub case: SimCase,
    /// Description of the failure.
    pub what: String,
}

/// Combined outcome of many cases. Independent of the number of threads, unless the search stopped
/// early.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of cases run.
    pub cases: u64,
    /// Number of workload steps completed.
    pub steps: u64,
    /// Number of cases that used several devices at once.
    pub divided: u64,
    /// Number of strikes of each fault.
    pub faults: BTreeMap<Fault, u64>,
    /// Combined hash; equal for equal runs of the same cases.
    pub hash: u64,
    /// Failed cases, by seed.
    pub failures: Vec<CaseFailure>,
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

    /// Returns how often a fault struck.
    pub fn struck(&self, fault: Fault) -> u64 {
        self.faults.get(&fault).copied().unwrap_or(0)
    }

    /// Returns the faults that struck less often than `least` times.
    pub fn missed(&self, least: u64) -> Vec<Fault> {
        let all = Fault::ALL.iter().copied();
        all.filter(|&fault| self.struck(fault) < least).collect()
    }
}

/// Range and limits of a search.
#[derive(Clone, Debug)]
pub struct Search {
    /// Seeds to run.
    pub seeds: Range<u64>,
    /// Workload for all seeds; `None` for each seed's own.
    pub workload: Option<Workload>,
    /// Number of cases run in parallel.
    pub threads: usize,
    /// Number of failures after which the search stops.
    pub most_failures: usize,
    /// Token that stops the search.
    pub cancel: CancelToken,
}

impl Search {
    /// Creates a search over these seeds, on one thread, that stops after ten failures.
    pub fn new(seeds: Range<u64>) -> Self {
        Search {
            seeds,
            workload: None,
            threads: 1,
            most_failures: 10,
            cancel: CancelToken::new(),
        }
    }

    /// Returns the case of a seed.
    fn case(&self, seed: u64) -> SimCase {
        let case = SimCase::new(seed);
        SimCase {
            workload: self.workload.unwrap_or(case.workload),
            ..case
        }
    }

    /// Runs the cases and calls `tell` with the number of cases completed.
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
                // If a thread cannot start, the others take its share.
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
                .map(|what| CaseFailure {
                    case: case.clone(),
                    what,
                })
                .collect(),
        }
    }
}

/// Minimizes a failure: returns the smallest case found that still fails, with fewer faults,
/// devices, steps and nodes.
pub fn shrink(failure: &CaseFailure) -> CaseFailure {
    let try_case = |case: SimCase| {
        let what = run(&case, false).failure?;
        Some(CaseFailure { case, what })
    };
    let mut smallest = failure.clone();
    let strikes = run(&failure.case, false).strikes;
    let listed = SimCase {
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
        type Part = fn(&mut SimCase) -> &mut usize;
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
