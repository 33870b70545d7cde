//! Arranges the help of commands with many flags: `-h` shows the most used ones, `--help` all.

use crate::Cli;
use crate::commands::dev::DevCommand;
use clap::{Command, CommandFactory, Subcommand};

/// Flags that `-h` shows, by command, the most used first. They are listed under "Options".
const MAX_USED: &[(&str, &[&str])] = &[
    (
        "run",
        &[
            "model",
            "hf_repo",
            "prompt",
            "file",
            "n_predict",
            "ctx_size",
            "chat",
            "temp",
            "seed",
            "list",
            "threads",
            "json",
            "quiet",
        ],
    ),
    (
        "chat",
        &[
            "model",
            "hf_repo",
            "prompt",
            "system",
            "n_predict",
            "ctx_size",
            "session",
            "thinking",
            "temp",
            "seed",
            "list",
            "threads",
            "quiet",
        ],
    ),
    (
        "serve",
        &[
            "model",
            "hf_repo",
            "host",
            "port",
            "api_key",
            "ctx_size",
            "parallel",
            "models_dir",
            "embeddings",
            "context_shift",
            "cache_disk",
            "list",
            "threads",
        ],
    ),
];

/// Returns the program's commands and flags.
pub fn command() -> Command {
    let mut program = Cli::command();
    for command in DevCommand::augment_subcommands(Command::new("dev")).get_subcommands() {
        program = program.mut_subcommand(command.get_name(), |command| command.hide(true));
    }
    MAX_USED.iter().fold(program, |program, (name, flags)| {
        // Some commands depend on features.
        match program.find_subcommand(name) {
            Some(_) => program.mut_subcommand(name, |command| arranged(command, flags)),
            None => program,
        }
    })
}

fn arranged(command: Command, most_used: &[&str]) -> Command {
    command.mut_args(|arg| {
        let id = arg.get_id().as_str();
        match most_used.iter().position(|flag| *flag == id) {
            Some(place) => arg.help_heading(None).display_order(place),
            None if arg.is_positional() => arg.help_heading(None),
            None => arg.hide_short_help(true),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_used_flags_exist() {
        for (name, flags) in MAX_USED {
            let program = command();
            let Some(command) = program.find_subcommand(name) else {
                continue;
            };
            for flag in *flags {
                let is_there = command.get_arguments().any(|arg| arg.get_id() == flag);
                let depends = ["hf_repo"].contains(flag) && cfg!(not(feature = "hub"));
                assert!(is_there || depends, "{name}: {flag}");
            }
        }
    }
}
