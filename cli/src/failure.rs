//! Failures of commands: one line on standard error and an exit code.

use crate::shown::{one_line, say};
use crate::{interrupt, ranks};
use std::fmt::Display;
use std::io::ErrorKind;

/// The reason why a command failed.
#[derive(Debug)]
pub enum Failure {
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
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// Creates a failure for wrong flags.
    pub fn usage(message: impl Display) -> Self {
        Failure::Usage(message.to_string())
    }

    /// Creates any other failure.
    pub fn error(message: impl Display) -> Self {
        Failure::Error(message.to_string())
    }

    /// Returns the message.
    pub fn text(&self) -> String {
        match self {
            Failure::Usage(message) => format!("{message} (see --help)"),
            Failure::Error(message) | Failure::Agreed(message) => message.clone(),
            Failure::Lost(message) => {
                format!("{message}; what it held is gone: start again when it is back")
            }
            Failure::Interrupted => "interrupted".to_owned(),
            Failure::OutputClosed => "nobody reads the output any more".to_owned(),
        }
    }

    /// Prints the message and returns the exit code. If several processes have the same failure,
    /// the first one prints it.
    pub fn report(self) -> i32 {
        let exit_code = match self {
            Failure::Usage(_) => 2,
            Failure::Error(_) | Failure::Lost(_) | Failure::Agreed(_) => 1,
            Failure::Interrupted => interrupt::exit_code(),
            Failure::OutputClosed => return 0,
        };
        let text = self.text();
        match (&self, ranks::rank()) {
            (Failure::Agreed(_) | Failure::Interrupted, Some(1..)) => {}
            (Failure::Interrupted, _) => say(text),
            (Failure::Usage(_) | Failure::Error(_) | Failure::Lost(_), Some(rank @ 1..)) => {
                say(format_args!("error: rank {rank}: {}", one_line(&text)));
            }
            _ => say(format_args!("error: {}", one_line(&text))),
        }
        exit_code
    }
}

/// Handles arguments that do not parse: prints the help if it was requested, and any other problem
/// in one line.
pub fn wrong_arguments(error: clap::Error) -> Outcome {
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
    Err(Failure::usage(
        lines.collect::<Vec<_>>().join("\n").trim_end(),
    ))
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::error(format_args!("cannot write the output: {error}")),
        }
    }
}

impl From<samite::gguf::Error> for Failure {
    fn from(error: samite::gguf::Error) -> Self {
        match error.kind() {
            samite::gguf::ErrorKind::Cancelled => Failure::Interrupted,
            _ => Failure::error(error),
        }
    }
}

impl From<samite::Error> for Failure {
    fn from(error: samite::Error) -> Self {
        match error {
            samite::Error::Cancelled => Failure::Interrupted,
            lost @ samite::Error::DeviceLost { .. } => Failure::Lost(lost.to_string()),
            error => Failure::error(error),
        }
    }
}

impl From<samite::llm::Error> for Failure {
    fn from(error: samite::llm::Error) -> Self {
        match error {
            error if error.is_cancelled() => Failure::Interrupted,
            samite::llm::Error::Rule(message) => Failure::Usage(message.into()),
            samite::llm::Error::Core(error) => error.into(),
            error => Failure::error(error),
        }
    }
}

impl From<samite::registry::RegistryError> for Failure {
    fn from(error: samite::registry::RegistryError) -> Self {
        Failure::usage(format_args!("--device: {error}"))
    }
}
