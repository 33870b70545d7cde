//! Compares samite with llama.cpp in pairs of consecutive samples: if the speed of the machine
//! changes, it changes for both.
//!
//! The order within a pair is random, and reversed in every second pair. The result is the median
//! of the pairs' ratios. Pairs during which the machine changed, by its [canaries](super::canary),
//! are dropped and replaced. If almost all pairs are disturbed, all count, and the result says so.
//!
//! The machine's limits are measured before and after the pairs of each row: the bandwidth of
//! shared memory varies, and the larger limits are closer to those of the best pairs.

use super::canary::{CpuTimes, Noise, Reading};
use super::flags::BenchArgs;
use super::limits::{self, MachineLimits};
use super::metadata::{describe, metadata};
use super::peer::Peer;
use super::statistics::{Ratio, median_of, ratio};
use super::work::{BenchCase, BenchRunner};
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::setup::ModelSetup;
use crate::shown::{one_line, say};
use crate::{interrupt, progress};
use samite::CancelToken;
use samite::llm::Model;
use samite::registry::{Peaks, Probe};
use samite::text::Rng;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Maximum number of pairs to try, as a multiple of the wanted ones.
const MAX_TRIES: usize = 2;

/// Two consecutive samples.
struct SamplePair {
    samite_first: bool,
    samite: f64,
    peer: f64,
    noise: Noise,
}

impl SamplePair {
    fn ratio(&self) -> f64 {
        self.samite / self.peer
    }
}

/// One line of the result.
struct ComparisonRow {
    work: BenchCase,
    threads: usize,
    /// Number of wanted pairs.
    wanted: usize,
    /// Tokens per second of llama.cpp without and with its packed weights, or 0 if it failed. The
    /// faster mode is compared.
    trial: [f64; 2],
    pairs: Vec<SamplePair>,
    /// The machine's limits before and after the pairs.
    limits: Vec<Peaks>,
    /// The limiting resource by the larger limits, and the rate at which its limit is reached.
    limit: Option<(&'static str, f64)>,
}

impl ComparisonRow {
    fn repack(&self) -> bool {
        self.trial[1] >= self.trial[0]
    }

    /// Returns the number of undisturbed pairs.
    fn quiet(&self) -> usize {
        let quiet = |pair: &&SamplePair| pair.noise.reason().is_none();
        self.pairs.iter().filter(quiet).count()
    }

    /// Returns whether too few pairs were undisturbed, so that all of them count.
    fn is_restless(&self) -> bool {
        2 * self.quiet() < self.wanted.min(self.pairs.len())
    }

    /// Returns the pairs that count.
    fn kept(&self) -> impl Iterator<Item = &SamplePair> {
        let all = self.is_restless();
        let counts = move |pair: &&SamplePair| all || pair.noise.reason().is_none();
        self.pairs.iter().filter(counts)
    }

    fn ratio(&self) -> Option<Ratio> {
        let ratios: Vec<f64> = self.kept().map(SamplePair::ratio).collect();
        ratio(&ratios)
    }

    fn samite(&self) -> f64 {
        median_of(self.kept().map(|pair| pair.samite))
    }

    fn peer(&self) -> f64 {
        median_of(self.kept().map(|pair| pair.peer))
    }

    fn share(&self) -> Option<(&'static str, f64)> {
        let (name, rate) = self.limit?;
        Some((name, self.samite() / rate))
    }
}

/// The report of a comparison.
#[derive(Default)]
struct Report {
    model: String,
    peer_version: Option<String>,
    rows: Vec<ComparisonRow>,
    limits: MachineLimits,
}

/// Compares all `works` with each number of threads. After Ctrl-C, prints the results so far.
pub fn run(
    args: &BenchArgs,
    setup: &ModelSetup,
    bench: &Path,
    threads: &[usize],
    works: &[BenchCase],
) -> CommandResult {
    let peer = Peer::new(bench, setup)?;
    let cancel = interrupt::token();
    let mut report = Report::default();
    let result = measure_all(args, setup, &peer, threads, works, &cancel, &mut report);
    let measured = report.rows.iter().any(|row| !row.pairs.is_empty());
    if measured || result.is_ok() {
        let mut out = std::io::stdout().lock();
        if args.json {
            writeln!(out, "{:#}", as_json(&report))?;
        } else {
            write!(out, "{}", as_table(&report))?;
        }
    }
    result
}

fn measure_all(
    args: &BenchArgs,
    setup: &ModelSetup,
    peer: &Peer,
    threads: &[usize],
    works: &[BenchCase],
    cancel: &CancelToken,
    report: &mut Report,
) -> CommandResult {
    let bar = progress::count("comparing", "pairs");
    bar.set_length((threads.len() * works.len() * args.pairs as usize) as u64);
    let seed = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut random = Rng::new(seed.map_or(0, |time| time.as_nanos() as u64));
    report.peer_version = peer.version(cancel)?;
    let probe = Probe::new();
    for &threads in threads {
        let model = setup.load(&CpuArgs::new(threads, &args.pool), cancel)?;
        report.model = describe(&model);
        for &work in works {
            report.rows.push(ComparisonRow {
                work,
                threads,
                wanted: args.pairs as usize,
                trial: [0.0; 2],
                pairs: Vec::new(),
                limits: Vec::new(),
                limit: None,
            });
            let Report {
                rows,
                peer_version,
                limits,
                ..
            } = &mut *report;
            let Some(row) = rows.last_mut() else { continue };
            let mut measure_limits = |row: &mut ComparisonRow| -> CommandResult {
                if !args.no_peaks {
                    row.limits
                        .push(limits.measure(threads, &args.pool, cancel)?);
                    let best = row.limits.iter().copied().reduce(Peaks::max);
                    row.limit = best.map(|peaks| work.limit(&model, &peaks));
                }
                Ok(())
            };
            measure_limits(row)?;
            let comparison = Comparison {
                args,
                setup,
                peer,
                model: &model,
                probe: &probe,
                cancel,
            };
            comparison.fill(row, peer_version, &mut random, &bar)?;
            measure_limits(row)?;
        }
    }
    drop(bar);
    Ok(())
}

/// Inputs for the measurement of a row.
struct Comparison<'a> {
    args: &'a BenchArgs,
    setup: &'a ModelSetup,
    peer: &'a Peer,
    model: &'a Arc<Model>,
    probe: &'a Probe,
    cancel: &'a CancelToken,
}

impl Comparison<'_> {
    /// Measures until there are enough pairs.
    fn fill(
        &self,
        row: &mut ComparisonRow,
        version: &mut Option<String>,
        random: &mut Rng,
        bar: &indicatif::ProgressBar,
    ) -> CommandResult {
        let repetitions = self.args.repetitions.unwrap_or(1);
        let (work, threads) = (row.work, row.threads);
        let sample_peer = |repack| {
            let context = &self.setup.context;
            self.peer
                .sample(work, threads, repack, repetitions, context, self.cancel)
        };
        let mut samite = BenchRunner::new(self.model, work, self.setup, self.cancel)?;
        let mut sample_samite = || -> CommandResult<f64> {
            let rates: CommandResult<Vec<f64>> =
                (0..repetitions).map(|_| samite.sample()).collect();
            Ok(median_of(rates?))
        };
        // Take the better of two runs each, in the order 0 1 1 0. One mode may fail: some builds do
        // not run with packed weights on every machine.
        let mut failures = [None, None];
        for repack in [false, true, true, false] {
            let (best, failure) = (
                &mut row.trial[usize::from(repack)],
                &mut failures[usize::from(repack)],
            );
            if failure.is_some() {
                continue;
            }
            match sample_peer(repack) {
                Ok(sample) => {
                    *best = best.max(sample.rate);
                    *version = version.take().or(sample.version);
                }
                Err(CommandError::Error(message)) => *failure = Some(message),
                Err(failure) => return Err(failure),
            }
        }
        match failures {
            [Some(message), Some(_)] => return Err(CommandError::Error(message)),
            [Some(message), None] | [None, Some(message)] => {
                progress::pause(|| {
                    say(format_args!(
                        "warning: only one of --repack 0 and 1 works: {}",
                        one_line(&message)
                    ));
                });
            }
            [None, None] => {}
        }
        let repack = row.repack();
        let mut samite_first = false;
        let mut reading = Reading::new(self.probe);
        while row.quiet() < row.wanted && row.pairs.len() < row.wanted * MAX_TRIES {
            samite_first = match row.pairs.len() % 2 {
                0 => random.next_u64() >> 63 == 0,
                _ => !samite_first,
            };
            let (before, start) = (CpuTimes::now(), Instant::now());
            let mut readings = vec![reading];
            let mut rates = [0.0; 2];
            for is_samite in [samite_first, !samite_first] {
                rates[usize::from(!is_samite)] = if is_samite {
                    sample_samite()?
                } else {
                    sample_peer(repack)?.rate
                };
                readings.push(Reading::new(self.probe));
            }
            reading = readings[2];
            let seconds = start.elapsed().as_secs_f64();
            let noise = Noise::new(&readings, before, CpuTimes::now(), seconds);
            bar.inc(u64::from(noise.reason().is_none()));
            row.pairs.push(SamplePair {
                samite_first,
                samite: rates[0],
                peer: rates[1],
                noise,
            });
        }
        Ok(())
    }
}

fn as_table(report: &Report) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    let version = report
        .peer_version
        .as_deref()
        .unwrap_or("of unknown version");
    let _ = writeln!(text, "{}; llama.cpp {version}\n", report.model);
    text += "| work | threads | samite t/s | llama.cpp t/s | repack | ratio | 95 % interval | pairs (restless) | share of limit |\n";
    text += "|---|---|---|---|---|---|---|---|---|\n";
    for row in &report.rows {
        let Some(ratio) = row.ratio() else { continue };
        let share = row.share().map_or("".to_owned(), |(limit, share)| {
            format!("{:.0} % of {limit}", share * 100.0)
        });
        let _ = writeln!(
            text,
            "| {} | {} | {:.1} | {:.1} | {} | {:.2} | {:.2} to {:.2} | {} ({}{}) | {share} |",
            row.work.name(),
            row.threads,
            row.samite(),
            row.peer(),
            u8::from(row.repack()),
            ratio.median,
            ratio.low,
            ratio.high,
            row.kept().count(),
            row.pairs.len() - row.quiet(),
            if row.is_restless() {
                " restless, not dropped"
            } else {
                ""
            },
        );
    }
    if !report.limits.is_empty() {
        let _ = write!(text, "\n{}", report.limits.lines());
    }
    text
}

fn as_json(report: &Report) -> Value {
    let pair = |pair: &SamplePair| {
        json!({
            "first": if pair.samite_first { "samite" } else { "llama.cpp" },
            "samite": pair.samite,
            "llama_cpp": pair.peer,
            "clock_drift": pair.noise.clock_drift,
            "read_drift": pair.noise.read_drift,
            "stolen": pair.noise.stolen,
            "foreign": pair.noise.foreign,
            "restless": pair.noise.reason(),
        })
    };
    let row = |row: &ComparisonRow| {
        let found = row.ratio();
        json!({
            "test": row.work.name(),
            "threads": row.threads,
            "samite": finite(row.samite()),
            "llama_cpp": finite(row.peer()),
            "ratio": found.map(|ratio| ratio.median),
            "ratio_low": found.map(|ratio| ratio.low),
            "ratio_high": found.map(|ratio| ratio.high),
            "ratio_of_all_pairs":
                ratio(&row.pairs.iter().map(SamplePair::ratio).collect::<Vec<_>>())
                    .map(|ratio| ratio.median),
            "repack": row.repack(),
            "llama_cpp_trial": { "repack_0": row.trial[0], "repack_1": row.trial[1] },
            "kept": row.kept().count(),
            "restless": row.pairs.len() - row.quiet(),
            "restless_dropped": !row.is_restless(),
            "limit": row.share().map(|(limit, _)| limit),
            "share_of_limit": row.share().and_then(|(_, share)| finite(share)),
            "limits": row.limits.iter().map(limits::to_json).collect::<Vec<_>>(),
            "pairs": row.pairs.iter().map(pair).collect::<Vec<_>>(),
        })
    };
    let mut value = metadata();
    value["model"] = report.model.as_str().into();
    value["llama_cpp_version"] = report.peer_version.as_deref().into();
    value["results"] = report.rows.iter().map(row).collect();
    value["limits"] = report.limits.to_json();
    value
}

fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}
