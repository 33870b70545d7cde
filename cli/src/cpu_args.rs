//! Flags for the threads of the CPU device.

use crate::args::thread_count;
use crate::failure::{CommandError, CommandResult};
use clap::Args;
use samite::llm::ContextOptions;
use samite::registry::{
    CpuSet, Pool, PoolError, PoolOptions, Priority, allowed_threads, allowed_threads_on,
};

/// Flags for affinity, priority and polling of CPU threads.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Threads")]
pub struct PoolArgs {
    /// CPU affinity of threads as a hexadecimal mask: 0xF0 for processors 4 to 7. Adds to
    /// --cpu-range [also: -C]
    #[arg(short = 'C', long, value_name = "MASK", value_parser = CpuSet::parse_mask)]
    cpu_mask: Option<CpuSet>,

    /// CPU affinity of threads as a range of processors, from the first to the last. Adds to
    /// --cpu-mask [also: -Cr]
    #[arg(long, value_name = "LO-HI", value_parser = CpuSet::parse_range,
        allow_hyphen_values = true)]
    cpu_range: Option<CpuSet>,

    /// Pin each thread to one of these processors: 0 or 1
    #[arg(long, value_name = "0|1", default_value = "0", action = clap::ArgAction::Set,
        value_parser = zero_or_one)]
    cpu_strict: bool,

    /// Thread priority: -1 low, 0 normal, 1 medium, 2 high, 3 realtime
    #[arg(long, value_name = "N", default_value = "0", value_parser = priority,
        allow_negative_numbers = true)]
    prio: Priority,

    /// Polling level: time that waiting threads spin before they sleep; 0 for none, 50 for some
    /// tens of microseconds, doubled by each 5 more
    #[arg(long, value_name = "0-100", value_parser = clap::value_parser!(u8).range(..=100))]
    poll: Option<u8>,
}

/// Flags for the CPU threads of a model.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Threads")]
pub struct CpuArgs {
    /// Number of CPU threads [default: all available]
    #[arg(short = 't', long, value_name = "N", value_parser = thread_count)]
    threads: Option<usize>,

    /// Number of CPU threads for several tokens at once, such as prefill [default: same as
    /// --threads] [also: -tb]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    threads_batch: Option<usize>,

    #[command(flatten)]
    pool: PoolArgs,

    #[command(flatten)]
    batch: BatchArgs,
}

/// llama.cpp's flags for threads in batches. In samite these are the same threads as those for
/// single tokens, so their affinity and priority must be the same.
#[derive(Clone, Debug, Default, Args)]
struct BatchArgs {
    #[arg(long, hide = true, value_name = "MASK", value_parser = CpuSet::parse_mask)]
    cpu_mask_batch: Option<CpuSet>,
    #[arg(long, hide = true, value_name = "LO-HI", value_parser = CpuSet::parse_range,
        allow_hyphen_values = true)]
    cpu_range_batch: Option<CpuSet>,
    #[arg(long, hide = true, value_name = "0|1", action = clap::ArgAction::Set,
        value_parser = zero_or_one)]
    cpu_strict_batch: Option<bool>,
    #[arg(long, hide = true, value_name = "N", value_parser = priority,
        allow_negative_numbers = true)]
    prio_batch: Option<Priority>,
    #[arg(long, hide = true, value_name = "0-100",
        value_parser = clap::value_parser!(u8).range(..=100))]
    poll_batch: Option<u8>,
}

impl BatchArgs {
    /// Rejects values that differ from the flags for all threads.
    fn check(&self, pool: &PoolArgs) -> CommandResult {
        let cpus = both(&self.cpu_mask_batch, &self.cpu_range_batch);
        let cpus_flag = match self.cpu_mask_batch {
            Some(_) => "--cpu-mask",
            None => "--cpu-range",
        };
        for (flag, differs) in [
            (cpus_flag, cpus.is_some() && cpus != pool.cpus()),
            (
                "--cpu-strict",
                self.cpu_strict_batch.is_some_and(|s| s != pool.cpu_strict),
            ),
            ("--prio", self.prio_batch.is_some_and(|p| p != pool.prio)),
            (
                "--poll",
                self.poll_batch.is_some() && self.poll_batch != pool.poll,
            ),
        ] {
            if differs {
                return Err(CommandError::usage(format_args!(
                    "{flag}-batch: the threads of prompts are those of single tokens: give {flag} the same value, or leave {flag}-batch out"
                )));
            }
        }
        Ok(())
    }
}

/// Returns the processors of both flags.
fn both(mask: &Option<CpuSet>, range: &Option<CpuSet>) -> Option<CpuSet> {
    match (mask, range) {
        (Some(mask), Some(range)) => Some(mask.clone().with(range)),
        (mask, range) => mask.as_ref().or(range.as_ref()).cloned(),
    }
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

impl PoolArgs {
    /// Returns the processors that flags name.
    fn cpus(&self) -> Option<CpuSet> {
        both(&self.cpu_mask, &self.cpu_range)
    }

    /// Returns the number of threads that can run at the same time.
    pub fn processors(&self) -> usize {
        self.cpus()
            .map_or_else(allowed_threads, |cpus| allowed_threads_on(&cpus))
    }

    /// Creates a pool of `threads` threads with these flags. The default is as many as can run at
    /// the same time.
    pub fn pool(&self, threads: Option<usize>) -> CommandResult<Pool> {
        let cpus = self.cpus();
        if self.cpu_strict && cpus.is_none() {
            return Err(CommandError::usage(
                "--cpu-strict: name processors with --cpu-mask or --cpu-range",
            ));
        }
        let processors = self.processors();
        let pool = Pool::with_options(&PoolOptions {
            threads: threads.unwrap_or(processors),
            processors,
            cpus,
            strict: self.cpu_strict,
            priority: self.prio,
            poll: self.poll,
        });
        pool.map_err(|error| match error {
            PoolError::Cpus(_) => {
                CommandError::usage(format_args!("{}: {error}", self.cpu_flags()))
            }
            PoolError::Priority(_) => CommandError::usage(format_args!("--prio: {error}")),
        })
    }

    /// Creates a pool of one thread that may run on all of the processors, for code that starts its
    /// own threads.
    pub fn place(&self) -> CommandResult<Pool> {
        let anywhere = PoolArgs {
            cpu_strict: false,
            ..self.clone()
        };
        anywhere.pool(Some(1))
    }

    /// Returns the flags that name processors, for errors.
    fn cpu_flags(&self) -> &str {
        match (&self.cpu_mask, &self.cpu_range) {
            (Some(_), Some(_)) => "--cpu-mask, --cpu-range",
            (None, Some(_)) => "--cpu-range",
            _ => "--cpu-mask",
        }
    }
}

impl CpuArgs {
    /// Creates flags for `threads` threads with the settings of `pool`.
    pub fn new(threads: usize, pool: &PoolArgs) -> Self {
        CpuArgs {
            threads: Some(threads),
            pool: pool.clone(),
            ..CpuArgs::default()
        }
    }

    /// Sets the default number of threads to the share of one of `programs` programs on the same
    /// processors.
    pub fn share(&mut self, programs: usize) {
        let mine = || (self.pool.processors() / programs.max(1)).max(1);
        self.threads = Some(self.threads.unwrap_or_else(mine));
    }

    /// Returns the threads for a single token, and for several.
    pub fn counts(&self) -> [usize; 2] {
        let threads = self.threads.unwrap_or_else(|| self.pool.processors());
        [threads, self.threads_batch.unwrap_or(threads)]
    }

    /// Creates the pool of the CPU device.
    pub fn pool(&self) -> CommandResult<Pool> {
        self.batch.check(&self.pool)?;
        let [threads, threads_batch] = self.counts();
        self.pool.pool(Some(threads.max(threads_batch)))
    }

    /// Sets the number of threads of contexts.
    pub fn apply(&self, options: &mut ContextOptions) {
        [options.threads, options.threads_batch] = self.counts().map(Some);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::RegistryArgs;
    use crate::setup::BackendSetup;
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

    /// Returns the threads for one token, for several, and of the device.
    fn threads(line: &str) -> [usize; 3] {
        let cpu = parse(line);
        let mut options = ContextOptions::default();
        cpu.apply(&mut options);
        let backends = BackendSetup::new(&RegistryArgs::default());
        let registry = backends.registry_on(cpu.pool().unwrap());
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
    fn the_device_uses_the_larger_thread_count() {
        let all = allowed_threads();
        assert_eq!(threads(""), [all; 3]);
        assert_eq!(threads("-t 3"), [3, 3, 3]);
        assert_eq!(threads("-t 2 --threads-batch 5"), [2, 5, 5]);
        assert_eq!(threads("-t 5 --threads-batch 2"), [5, 2, 5]);
        assert_eq!(threads("--threads-batch 99"), [all, 99, 99]);
    }

    #[test]
    fn processors_come_from_both_flags() {
        let cpus = |line| parse(line).pool.cpus().map(|cpus| cpus.to_string());
        assert_eq!(cpus(""), None);
        assert_eq!(cpus("-C F1 --cpu-range 9-10"), Some("0, 4-7, 9-10".into()));
        assert_eq!(cpus("--cpu-range -3"), Some("0-3".into()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_processor_list_sets_the_thread_count() {
        let first = CpuSet::allowed().unwrap().iter().next().unwrap();
        let line = format!("--cpu-range {first}-{first} --cpu-strict 1 --poll 0");
        assert_eq!(threads(&line), [1; 3]);
    }

    #[test]
    fn prefill_thread_flags_must_match_the_general_ones() {
        let check = |line: &str| {
            let cpu = parse(line);
            cpu.batch.check(&cpu.pool)
        };
        for line in [
            "",
            "-C F --cpu-mask-batch 0xF --prio -1 --prio-batch -1 --poll 7 --poll-batch 7",
            "-C F --cpu-mask-batch 3 --cpu-range-batch 2-3",
            "-C 1 --cpu-strict 1 --cpu-strict-batch 1 --cpu-range-batch 0-0",
            "--cpu-strict-batch 0 --prio-batch 0",
        ] {
            check(line).unwrap();
        }
        for (line, flag) in [
            ("--cpu-mask-batch F", "--cpu-mask-batch: "),
            ("-C 1 --cpu-range-batch 1-1", "--cpu-range-batch: "),
            ("-C 1 --cpu-strict-batch 1", "--cpu-strict-batch: "),
            ("--prio -1 --prio-batch 0", "--prio-batch: "),
            ("--poll-batch 50", "--poll-batch: "),
        ] {
            match check(line) {
                Err(CommandError::Usage(message)) => {
                    assert!(message.starts_with(flag), "{message}")
                }
                other => panic!("{line}: {other:?}"),
            }
        }
    }
}
