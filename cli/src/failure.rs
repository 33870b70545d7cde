//! How commands fail: one line on standard error, and an exit code.

use std::fmt::Display;
use std::io::ErrorKind;
use std::process::ExitCode;

/// Why a command did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// The flags contradict each other or name something that does not exist.
    Usage(String),
    /// Something went wrong.
    Error(String),
    /// Ctrl-C.
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

    /// Prints the message and returns the exit code.
    pub fn report(self) -> ExitCode {
        // A message is one line, whatever was put into it.
        let line = |message: &str| {
            message
                .split('\n')
                .map(str::trim)
                .filter(|part| !part.is_empty())
                .collect::<Vec<_>>()
                .join("; ")
        };
        match self {
            Failure::Usage(message) => {
                eprintln!("error: {} (see --help)", line(&message));
                ExitCode::from(2)
            }
            Failure::Error(message) => {
                eprintln!("error: {}", line(&message));
                ExitCode::FAILURE
            }
            Failure::Interrupted => {
                eprintln!("interrupted");
                ExitCode::from(130)
            }
            Failure::OutputClosed => ExitCode::SUCCESS,
        }
    }
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
        Failure::usage(error)
    }
}
