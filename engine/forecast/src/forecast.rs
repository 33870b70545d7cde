//! Prompt and generation, and the answer.

use crate::drive::{Drive, Known};
use crate::events::Played;
use crate::machines::Cluster;
use samite_core::Result;
use samite_sched::Plan;
use serde::Serialize;
use std::fmt;

/// Tokens whose generation is played.
const PLAYED_TOKENS: usize = 3;

/// What is to be foretold.
pub struct Task<'a> {
    /// Plans of the micro-batches of a prompt in their order, each with the number of its tokens.
    /// The same plan may stand there several times.
    pub prompt: Vec<(&'a Plan, usize)>,
    /// The plan of a single token, and how many are generated.
    pub generation: Option<(&'a Plan, usize)>,
}

/// Where the time of a machine went, in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Its name; `program` is what drives the others, and its processor.
    pub machine: String,
    /// It computed.
    pub compute: f64,
    /// Messages: sent, taken, and on their way to it while it had nothing else to do.
    pub link: f64,
    /// It had nothing to do.
    pub waiting: f64,
}

/// A prompt, or the generation of a token.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    /// Tokens.
    pub tokens: usize,
    /// Seconds for all of them.
    pub seconds: f64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// By machine, for all tokens.
    pub machines: Vec<Row>,
}

/// What is foretold.
#[derive(Clone, Debug, Serialize)]
pub struct Forecast {
    /// The prompt.
    pub prompt: Option<Phase>,
    /// Generation behind the prompt.
    pub generation: Option<Phase>,
}

/// Says how long a task takes on the machines of a cluster. The plans' devices have the names of
/// its machines; `cpu` is the host's.
///
/// # Errors
/// [`Error::InvalidArgument`](samite_core::Error::InvalidArgument) for devices that are none of the
/// machines, and for rates that the file does not have.
pub fn forecast(cluster: &Cluster, task: &Task<'_>) -> Result<Forecast> {
    let before: usize = task.prompt.iter().map(|(_, tokens)| tokens).sum();
    let prompt = match task.prompt.is_empty() {
        true => None,
        false => Some(prompt(cluster, &task.prompt)?),
    };
    let generation = task
        .generation
        .map(|(plan, tokens)| generation(cluster, plan, before, tokens))
        .transpose()?;
    Ok(Forecast { prompt, generation })
}

fn prompt(cluster: &Cluster, pieces: &[(&Plan, usize)]) -> Result<Phase> {
    let mut drive = Drive::new(cluster);
    let mut before = 0;
    let mut present: Option<(&Plan, Known<'_>)> = None;
    for (number, &(plan, tokens)) in pieces.iter().enumerate() {
        let known = match present {
            Some((same, known)) if std::ptr::eq(same, plan) => known,
            other => {
                if other.is_some() {
                    drive.join();
                }
                Known::new(plan, cluster)?
            }
        };
        // Each token sees those before it, and itself.
        let seen = before as f64 + (tokens + 1) as f64 / 2.0;
        let is_last = number + 1 == pieces.len();
        drive.run(&known, seen, is_last)?;
        before += tokens;
        present = Some((plan, known));
    }
    drive.join();
    Ok(phase(cluster, before, drive.tasks.play(), 1.0))
}

fn generation(cluster: &Cluster, plan: &Plan, before: usize, tokens: usize) -> Result<Phase> {
    let known = Known::new(plan, cluster)?;
    let mut drive = Drive::new(cluster);
    let played = tokens.clamp(1, PLAYED_TOKENS);
    // Time grows evenly with what is seen: that of the token in the middle is the mean.
    let seen = before as f64 + (tokens + 1) as f64 / 2.0;
    for _ in 0..played {
        drive.run(&known, seen, true)?;
        drive.join();
    }
    let times = tokens as f64 / played as f64;
    Ok(phase(cluster, tokens, drive.tasks.play(), times))
}

fn phase(cluster: &Cluster, tokens: usize, played: Played, times: f64) -> Phase {
    let seconds = played.seconds();
    let names = cluster.members.iter().map(|member| member.name.as_str());
    let names = ["program"].into_iter().chain(names);
    let machines = names
        .enumerate()
        .map(|(resource, name)| {
            let account = played.accounts.get(resource).copied().unwrap_or_default();
            Row {
                machine: name.to_owned(),
                compute: account.compute * times,
                link: account.link * times,
                waiting: (seconds - account.compute - account.link).max(0.0) * times,
            }
        })
        .collect();
    Phase {
        tokens,
        seconds: seconds * times,
        tokens_per_second: tokens as f64 / (seconds * times).max(f64::MIN_POSITIVE),
        machines,
    }
}

impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phases = [("prompt", &self.prompt), ("generation", &self.generation)];
        for (name, phase) in phases {
            let Some(phase) = phase else { continue };
            writeln!(
                f,
                "{name}: {} tokens in {:.4} s, {:.2} tokens/s",
                phase.tokens, phase.seconds, phase.tokens_per_second
            )?;
            writeln!(
                f,
                "    {:<16} {:>10} {:>10} {:>10}",
                "machine", "compute", "link", "waiting"
            )?;
            let share = |part: f64| {
                format!(
                    "{:.1} %",
                    100.0 * part / phase.seconds.max(f64::MIN_POSITIVE)
                )
            };
            for row in &phase.machines {
                writeln!(
                    f,
                    "    {:<16} {:>10} {:>10} {:>10}",
                    row.machine,
                    share(row.compute),
                    share(row.link),
                    share(row.waiting)
                )?;
            }
        }
        Ok(())
    }
}
