//! `samite inspect`: shows metadata and tensors of a GGUF file.

use crate::failure::CommandResult;
use crate::shown::{NAME_WIDTH, escaped, shortened};
use clap::Args;
use samite::gguf::{Array, GgufFile, LoadMode, TensorInfo, Value};
use samite::sched::explain::human_bytes;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Maximum width of a key and its value without `--full`, so that lines have at most 80 columns.
const LINE_WIDTH: usize = 78;

/// Flags of `samite inspect`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite inspect model.gguf
  samite inspect model.gguf --filter tokenizer --no-tensors --full")]
pub struct InspectArgs {
    /// GGUF file
    model: PathBuf,
    /// Show only keys and tensors whose names contain this text
    #[arg(short, long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Do not list tensors
    #[arg(long)]
    no_tensors: bool,
    /// Show long arrays, strings and names in full
    #[arg(long)]
    full: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: InspectArgs) -> CommandResult {
    // An incomplete download also has a header.
    let file = GgufFile::open_header(&args.model, LoadMode::Read)?;
    let keys = || {
        file.metadata()
            .iter()
            .filter(|(key, _)| key.contains(&args.filter))
    };
    let tensors = || {
        file.tensors()
            .iter()
            .filter(|tensor| !args.no_tensors && tensor.name.contains(&args.filter))
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        let metadata: serde_json::Map<_, _> = keys()
            .map(|(key, value)| (key.to_owned(), to_json(value)))
            .collect();
        let tensors: Vec<_> = tensors()
            .map(|t| {
                json!({ "name": &*t.name, "dtype": t.dtype.name(),
                "shape": &t.shape[..t.n_dims], "bytes": t.size, "offset": t.offset,
                "file": t.file })
            })
            .collect();
        let parts: Vec<_> = file
            .parts()
            .iter()
            .map(|part| {
                json!({ "path": part.path(), "bytes": part.file_bytes(),
                "version": part.version(), "alignment": part.alignment() })
            })
            .collect();
        writeln!(
            out,
            "{:#}",
            json!({ "files": parts, "metadata": metadata, "tensors": tensors })
        )?;
        return Ok(());
    }
    for part in file.parts() {
        writeln!(
            out,
            "{}: GGUF v{}, {}, alignment {}",
            escaped(&part.path().display().to_string()),
            part.version(),
            human_bytes(usize::try_from(part.file_bytes()).unwrap_or(usize::MAX)),
            part.alignment()
        )?;
    }
    writeln!(out, "\n{} metadata keys", file.metadata().len())?;
    for (key, value) in keys() {
        let text = if args.full {
            full(value)
        } else {
            value.to_string()
        };
        let line = format!("  {key} = {text}");
        if args.full {
            writeln!(out, "{}", escaped(&line))?
        } else {
            writeln!(out, "{}", shortened(&line, LINE_WIDTH))?
        }
    }
    let elements = file.tensors().total_elements();
    writeln!(
        out,
        "\n{} tensors, {:.3} million elements, {}",
        file.tensors().len(),
        elements as f64 / 1e6,
        human_bytes(usize::try_from(file.tensors().total_bytes()).unwrap_or(usize::MAX))
    )?;
    let name = |tensor: &TensorInfo| {
        if args.full {
            escaped(&tensor.name).into_owned()
        } else {
            shortened(&tensor.name, NAME_WIDTH)
        }
    };
    let width = tensors().map(|tensor| name(tensor).chars().count()).max();
    let width = width.unwrap_or(0);
    for tensor in tensors() {
        let shape = format!("{:?}", &tensor.shape[..tensor.n_dims]);
        writeln!(
            out,
            "  {:<width$}  {:<7} {shape:<20} {:>10}",
            name(tensor),
            tensor.dtype.name(),
            human_bytes(tensor.size)
        )?;
    }
    Ok(())
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn full(value: &Value) -> String {
    match value {
        Value::String(bytes) => lossy(bytes),
        Value::Array(_) => to_json(value).to_string(),
        other => other.to_string(),
    }
}

fn to_json(value: &Value) -> serde_json::Value {
    match value {
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::String(v) => json!(lossy(v)),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        Value::F64(v) => json!(v),
        Value::Array(array) => match array {
            Array::U8(v) => json!(v),
            Array::I8(v) => json!(v),
            Array::U16(v) => json!(v),
            Array::I16(v) => json!(v),
            Array::U32(v) => json!(v),
            Array::I32(v) => json!(v),
            Array::F32(v) => json!(v),
            Array::Bool(v) => json!(v),
            Array::U64(v) => json!(v),
            Array::I64(v) => json!(v),
            Array::F64(v) => json!(v),
            Array::String(v) => v.iter().map(lossy).collect(),
        },
    }
}
