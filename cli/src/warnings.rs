//! Prints the warnings of the libraries on standard error.

use crate::progress;
use crate::shown::{one_line, say};
use std::io::{Result, Write};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::{fmt, format::debug_fn};

/// From now on, warnings are printed, a line each.
pub fn print() {
    let fields = debug_fn(|line, field, value| match field.name() {
        "message" => write!(line, "{value:?}"),
        name => write!(line, "{name} {value:?}"),
    });
    let printer = fmt()
        .with_max_level(LevelFilter::WARN)
        .without_time()
        .with_level(false)
        .with_target(false)
        .fmt_fields(fields.delimited(", "))
        .with_writer(|| Warning);
    // It fails if somebody listens already, and then there is nothing to do.
    let _ = printer.try_init();
}

/// Prints what is written at once as one warning, with progress bars out of its way.
struct Warning;

impl Write for Warning {
    fn write(&mut self, text: &[u8]) -> Result<usize> {
        let line = one_line(&String::from_utf8_lossy(text));
        progress::pause(|| say(format_args!("warning: {line}")));
        Ok(text.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}
