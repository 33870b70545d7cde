//! Flags about the threads of the CPU device.

use crate::args::thread_count;
use crate::failure::{Failure, Outcome};
use clap::Args;
use samite::llm::ContextOptions;
use samite::registry::{
    CpuSet, Pool, PoolError, PoolOptions, Priority, allowed_threads, allowed_threads_on,
};

/// How many CPU threads a model is computed with, where they run, and how.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Threads")]
pub struct CpuArgs {
    /// CPU threads; as many as this process may use by default
    #[arg(short = 't', long, value_name = "N", value_parser = thread_count)]
    threads: Option<usize>,

    /// CPU threads for several tokens at once, such as those of a prompt; as many as for one by default [also: -tb]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    threads_batch: Option<usize>,

    /// Processors that threads run on, as bits of a hexadecimal number: 0xF0 for 4 to 7. Adds to --cpu-range [also: -C]
    #[arg(short = 'C', long, value_name = "MASK", value_parser = CpuSet::parse_mask)]
    cpu_mask: Option<CpuSet>,

    /// Processors that threads run on, from the first to the last. Adds to --cpu-mask [also: -Cr]
    #[arg(long, value_name = "LO-HI", value_parser = CpuSet::parse_range, allow_hyphen_values = true)]
    cpu_range: Option<CpuSet>,

    /// Whether each thread keeps to one of these processors: 0 or 1
    #[arg(long, value_name = "0|1", default_value = "0", action = clap::ArgAction::Set, value_parser = zero_or_one)]
    cpu_strict: bool,

    /// Priority of threads: -1 low, 0 normal, 1 medium, 2 high, 3 realtime
    #[arg(long, value_name = "N", default_value = "0", value_parser = priority, allow_negative_numbers = true)]
    prio: Priority,

    /// How long waiting threads spin before they sleep: 0 not at all, 50 some tens of microseconds; each 5 more double it
    #[arg(long, value_name = "0-100", value_parser = clap::value_parser!(u8).range(..=100))]
    poll: Option<u8>,
}

fn zero_or_one(text: &str) -> Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("must be 0 or 1".to_owned()),
    }
}

fn priority(text: &str) -> Result<Priority, String> {
    let level = text.parse().ok().and_then(Priority::from_level);
    level.ok_or_else(|| "must be a number from -1 to 3".to_owned())
}

impl CpuArgs {
    /// So many threads.
    pub fn new(threads: usize) -> Self {
        CpuArgs {
            threads: Some(threads),
            ..CpuArgs::default()
        }
    }

    /// The processors that were named.
    fn cpus(&self) -> Option<CpuSet> {
        match (&self.cpu_mask, &self.cpu_range) {
            (Some(mask), Some(range)) => Some(mask.clone().with(range)),
            (mask, range) => mask.as_ref().or(range.as_ref()).cloned(),
        }
    }

    /// How many threads can compute at the same time.
    fn processors(&self) -> usize {
        self.cpus()
            .map_or_else(allowed_threads, |cpus| allowed_threads_on(&cpus))
    }

    /// Threads for a single token, and for several.
    fn counts(&self) -> [usize; 2] {
        let threads = self.threads.unwrap_or_else(|| self.processors());
        [threads, self.threads_batch.unwrap_or(threads)]
    }

    /// The CPU's threads, as these flags say.
    pub fn pool(&self) -> Outcome<Pool> {
        let cpus = self.cpus();
        if self.cpu_strict && cpus.is_none() {
            return Err(Failure::usage(
                "--cpu-strict: name processors with --cpu-mask or --cpu-range",
            ));
        }
        let [threads, threads_batch] = self.counts();
        let threads = threads.max(threads_batch);
        let pool = Pool::with_options(&PoolOptions {
            threads,
            processors: self.processors(),
            cpus,
            strict: self.cpu_strict,
            priority: self.prio,
            poll: self.poll,
        });
        pool.map_err(|error| match error {
            PoolError::Cpus(_) => Failure::usage(format_args!("{}: {error}", self.cpu_flags())),
            PoolError::Priority(_) => Failure::usage(format_args!("--prio: {error}")),
        })
    }

    /// The flags that name processors, for errors.
    fn cpu_flags(&self) -> &str {
        match (&self.cpu_mask, &self.cpu_range) {
            (Some(_), Some(_)) => "--cpu-mask, --cpu-range",
            (None, Some(_)) => "--cpu-range",
            _ => "--cpu-mask",
        }
    }

    /// Has contexts use as many threads as these flags say.
    pub fn apply(&self, options: &mut ContextOptions) {
        [options.threads, options.threads_batch] = self.counts().map(Some);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::RegistryArgs;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        cpu: CpuArgs,
    }

    fn parse(line: &str) -> CpuArgs {
        let words = std::iter::once("samite").chain(line.split_whitespace());
        Line::try_parse_from(words).unwrap().cpu
    }

    /// Threads of one token, of several, and of the device.
    fn threads(line: &str) -> [usize; 3] {
        let cpu = parse(line);
        let mut options = ContextOptions::default();
        cpu.apply(&mut options);
        let registry = RegistryArgs::default().registry_on(cpu.pool().unwrap());
        let device = registry.device("cpu").unwrap();
        let device = format!("{device:?}");
        let count = device.split("threads: ").nth(1).unwrap();
        let count = count.trim_end_matches(" }").parse().unwrap();
        [
            options.threads.unwrap(),
            options.threads_batch.unwrap(),
            count,
        ]
    }

    #[test]
    fn the_device_has_the_larger_number_of_threads() {
        let all = allowed_threads();
        assert_eq!(threads(""), [all; 3]);
        assert_eq!(threads("-t 3"), [3, 3, 3]);
        assert_eq!(threads("-t 2 --threads-batch 5"), [2, 5, 5]);
        assert_eq!(threads("-t 5 --threads-batch 2"), [5, 2, 5]);
        assert_eq!(threads("--threads-batch 99"), [all, 99, 99]);
    }

    #[test]
    fn processors_come_from_both_flags() {
        let cpus = |line| parse(line).cpus().map(|cpus| cpus.to_string());
        assert_eq!(cpus(""), None);
        assert_eq!(cpus("-C F1 --cpu-range 9-10"), Some("0, 4-7, 9-10".into()));
        assert_eq!(cpus("--cpu-range -3"), Some("0-3".into()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn there_are_as_many_threads_as_processors_that_were_named() {
        let first = CpuSet::allowed().unwrap().iter().next().unwrap();
        let line = format!("--cpu-range {first}-{first} --cpu-strict 1 --poll 0");
        assert_eq!(threads(&line), [1; 3]);
    }
}
