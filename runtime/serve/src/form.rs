//! Constraints of a text: schemas and grammars in requests.

use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use samite_grammar::{Grammar, GrammarError, GrammarPart, Lazy, Trigger, close_objects};
use samite_text::Constraint;
use serde_json::{Value, json};

/// The constraint of a text, as the request states it.
#[derive(Clone, Debug)]
pub enum Form {
    Free,
    Schema(Value),
    Gbnf(String),
    /// Tool calls. Only calls if the request demands one.
    Calls {
        grammar: Grammar,
        triggers: Vec<Trigger>,
    },
}

fn grammar_error(field: &str, error: &GrammarError) -> ApiError {
    ApiError::field(field, error)
}

/// Reads the constraint of a text: `json_schema`, `grammar`, and OpenAI's `response_format`.
pub fn form(fields: &Fields<'_>) -> Result<(&'static str, Form)> {
    if let Some((_, schema)) = fields.get(&["json_schema"]) {
        if fields.has("grammar") {
            return Err(ApiError::field(
                "grammar",
                "a text keeps to \"json_schema\" or to \"grammar\", not to both",
            ));
        }
        return Ok(("json_schema", Form::Schema(schema.clone())));
    }
    if let Some(text) = fields.text(&["grammar"])?.filter(|text| !text.is_empty()) {
        return Ok(("grammar", Form::Gbnf(text.to_owned())));
    }
    let Some(format) = fields.fields("response_format")? else {
        return Ok(("response_format", Form::Free));
    };
    let any_object = || json!({"type": "object"});
    let form = match format.text(&["type"])?.unwrap_or("text") {
        "text" => Form::Free,
        "json_object" => match format.get(&["schema"]) {
            Some((_, schema)) => Form::Schema(schema.clone()),
            None => Form::Schema(any_object()),
        },
        "json_schema" => {
            let inner = format.fields("json_schema")?;
            let schema = inner.and_then(|inner| inner.get(&["schema"]));
            let schema = schema.or_else(|| format.get(&["schema"]));
            Form::Schema(schema.map_or_else(any_object, |(_, schema)| schema.clone()))
        }
        other => {
            return Err(ApiError::field(
                "response_format",
                format!("\"type\" must be text, json_object or json_schema, and is \"{other}\""),
            ));
        }
    };
    Ok(("response_format", form))
}

/// Returns the schema of an object in the form that grammars expect, with closed objects.
fn schema_value(field: &str, schema: &Value) -> Result<Value> {
    match schema {
        Value::Object(members) if members.is_empty() => Ok(json!({"type": "object"})),
        Value::Object(_) | Value::Bool(_) => {
            let mut schema = schema.clone();
            close_objects(&mut schema);
            Ok(schema)
        }
        other => Err(ApiError::field(
            field,
            format!(
                "a schema is an object, and this is {}",
                crate::fields::kind(other)
            ),
        )),
    }
}

/// Returns the form of an answer that either calls tools or is JSON that matches a schema. Without
/// triggers, a call is required and the schema does not apply.
pub fn calls_or_schema(
    context: &RequestContext,
    field: &str,
    schema: &Value,
    calls: Grammar,
    triggers: Vec<Trigger>,
) -> Result<Form> {
    let schema = schema_value(field, schema)?.to_string();
    let whole = {
        let _turn = context.compiling.begin_blocking(context.caller.owner)?;
        Grammar::json_schema(&schema).and_then(|grammar| grammar.check())
    };
    whole.map_err(|error| grammar_error(field, &error))?;
    if triggers.is_empty() {
        return Ok(Form::Calls {
            grammar: calls,
            triggers,
        });
    }
    let part = GrammarPart::json_schema(&schema).map_err(|error| grammar_error(field, &error))?;
    let either = calls.or(part);
    let grammar = either.ok_or_else(|| ApiError::field(field, "cannot be used with tools"))?;
    Ok(Form::Calls {
        grammar,
        triggers: Vec::new(),
    })
}

/// Compiles the constraint of a text.
pub fn constraint(
    context: &RequestContext,
    field: &str,
    form: &Form,
    before: Option<&'static str>,
) -> Result<Option<Box<dyn Constraint>>> {
    let grammar = match form {
        Form::Free => return Ok(None),
        Form::Schema(schema) => Grammar::json_schema(&schema_value(field, schema)?.to_string()),
        Form::Gbnf(text) => Grammar::gbnf(text),
        Form::Calls { grammar, .. } => Ok(grammar.clone()),
    };
    let grammar = grammar.map_err(|error| grammar_error(field, &error))?;
    let _turn = context.compiling.begin_blocking(context.caller.owner)?;
    let begin = || {
        let begun = grammar.constraint(context.vocabulary()?);
        let mut constraint = begun.map_err(|error| grammar_error(field, &error))?;
        // Check the first mask now, so that a grammar that allows no text or is too large fails
        // before the answer starts.
        let mask = constraint.mask();
        let mask = mask.map_err(|error| ApiError::field(field, error))?;
        if mask.iter().any(|&word| word != 0) {
            Ok(constraint)
        } else {
            Err(ApiError::field(field, "no text can begin"))
        }
    };
    let constraint = begin().map_err(|error| match grammar.check() {
        // Compiling without a vocabulary gives a better error message.
        Err(better) => grammar_error(field, &better),
        Ok(()) => error,
    })?;
    let lazy = match form {
        Form::Calls { triggers, .. } if !triggers.is_empty() => {
            let lazy = Lazy::new(constraint, triggers);
            let lazy = lazy.map_err(|error| grammar_error(field, &error))?;
            return Ok(Some(Box::new(lazy.sleep_until(before.unwrap_or_default()))));
        }
        _ => before,
    };
    Ok(Some(match lazy {
        None => Box::new(constraint),
        Some(mark) => {
            let lazy = Lazy::new(constraint, &[Trigger::After(mark.to_owned())]);
            Box::new(lazy.map_err(|error| grammar_error(field, &error))?)
        }
    }))
}
