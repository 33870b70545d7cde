//! `samite dev compare`: runs a model on two devices in step, and finds the first operation that
//! differs.

use crate::args::ModelArgs;
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::files::TextSource;
use crate::interrupt;
use crate::setup::ModelSetup;
use crate::shown::{NAME_WIDTH, counted, escaped, json_number, shortened, wrapped};
use crate::watch::extents;
use clap::Args;
use samite::llm::{Batch, Context, Model};
use samite::sched::Watch;
use samite::sched::compare::{Difference, Pair};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;

/// Flags of `samite dev compare`.
#[derive(Debug, Args)]
#[command(
    after_help = "The text without its last token is computed at once, and then the last token \
alone. Each operation gets the same operands on both devices: the first device continues with the \
results of the second. The CPU computes operations that a device does not support. Fused kernels \
are not tested, because each result is read.

Results that are NaN on both devices are equal; the number of operations with only NaN is \
reported. In JSON, non-finite numbers are the strings \
\"Infinity\", \"-Infinity\" and \"NaN\".

Examples:
  samite dev compare -m model.gguf --device cpu,reference
  samite dev compare -m model.gguf --device ggml:Vulkan0,cpu -p \"Hello\" --all
  samite dev compare --device cpu,reference --limit 1e-6 --json"
)]
pub struct CompareArgs {
    /// Text to compute [default: a built-in sentence]
    #[arg(
        short,
        long,
        value_name = "TEXT",
        conflicts_with = "file",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,

    /// File with the text to compute
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Normalized mean squared error above which an operation differs; a single element may deviate
    /// by ten times its root. The default is twice the error of rounding activations to 8 bits
    #[arg(long, value_name = "X", default_value = "1e-3", value_parser = limit,
        allow_negative_numbers = true)]
    limit: f64,

    /// Continue after the first operation that differs, and list all
    #[arg(long)]
    all: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    cpu: CpuArgs,
}

fn limit(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(limit) if limit >= 0.0 && limit.is_finite() => Ok(limit),
        _ => Err("must be a number from 0".to_owned()),
    }
}

/// Default text.
const TEXT: &str = "Once upon a time, there was a little dog who lived by the sea.";

pub fn run(args: CompareArgs) -> CommandResult {
    let cancel = interrupt::token();
    let source = match (args.prompt, &args.file) {
        (Some(text), _) => Some(TextSource::text(text)),
        (None, Some(path)) => Some(TextSource::file(path)?),
        (None, None) => None,
    };
    let setup = ModelSetup::new(&args.model)?;
    let mut options = setup.context_options(&cancel);
    args.cpu.apply(&mut options);
    options.copies = 1;
    let [first, second] = setup.load_pair(&args.cpu, &cancel)?;
    let most = options.n_ctx.unwrap_or(first.spec().n_ctx_train);
    let tokens = tokens(&first, source, args.file.is_some(), most)?;
    let n_batch = options.n_batch;
    options.n_ctx.get_or_insert(tokens.len());
    let mut first = setup.context(first, options.clone())?;
    let mut second = setup.context(second, options)?;

    let mut report = ComparisonReport {
        limit: args.limit,
        is_json: args.json,
        ..ComparisonReport::default()
    };
    let (before, last) = tokens.split_at(tokens.len() - 1);
    let parts = before.chunks(n_batch).chain([last]);
    let mut position = 0;
    let mut failure = None;
    for part in parts {
        let batch = Batch::sequence(part, position, 0);
        position += part.len() as i32;
        let result = Context::compare([&mut first, &mut second], &batch, |pair| {
            let differs = report.add(pair).unwrap_or_else(|error| {
                failure = Some(error);
                true
            });
            Ok(if differs && (!args.all || failure.is_some()) {
                Watch::Stop
            } else {
                Watch::Continue
            })
        });
        match result {
            Err(error) if error.is_stopped() => break,
            result => result?,
        }
    }
    failure.map_or(Ok(()), Err)?;
    report.finish(args.all)
}

/// Returns the tokens of the text, at least one. Does not read a file to its end if it has too many
/// tokens.
fn tokens(
    model: &Model,
    source: Option<TextSource>,
    is_file: bool,
    most: usize,
) -> CommandResult<Vec<u32>> {
    let source = match (source, model.tokenizer()) {
        (Some(source), _) => source,
        (None, Ok(_)) => TextSource::text(TEXT.to_owned()),
        // Without a vocabulary, use arbitrary tokens.
        (None, Err(_)) => {
            let n_vocab = model.spec().n_vocab as u32;
            let count = most.min(16) as u32;
            return Ok((1..=count).map(|i| i * 7919 % n_vocab).collect());
        }
    };
    let mut tokens = source.tokens(model.tokenizer()?, true, most, |_| {})?;
    if tokens.is_empty() {
        return Err(CommandError::usage("the text is empty: give one with -p"));
    }
    let left_out = tokens.len().saturating_sub(most);
    if left_out > 0 {
        tracing::warn!(
            "the context has room for {}: {}{} of the text left out; see --ctx-size",
            counted(most, "token"),
            if is_file { "at least " } else { "" },
            counted(left_out, "token")
        );
    }
    tokens.truncate(most);
    Ok(tokens)
}

/// Results of a comparison.
#[derive(Default)]
struct ComparisonReport {
    limit: f64,
    is_json: bool,
    steps: usize,
    compared: usize,
    /// The node with the largest error within the limit, and that error.
    largest: Option<(String, f64)>,
    differing: usize,
    /// Number of nodes that are all NaN on both devices, and the first of them.
    all_nan: usize,
    first_nan: Option<String>,
    json: Vec<Value>,
}

impl ComparisonReport {
    /// Adds a node. Returns whether it differs.
    fn add(&mut self, pair: &Pair<'_>) -> CommandResult<bool> {
        self.steps += usize::from(pair.number == 0);
        self.compared += 1;
        let nmse = pair.difference.nmse;
        if pair.difference.all_nan {
            self.all_nan += 1;
            self.first_nan
                .get_or_insert_with(|| described(pair.nodes[0]).0);
        }
        if !pair.difference.exceeds(self.limit) {
            let most = self.largest.as_ref().map_or(0.0, |(_, most)| *most);
            if nmse > most {
                self.largest = Some((pair.nodes[0].tensor().name.to_string(), nmse));
            }
            return Ok(false);
        }
        self.differing += 1;
        if self.is_json {
            self.json.push(as_json(pair, self.steps - 1));
        } else {
            write!(
                std::io::stdout().lock(),
                "{}",
                as_text(pair, self.steps - 1)
            )?;
        }
        Ok(true)
    }

    fn finish(self, all: bool) -> CommandResult {
        let mut out = std::io::stdout().lock();
        if self.is_json {
            let largest = self
                .largest
                .map(|(name, nmse)| json!({ "name": name, "nmse": nmse }));
            let report = json!({
                "limit": self.limit,
                "steps": self.steps,
                "compared": self.compared,
                "largest_within_limit": largest,
                "all_nan": self.all_nan,
                "first_all_nan": self.first_nan,
                "differing": self.json,
            });
            writeln!(out, "{report:#}")?;
        } else {
            let most = match &self.largest {
                Some((name, nmse)) => {
                    let name = shortened(name, NAME_WIDTH);
                    format!(", the largest other error is {nmse:.1e}, of {name}")
                }
                None => String::new(),
            };
            let line = format!(
                "{} compared in {}, {} beyond {:e}{most}",
                counted(self.compared, "operation"),
                counted(self.steps, "step"),
                self.differing,
                self.limit,
            );
            writeln!(out, "{}", wrapped(&line, 80))?;
        }
        if let Some(name) = &self.first_nan {
            tracing::warn!(
                "{} nothing but NaN on both devices, first {}: that says nothing about them; look at the model and the nodes before",
                match self.all_nan {
                    1 => "1 operation is".to_owned(),
                    several => format!("{several} operations are"),
                },
                shortened(name, NAME_WIDTH)
            );
        }
        match self.differing {
            0 => Ok(()),
            1 if !all => Err(CommandError::error(
                "an operation differs; --all goes on behind it",
            )),
            1 => Err(CommandError::error("1 operation differs")),
            differing => Err(CommandError::error(format_args!(
                "{differing} operations differ"
            ))),
        }
    }
}

/// Returns the name, type and extents of a result or operand.
fn described(node: samite::Node<'_>) -> (String, &'static str, Vec<usize>) {
    let name = match &*node.tensor().name {
        "" => node.id().to_string(),
        name => name.to_owned(),
    };
    (name, node.dtype().name(), extents(node.layout()))
}

fn operands<'a>(
    pair: &'a Pair<'_>,
) -> impl Iterator<Item = (String, &'static str, Vec<usize>)> + 'a {
    let node = pair.nodes[0];
    let sources = node.tensor().operands();
    sources.map(move |(_, source)| described(node.graph().node(source)))
}

/// Returns an index into a tensor, in the order of its extents.
fn place(pair: &Pair<'_>) -> Vec<usize> {
    let count = extents(pair.nodes[0].layout()).len();
    pair.difference.at[..count].to_vec()
}

fn as_json(pair: &Pair<'_>, step: usize) -> Value {
    let (name, dtype, shape) = described(pair.nodes[0]);
    let Difference {
        nmse,
        largest,
        values,
        ..
    } = pair.difference;
    let operands = operands(pair)
        .map(|(name, dtype, shape)| json!({ "name": name, "type": dtype, "shape": shape }));
    json!({
        "step": step,
        "number": pair.number,
        "name": name,
        "operation": pair.nodes[0].op().name(),
        "type": dtype,
        "shape": shape,
        "operands": operands.collect::<Vec<_>>(),
        "devices": pair.devices.map(|device| device.name()),
        "nmse": json_number(nmse),
        "largest": json_number(largest),
        "at": place(pair),
        "values": values.map(json_number),
    })
}

fn as_text(pair: &Pair<'_>, step: usize) -> String {
    let (name, dtype, shape) = described(pair.nodes[0]);
    let Difference {
        nmse,
        largest,
        values,
        ..
    } = pair.difference;
    let head = format!(
        "{}, step {step}: {} {dtype} {shape:?}, error {nmse:.1e}",
        shortened(&name, NAME_WIDTH),
        pair.nodes[0].op().name(),
    );
    let operands = operands(pair).map(|(name, dtype, shape)| {
        let name = shortened(&name, NAME_WIDTH);
        format!("{name} {dtype} {shape:?}")
    });
    let operands = format!("    of {}", operands.collect::<Vec<_>>().join(", "));
    let [a, b] = pair
        .devices
        .map(|device| escaped(device.name()).into_owned());
    let worst = format!(
        "    largest difference {largest:.3e} at {:?}, {:.6} on {a}, {:.6} on {b}",
        place(pair),
        values[0],
        values[1],
    );
    let lines = [head, operands, worst].map(|line| wrapped(&line, 80) + "\n");
    lines.concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite::registry::{BuiltIn, Registry};
    use samite::sched::compare::compare_devices;
    use samite::{DType, Graph, f32_bytes};
    use std::sync::Arc;

    #[test]
    fn json_encodes_non_finite_numbers_as_strings() {
        let words = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.5].map(json_number);
        assert_eq!(json!(words), json!(["Infinity", "-Infinity", "NaN", 0.5]));
        // A result that overflows.
        let registry = Registry::built_in(BuiltIn::default());
        let right = Arc::clone(registry.device("reference").unwrap());
        let wrong = samite_testing::wrong_device(&right, |_| true);
        let mut graph = Graph::new();
        let x = graph.input("x", DType::F32, [2, 1, 1, 1]).unwrap();
        let y = graph.scale(x, 1.0).unwrap();
        graph.set_output(y);
        let inputs = [(x, f32_bytes(&[1.0, 2f32.powi(127) * 1.99]))];
        let mut found = Value::Null;
        compare_devices(&graph, [&[wrong], &[right]], &inputs, |pair| {
            found = as_json(pair, 0);
            Ok(Watch::Continue)
        })
        .unwrap();
        assert_eq!(found["nmse"], "Infinity", "{found}");
        assert_eq!(found["largest"], "Infinity", "{found}");
        assert_eq!(found["values"][0], "Infinity", "{found}");
        assert_eq!(found["at"], json!([1]), "{found}");
    }
}
