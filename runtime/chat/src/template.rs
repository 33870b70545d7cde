//! Chat templates: how a conversation becomes the text that a model was trained on.
//!
//! A template is a program in Jinja that comes with a model, so it is as trustworthy as any file: it may take so many steps, nest so deeply and write
//! so much, and nothing else. It sees what Python's `transformers` would show it, and what it writes is the same, to the byte.

mod builtin;
mod python;
mod source;
mod time;

pub use builtin::BUILTIN;
pub use time::DateTime;

use crate::error::TemplateError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use std::io::{self, Write};

/// What rendering may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest text of a template, in bytes.
    pub source: usize,
    /// Steps of the program; 64 bytes of a new text count as one, so it limits memory, too.
    pub steps: u64,
    /// How deeply macros may call each other.
    pub recursion: usize,
    /// Longest text that is written, in bytes.
    pub output: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            source: 256 << 10,
            steps: 10_000_000,
            recursion: 100,
            output: 64 << 20,
        }
    }
}

/// A compiled template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
    limits: Limits,
}

/// The one template of an environment.
const NAME: &str = "chat";

impl Template {
    /// Compiles a template, with the usual limits.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] and [`TemplateError::Limit`].
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        Self::with_limits(source, Limits::default())
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] and [`TemplateError::Limit`].
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
        environment.set_fuel(Some(limits.steps));
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

    /// The text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// What the template writes when it sees these names.
    ///
    /// # Errors
    /// All but [`TemplateError::Syntax`].
    pub fn render(
        &self,
        context: &serde_json::Value,
        now: DateTime,
    ) -> Result<String, TemplateError> {
        let mut names: Vec<(String, Value)> = Vec::new();
        for (name, value) in context.as_object().into_iter().flatten() {
            names.push((name.clone(), Value::from(Serde(value))));
        }
        names.push((
            "strftime_now".to_owned(),
            Value::from_function(move |format: &str| now.format(format)),
        ));
        let context = Value::from_pairs(names);
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| template_error(&error, false))?;
        let mut output = Output {
            text: Vec::new(),
            limit: self.limits.output,
        };
        match guarded(|| template.render_captured_to(context, &mut output)) {
            // All that is written is text.
            Ok(_) => Ok(String::from_utf8(output.text).unwrap_or_default()),
            Err(_) if output.text.len() > output.limit => Err(TemplateError::Limit(format!(
                "it writes more than {} bytes",
                output.limit
            ))),
            Err(error) => Err(template_error(&error, false)),
        }
    }
}

/// Does something that must not panic, whatever the template is, but is not ours.
fn guarded<T>(act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or_else(|_| {
        Err(Error::new(
            ErrorKind::InvalidOperation,
            "it does what the engine cannot do",
        ))
    })
}

/// A text that grows up to a limit.
struct Output {
    text: Vec<u8>,
    limit: usize,
}

impl Write for Output {
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
