//! Failures of commands: one line on standard error and an exit code.

use crate::shown::{one_line, say};
use crate::{interrupt, ranks};
use std::fmt::Display;
use std::io::ErrorKind;

/// The reason why a command failed.
#[derive(Debug)]
pub enum CommandError {
    /// The flags contradict each other or name something that does not exist.
    Usage(String),
    /// Any other error.
    Error(String),
    /// A device was lost with its memory.
    Lost(String),
    /// An error that all of several processes have.
    Agreed(String),
    /// Ctrl-C, or another signal that ends the program.
    Interrupted,
    /// The reader closed the output.
    OutputClosed,
}

/// Result of a command.
pub type CommandResult<T = ()> = Result<T, CommandError>;

impl CommandError {
    /// Creates a failure for wrong flags.
    pub fn usage(message: impl Display) -> Self {
        CommandError::Usage(message.to_string())
    }

    /// Creates any other failure.
    pub fn error(message: impl Display) -> Self {
        CommandError::Error(message.to_string())
    }

    /// Returns the message.
    pub fn text(&self) -> String {
        match self {
            CommandError::Usage(message) => format!("{message} (see --help)"),
            CommandError::Error(message) | CommandError::Agreed(message) => message.clone(),
            CommandError::Lost(message) => {
                format!("{message}; what it held is gone: start again when it is back")
            }
            CommandError::Interrupted => "interrupted".to_owned(),
            CommandError::OutputClosed => "nobody reads the output any more".to_owned(),
        }
    }

    /// Prints the message and returns the exit code. If several processes have the same failure,
    /// the first one prints it.
    pub fn report(self) -> i32 {
        let exit_code = match self {
            CommandError::Usage(_) => 2,
            CommandError::Error(_) | CommandError::Lost(_) | CommandError::Agreed(_) => 1,
            CommandError::Interrupted => interrupt::exit_code(),
            CommandError::OutputClosed => return 0,
        };
        let text = self.text();
        match (&self, ranks::rank()) {
            (CommandError::Agreed(_) | CommandError::Interrupted, Some(1..)) => {}
            (CommandError::Interrupted, _) => say(text),
            (
                CommandError::Usage(_) | CommandError::Error(_) | CommandError::Lost(_),
                Some(rank @ 1..),
            ) => {
                say(format_args!("error: rank {rank}: {}", one_line(&text)));
            }
            _ => say(format_args!("error: {}", one_line(&text))),
        }
        exit_code
    }
}

/// Handles arguments that do not parse: prints the help if it was requested, and any other problem
/// in one line.
pub fn wrong_arguments(error: clap::Error) -> CommandResult {
    if !error.use_stderr() {
        return Ok(error.print()?);
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    // Cut off the usage, which has several lines.
    let end = ["\nUsage:", "\nFor more information"]
        .iter()
        .filter_map(|start| text.find(start))
        .min();
    let text = &text[..end.unwrap_or(text.len())];
    // clap suggests to put `--` first, but that would turn the value into a positional argument.
    let lines = text.trim_end().lines();
    let lines = lines.filter(|line| !line.trim_start().starts_with("tip: to pass "));
    Err(CommandError::usage(
        lines.collect::<Vec<_>>().join("\n").trim_end(),
    ))
}

impl From<std::io::Error> for CommandError {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => CommandError::OutputClosed,
            _ => CommandError::error(format_args!("cannot write the output: {error}")),
        }
    }
}

impl From<samite::gguf::Error> for CommandError {
    fn from(error: samite::gguf::Error) -> Self {
        match error.kind() {
            samite::gguf::ErrorKind::Cancelled => CommandError::Interrupted,
            _ => CommandError::error(error),
        }
    }
}

impl From<samite::Error> for CommandError {
    fn from(error: samite::Error) -> Self {
        match error {
            samite::Error::Cancelled => CommandError::Interrupted,
            lost @ samite::Error::DeviceLost { .. } => CommandError::Lost(lost.to_string()),
            error => CommandError::error(error),
        }
    }
}

impl From<samite::llm::Error> for CommandError {
    fn from(error: samite::llm::Error) -> Self {
        match error {
            error if error.is_cancelled() => CommandError::Interrupted,
            samite::llm::Error::Rule(message) => CommandError::Usage(message.into()),
            samite::llm::Error::Core(error) => error.into(),
            error => CommandError::error(error),
        }
    }
}

impl From<samite::registry::RegistryError> for CommandError {
    fn from(error: samite::registry::RegistryError) -> Self {
        CommandError::usage(format_args!("--device: {error}"))
    }
}
