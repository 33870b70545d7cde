//! Chat templates: programs that render a conversation in the format of a model's training data.
//!
//! A template is a Jinja program that comes with a model, so it is as untrusted as any file. It has
//! limits on steps, nesting and output, and no side effects. It sees the same variables as in
//! Python's `transformers`, and its output is the same, byte for byte.

mod builtin;
mod charged;
mod concat;
mod python;
mod source;
mod time;

pub use builtin::BUILTIN;
pub use time::DateTime;

use crate::error::TemplateError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::io::{self, Write};

/// Limits of rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of a template's text, in bytes.
    pub source: usize,
    /// Maximum number of steps of the program. 64 bytes of new text count as one step.
    pub steps: u64,
    /// Maximum bytes of new text and values, besides 4096 for each byte that the template sees.
    /// Memory is charged as steps, so it also limits these.
    pub memory: usize,
    /// Maximum depth of macro calls.
    pub recursion: usize,
    /// Maximum size of the output, in bytes.
    pub output: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            source: 256 << 10,
            steps: 10_000_000,
            memory: 64 << 20,
            recursion: 100,
            output: 64 << 20,
        }
    }
}

/// Steps per byte of the input, and per value in it.
const STEPS_PER_BYTE: u64 = 64;

impl Limits {
    /// Returns the step limit of a template whose input has this many bytes.
    fn steps_for(&self, bytes: usize) -> u64 {
        let own = (self.memory / charged::BYTES_PER_STEP) as u64;
        let more = STEPS_PER_BYTE.saturating_mul(bytes as u64);
        self.steps.min(own.saturating_add(more))
    }
}

/// Returns the size of a value: the bytes of its texts, plus 16 for each value in it.
fn size(value: &serde_json::Value) -> usize {
    use serde_json::Value;
    16 + match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(size).sum(),
        Value::Object(map) => map.iter().map(|(name, item)| name.len() + size(item)).sum(),
        _ => 0,
    }
}

/// A compiled template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
    limits: Limits,
}

/// Name of the only template of an environment.
const NAME: &str = "chat";

impl Template {
    /// Compiles a template with the default limits.
    ///
    /// # Errors
    /// Returns [`TemplateError::Syntax`] or [`TemplateError::Limit`].
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        Self::with_limits(source, Limits::default())
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// Returns [`TemplateError::Syntax`] or [`TemplateError::Limit`].
    pub fn with_limits(source: &str, limits: Limits) -> Result<Self, TemplateError> {
        if source.len() > limits.source {
            let message = format!(
                "its text has {} bytes, and may have {}",
                source.len(),
                limits.source
            );
            return Err(TemplateError::Limit(message));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(|error| template_error(&error, true))?);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_recursion_limit(limits.recursion);
        python::add_to(&mut environment);
        let prepared = source::prepare(source)?;
        guarded(|| environment.add_template_owned(NAME, prepared))
            .map_err(|error| template_error(&error, true))?;
        Ok(Self {
            environment,
            source: source.to_owned(),
            limits,
        })
    }

    /// Returns the text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders the template with these variables.
    ///
    /// # Errors
    /// Returns any error but [`TemplateError::Syntax`].
    pub fn render(
        &self,
        context: &serde_json::Value,
        now: DateTime,
    ) -> Result<String, TemplateError> {
        let mut names: Vec<(String, Value)> = Vec::new();
        let seen = size(context);
        for (name, value) in context.as_object().into_iter().flatten() {
            names.push((name.clone(), Value::from(Serde(value))));
        }
        names.push((
            "strftime_now".to_owned(),
            Value::from_function(
                move |state: &State, format: &str| -> Result<String, Error> {
                    // A directive of two bytes may expand to nine.
                    charged::charge(state, format.len().saturating_mul(5))?;
                    Ok(now.format(format))
                },
            ),
        ));
        let context = Value::from_pairs(names);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(self.limits.steps_for(seen)));
        let template = environment
            .get_template(NAME)
            .map_err(|error| template_error(&error, false))?;
        let mut output = LimitedOutput {
            text: Vec::new(),
            limit: self.limits.output,
        };
        match guarded(|| template.render_captured_to(context, &mut output)) {
            // The output is always valid UTF-8.
            Ok(_) => Ok(String::from_utf8(output.text).unwrap_or_default()),
            Err(_) if output.text.len() > output.limit => Err(TemplateError::Limit(format!(
                "it writes more than {} bytes",
                output.limit
            ))),
            Err(error) => Err(template_error(&error, false)),
        }
    }
}

/// Runs foreign code that must not panic, whatever the template is. Turns a panic into an error.
fn guarded<T>(act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or_else(|_| {
        Err(Error::new(
            ErrorKind::InvalidOperation,
            "it does what the engine cannot do",
        ))
    })
}

/// Output with a size limit.
struct LimitedOutput {
    text: Vec<u8>,
    limit: usize,
}

impl Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        if self.text.len() > self.limit {
            return Err(io::Error::other("too long"));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn template_error(error: &Error, is_syntax: bool) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut line = error.line();
    let mut message = None;
    while let Some(error) = cause {
        if let Some(python::Raised(message)) = error.downcast_ref() {
            return TemplateError::Refused(message.clone());
        }
        if let Some(error) = error.downcast_ref::<Error>() {
            if error.kind() == ErrorKind::OutOfFuel {
                let message = error
                    .detail()
                    .unwrap_or("it takes too many steps, or too much memory");
                return TemplateError::Limit(message.to_owned());
            }
            line = error.line().or(line);
            message = Some(
                error
                    .detail()
                    .map_or_else(|| error.kind().to_string(), str::to_owned),
            );
        }
        cause = error.source();
    }
    let line = line.unwrap_or(1);
    let message = message.unwrap_or_else(|| error.to_string());
    if is_syntax {
        TemplateError::Syntax { line, message }
    } else {
        TemplateError::Render { line, message }
    }
}
