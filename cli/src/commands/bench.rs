//! `samite bench`

use crate::args::{self, ModelArgs, ThreadArgs, thread_count, token_count};
use crate::failure::{Failure, Outcome};
use crate::{interrupt, progress};
use clap::Args;
use samite::CancelToken;
use samite::llm::{Batch, Context, Model};
use samite::registry::{Peaks, allowed_threads, measure_peaks};
use serde_json::json;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

/// Flags of `samite bench`.
#[derive(Debug, Args)]
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
    #[arg(short = 'd', long, value_name = "N", default_value = "0", value_parser = token_count)]
    depth: usize,
    /// Repetitions
    #[arg(short = 'r', long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Do not measure the machine's limits
    #[arg(long)]
    no_peaks: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is measured.
#[derive(Clone, Copy)]
struct Test {
    /// Whether the tokens come together, as a prompt, or one after the other.
    is_prompt: bool,
    tokens: usize,
    depth: usize,
}

impl Test {
    fn name(self) -> String {
        let kind = if self.is_prompt { "pp" } else { "tg" };
        match self.depth {
            0 => format!("{kind}{}", self.tokens),
            depth => format!("{kind}{}@{depth}", self.tokens),
        }
    }

    /// The machine's limit for this: arithmetic for prompts, reading for generation; and the rate in tokens per second
    /// at which it would be reached.
    fn limit(self, model: &Model, peaks: &Peaks) -> (&'static str, f64) {
        if !self.is_prompt {
            return ("reading", peaks.read_bytes / model.file_bytes() as f64);
        }
        let operations = 2.0 * matrix_elements(model) as f64;
        match peaks.i8_operations {
            Some(peak) => ("8-bit products", peak / operations),
            None => ("f32 arithmetic", peaks.f32_operations / operations),
        }
    }
}

/// One measurement.
struct Row {
    test: Test,
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

/// The median of sorted numbers.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        (sorted[middle - 1] + sorted[middle]) / 2.0
    }
}

pub fn run(args: BenchArgs) -> Outcome {
    let tests = |counts: &[usize], is_prompt| {
        let wanted = counts.iter().copied().filter(|&tokens| tokens > 0);
        let depth = args.depth;
        let test = |tokens| Test {
            is_prompt,
            tokens,
            depth,
        };
        wanted.map(test).collect::<Vec<_>>()
    };
    let tests = [tests(&args.n_prompt, true), tests(&args.n_gen, false)].concat();
    if tests.is_empty() {
        return Err(Failure::usage(
            "nothing to measure: give prompt lengths with -p or numbers of generated tokens with -n",
        ));
    }
    let mut threads = args.threads.clone();
    if threads.is_empty() {
        threads.push(allowed_threads());
    }

    let cancel = interrupt::token()?;
    let bar = progress::count("measuring");
    bar.set_length((threads.len() * tests.len()) as u64);
    let (mut rows, mut limits, mut name) = (Vec::new(), Vec::new(), String::new());
    for &threads in &threads {
        let model = args.model.load(ThreadArgs::new(threads), &cancel)?;
        name = format!(
            "{} ({:.1} M parameters, {:.1} MB)",
            model.name(),
            model.n_params() as f64 / 1e6,
            model.file_bytes() as f64 / 1e6
        );
        let peaks = (!args.no_peaks).then(|| measure_peaks(threads));
        for &test in &tests {
            let rates = measure(&args, &model, test, &cancel)?;
            let share = peaks.as_ref().map(|peaks| {
                let (limit, rate) = test.limit(&model, peaks);
                (limit, median(&rates) / rate)
            });
            rows.push(Row {
                test,
                threads,
                rates,
                share,
            });
            bar.inc(1);
        }
        limits.extend(peaks);
    }
    bar.finish_and_clear();
    if args.json {
        print_json(&name, &rows, &limits)
    } else {
        print_table(&name, &rows, &limits)
    }
}

fn print_json(name: &str, rows: &[Row], limits: &[Peaks]) -> Outcome {
    let results: Vec<_> = rows
        .iter()
        .map(|row| {
            json!({
                "test": row.test.name(),
                "threads": row.threads,
                "median": row.median(),
                "tokens_per_second": row.rates,
                "share_of_limit": row.share.map(|(_, share)| share),
                "limit": row.share.map(|(limit, _)| limit),
            })
        })
        .collect();
    let limits: Vec<_> = limits
        .iter()
        .map(|peaks| {
            json!({
                "threads": peaks.threads,
                "read_bytes": peaks.read_bytes,
                "f32_operations": peaks.f32_operations,
                "i8_operations": peaks.i8_operations,
            })
        })
        .collect();
    let value = json!({ "model": name, "results": results, "limits": limits });
    writeln!(std::io::stdout().lock(), "{value:#}")?;
    Ok(())
}

fn print_table(name: &str, rows: &[Row], limits: &[Peaks]) -> Outcome {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{name}")?;
    write!(
        out,
        "{:<14} {:>7} {:>12} {:>12} {:>12}",
        "test", "threads", "median t/s", "min", "max"
    )?;
    let header = if limits.is_empty() {
        ""
    } else {
        "  share of the machine's limit"
    };
    writeln!(out, "{header}")?;
    for row in rows {
        let (min, max) = (row.rates[0], row.rates[row.rates.len() - 1]);
        write!(
            out,
            "{:<14} {:>7} {:>12.1} {min:>12.1} {max:>12.1}",
            row.test.name(),
            row.threads,
            row.median()
        )?;
        match row.share {
            Some((limit, share)) => writeln!(out, "  {:.1} % of {limit}", share * 100.0)?,
            None => writeln!(out)?,
        }
    }
    for peaks in limits {
        let i8 = peaks
            .i8_operations
            .map_or_else(String::new, |ops| format!(", {:.0} GOP/s 8-bit", ops / 1e9));
        writeln!(
            out,
            "limits, {} threads: {:.1} GB/s reading, {:.0} GFLOP/s f32{i8}",
            peaks.threads,
            peaks.read_bytes / 1e9,
            peaks.f32_operations / 1e9
        )?;
    }
    Ok(())
}

/// Weights that every token is multiplied with: all matrices but the embedding.
fn matrix_elements(model: &Model) -> u64 {
    let h = model.hparams();
    model
        .n_params()
        .saturating_sub((h.n_vocab * h.n_embd) as u64)
}

/// Tokens per second of each repetition, ascending. A first round, which is not counted, warms up.
fn measure(
    args: &BenchArgs,
    model: &Arc<Model>,
    test: Test,
    cancel: &CancelToken,
) -> Outcome<Vec<f64>> {
    let mut options = args.model.context_options(cancel)?;
    let needed = test.depth + test.tokens;
    options.n_ctx = Some(options.n_ctx.map_or(needed, |n_ctx| n_ctx.max(needed)));
    let mut context = args::context(Arc::clone(model), options)?;
    let n_vocab = model.hparams().n_vocab as u32;
    // Any tokens do: speed does not depend on which.
    let token = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % n_vocab;
    let prompt = |context: &mut Context, from: usize, count: usize| -> Outcome {
        let step = context.options().n_batch;
        let end = from + count;
        for start in (from..end).step_by(step) {
            let ids: Vec<u32> = (start..end.min(start + step)).map(token).collect();
            context.decode(&Batch::sequence(&ids, start as i32, 0))?;
        }
        Ok(())
    };
    let mut rates = Vec::new();
    for round in 0..=args.repetitions {
        context.clear()?;
        prompt(&mut context, 0, test.depth)?;
        let start = Instant::now();
        if test.is_prompt {
            prompt(&mut context, test.depth, test.tokens)?;
        } else {
            let mut batch = Batch::new();
            for i in 0..test.tokens {
                batch.clear();
                batch.add(token(i), (test.depth + i) as i32, &[0], true);
                context.decode(&batch)?;
            }
        }
        let rate = test.tokens as f64 / start.elapsed().as_secs_f64();
        if round > 0 {
            rates.push(rate);
        }
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates)
}
