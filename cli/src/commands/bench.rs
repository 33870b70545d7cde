//! `samite bench`

use crate::args::{ModelArgs, parse_list};
use crate::failure::Outcome;
use crate::{interrupt, progress};
use clap::Args;
use samite::CancelToken;
use samite::llm::{Batch, Context, Model};
use serde_json::json;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

/// Flags of `samite bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt lengths to measure, separated by commas; 0 for none
    #[arg(short = 'p', long, value_name = "LIST", default_value = "512")]
    n_prompt: String,
    /// Numbers of generated tokens to measure, separated by commas; 0 for none
    #[arg(short = 'n', long, value_name = "LIST", default_value = "64")]
    n_gen: String,
    /// Tokens in the context before each measurement
    #[arg(short = 'd', long, value_name = "N", default_value = "0")]
    depth: usize,
    /// Numbers of threads to measure, separated by commas, instead of --threads
    #[arg(long, value_name = "LIST")]
    threads_list: Option<String>,
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

/// One measurement.
struct Row {
    test: String,
    threads: usize,
    /// Tokens per second of each repetition, ascending.
    rates: Vec<f64>,
    /// Share of the machine's limit: arithmetic for prompts, reading for generation.
    share: Option<f64>,
}

impl Row {
    fn median(&self) -> f64 {
        let n = self.rates.len();
        if n % 2 == 1 {
            self.rates[n / 2]
        } else {
            (self.rates[n / 2 - 1] + self.rates[n / 2]) / 2.0
        }
    }
}

/// A list of numbers in which 0 stands for nothing.
fn list(text: &str, flag: &str) -> Outcome<Vec<usize>> {
    if text.trim() == "0" {
        Ok(Vec::new())
    } else {
        parse_list(text, flag)
    }
}

pub fn run(args: BenchArgs) -> Outcome {
    let cancel = interrupt::token()?;
    let prompts = list(&args.n_prompt, "--n-prompt")?;
    let generations = list(&args.n_gen, "--n-gen")?;
    let threads = match (&args.threads_list, args.model.devices.threads) {
        (Some(list), _) => parse_list(list, "--threads-list")?,
        (None, Some(threads)) => vec![usize::from(threads)],
        (None, None) => vec![samite::registry::allowed_threads()],
    };
    let mut rows = Vec::new();
    let bar = progress::count("measuring");
    bar.set_length((threads.len() * (prompts.len() + generations.len())) as u64);
    let mut name = String::new();
    for &threads in &threads {
        let mut model_args = args.model.clone();
        model_args.devices.threads = u16::try_from(threads).ok();
        let model = model_args.load(&cancel)?;
        name = format!(
            "{} ({:.1} M parameters, {:.1} MB)",
            model.name(),
            model.n_params() as f64 / 1e6,
            model.file_bytes() as f64 / 1e6
        );
        let peaks = (!args.no_peaks).then(|| samite::registry::measure_peaks(threads));
        for (tokens, is_prompt) in prompts
            .iter()
            .map(|&n| (n, true))
            .chain(generations.iter().map(|&n| (n, false)))
        {
            let mut row = measure(&args, &model, &model_args, tokens, is_prompt, &cancel)?;
            row.threads = threads;
            row.share = peaks.map(|peaks| {
                let weights = matrix_elements(&model) as f64;
                if is_prompt {
                    row.median() * weights * 2.0
                        / peaks.i8_operations.unwrap_or(peaks.f32_operations)
                } else {
                    row.median() * model.file_bytes() as f64 / peaks.read_bytes
                }
            });
            rows.push((row, is_prompt, peaks));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    if args.json {
        let results: Vec<_> = rows
            .iter()
            .map(|(row, _, peaks)| {
                json!({
                    "test": row.test, "threads": row.threads, "median": row.median(), "tokens_per_second": row.rates,
                    "share_of_peak": row.share,
                    "peaks": peaks.map(|p| json!({ "read_bytes": p.read_bytes, "f32_operations": p.f32_operations, "i8_operations": p.i8_operations })),
                })
            })
            .collect();
        writeln!(out, "{:#}", json!({ "model": name, "results": results }))?;
        return Ok(());
    }
    writeln!(out, "{name}")?;
    writeln!(
        out,
        "{:<14} {:>7} {:>12} {:>12} {:>12}  share of the machine's limit",
        "test", "threads", "median t/s", "min", "max"
    )?;
    for (row, is_prompt, peaks) in &rows {
        let share = row.share.map_or_else(String::new, |share| {
            let limit = match (is_prompt, peaks.and_then(|p| p.i8_operations)) {
                (false, _) => "reading",
                (true, Some(_)) => "8-bit products",
                (true, None) => "f32 arithmetic",
            };
            format!("{:.1} % of {limit}", share * 100.0)
        });
        let (min, max) = (
            row.rates.first().copied().unwrap_or(0.0),
            row.rates.last().copied().unwrap_or(0.0),
        );
        writeln!(
            out,
            "{:<14} {:>7} {:>12.1} {min:>12.1} {max:>12.1}  {share}",
            row.test,
            row.threads,
            row.median()
        )?;
    }
    for peaks in rows.iter().filter_map(|(_, _, peaks)| *peaks).fold(
        Vec::<samite::registry::Peaks>::new(),
        |mut seen, p| {
            if seen.iter().all(|s| s.threads != p.threads) {
                seen.push(p);
            }
            seen
        },
    ) {
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

fn measure(
    args: &BenchArgs,
    model: &Arc<Model>,
    model_args: &ModelArgs,
    tokens: usize,
    is_prompt: bool,
    cancel: &CancelToken,
) -> Outcome<Row> {
    let mut options = model_args.context_options(cancel)?;
    options.n_ctx = Some(
        options
            .n_ctx
            .unwrap_or(args.depth + tokens)
            .max(args.depth + tokens),
    );
    let mut context = Context::new(Arc::clone(model), options)?;
    let n_vocab = model.hparams().n_vocab as u32;
    // Any tokens do: speed does not depend on which.
    let token = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % n_vocab;
    let fill = |context: &mut Context, from: usize, count: usize| -> Outcome {
        let step = context.options().n_batch;
        for start in (from..from + count).step_by(step) {
            let ids: Vec<u32> = (start..(from + count).min(start + step))
                .map(token)
                .collect();
            context.decode(&Batch::sequence(&ids, start as i32, 0))?;
        }
        Ok(())
    };
    let mut rates = Vec::new();
    // The first round warms up.
    for round in 0..=args.repetitions {
        context.clear()?;
        fill(&mut context, 0, args.depth)?;
        let start = Instant::now();
        if is_prompt {
            fill(&mut context, args.depth, tokens)?;
        } else {
            let mut batch = Batch::new();
            for i in 0..tokens {
                batch.clear();
                batch.add(token(i), (args.depth + i) as i32, &[0], true);
                context.decode(&batch)?;
            }
        }
        let rate = tokens as f64 / start.elapsed().as_secs_f64();
        if round > 0 {
            rates.push(rate);
        }
    }
    rates.sort_by(f64::total_cmp);
    let depth = if args.depth > 0 {
        format!("@{}", args.depth)
    } else {
        String::new()
    };
    let test = format!("{}{tokens}{depth}", if is_prompt { "pp" } else { "tg" });
    Ok(Row {
        test,
        threads: 0,
        rates,
        share: None,
    })
}
