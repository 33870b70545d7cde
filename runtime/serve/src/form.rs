//! Constraints of a text: schemas and grammars in requests.

use crate::compiled_grammars::GrammarKey;
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use samite_grammar::{
    Grammar, GrammarConstraint, GrammarError, GrammarPart, Lazy, Trigger, close_objects,
};
use samite_text::Constraint;
use serde_json::{Map, Value, json};

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
    let format = response_format(fields)?;
    let grammar = fields.text(&["grammar"])?.filter(|text| !text.is_empty());
    match (fields.get(&["json_schema"]), grammar) {
        (Some(_), Some(_)) => Err(ApiError::field(
            "grammar",
            "a text keeps to \"json_schema\" or to \"grammar\", not to both",
        )),
        (Some((_, schema)), None) => Ok(("json_schema", Form::Schema(schema.clone()))),
        (None, Some(text)) => Ok(("grammar", Form::Gbnf(text.to_owned()))),
        (None, None) => Ok(("response_format", format)),
    }
}

fn response_format(fields: &Fields<'_>) -> Result<Form> {
    const NAME: &str = "response_format";
    let Some(format) = fields.fields(NAME)? else {
        return Ok(Form::Free);
    };
    let wrapper = format.fields("json_schema")?;
    let inner = wrapper.and_then(|wrapper| wrapper.get(&["schema"]));
    let outer = format.get(&["schema"]);
    for (_, schema) in inner.iter().chain(&outer) {
        check_schema(NAME, schema)?;
    }
    let schema = match format.text(&["type"])?.unwrap_or("text") {
        "text" => return Ok(Form::Free),
        "json_object" => outer,
        "json_schema" => inner.or(outer),
        other => {
            return Err(ApiError::field(
                NAME,
                format!("\"type\" must be text, json_object or json_schema, and is \"{other}\""),
            ));
        }
    };
    let any_object = || json!({"type": "object"});
    let schema = schema.map_or_else(any_object, |(_, schema)| schema.clone());
    Ok(Form::Schema(schema))
}

/// Rejects a value that cannot be a schema.
pub fn check_schema(field: &str, schema: &Value) -> Result<()> {
    if schema.is_object() || schema.is_boolean() {
        return Ok(());
    }
    let message = format!(
        "a schema is an object, and this is {}",
        crate::fields::kind(schema)
    );
    Err(ApiError::field(field, message))
}

/// Returns the schema of an object in the form that grammars expect, with closed objects.
fn schema_value(field: &str, schema: &Value) -> Result<Value> {
    check_schema(field, schema)?;
    if schema.as_object().is_some_and(Map::is_empty) {
        return Ok(json!({"type": "object"}));
    }
    let mut schema = schema.clone();
    close_objects(&mut schema);
    Ok(schema)
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

/// Returns the constraint of a grammar, which is compiled unless a recent request did so.
fn compiled(context: &RequestContext, field: &str, grammar: &Grammar) -> Result<GrammarConstraint> {
    let known = &context.compiled_grammars;
    let key = GrammarKey::new(context.caller.owner, grammar);
    if let Some(constraint) = known.find(key) {
        return Ok(constraint);
    }
    let _turn = context.compiling.begin_blocking(context.caller.owner)?;
    // Another request may have compiled it in the meantime.
    if let Some(constraint) = known.find(key) {
        return Ok(constraint);
    }
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
    known.add(key, &constraint);
    Ok(constraint)
}

/// Returns the constraint of a text.
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
    let constraint = compiled(context, field, &grammar)?;
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
