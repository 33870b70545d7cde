//! `samite plan`: explains where a model would run and how much memory it needs, from the header of
//! its file.

mod simulate;

use crate::args::{ModelArgs, token_count};
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::model_name::ModelName;
use crate::setup::{ModelSetup, divided, predicted};
use crate::shown::escaped_lines;
use crate::{files, interrupt};
use clap::Args;
use samite::CancelToken;
use samite::llm::{ContextOptions, MemoryUse, Model, Shortage};
use samite::sched::explain::human_bytes;
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;

/// Flags of `samite plan`.
#[derive(Debug, Args)]
#[command(
    after_help = "With -vv, also prints each operation with its device and reason, to standard \
        error.

Examples:
  samite plan model.gguf
  samite plan -m model.gguf --svg plan.svg
  samite plan -m model.gguf --device reference,cpu --place 'layers=2-:cpu'
  samite plan -m model.gguf --simulate machines.toml -sm tensor -p 512 -n 128"
)]
pub struct PlanArgs {
    #[command(flatten)]
    name: ModelName,
    /// Number of tokens in the planned batch; 1 for decode
    #[arg(long, value_name = "N", default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Draw the splits across devices into an SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Predict the speed on the machines described in this file, which need not exist
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "svg"])]
    simulate: Option<PathBuf>,
    /// Number of prompt tokens to simulate; 0 for none
    #[arg(short = 'p', long, value_name = "N", default_value = "512", value_parser = token_count,
        requires = "simulate")]
    n_prompt: usize,
    /// Number of generated tokens to simulate after the prompt; 0 for none
    #[arg(short = 'n', long, value_name = "N", default_value = "64", value_parser = token_count,
        requires = "simulate")]
    n_gen: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    model: ModelArgs,

    #[cfg(feature = "vision")]
    #[command(flatten)]
    encoder: crate::images::EncoderArgs,

    #[command(flatten)]
    cpu: CpuArgs,
}

pub fn run(mut args: PlanArgs) -> CommandResult {
    args.name.apply(&mut args.model)?;
    let cancel = interrupt::token();
    let setup = ModelSetup::new(&args.model)?;
    if let Some(file) = &args.simulate {
        return simulate::run(&args, &setup, file, &cancel);
    }
    let tokens = args.tokens as usize;
    if tokens > setup.context.n_ubatch {
        return Err(CommandError::usage(format_args!(
            "--tokens {tokens} is more than --ubatch-size {}",
            setup.context.n_ubatch
        )));
    }
    let mut options = setup.context_options(&cancel);
    let (setup, encoder) = args.beside_encoder(setup, &mut options, &cancel)?;
    let picture = files::create(&args.svg)?;
    let model = setup.load_header(&args.cpu, &cancel)?;
    let context = setup.context_plan(model, options)?;
    let plan = context.plan(tokens)?;
    // The scheduler logs only plans that are used.
    tracing::debug!(target: "samite_sched", "the plan:\n{}", plan.nodes());
    if let Some(file) = picture {
        files::finish(file, &plan.to_svg())?;
    }
    let mut out = std::io::stdout().lock();
    let memory = context.memory()?;
    let shortages = context.shortages(encoder.as_deref().unwrap_or_default())?;
    let cpu_added = setup.devices.adds_cpu(plan.devices());
    let explanation = divided(&plan)
        .map(|(device, nodes)| device.explain(plan.graph(), &nodes))
        .transpose()?;
    let prediction = match tokens {
        1 => predicted(&plan)?,
        _ => None,
    };
    if args.json {
        writeln!(
            out,
            "{:#}",
            json!({
                "plan": plan.to_json(), "memory": memory_json(&memory),
                "fit": fit_json(context.model()), "cpu_added": cpu_added,
                "shortages": shortages_json(&shortages),
                "divided": explanation, "prediction": prediction,
                "encoder": encoder.as_deref().map(memory_json),
            })
        )?;
        return Ok(());
    }
    if cpu_added {
        writeln!(
            out,
            "the cpu is behind the devices that were named, for what they cannot do; --only leaves it out"
        )?;
    }
    write_fit(&mut out, context.model())?;
    write!(out, "{}", escaped_lines(&plan.to_string()))?;
    if let Some(explanation) = explanation {
        write!(out, "{}", escaped_lines(&explanation.to_string()))?;
    }
    if let Some(prediction) = prediction {
        writeln!(
            out,
            "    predicted: {:.2} ms for a token, {:.2} of them for exchanges; {:.2} on {} alone",
            prediction.divided * 1e3,
            prediction.exchanging * 1e3,
            prediction.alone * 1e3,
            prediction.best
        )?;
    }
    write_memory(&mut out, "memory", &memory)?;
    if let Some(encoder) = &encoder {
        write_memory(&mut out, "images", encoder)?;
    }
    for Shortage {
        device,
        needed,
        free,
    } in &shortages
    {
        writeln!(
            out,
            "does not fit: {device} needs {} and has {} free; lower -c or -ub, or use --kv q8_0",
            human_bytes(*needed),
            human_bytes(*free)
        )?;
    }
    if let Some(path) = &args.svg {
        writeln!(out, "picture: {}", path.display())?;
    }
    Ok(())
}

impl PlanArgs {
    /// Plans the image encoder. Returns the setup of a model beside it, and its memory.
    #[cfg(feature = "vision")]
    fn beside_encoder(
        &self,
        setup: ModelSetup,
        options: &mut ContextOptions,
        cancel: &CancelToken,
    ) -> CommandResult<(ModelSetup, Option<Vec<MemoryUse>>)> {
        let plan = self.encoder.plan(&setup, &self.cpu)?;
        let Some(plan) = plan.map_err(CommandError::error)? else {
            return Ok((setup, None));
        };
        let model = setup.load_header(&self.cpu, cancel)?;
        plan.check(&model).map_err(CommandError::error)?;
        crate::images::fit(plan.spec(), options);
        Ok((setup.leaving(plan.bytes()), Some(plan.memory().to_vec())))
    }

    #[cfg(not(feature = "vision"))]
    fn beside_encoder(
        &self,
        setup: ModelSetup,
        _options: &mut ContextOptions,
        _cancel: &CancelToken,
    ) -> CommandResult<(ModelSetup, Option<Vec<MemoryUse>>)> {
        Ok((setup, None))
    }
}

fn shortages_json(shortages: &[Shortage]) -> Value {
    let each = shortages.iter().map(|shortage| {
        json!({"device": shortage.device, "needed": shortage.needed, "free": shortage.free})
    });
    each.collect()
}

/// Writes a table of the memory use, by kind of memory.
fn write_memory(out: &mut impl Write, title: &str, memory: &[MemoryUse]) -> std::io::Result<()> {
    writeln!(
        out,
        "\n{:<12} {:>12} {:>12} {:>12} {:>12}",
        title, "weights", "kv cache", "compute", "sum"
    )?;
    for row in memory {
        let cells = [
            row.weights,
            row.kv,
            row.compute,
            row.weights + row.kv + row.compute,
        ]
        .map(human_bytes);
        writeln!(
            out,
            "{:<12} {:>12} {:>12} {:>12} {:>12}",
            row.memory, cells[0], cells[1], cells[2], cells[3]
        )?;
    }
    Ok(())
}

fn memory_json(memory: &[MemoryUse]) -> serde_json::Value {
    let row = |row: &MemoryUse| {
        json!({ "memory": row.memory, "weights": row.weights, "kv": row.kv,
        "compute": row.compute })
    };
    memory.iter().map(row).collect()
}

/// Writes how layers were fitted to free memory, if they were.
fn write_fit(out: &mut impl Write, model: &Model) -> std::io::Result<()> {
    let Some(fit) = model.fit() else {
        return Ok(());
    };
    writeln!(
        out,
        "layers fitted to free memory, the output counting as one:"
    )?;
    for need in &fit.needs {
        let free = need.free.map_or("unknown".to_owned(), human_bytes);
        writeln!(
            out,
            "    {}: {} of {}; {} needed, {free} free",
            need.device,
            need.layers,
            fit.layers.len(),
            human_bytes(need.bytes())
        )?;
    }
    Ok(())
}

fn fit_json(model: &Model) -> serde_json::Value {
    let Some(fit) = model.fit() else {
        return serde_json::Value::Null;
    };
    let needs = fit.needs.iter().map(|need| {
        json!({
            "device": need.device, "free": need.free, "layers": need.layers,
            "weights": need.weights, "kv": need.kv, "compute": need.compute,
        })
    });
    json!({ "layers": fit.layers, "devices": needs.collect::<Vec<_>>() })
}
