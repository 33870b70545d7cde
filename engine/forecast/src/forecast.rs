//! Forecast of prefill and decode.

use crate::drive::{Drive, LocatedPlan};
use crate::events::Played;
use crate::machines::Cluster;
use samite_core::Result;
use samite_sched::Plan;
use serde::Serialize;
use std::fmt;

/// Number of tokens whose decoding is simulated.
const PLAYED_TOKENS: usize = 3;

/// Workload to forecast.
pub struct Task<'a> {
    /// Plans of the micro-batches of a prompt in order, each with its number of tokens. A plan may
    /// occur several times.
    pub prompt: Vec<(&'a Plan, usize)>,
    /// The plan for decoding a single token, and the number of tokens.
    pub generation: Option<(&'a Plan, usize)>,
}

/// Time accounting of a machine, in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the machine. `program` is the process that drives the others, with its processor.
    pub machine: String,
    /// Time spent computing.
    pub compute: f64,
    /// Time for messages: sent, received, and in transit to it while it was otherwise idle.
    pub link: f64,
    /// Idle time.
    pub waiting: f64,
}

/// Prefill, or decoding of a token.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    /// Number of tokens.
    pub tokens: usize,
    /// Seconds for all of them.
    pub seconds: f64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Accounting by machine, for all tokens.
    pub machines: Vec<Row>,
}

/// Result of a forecast.
#[derive(Clone, Debug, Serialize)]
pub struct Forecast {
    /// Prefill.
    pub prompt: Option<Phase>,
    /// Decoding after the prompt.
    pub generation: Option<Phase>,
}

/// Forecasts the duration of a workload on the machines of a cluster. The plans' devices have the
/// names of the cluster's machines; `cpu` is the host's.
///
/// # Errors
/// [`Error::InvalidArgument`](samite_core::Error::InvalidArgument) for devices that are not in the
/// cluster, and for rates missing in the file.
pub fn forecast(cluster: &Cluster, task: &Task<'_>) -> Result<Forecast> {
    let before: usize = task.prompt.iter().map(|(_, tokens)| tokens).sum();
    let prompt = if task.prompt.is_empty() {
        None
    } else {
        Some(prompt(cluster, &task.prompt)?)
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
    let mut present: Option<(&Plan, LocatedPlan<'_>)> = None;
    for (number, &(plan, tokens)) in pieces.iter().enumerate() {
        let known = match present {
            Some((same, known)) if std::ptr::eq(same, plan) => known,
            other => {
                if other.is_some() {
                    drive.join();
                }
                LocatedPlan::new(plan, cluster)?
            }
        };
        // Each token sees the earlier ones and itself.
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
    let known = LocatedPlan::new(plan, cluster)?;
    let mut drive = Drive::new(cluster);
    let played = tokens.clamp(1, PLAYED_TOKENS);
    // Time grows linearly with the number of tokens seen, so that of the middle token is the mean.
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
