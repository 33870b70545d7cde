//! Cases of many seeds, regression cases, and reproducibility of a case.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_sim::{Fault, Search, SimCase, Workload, run, shrink};

/// Number of cases in one test run; `samite dev sim` runs more in the same time.
/// `SAMITE_SIM_SEEDS=first..end` selects other seeds, `SAMITE_SIM_WORKLOAD` a single workload.
/// `SAMITE_SIM_SHRINK=0` reports failures without minimizing them.
const SEEDS: u64 = 300;

#[test]
fn seeds_pass() {
    let range = std::env::var("SAMITE_SIM_SEEDS").ok().map(|range| {
        let (first, end) = range.split_once("..").unwrap();
        first.parse().unwrap()..end.parse().unwrap()
    });
    let workload = std::env::var("SAMITE_SIM_WORKLOAD").ok();
    let workload: Option<Workload> = workload.map(|name| name.parse().unwrap());
    let search = Search {
        workload,
        threads: std::thread::available_parallelism().unwrap().get(),
        most_failures: 1,
        ..Search::new(range.unwrap_or(0..SEEDS))
    };
    let summary = search.run(&|_| {});
    if let Some(failure) = summary.failures.first() {
        let failure = match std::env::var("SAMITE_SIM_SHRINK").as_deref() {
            Ok("0") => failure.clone(),
            _ => shrink(failure),
        };
        panic!("{}; again: samite dev sim {}", failure.what, failure.case);
    }
    println!("{} cases, {} steps", summary.cases, summary.steps);
    if workload.is_some() {
        return println!("{:?}", summary.faults);
    }
    // Guard against a search that exercises too little.
    assert!(summary.steps > 3 * summary.cases, "{summary:?}");
    assert!(summary.divided > summary.cases / 4, "{summary:?}");
    if summary.cases >= 2_000 {
        assert_eq!(summary.missed(1), [], "{summary:?}");
    }
}

#[test]
fn regression_cases_pass() {
    let mut count = 0;
    for line in include_str!("../seeds.txt").lines() {
        let Some((case, found)) = line.split_once('#') else {
            continue;
        };
        let mut words = case.split_whitespace();
        let (Some(workload), Some(seed)) = (words.next(), words.next()) else {
            continue;
        };
        if workload == "remote" && cfg!(not(feature = "remote")) {
            continue;
        }
        let case = SimCase {
            workload: workload.parse().unwrap(),
            ..SimCase::new(seed.parse().unwrap())
        };
        assert_eq!(run(&case, false).failure, None, "{case}: {found}");
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn cases_are_reproducible_on_any_thread_count() {
    let search = |threads| {
        let search = Search {
            threads,
            ..Search::new(300..360)
        };
        search.run(&|_| {})
    };
    let one = search(1);
    assert_eq!(one, search(3));
    for seed in [303, 306] {
        let traced = run(&SimCase::new(seed), true);
        assert_eq!(traced.hash, run(&SimCase::new(seed), false).hash);
        assert_ne!(traced.hash, run(&SimCase::new(seed + 8), false).hash);
        let trace = traced.trace.unwrap();
        assert!(trace.lines().count() > 20, "{trace}");
    }
}

#[test]
fn only_listed_faults_strike() {
    let mut differing = 0;
    for seed in 0..60 {
        let drawn = run(&SimCase::new(seed), false);
        let case = SimCase {
            strikes: Some(drawn.strikes.clone()),
            ..SimCase::new(seed)
        };
        let listed = run(&case, false);
        assert_eq!((listed.hash, listed.strikes), (drawn.hash, drawn.strikes));
        let case = SimCase {
            strikes: Some(Vec::new()),
            ..SimCase::new(seed)
        };
        let none = run(&case, false);
        assert_eq!(none.strikes, []);
        differing += u32::from(none.hash != listed.hash);
    }
    assert!(differing > 15, "{differing}");
}

#[test]
fn every_workload_triggers_its_own_faults() {
    for (workload, fault) in [
        (Workload::Graphs, Fault::Import),
        (Workload::Models, Fault::ReadFile),
        (Workload::Requests, Fault::Compute),
        (Workload::Rpc, Fault::Cut),
        #[cfg(feature = "remote")]
        (Workload::Remote, Fault::Silence),
    ] {
        let search = Search {
            workload: Some(workload),
            ..Search::new(0..60)
        };
        let summary = search.run(&|_| {});
        let failures = summary
            .failures
            .iter()
            .map(|failure| format!("{failure:?}"));
        assert_eq!(failures.collect::<Vec<_>>(), [""; 0], "{workload:?}");
        assert!(summary.faults.contains_key(&fault), "{summary:?}");
    }
}
