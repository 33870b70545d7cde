//! `samite bench`

mod canary;
mod compare;
mod limits;
mod metadata;
mod peer;
mod statistics;
mod work;

use crate::args::{ModelArgs, ThreadArgs, sequence_count, thread_count, token_count};
use crate::failure::{Failure, Outcome};
use crate::progress;
use crate::shown::shortened;
use clap::Args;
use limits::Limits;
use metadata::metadata;
use samite::CancelToken;
use samite::llm::Model;
use samite::registry::allowed_threads;
use serde_json::json;
use statistics::median;
use std::io::Write;
use std::path::PathBuf;
use work::{Bench, Work};

/// Repetitions where nothing is compared, unless told otherwise.
const REPETITIONS: u32 = 5;

/// Flags of `samite bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite bench -m model.gguf
  samite bench -m model.gguf -p 512,2048 -n 128 -t 1,2,4
  samite bench -m model.gguf --compare ~/llama.cpp/build/bin/llama-bench")]
pub struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Numbers of CPU threads to measure; by default as many as this process may use
    #[arg(short = 't', long, value_name = "LIST", value_delimiter = ',', value_parser = thread_count)]
    threads: Vec<usize>,
    /// Prompt lengths to measure; 0 for none
    #[arg(short = 'p', long, value_name = "LIST", value_delimiter = ',', default_value = "512", value_parser = token_count)]
    n_prompt: Vec<usize>,
    /// Numbers of generated tokens to measure; 0 for none
    #[arg(short = 'n', long, value_name = "LIST", value_delimiter = ',', default_value = "64", value_parser = token_count)]
    n_gen: Vec<usize>,
    /// Tokens in the context before each measurement
    #[arg(short = 'd', long, value_name = "LIST", value_delimiter = ',', default_value = "0", value_parser = token_count)]
    depth: Vec<usize>,
    /// Numbers of sequences that generate together; prompts are measured with one
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1", value_parser = sequence_count)]
    sequences: Vec<usize>,
    /// Repetitions; 5 by default. In a comparison, of each sample, whose median counts; 1 by default
    #[arg(short = 'r', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: Option<u32>,
    /// Compare with llama.cpp: the path of its llama-bench (llama-batched-bench is looked for beside it)
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Pairs of samples in a comparison
    #[arg(long, value_name = "N", default_value = "12", value_parser = clap::value_parser!(u32).range(1..=1000), requires = "compare")]
    pairs: u32,
    /// Do not measure the machine's limits; otherwise, a comparison measures them before and after the pairs of each test,
    /// and the larger ones count
    #[arg(long)]
    no_peaks: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl BenchArgs {
    /// All combinations: prompts first.
    fn works(&self) -> Vec<Work> {
        let mut works = Vec::new();
        let once = [1];
        for (is_prompt, counts, sequences) in [
            (true, &self.n_prompt, once.as_slice()),
            (false, &self.n_gen, &self.sequences),
        ] {
            for &tokens in counts.iter().filter(|&&tokens| tokens > 0) {
                for &depth in &self.depth {
                    works.extend(sequences.iter().map(|&sequences| Work {
                        is_prompt,
                        tokens,
                        depth,
                        sequences,
                    }));
                }
            }
        }
        works
    }
}

/// One measurement.
struct Row {
    work: Work,
    threads: usize,
    /// Tokens per second of each repetition, ascending.
    rates: Vec<f64>,
    /// The machine's limit, and the share of it that was reached.
    share: Option<(&'static str, f64)>,
}

impl Row {
    fn median(&self) -> f64 {
        median(&self.rates)
    }
}

/// A line about a model.
fn describe(model: &Model) -> String {
    format!(
        "{} ({:.1} M parameters, {:.1} MB)",
        shortened(model.name(), 40),
        model.n_params() as f64 / 1e6,
        model.file_bytes() as f64 / 1e6
    )
}

pub fn run(args: BenchArgs) -> Outcome {
    let works = args.works();
    if works.is_empty() {
        return Err(Failure::usage(
            "nothing to measure: give prompt lengths with -p or numbers of generated tokens with -n",
        ));
    }
    let mut threads = args.threads.clone();
    if threads.is_empty() {
        threads.push(allowed_threads());
    }
    if let Some(bench) = &args.compare {
        return compare::run(&args, bench, &threads, &works);
    }

    // Nothing is lost and nothing to be tidied up: a signal ends the program at once.
    let cancel = CancelToken::new();
    let repetitions = args.repetitions.unwrap_or(REPETITIONS);
    let bar = progress::count("measuring", "tests");
    bar.set_length((threads.len() * works.len()) as u64);
    let (mut rows, mut limits, mut name) = (Vec::new(), Limits::default(), String::new());
    for &threads in &threads {
        let model = args.model.load(ThreadArgs::new(threads), &cancel)?;
        name = describe(&model);
        let peaks = (!args.no_peaks)
            .then(|| limits.measure(threads, &cancel))
            .transpose()?;
        for &work in &works {
            let mut bench = Bench::new(&model, work, &args.model, &cancel)?;
            let rates: Outcome<Vec<f64>> = (0..repetitions).map(|_| bench.sample()).collect();
            let mut rates = rates?;
            rates.sort_by(f64::total_cmp);
            let share = peaks.as_ref().map(|peaks| {
                let (limit, rate) = work.limit(&model, peaks);
                (limit, median(&rates) / rate)
            });
            rows.push(Row {
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

fn print_json(name: &str, rows: &[Row], limits: &Limits) -> Outcome {
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

fn print_table(name: &str, rows: &[Row], limits: &Limits) -> Outcome {
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
