//! The `samite` program: language models and their compute graphs from the command line.
//!
//! Results go to standard output, everything else (progress, timings, warnings, errors) to standard
//! error. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C (143 after SIGTERM, 129
//! after SIGHUP).

#![forbid(unsafe_code)]

mod args;
mod chunks;
mod commands;
mod cpu_args;
mod failure;
mod files;
#[cfg(feature = "grammar")]
mod grammar;
mod help;
#[cfg(feature = "hub")]
mod hub;
#[cfg(feature = "vision")]
mod images;
mod interrupt;
mod log;
mod model_name;
mod progress;
mod ranks;
mod renewal;
mod sampling;
mod setup;
mod shown;
mod spelling;
mod trace_file;
mod watch;

use clap::{FromArgMatches, Parser};

/// One compute graph woven through many devices: run, inspect, convert and measure language models
/// in GGUF files.
#[derive(Debug, Parser)]
#[command(
    name = "samite",
    version,
    propagate_version = true,
    max_term_width = 80
)]
struct Cli {
    #[command(flatten)]
    log: log::LogArgs,

    #[command(subcommand)]
    command: commands::Command,
}

impl Cli {
    fn run(self) -> failure::CommandResult {
        self.log.start()?;
        self.command.run()
    }
}

/// Checks for enough memory to parse arguments and report errors.
fn check_memory() -> failure::CommandResult {
    Ok(samite::ask_for_memory(4 << 20, "starting the program")?)
}

fn main() {
    samite::share_heap_if_limited();
    let result = check_memory()
        .and_then(|()| spelling::translate(std::env::args_os()))
        .and_then(|arguments| {
            let parsed = help::command()
                .try_get_matches_from(arguments)
                .and_then(|matches| Cli::from_arg_matches(&matches));
            parsed.map_or_else(failure::wrong_arguments, Cli::run)
        });
    let is_done = result.is_ok();
    let exit_code = result.map_or_else(failure::CommandError::report, |()| 0);
    interrupt::leave(ranks::leave(exit_code, is_done))
}
