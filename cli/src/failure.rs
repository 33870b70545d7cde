//! How commands fail: with one line on standard error and an exit code.

use crate::interrupt;
use crate::shown::{one_line, say};
use std::fmt::Display;
use std::io::ErrorKind;

/// Why a command did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// The flags contradict each other or name something that does not exist.
    Usage(String),
    /// Something went wrong.
    Error(String),
    /// Ctrl-C, or another signal that asks for an end.
    Interrupted,
    /// Whoever reads the output has seen enough.
    OutputClosed,
}

/// What commands return.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure about wrong flags.
    pub fn usage(message: impl Display) -> Self {
        Failure::Usage(message.to_string())
    }

    /// Any other failure.
    pub fn error(message: impl Display) -> Self {
        Failure::Error(message.to_string())
    }

    /// What went wrong, in one line.
    pub fn message(&self) -> String {
        match self {
            Failure::Usage(message) | Failure::Error(message) => one_line(message),
            Failure::Interrupted => "interrupted".to_owned(),
            Failure::OutputClosed => "nobody reads the output".to_owned(),
        }
    }

    /// Prints the message and returns the exit code.
    pub fn report(self) -> i32 {
        match self {
            Failure::Usage(message) => {
                say(format_args!("error: {} (see --help)", one_line(&message)));
                2
            }
            Failure::Error(message) => {
                say(format_args!("error: {}", one_line(&message)));
                1
            }
            Failure::Interrupted => {
                say("interrupted");
                interrupt::exit_code()
            }
            Failure::OutputClosed => 0,
        }
    }
}

/// What to do when the arguments are no command: help that was asked for is printed, and anything else is said in one
/// line.
pub fn wrong_arguments(error: clap::Error) -> Outcome {
    if !error.use_stderr() {
        return Ok(error.print()?);
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    // What follows is how to use the command, several lines long.
    let end = ["\nUsage:", "\nFor more information"]
        .iter()
        .filter_map(|start| text.find(start))
        .min();
    Err(Failure::usage(&text[..end.unwrap_or(text.len())]))
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
            error => Failure::error(error),
        }
    }
}

impl From<samite::llm::Error> for Failure {
    fn from(error: samite::llm::Error) -> Self {
        match error {
            error if error.is_cancelled() => Failure::Interrupted,
            samite::llm::Error::Rule(message) => Failure::Usage(message.into()),
            error => Failure::error(error),
        }
    }
}

impl From<samite::registry::RegistryError> for Failure {
    fn from(error: samite::registry::RegistryError) -> Self {
        Failure::usage(format_args!("--device: {error}"))
    }
}
