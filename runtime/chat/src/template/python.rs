//! Python features that templates rely on and that minijinja and its `pycompat` lack: JSON in the
//! format of `json.dumps`, times in the format of `strftime`, lists that can grow, and tests for
//! which a text is a sequence.

use super::charged::{self, text_of};
use minijinja::value::{
    Enumerator, Kwargs, Object, ObjectRepr, Serde, ValueKind, ValueOrKwargs, from_args,
};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::fmt::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum nesting of values that are stored or written as JSON.
const DEEPEST: usize = 200;

/// Marks an error that the template raised with `raise_exception`.
#[derive(Debug)]
pub(super) struct Raised(pub String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", to_json);
    environment.add_filter("from_json", from_json);
    environment.add_filter("fromjson", from_json);
    // Python writes very large and very small numbers with an exponent.
    environment.add_filter(
        "string",
        |state: &State, value: Value| -> Result<Value, Error> {
            if value.kind() == ValueKind::String {
                Ok(value)
            } else if is_float(&value) {
                Ok(Value::from(number(&value)))
            } else {
                text_of(state, &value).map(Value::from)
            }
        },
    );
    environment.set_formatter(|output, state, value| {
        if is_float(value) {
            return output.write_str(&number(value)).map_err(Error::from);
        }
        minijinja::escape_formatter(output, state, value)
    });
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::Map | ValueKind::String
        )
    });
    environment.add_test("iterable", |value: &Value| {
        let kind = value.kind();
        kind == ValueKind::String
            || kind == ValueKind::Undefined
            || value.try_iter().is_ok() && kind != ValueKind::None
    });
    environment.add_function(
        "raise_exception",
        |state: &State, message: &Value| -> Result<Value, Error> {
            let message = text_of(state, message)?;
            Err(Error::new(ErrorKind::InvalidOperation, message.clone())
                .with_source(Raised(message)))
        },
    );
    environment.add_function("namespace", namespace);
    environment.add_function(super::source::KEEP, |state: &mut State, value: Value| {
        keep(state, value)
    });
    environment.add_function(
        super::source::KEEP_INSIDE,
        |state: &mut State, value: Value| keep_inside(state, value),
    );
    charged::add_to(environment);
    // These filters nest values without a check, and no template uses them.
    for name in ["batch", "slice", "groupby", "zip", "chain"] {
        environment.remove_filter(name);
    }
}

/// Implements `namespace`, with lists in it that can grow: templates keep queues there.
fn namespace(state: &mut State, defaults: Option<ValueOrKwargs>) -> Result<Value, Error> {
    let built_in = Value::from_function(minijinja::functions::namespace);
    let Some(defaults) = defaults.map(ValueOrKwargs::into_value) else {
        return built_in.call(state, &[]);
    };
    let mut pairs = Vec::new();
    if defaults.kind() == ValueKind::Map {
        for name in defaults.try_iter()? {
            pairs.push((
                name.to_string(),
                keep_inside(state, defaults.get_item(&name)?)?,
            ));
        }
    }
    let pairs: Kwargs = pairs.into_iter().collect();
    built_in.call(state, &[pairs.into()])
}

/// Checks a value that a template stores. It must not contain a namespace, which could contain
/// itself, nor nest too deeply: printing or dropping such a value could overflow the stack. A
/// growing list inside another value is copied. A namespace itself may be stored, as another name
/// for it.
fn keep(state: &State, value: Value) -> Result<Value, Error> {
    if is_list(&value) || is_namespace(&value) {
        return Ok(value);
    }
    frozen(state, value, 0)
}

/// Checks a value that is stored in a namespace. It must not be a namespace; a list becomes one
/// that can grow.
fn keep_inside(state: &State, value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Seq {
        return frozen(state, value, 0);
    }
    let items: Result<_, Error> = value
        .try_iter()?
        .map(|item| {
            state.consume_fuel(1)?;
            frozen(state, item, 1)
        })
        .collect();
    Ok(Value::from_object(List(Mutex::new(items?))))
}

fn is_list(value: &Value) -> bool {
    value.downcast_object_ref::<List>().is_some()
}

fn is_namespace(value: &Value) -> bool {
    value
        .as_object()
        .is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Returns the value with copies of its growing lists.
fn frozen(state: &State, value: Value, depth: usize) -> Result<Value, Error> {
    Ok(changed(state, &value, depth)?.unwrap_or(value))
}

/// Returns the value with copies of its growing lists, or `None` if it has none.
fn changed(state: &State, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
    let kind = value.kind();
    if !matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(None);
    }
    if is_namespace(value) {
        let message = "a namespace cannot be kept within another value";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    if depth > DEEPEST {
        let message = format!("a value nests deeper than {DEEPEST} levels");
        return Err(Error::new(ErrorKind::OutOfFuel, message));
    }
    state.consume_fuel(1)?;
    let mut pairs = Vec::new();
    let mut is_changed = is_list(value) || kind == ValueKind::Iterable;
    for key in value.try_iter()? {
        state.consume_fuel(1)?;
        let item = if kind == ValueKind::Map {
            value.get_item(&key)?
        } else {
            key.clone()
        };
        let other = changed(state, &item, depth + 1)?;
        is_changed |= other.is_some();
        pairs.push((key, other.unwrap_or(item)));
    }
    Ok(is_changed.then(|| match kind {
        ValueKind::Map => Value::from_pairs(pairs),
        _ => pairs.into_iter().map(|(_, item)| item).collect(),
    }))
}

/// A list that can grow.
#[derive(Debug)]
struct List(Mutex<Vec<Value>>);

impl List {
    fn items(&self) -> std::sync::MutexGuard<'_, Vec<Value>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items().get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items().len())
    }
}

/// Implements methods that `pycompat` lacks.
fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        charged::charge_for_method(state, text, name, arguments)?;
    }
    match (value.kind(), name) {
        (ValueKind::Seq, "append" | "extend" | "insert" | "pop") => {
            change_list(state, value, name, arguments)
        }
        (ValueKind::Seq, "copy") | (ValueKind::Map, "copy") => Ok(value.clone()),
        (ValueKind::Seq, "index") => {
            let (wanted,): (Value,) = from_args(arguments)?;
            let found = value.try_iter()?.position(|item| item == wanted);
            if let Some(at) = found {
                return Ok(Value::from(at));
            }
            let message = format!("{} is not in the list", text_of(state, &wanted)?);
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
        (ValueKind::String, "format") if asks_for_much(value.as_str().unwrap_or_default()) => {
            let message = "it formats to a width of more than 9999";
            Err(Error::new(ErrorKind::OutOfFuel, message))
        }
        (ValueKind::String, "removeprefix" | "removesuffix") => {
            let (part,): (&str,) = from_args(arguments)?;
            let text = value.as_str().unwrap_or_default();
            let rest = if name == "removeprefix" {
                text.strip_prefix(part)
            } else {
                text.strip_suffix(part)
            };
            Ok(Value::from(rest.unwrap_or(text)))
        }
        (ValueKind::String, "rsplit" | "partition" | "rpartition") => {
            split(value.as_str().unwrap_or_default(), name, arguments)
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

/// Returns whether a format may have a width or precision of five digits: the text that it creates
/// is not charged.
fn asks_for_much(format: &str) -> bool {
    let digits = |part: &[u8]| part.iter().all(u8::is_ascii_digit);
    format.as_bytes().windows(5).any(digits)
}

fn split(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if name == "rsplit" {
        let (separator, most): (&str, Option<usize>) = from_args(arguments)?;
        if separator.is_empty() {
            return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
        }
        let mut parts: Vec<Value> = text
            .rsplitn(most.unwrap_or(usize::MAX - 1) + 1, separator)
            .map(Value::from)
            .collect();
        parts.reverse();
        return Ok(Value::from(parts));
    }
    let (separator,): (&str,) = from_args(arguments)?;
    let parts = if name == "partition" {
        text.split_once(separator)
    } else {
        text.rsplit_once(separator)
    };
    let parts = match parts {
        Some((before, after)) => [before, separator, after],
        None if name == "partition" => [text, "", ""],
        None => ["", "", text],
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

fn change_list(
    state: &State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let list = value.downcast_object_ref::<List>().ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("only lists that are part of a namespace have the method {name}"),
        )
    })?;
    // Charge for each item, because it stays in memory.
    state.consume_fuel(1)?;
    let position = |given: Option<i64>, length: usize| {
        let at = given.unwrap_or(-1);
        if at < 0 {
            length.checked_sub(at.unsigned_abs() as usize)
        } else {
            Some(at as usize)
        }
    };
    match name {
        "append" => {
            let (item,): (Value,) = from_args(arguments)?;
            let item = frozen(state, item, 1)?;
            list.items().push(item);
            Ok(Value::from(()))
        }
        "extend" => {
            let (more,): (Value,) = from_args(arguments)?;
            let more: Result<Vec<Value>, Error> = more
                .try_iter()?
                .map(|item| frozen(state, item, 1))
                .collect();
            let more = more?;
            state.consume_fuel(more.len() as u64)?;
            list.items().extend(more);
            Ok(Value::from(()))
        }
        "insert" => {
            let (at, item): (i64, Value) = from_args(arguments)?;
            let item = frozen(state, item, 1)?;
            let mut items = list.items();
            let length = items.len();
            items.insert(position(Some(at), length).unwrap_or(0).min(length), item);
            Ok(Value::from(()))
        }
        _ => {
            let (at,): (Option<i64>,) = from_args(arguments)?;
            let mut items = list.items();
            let length = items.len();
            let at = position(at, length).filter(|&at| at < length);
            let at = at.ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    "pop from an empty list, or beyond its end",
                )
            })?;
            Ok(items.remove(at))
        }
    }
}

/// Writes JSON like Python's `json.dumps`, with `ensure_ascii` false by default.
fn to_json(state: &State, value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Value> = options.get("separators")?;
    let [item, key] = match separators.filter(|separators| !separators.is_none()) {
        Some(pair) => {
            let part = |i| text_of(state, &pair.get_item(&Value::from(i)).unwrap_or_default());
            [short(part(0)?)?, short(part(1)?)?]
        }
        None => [
            if indent.as_ref().is_some_and(|indent| !indent.is_none()) {
                ","
            } else {
                ", "
            }
            .to_owned(),
            ": ".to_owned(),
        ],
    };
    let indent = match indent {
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => short(text.to_owned())?,
            None => " ".repeat(indent.as_usize().unwrap_or(0).min(16)),
        }),
        None => None,
    };
    let mut writer = Json {
        state,
        text: String::new(),
        charged: 0,
        item,
        key,
        indent,
        is_ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        is_sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    writer.write(value, 0)?;
    Ok(writer.text)
}

/// Rejects long separators and indentations, which are written before they are charged.
fn short(text: String) -> Result<String, Error> {
    const LONGEST: usize = 64;
    if text.len() <= LONGEST {
        return Ok(text);
    }
    let message = format!("a separator or indentation of JSON is longer than {LONGEST} bytes");
    Err(Error::new(ErrorKind::OutOfFuel, message))
}

struct Json<'a, 'b, 'c> {
    state: &'a State<'b, 'c>,
    text: String,
    /// Length of the text that has been charged.
    charged: usize,
    item: String,
    key: String,
    indent: Option<String>,
    is_ascii: bool,
    is_sorted: bool,
}

impl Json<'_, '_, '_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(Error::new(
                ErrorKind::OutOfFuel,
                format!("a value nests deeper than {DEEPEST} levels"),
            ));
        }
        self.state.consume_fuel(1)?;
        self.pay()?;
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self
                .text
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                self.text.push('[');
                let mut is_first = true;
                for item in value.try_iter()? {
                    self.next(&mut is_first, depth);
                    self.write(&item, depth + 1)?;
                }
                self.end(is_first, depth, ']');
            }
            ValueKind::Map => {
                self.text.push('{');
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.is_sorted {
                    keys.sort();
                }
                let mut is_first = true;
                for key in keys {
                    self.next(&mut is_first, depth);
                    match key.kind() {
                        ValueKind::String => self.string(key.as_str().unwrap_or_default())?,
                        ValueKind::None => self.text.push_str("\"null\""),
                        ValueKind::Bool => self.text.push_str(if key.is_true() {
                            "\"true\""
                        } else {
                            "\"false\""
                        }),
                        _ => self.string(&text_of(self.state, &key)?)?,
                    }
                    self.text.push_str(&self.key.clone());
                    self.write(&value.get_item(&key)?, depth + 1)?;
                }
                self.end(is_first, depth, '}');
            }
            kind => {
                let message = format!("a value of the kind \"{kind}\" cannot be written as JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    /// Charges for the text since the last charge. The engine charges for complete text only, which
    /// may be too late.
    fn pay(&mut self) -> Result<(), Error> {
        let grown = self.text.len() - self.charged;
        self.charged = self.text.len();
        charged::charge(self.state, grown)
    }

    fn next(&mut self, is_first: &mut bool, depth: usize) {
        if !std::mem::take(is_first) {
            self.text.push_str(&self.item);
        }
        self.line(depth + 1);
    }

    fn end(&mut self, is_empty: bool, depth: usize, bracket: char) {
        if !is_empty {
            self.line(depth);
        }
        self.text.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            (0..depth).for_each(|_| self.text.push_str(indent));
        }
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        self.text.push('"');
        for c in text.chars() {
            // An escape has up to twelve bytes.
            if self.text.len() - self.charged > 4096 {
                self.pay()?;
            }
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                c if c < ' ' => self.unit(c as u16),
                c if self.is_ascii && !c.is_ascii() => {
                    let mut units = [0; 2];
                    c.encode_utf16(&mut units)
                        .iter()
                        .for_each(|&unit| self.unit(unit));
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
        Ok(())
    }

    fn unit(&mut self, unit: u16) {
        // Writing to a string cannot fail.
        let _ = write!(self.text, "\\u{unit:04x}");
    }
}

/// Returns a number in Python's format.
pub(super) fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(number) = f64::try_from(value.clone()) else {
        return value.to_string();
    };
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned();
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent
            .strip_prefix('-')
            .map_or(('+', exponent), |exponent| ('-', exponent));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = number.to_string();
    if text.contains('.') {
        text
    } else {
        text + ".0"
    }
}

fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

fn from_json(state: &State, text: &str) -> Result<Value, Error> {
    charged::charge_for_json(state, text)?;
    let value: serde_json::Value = serde_json::from_str(text)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("from_json: {error}")))?;
    Ok(Value::from(Serde(value)))
}
