//! `samite dev sim`: runs the scheduler and models on simulated devices with fault injection.

use crate::failure::{CommandError, CommandResult};
use crate::interrupt;
use crate::progress;
use crate::shown::counted;
use clap::Args;
use samite_sim::{
    CaseFailure, Fault, FaultOccurrence, Search, SimCase, Workload, run as simulate, shrink,
};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Number of cases above which a search must trigger every fault: otherwise it shows less than it
/// seems to.
const MANY: u64 = 5_000;

/// Flags of `samite dev sim`.
#[derive(Debug, Args)]
#[command(after_help = "A failing case is shrunk, and its flags are printed. \
docs/simulation.md describes the simulation.

Examples:
  samite dev sim --count 100000
  samite dev sim --seed 2026 --trace -
  samite dev sim --seed 841 --devices 1 --steps 3 --faults 'compute@1,lose@0'")]
pub struct SimArgs {
    /// Seed of the case to run, or of the first of several
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Number of seeds to run
    #[arg(long, value_name = "N", default_value_t = 1)]
    count: u64,
    /// Workload: graphs, models, requests, rpc or remote [default: chosen by the seed]
    #[arg(long, value_name = "NAME")]
    workload: Option<Workload>,
    /// Maximum number of devices in addition to the host's CPU
    #[arg(long, value_name = "N", conflicts_with = "count")]
    devices: Option<usize>,
    /// Maximum number of computed nodes in a random graph
    #[arg(long, value_name = "N", conflicts_with = "count")]
    nodes: Option<usize>,
    /// Maximum number of steps
    #[arg(long, value_name = "N", conflicts_with = "count")]
    steps: Option<usize>,
    /// Inject exactly these faults, such as `compute@1,lose@0`: the second computed node fails, and
    /// the first opportunity to lose a device is taken
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        conflicts_with = "count"
    )]
    faults: Option<Vec<String>>,
    /// Write all events to a file; `-` for standard output
    #[arg(long, value_name = "FILE", conflicts_with = "count")]
    trace: Option<PathBuf>,
    /// Number of cases to run at once [default: one per processor]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    /// Fail unless each fault struck at least N times [default: 1 for 5,000 cases or more of all
    /// workloads, otherwise 0]
    #[arg(long, value_name = "N")]
    least: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: SimArgs) -> CommandResult {
    if args.count > 1 {
        return search(&args);
    }
    let case = args.case()?;
    let outcome = simulate(&case, args.trace.is_some());
    match (&args.trace, &outcome.trace) {
        (Some(path), Some(trace)) if path.as_os_str() == "-" => {
            std::io::stdout().lock().write_all(trace.as_bytes())?;
        }
        (Some(path), Some(trace)) => std::fs::write(path, trace)
            .map_err(|error| CommandError::error(format_args!("{}: {error}", path.display())))?,
        _ => {}
    }
    let strikes: Vec<_> = outcome
        .strikes
        .iter()
        .map(FaultOccurrence::to_string)
        .collect();
    if args.json {
        let found = json!({
            "case": case.to_string(),
            "failure": outcome.failure,
            "steps": outcome.steps,
            "faults": strikes,
            "hash": format!("{:016x}", outcome.hash),
        });
        writeln!(std::io::stdout().lock(), "{found:#}")?;
    } else {
        let faults = if strikes.is_empty() {
            "no faults".to_owned()
        } else {
            strikes.join(", ")
        };
        writeln!(
            std::io::stdout().lock(),
            "{}, {faults}, trace {:016x}",
            counted(outcome.steps, "step"),
            outcome.hash
        )?;
    }
    match outcome.failure {
        None => Ok(()),
        Some(what) => Err(fails(CaseFailure { case, what })),
    }
}

impl SimArgs {
    fn case(&self) -> CommandResult<SimCase> {
        let whole = SimCase::new(self.seed);
        let strikes = self.faults.as_ref().map(|faults| {
            let faults = faults.iter().filter(|fault| !fault.is_empty());
            let strikes = faults.map(|fault| fault.parse::<FaultOccurrence>());
            strikes.collect::<Result<Vec<_>, _>>()
        });
        Ok(SimCase {
            workload: self.workload.unwrap_or(whole.workload),
            devices: self.devices.unwrap_or(whole.devices),
            nodes: self.nodes.unwrap_or(whole.nodes),
            steps: self.steps.unwrap_or(whole.steps),
            strikes: strikes
                .transpose()
                .map_err(|error| CommandError::usage(format_args!("--faults: {error}")))?,
            ..whole
        })
    }
}

/// Shrinks a failed case and returns an error with the command that runs it again.
fn fails(found: CaseFailure) -> CommandError {
    let CaseFailure { case, what } = shrink(&found);
    CommandError::error(format_args!("{what}; again: samite dev sim {case}"))
}

fn search(args: &SimArgs) -> CommandResult {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let end = args.seed.checked_add(args.count);
    let end = end.ok_or_else(|| CommandError::usage("--count: there are not so many seeds"))?;
    let search = Search {
        workload: args.workload,
        threads: args.threads.unwrap_or(threads),
        cancel: interrupt::token(),
        ..Search::new(args.seed..end)
    };
    let bar = progress::count("simulating", "cases");
    bar.set_length(args.count);
    let summary = search.run(&|done| bar.set_position(done));
    drop(bar);
    let mut out = std::io::stdout().lock();
    let failures = summary.failures.iter();
    if args.json {
        let faults = Fault::ALL
            .iter()
            .map(|&fault| (fault.to_string(), json!(summary.struck(fault))));
        let found = json!({
            "cases": summary.cases,
            "steps": summary.steps,
            "divided": summary.divided,
            "faults": faults.collect::<serde_json::Map<_, _>>(),
            "hash": format!("{:016x}", summary.hash),
            "failures": failures
                .map(|CaseFailure { case, what }| json!({ "case": case.to_string(), "what": what }))
                .collect::<Vec<_>>(),
        });
        writeln!(out, "{found:#}")?;
    } else {
        for &fault in Fault::ALL {
            writeln!(out, "{fault:<14} {:>9}", summary.struck(fault))?;
        }
        writeln!(
            out,
            "{} cases with {} steps, {} cases on several devices, trace {:016x}",
            summary.cases, summary.steps, summary.divided, summary.hash
        )?;
        for CaseFailure { case, what } in failures {
            writeln!(out, "failed: samite dev sim {case}: {what}")?;
        }
    }
    if let Some(first) = summary.failures.first() {
        return Err(fails(first.clone()));
    }
    if interrupt::token().is_cancelled() {
        return Err(CommandError::Interrupted);
    }
    // A single workload triggers only some faults.
    let is_whole = args.count >= MANY && args.workload.is_none();
    let least = args.least.unwrap_or(u64::from(is_whole));
    let missed = summary.missed(least);
    if missed.is_empty() {
        Ok(())
    } else {
        let missed: Vec<_> = missed.iter().map(|fault| fault.name()).collect();
        Err(CommandError::error(format_args!(
            "these faults struck less than {least} times, so the search shows little: {}",
            missed.join(", ")
        )))
    }
}
