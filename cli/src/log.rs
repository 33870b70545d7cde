//! Prints log messages of the libraries to standard error: warnings, and more with `-v`, `--log` or
//! `SAMITE_LOG`.

use crate::failure::{CommandError, CommandResult};
use crate::progress;
use crate::shown::{NAME_WIDTH, escaped, one_line, say, shortened};
use clap::Args;
use samite::registry::ranks::Launch;
use std::collections::HashSet;
use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Flags for logging.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Logging")]
pub struct LogArgs {
    /// Log actions to standard error; -vv adds the device of each operation and the reason for it,
    /// -vvv everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,

    /// Log filter: `debug`, `samite_sched=debug`, `off`, several separated by `,`; overrides the
    /// variable SAMITE_LOG
    #[arg(long, global = true, value_name = "FILTER", overrides_with = "log")]
    log: Option<String>,
}

/// Environment variable that sets the log level if no flag does.
const VARIABLE: &str = "SAMITE_LOG";

/// Common prefix of the names of all components.
const PARTS: &str = "samite";

/// Set if `-v` was given.
static IS_VERBOSE: AtomicBool = AtomicBool::new(false);

/// Returns whether `-v` was given, for commands that then print more.
pub fn is_verbose() -> bool {
    IS_VERBOSE.load(Ordering::Relaxed)
}

impl LogArgs {
    /// Starts to print the libraries' log messages.
    pub fn start(&self) -> CommandResult {
        IS_VERBOSE.store(self.verbose > 0, Ordering::Relaxed);
        let variable = std::env::var_os(VARIABLE);
        let variable = variable.as_ref().map(|filter| filter.to_string_lossy());
        let targets = self.targets(variable.as_deref())?;
        // This fails if a subscriber is already installed, and then there is nothing to do.
        let _ = tracing_subscriber::registry()
            .with(EventPrinter::default().with_filter(targets))
            .try_init();
        Ok(())
    }

    /// Returns the filter of messages. `variable` is the value of the environment variable.
    fn targets(&self, variable: Option<&str>) -> CommandResult<Targets> {
        let (name, filter) = match (&self.log, self.verbose, variable) {
            (Some(filter), _, _) => ("--log", &**filter),
            (None, 0, Some(filter)) => (VARIABLE, filter),
            // Of several processes, the first one prints the warnings of all.
            (None, 0, None) if Launch::from_environment().is_some_and(|l| l.rank > Some(0)) => {
                return Ok(Targets::new().with_default(LevelFilter::ERROR));
            }
            (None, verbose, _) => {
                let levels = [
                    LevelFilter::WARN,
                    LevelFilter::INFO,
                    LevelFilter::DEBUG,
                    LevelFilter::TRACE,
                ];
                let level = levels[usize::from(verbose).min(levels.len() - 1)];
                return Ok(Targets::new().with_default(level));
            }
        };
        let targets: Targets = filter.parse().map_err(|error| {
            CommandError::usage(format_args!(
                "{name}: '{filter}' is no filter: {error}; write a level (error, warn, info, debug, trace, off), or part=level, with commas between them"
            ))
        })?;
        // An invalid level parses as the name of a component, so a misspelled level would disable
        // all messages.
        for (part, _) in &targets {
            if !PARTS.starts_with(part) && !part.starts_with(PARTS) {
                return Err(CommandError::usage(format_args!(
                    "{name}: '{}' is no level (error, warn, info, debug, trace, off), and no part, which would begin with {PARTS}",
                    shortened(part, NAME_WIDTH)
                )));
            }
        }
        // Keep the warnings of other components.
        Ok(match targets.default_level() {
            Some(_) => targets,
            None => targets.with_default(LevelFilter::WARN),
        })
    }
}

/// Prints events without disturbing progress bars. A warning is printed on one line, and once.
#[derive(Default)]
struct EventPrinter {
    warnings: Mutex<HashSet<String>>,
}

/// Number of different warnings to remember.
const REMEMBERED: usize = 1000;

impl EventPrinter {
    /// Returns the text to print for an event, if any.
    fn lines(&self, level: Level, text: &str) -> Option<String> {
        if level > Level::WARN {
            let name = level.as_str().to_ascii_lowercase();
            let lines = text
                .lines()
                .map(|line| format!("{name}: {}", escaped(line)));
            return Some(lines.collect::<Vec<_>>().join("\n"));
        }
        let line = one_line(text);
        if level == Level::ERROR {
            return Some(format!("error: {line}"));
        }
        let mut known = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(&line) {
            return None;
        }
        if known.len() < REMEMBERED {
            known.insert(line.clone());
        }
        Some(format!("warning: {line}"))
    }
}

impl<S: Subscriber> Layer<S> for EventPrinter {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        if let Some(lines) = self.lines(*event.metadata().level(), &text.0) {
            progress::pause(|| say(lines));
        }
    }
}

/// Text of an event: its message and its fields.
#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if !self.0.is_empty() {
            self.0.push_str(", ");
        }
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, "{name} {value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(verbose: u8, log: Option<&str>) -> LogArgs {
        let log = log.map(str::to_owned);
        LogArgs { verbose, log }
    }

    #[test]
    fn log_flags_override_the_variable_and_warnings_stay() {
        let shows = |args: &LogArgs, variable, target: &str, level| {
            args.targets(variable).unwrap().would_enable(target, &level)
        };
        let quiet = args(0, None);
        assert!(shows(&quiet, None, "samite_sched", Level::WARN));
        assert!(!shows(&quiet, None, "samite_sched", Level::INFO));
        assert!(shows(&quiet, Some("info"), "x", Level::INFO));
        for (verbose, level, less) in [
            (1, Level::INFO, Level::DEBUG),
            (2, Level::DEBUG, Level::TRACE),
        ] {
            let args = args(verbose, None);
            assert!(shows(&args, Some("off"), "x", level), "{verbose}");
            assert!(!shows(&args, Some("trace"), "x", less), "{verbose}");
        }
        assert!(shows(&args(9, None), None, "x", Level::TRACE));
        let one = args(1, Some("samite_sched=debug"));
        assert!(shows(
            &one,
            Some("trace"),
            "samite_sched::plan",
            Level::DEBUG
        ));
        assert!(!shows(&one, None, "samite_llm", Level::INFO));
        assert!(
            shows(&one, None, "samite_llm", Level::WARN),
            "warnings stay"
        );
        assert!(!shows(&args(0, Some("off")), None, "x", Level::ERROR));
    }

    #[test]
    fn invalid_log_filters_are_named() {
        let message = |result: CommandResult<Targets>| match result {
            Err(CommandError::Usage(message)) => message,
            other => panic!("{other:?}"),
        };
        let text = message(args(0, Some("samite=loud")).targets(None));
        assert!(text.starts_with("--log: 'samite=loud'"), "{text}");
        let text = message(args(0, None).targets(Some("a=b=c")));
        assert!(text.starts_with("SAMITE_LOG: "), "{text}");
        for wrong in ["debgu", "info,sched=debug", "\u{fffd}", "samit3=info"] {
            let text = message(args(0, Some(wrong)).targets(None));
            assert!(text.contains("no level"), "{wrong}: {text}");
        }
        for right in ["samite", "samite_llm::fit=debug,warn", "2", ""] {
            assert!(args(0, Some(right)).targets(None).is_ok(), "{right}");
        }
    }

    #[test]
    fn warnings_are_deduplicated_and_messages_escaped() {
        let printer = EventPrinter::default();
        let warning = |text| printer.lines(Level::WARN, text);
        assert_eq!(warning("a\nb"), Some("warning: a; b".to_owned()));
        assert_eq!(warning("a\nb"), None);
        assert_eq!(warning("a"), Some("warning: a".to_owned()));
        let debug = |text| printer.lines(Level::DEBUG, text);
        for _ in 0..2 {
            let lines = debug("a\n  b\u{1b}[2J").unwrap();
            assert_eq!(lines, "debug: a\ndebug:   b\\u{1b}[2J");
        }
    }
}
