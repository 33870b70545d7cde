//! `--watch`: shows results of nodes while a model runs, or writes them to files.

pub mod npy;

use crate::failure::{CommandError, CommandResult};
use crate::shown::{NAME_WIDTH, escaped, json_number, say, shortened, wrapped};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use samite::llm::{Context, NodeNames, WatchedResult, Watcher};
use samite::quant::RowReader;
use samite::sched::Watch;
use samite::{DType, Layout};
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Number of values to show of each result.
const SHOWN: usize = 6;

/// File name of the list of results.
const INDEX: &str = "index.jsonl";

/// Flags for watching nodes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Watching")]
pub struct WatchArgs {
    /// Print nodes with matching names to standard error as they are computed: `l_out-*`, `*` for
    /// all; may be repeated
    #[arg(long, value_name = "PATTERN", value_parser = NonEmptyStringValueParser::new())]
    watch: Vec<String>,

    /// Write these nodes to an empty or new folder instead: one NumPy file each (outermost extent
    /// first), and index.jsonl
    #[arg(long, value_name = "FOLDER", requires = "watch")]
    watch_dir: Option<PathBuf>,

    /// Maximum amount of data to write to --watch-dir, in MiB
    #[arg(
        long,
        value_name = "MIB",
        default_value = "4096",
        requires = "watch_dir",
        allow_negative_numbers = true
    )]
    watch_limit: u32,
}

impl WatchArgs {
    /// Returns whether any node is watched.
    pub fn is_given(&self) -> bool {
        !self.watch.is_empty()
    }

    /// Prepares the watch. An unusable folder fails here, before a model is loaded.
    pub fn prepare(&self) -> CommandResult<Option<Watching>> {
        if self.watch.is_empty() {
            return Ok(None);
        }
        let limit = u64::from(self.watch_limit) << 20;
        let folder = self.watch_dir.as_ref();
        Ok(Some(Watching {
            names: NodeNames::new(&self.watch)?,
            folder: folder.map(|path| Folder::new(path, limit)).transpose()?,
        }))
    }
}

/// A prepared watch.
pub struct Watching {
    names: NodeNames,
    folder: Option<Folder>,
}

/// Failure during a watch.
#[derive(Clone, Default)]
pub struct Trouble(Arc<Mutex<Option<CommandError>>>);

impl Trouble {
    /// Returns the failure, if there was one. It is the reason why the run stopped.
    pub fn check(&self) -> CommandResult {
        let mut failure = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failure.take().map_or(Ok(()), Err)
    }

    fn set(&self, failure: CommandError) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
    }
}

impl Watching {
    /// Watches the runs of `context` from now on. The first one is a prompt of `tokens` tokens.
    pub fn start(self, context: &mut Context, tokens: usize) -> CommandResult<Trouble> {
        let Watching { names, mut folder } = self;
        check_names(&names, context, tokens)?;
        let trouble = Trouble::default();
        let result = trouble.clone();
        let mut bytes = Vec::new();
        context.watch(Some(Watcher::of_names(names, move |seen| {
            bytes.resize(seen.value.layout().bytes(), 0);
            seen.value.read(0, &mut bytes)?;
            let shown = match &mut folder {
                Some(folder) => folder.add(seen, &bytes),
                None => show(seen, &bytes),
            };
            Ok(match shown {
                Ok(()) => Watch::Continue,
                Err(failure) => {
                    result.set(failure);
                    Watch::Stop
                }
            })
        })));
        Ok(trouble)
    }
}

/// Rejects patterns that match no node of the model's graphs.
fn check_names(names: &NodeNames, context: &Context, tokens: usize) -> CommandResult {
    let prompt = tokens.clamp(1, context.options().n_ubatch);
    let plans = [context.plan(prompt)?, context.plan(1)?];
    let tensors = plans.iter().flat_map(|plan| plan.graph().tensors());
    let all = tensors
        .filter(|tensor| tensor.is_computed() || tensor.op.is_view())
        .map(|tensor| &*tensor.name);
    let Some(pattern) = names.without_match(all.clone()).first().copied() else {
        return Ok(());
    };
    let mut known: Vec<&str> = Vec::new();
    for name in all.filter(|name| !name.is_empty()) {
        if !known.contains(&name) {
            known.push(name);
        }
        if known.len() == 12 {
            break;
        }
    }
    Err(CommandError::usage(format_args!(
        "--watch: no node of this model is called '{}'; the first ones are {}",
        shortened(pattern, NAME_WIDTH),
        known.join(", ")
    )))
}

/// Returns the extents, innermost first, without trailing ones.
pub fn extents(layout: &Layout) -> Vec<usize> {
    let shape = layout.shape();
    let count = shape.iter().rposition(|&extent| extent != 1);
    shape[..=count.unwrap_or(0)].to_vec()
}

/// Summary of a result in one line.
struct Summary {
    sum: f64,
    not_finite: usize,
    first: Vec<f64>,
}

impl Summary {
    fn new(layout: &Layout, bytes: &[u8]) -> CommandResult<Self> {
        let mut reader = RowReader::default();
        let mut summary = Summary {
            sum: 0.0,
            not_finite: 0,
            first: Vec::new(),
        };
        for row in 0..layout.rows() {
            let values = reader.read(layout, bytes, row)?;
            summary.sum += values.iter().sum::<f64>();
            summary.not_finite += values.iter().filter(|value| !value.is_finite()).count();
            if row == 0 {
                summary.first.extend(values.iter().take(SHOWN));
            }
        }
        Ok(summary)
    }
}

/// Prints a summary of a result and its first values.
fn show(seen: &WatchedResult<'_>, bytes: &[u8]) -> CommandResult {
    let (tensor, layout) = (seen.node.tensor(), seen.value.layout());
    let summary = Summary::new(layout, bytes)?;
    let mut line = format!(
        "{}, step {}: {} on {}, {} {:?}, sum {}",
        shortened(&tensor.name, NAME_WIDTH),
        seen.step,
        tensor.op.name(),
        escaped(seen.device.name()),
        layout.dtype(),
        extents(layout),
        number(layout.dtype(), summary.sum),
    );
    if summary.not_finite > 0 {
        line.push_str(&format!(", {} not finite", summary.not_finite));
    }
    let values = summary.first.iter();
    let values: String = values
        .map(|&value| format!(" {:>11}", number(layout.dtype(), value)))
        .collect();
    let more = if layout.elements() > summary.first.len() {
        " …"
    } else {
        ""
    };
    say(format_args!("{}\n   {values}{more}", wrapped(&line, 80)));
    Ok(())
}

/// Formats an element in at most 11 characters.
fn number(dtype: DType, value: f64) -> String {
    let is_whole = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    match value.abs() {
        _ if is_whole => format!("{value:.0}"),
        0.0 => "0.0000".to_owned(),
        0.001..1e5 => format!("{value:.4}"),
        _ => format!("{value:.3e}"),
    }
}

/// A folder of results.
struct Folder {
    path: PathBuf,
    is_new: bool,
    index: File,
    files: usize,
    /// Bytes that may still be written.
    left: u64,
    limit: u64,
}

/// Minimum bytes that a file takes.
const LEAST: u64 = 4096;

fn wrong(path: &Path, error: &std::io::Error) -> CommandError {
    CommandError::error(format_args!("--watch-dir: {}: {error}", path.display()))
}

impl Folder {
    fn new(path: &Path, limit: u64) -> CommandResult<Self> {
        let is_new = !path.exists();
        if !is_new && !path.is_dir() {
            return Err(CommandError::usage(format_args!(
                "--watch-dir: {} is not a folder: name a new one",
                path.display()
            )));
        }
        std::fs::create_dir_all(path).map_err(|error| wrong(path, &error))?;
        let mut content = std::fs::read_dir(path).map_err(|error| wrong(path, &error))?;
        if content.next().is_some() {
            return Err(CommandError::usage(format_args!(
                "--watch-dir: {} is not empty: name a new folder",
                path.display()
            )));
        }
        let index = path.join(INDEX);
        Ok(Folder {
            path: path.to_owned(),
            is_new,
            index: File::create_new(&index).map_err(|error| wrong(&index, &error))?,
            files: 0,
            left: limit,
            limit,
        })
    }

    fn add(&mut self, seen: &WatchedResult<'_>, bytes: &[u8]) -> CommandResult {
        let (tensor, layout) = (seen.node.tensor(), seen.value.layout());
        let size = npy::size(layout).max(LEAST);
        let Some(left) = self.left.checked_sub(size) else {
            return Err(CommandError::error(format_args!(
                "--watch-dir: '{}' of step {} would be more than the {} MiB of --watch-limit: watch fewer nodes or steps (-n), or raise it",
                tensor.name,
                seen.step,
                self.limit >> 20
            )));
        };
        self.left = left;
        let name = format!("{:06}-{}.npy", self.files, safe(&tensor.name));
        let path = self.path.join(&name);
        npy::write(&path, layout, bytes).map_err(|error| {
            // Do not leave a partial file.
            let _ = std::fs::remove_file(&path);
            wrong(&path, &error)
        })?;
        self.files += 1;
        let summary = Summary::new(layout, bytes)?;
        let entry = json!({
            "file": name,
            "step": seen.step,
            "name": &*tensor.name,
            "operation": tensor.op.name(),
            "device": seen.device.name(),
            "type": layout.dtype().name(),
            "shape": extents(layout),
            "sum": json_number(summary.sum),
        });
        writeln!(self.index, "{entry}").map_err(|error| wrong(&self.path.join(INDEX), &error))
    }
}

impl Drop for Folder {
    /// Removes the folder if it holds no results.
    fn drop(&mut self) {
        if self.files == 0 {
            let _ = std::fs::remove_file(self.path.join(INDEX));
            if self.is_new {
                let _ = std::fs::remove_dir(&self.path);
            }
        }
    }
}

/// Returns a name that is safe in a file name.
fn safe(name: &str) -> String {
    let characters = name.chars().take(64);
    let safe = characters.map(|c| match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' | '-' => c,
        _ => '_',
    });
    safe.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_sanitized() {
        assert_eq!(safe("l_out-0.x"), "l_out-0.x");
        assert_eq!(safe("../a b\u{1b}[2J/é"), ".._a_b__2J__");
        assert_eq!(safe(&"x".repeat(1000)).len(), 64);
    }

    #[test]
    fn numbers_fit_into_their_column() {
        let f32s = [
            0.0,
            -0.001,
            -99999.99,
            1e5,
            -1e-9,
            f64::NAN,
            f64::NEG_INFINITY,
        ];
        for value in f32s {
            let text = number(DType::F32, value);
            assert!(text.len() <= 11, "{text}");
        }
        assert_eq!(number(DType::I32, -2147483648.0), "-2147483648");
        assert_eq!(number(DType::F16, 1.0 / 3.0), "0.3333");
    }
}
