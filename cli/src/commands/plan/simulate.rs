//! `samite plan --simulate`: predicts the speed of a model on machines that a file describes.

use super::{PlanArgs, fit_json, memory_json, write_fit, write_memory};
use crate::failure::{CommandError, CommandResult};
use crate::setup::ModelSetup;
use samite::CancelToken;
use samite::forecast::{Cluster, Task, forecast};
use samite::llm::MemoryUse;
use serde_json::json;
use std::io::Write;
use std::path::Path;

/// Maximum bytes of a file of machines. A larger file is of another kind.
const MAX_BYTES: u64 = 1 << 20;

pub fn run(
    args: &PlanArgs,
    setup: &ModelSetup,
    file: &Path,
    cancel: &CancelToken,
) -> CommandResult {
    if args.n_prompt + args.n_gen == 0 {
        return Err(CommandError::usage(
            "nothing to simulate: give a prompt with -p or generated tokens with -n",
        ));
    }
    let shown = file.display();
    let unreadable =
        |error| CommandError::error(format_args!("--simulate: cannot read {shown}: {error}"));
    if std::fs::metadata(file).map_err(unreadable)?.len() > MAX_BYTES {
        return Err(CommandError::error(format_args!(
            "--simulate: {shown} is too large for a description of machines"
        )));
    }
    let text = std::fs::read_to_string(file).map_err(unreadable)?;
    let cluster = Cluster::parse(&shown.to_string(), &text)?;

    let mut options = setup.context_options(cancel);
    let needed = args.n_prompt + args.n_gen;
    options.n_ctx = Some(options.n_ctx.map_or(needed, |n_ctx| n_ctx.max(needed)));
    let model = setup.load_header_on_cluster(&args.cpu, &cluster, cancel)?;
    let micro = options.n_ubatch.max(1);
    let context = setup.context_plan(model, options)?;
    let memory = context.memory()?;
    let short = short_of(&memory, &cluster);

    let plan = |tokens: usize| match tokens {
        0 => Ok(None),
        tokens => context.plan(tokens).map(Some),
    };
    let whole = plan(micro.min(args.n_prompt))?;
    let rest = plan(args.n_prompt % micro)?.filter(|_| args.n_prompt > micro);
    let single = plan(args.n_gen.min(1))?;
    let mut prompt = Vec::new();
    if let Some(whole) = &whole {
        let tokens = micro.min(args.n_prompt);
        prompt.resize(args.n_prompt / tokens, (whole, tokens));
    }
    prompt.extend(rest.as_ref().map(|rest| (rest, args.n_prompt % micro)));
    let found = forecast(
        &cluster,
        &Task {
            prompt,
            generation: single.as_ref().map(|plan| (plan, args.n_gen)),
        },
    )?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(
            out,
            "{:#}",
            json!({
                "simulated": true, "machines": shown.to_string(), "prompt": found.prompt,
                "generation": found.generation,
                "memory": memory_json(&memory), "short_of_memory": short,
                "fit": fit_json(context.model()),
            })
        )?;
        return Ok(());
    }
    write_fit(&mut out, context.model())?;
    writeln!(out, "simulated with {shown}, not measured:")?;
    write!(out, "{found}")?;
    write_memory(&mut out, "memory", &memory)?;
    for name in short {
        writeln!(out, "{name} has too little memory for that")?;
    }
    Ok(())
}

/// Returns the machines whose memory is too small for the plan.
fn short_of(memory: &[MemoryUse], cluster: &Cluster) -> Vec<String> {
    let members = cluster.members.iter();
    let needed = |name: &str| -> usize {
        let own = memory.iter().filter(|row| {
            let rest = row.memory.strip_prefix(name);
            rest.is_some_and(|rest| matches!(rest, "" | "-packed"))
        });
        own.map(|row| row.weights + row.kv + row.compute).sum()
    };
    members
        .filter(|member| needed(&member.name) > member.device.memory)
        .map(|member| member.name.clone())
        .collect()
}
