//! Operations that charge steps before they allocate memory.
//!
//! The engine charges for most results once they are complete. A hostile template could create one
//! that exceeds the machine's memory, so the operations here charge while a result grows.

use minijinja::filters;
use minijinja::value::{Kwargs, Rest, StringInput, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::fmt::{self, Write};

/// Bytes of text per step, as in the engine.
pub(super) const BYTES_PER_STEP: usize = 64;

/// Bytes of growth between charges.
const CHARGED_AT_ONCE: usize = 4096;

/// Charges for `bytes` of memory.
pub(super) fn charge(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_STEP) as u64)
}

/// Counts and charges for written text, and keeps it if `text` is set.
struct Charged<'a, 'b, 'c> {
    state: &'a State<'b, 'c>,
    text: Option<String>,
    length: usize,
    paid: usize,
}

impl Write for Charged<'_, '_, '_> {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        self.length = self.length.saturating_add(part.len());
        let owed = self.length - self.paid;
        if owed >= CHARGED_AT_ONCE {
            charge(self.state, owed).map_err(|_| fmt::Error)?;
            self.paid = self.length;
        }
        if let Some(text) = &mut self.text {
            text.push_str(part);
        }
        Ok(())
    }
}

/// Writes the text of a value.
fn write<'a, 'b, 'c>(
    state: &'a State<'b, 'c>,
    value: &Value,
    text: Option<String>,
) -> Result<Charged<'a, 'b, 'c>, Error> {
    let mut charged = Charged {
        state,
        text,
        length: 0,
        paid: 0,
    };
    match write!(charged, "{value}") {
        Ok(()) => Ok(charged),
        Err(_) => Err(Error::from(ErrorKind::OutOfFuel)),
    }
}

/// Returns the text of a value.
pub(super) fn text_of(state: &State, value: &Value) -> Result<String, Error> {
    let written = write(state, value, Some(String::new()))?;
    Ok(written.text.unwrap_or_default())
}

/// Charges for the text of a value without creating it, and returns its length.
fn charge_for_text(state: &State, value: &Value) -> Result<usize, Error> {
    Ok(write(state, value, None)?.length)
}

/// Charges for the parts of a text that is split at a separator, or at white space without one.
pub(super) fn charge_for_parts(
    state: &State,
    text: &str,
    separator: Option<&str>,
) -> Result<(), Error> {
    let count = match separator {
        Some(separator) => text.matches(separator).count(),
        None => text.split_whitespace().count(),
    };
    state.consume_fuel(count as u64)
}

/// Charges for the result of a string method.
pub(super) fn charge_for_method(
    state: &State,
    text: &str,
    name: &str,
    arguments: &[Value],
) -> Result<(), Error> {
    let separator = arguments.first().and_then(Value::as_str);
    match name {
        "split" | "rsplit" => charge_for_parts(state, text, separator),
        "splitlines" => charge_for_parts(state, text, Some("\n")),
        "join" => {
            let list = arguments.first();
            list.map_or(Ok(()), |list| charge_for_text(state, list).map(drop))
        }
        "format" => charge_for_format(state, text, arguments),
        _ => Ok(()),
    }
}

/// Charges as if each replacement field held the longest argument, and for all widths.
fn charge_for_format(state: &State, format: &str, arguments: &[Value]) -> Result<(), Error> {
    let mut longest = 0;
    for argument in arguments {
        longest = longest.max(charge_for_text(state, argument)?);
    }
    let fields = format.matches('{').count();
    let digits = format.split(|c: char| !c.is_ascii_digit());
    let widths: usize = digits
        .filter_map(|digits| digits.parse::<usize>().ok())
        .sum();
    charge(state, fields.saturating_mul(longest).saturating_add(widths))
}

/// Charges for the values of a JSON text. Each takes much more memory than its text.
pub(super) fn charge_for_json(state: &State, text: &str) -> Result<(), Error> {
    const STEPS_PER_VALUE: u64 = 3;
    let values = text.bytes().filter(|byte| b",:[{".contains(byte)).count();
    state.consume_fuel(values as u64 * STEPS_PER_VALUE)
}

/// Replaces filters that charge only for complete results.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("join", join);
    environment.add_filter("split", split);
    environment.add_filter("lines", lines);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_filter("format", format);
    environment.add_function(
        super::concat::TEXT,
        |state: &State, value: Value| match value.kind() {
            ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
                text_of(state, &value).map(Value::from)
            }
            _ => Ok(value),
        },
    );
    // Chat templates do not use these.
    environment.remove_filter("pprint");
    environment.remove_global("debug");
}

fn join(
    state: &mut State,
    value: &Value,
    joiner: Option<StringInput<'_>>,
    attribute: Option<&str>,
    names: Kwargs,
) -> Result<Value, Error> {
    charge_for_text(state, value)?;
    filters::join(state, value, joiner, attribute, names)
}

fn split(
    state: &State,
    value: &Value,
    separator: Option<&str>,
    most: Option<i64>,
) -> Result<Value, Error> {
    charge_for_parts(state, value.as_str().unwrap_or_default(), separator)?;
    filters::split(value, separator.map(Into::into), most)
}

fn lines(state: &State, value: &Value) -> Result<Value, Error> {
    charge_for_parts(state, value.as_str().unwrap_or_default(), Some("\n"))?;
    filters::lines(value)
}

fn escape(state: &mut State, value: &Value) -> Result<Value, Error> {
    // The longest character reference, `&quot;`, has six bytes.
    let length = charge_for_text(state, value)?;
    charge(state, length.saturating_mul(6))?;
    filters::escape(state, value)
}

/// Formats like `%` in Python. A named argument may be used many times.
fn format(
    state: &mut State,
    format: &Value,
    arguments: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let mut longest = 0;
    for argument in arguments.iter() {
        longest = longest.max(charge_for_text(state, &argument.clone().into_value())?);
    }
    let fields = format.as_str().unwrap_or_default().matches('%').count();
    charge(state, fields.saturating_mul(longest))?;
    filters::format(state, format, arguments)
}
