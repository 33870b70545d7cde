//! `samite bench`: measures tokens per second, alone or compared with llama.cpp.

mod canary;
mod compare;
mod flags;
pub mod limits;
mod metadata;
mod peer;
mod statistics;
mod work;

use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::setup::ModelSetup;
use crate::{progress, renewal};
pub use flags::BenchArgs;
use limits::MachineLimits;
use metadata::{describe, metadata};
use samite::llm::Model;
use samite::{CancelToken, Device, DeviceKind};
use serde_json::json;
use statistics::median;
use std::io::Write;
use std::sync::Arc;
use work::{BenchCase, BenchRunner};

/// Default repetitions without a comparison.
const REPETITIONS: u32 = 5;

/// One measurement.
struct BenchRow {
    work: BenchCase,
    threads: usize,
    /// Tokens per second of each repetition, in ascending order.
    rates: Vec<f64>,
    /// The limiting resource of the machine, and the share of its limit that was reached.
    share: Option<(&'static str, f64)>,
}

impl BenchRow {
    fn median(&self) -> f64 {
        median(&self.rates)
    }
}

pub fn run(mut args: BenchArgs) -> CommandResult {
    args.name.apply(&mut args.model)?;
    let works = args.works();
    if works.is_empty() {
        return Err(CommandError::usage(
            "nothing to measure: give prompt lengths with -p or numbers of generated tokens with -n",
        ));
    }
    let mut threads = args.threads.clone();
    if threads.is_empty() {
        threads.push(args.pool.processors());
    }
    let setup = ModelSetup::new(&args.model)?;
    if let Some(bench) = &args.compare {
        return compare::run(&args, &setup, bench, &threads, &works);
    }

    // There is no state to lose or clean up, so a signal ends the program at once.
    let cancel = CancelToken::new();
    let repetitions = args.repetitions.unwrap_or(REPETITIONS);
    let bar = progress::count("measuring", "tests");
    bar.set_length((threads.len() * works.len()) as u64);
    let (mut rows, mut limits, mut name) = (Vec::new(), MachineLimits::default(), String::new());
    for &threads in &threads {
        let cpu = CpuArgs::new(threads, &args.pool);
        let model = renewal::load(&setup, &cpu, &cancel)?;
        name = describe(&model);
        // The CPU's limits do not apply to work on another device.
        let other = other_device(&model);
        let peaks = (!args.no_peaks && other.is_none())
            .then(|| limits.measure(threads, &args.pool, &cancel))
            .transpose()?;
        let of_other = match &other {
            Some(device) if !args.no_peaks => limits.measure_device(&**device)?,
            _ => None,
        };
        // A bidirectional model does not generate.
        let writes = !model.spec().is_bidirectional();
        for &work in works.iter().filter(|work| writes || work.is_prompt) {
            let mut bench = BenchRunner::new(&model, work, &setup, &cancel)?;
            let rates: CommandResult<Vec<f64>> = (0..repetitions).map(|_| bench.sample()).collect();
            let mut rates = rates?;
            rates.sort_by(f64::total_cmp);
            let limit = match (&peaks, &of_other) {
                (Some(peaks), _) => Some(work.limit(&model, peaks)),
                (None, Some(limits)) => Some(work.limit_of_device(&model, limits)),
                (None, None) => None,
            };
            let share = limit.map(|(limit, rate)| (limit, median(&rates) / rate));
            rows.push(BenchRow {
                work,
                threads,
                rates,
                share,
            });
            bar.inc(1);
        }
    }
    drop(bar);
    if args.json {
        print_json(&name, &rows, &limits)
    } else {
        print_table(&name, &rows, &limits)
    }
}

/// Returns the first GPU of the model. If several share the work, shares are relative to the first
/// one's limits.
fn other_device(model: &Model) -> Option<Arc<dyn Device>> {
    let devices = model.devices().iter();
    let is_gpu = |kind| matches!(kind, DeviceKind::Gpu | DeviceKind::IntegratedGpu);
    let mut others = devices.filter(|device| is_gpu(device.kind()));
    others.next().cloned()
}

fn print_json(name: &str, rows: &[BenchRow], limits: &MachineLimits) -> CommandResult {
    let results: Vec<_> = rows
        .iter()
        .map(|row| {
            json!({
                "test": row.work.name(),
                "threads": row.threads,
                "median": row.median(),
                "tokens_per_second": row.rates,
                "share_of_limit": row.share.map(|(_, share)| share),
                "limit": row.share.map(|(limit, _)| limit),
            })
        })
        .collect();
    let mut value = metadata();
    value["model"] = name.into();
    value["results"] = results.into();
    value["limits"] = limits.to_json();
    writeln!(std::io::stdout().lock(), "{value:#}")?;
    Ok(())
}

fn print_table(name: &str, rows: &[BenchRow], limits: &MachineLimits) -> CommandResult {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{name}")?;
    write!(
        out,
        "{:<14} {:>7} {:>10} {:>9} {:>9}",
        "test", "threads", "median t/s", "min", "max"
    )?;
    let header = if limits.is_empty() {
        ""
    } else {
        "  of the machine's limit"
    };
    writeln!(out, "{header}")?;
    for row in rows {
        let (min, max) = (row.rates[0], row.rates[row.rates.len() - 1]);
        write!(
            out,
            "{:<14} {:>7} {:>10.1} {min:>9.1} {max:>9.1}",
            row.work.name(),
            row.threads,
            row.median()
        )?;
        match row.share {
            Some((limit, share)) => writeln!(out, "  {:.1} % of {limit}", share * 100.0)?,
            None => writeln!(out)?,
        }
    }
    write!(out, "{}", limits.lines())?;
    Ok(())
}
