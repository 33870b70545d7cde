//! What a text can keep to.

use crate::constraint::GrammarConstraint;
use crate::error::{GrammarError, Result};
use crate::gbnf::Gbnf;
use crate::schema;
use crate::vocabulary::{GrammarVocabulary, byte_factory};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory, panic_utils};
use serde_json::Value;

/// Longest regular expression.
const LONGEST_REGEX: usize = 1 << 16;

/// What a text keeps to; it was found sound.
#[derive(Clone, Debug)]
pub struct Grammar(Form);

#[derive(Clone, Debug)]
enum Form {
    Schema(Value),
    Regex(String),
    Gbnf(Gbnf),
}

impl Grammar {
    /// Text in JSON that a schema describes: the members of objects come in its order.
    ///
    /// # Errors
    /// [`GrammarError::Schema`] if this is no schema, or has a part that cannot be enforced.
    pub fn json_schema(text: &str) -> Result<Self> {
        schema::prepare(text).map(|schema| Grammar(Form::Schema(schema)))
    }

    /// Text that is matched as a whole by a regular expression: that of the crate `regex`, so without look-around and back-references.
    ///
    /// # Errors
    /// [`GrammarError::Regex`].
    pub fn regex(text: &str) -> Result<Self> {
        if text.len() > LONGEST_REGEX {
            let message = format!("it has {} bytes; {LONGEST_REGEX} are allowed", text.len());
            return Err(GrammarError::Regex(message));
        }
        let escapes = text.len() - text.trim_end_matches('\\').len();
        if !escapes.is_multiple_of(2) {
            return Err(GrammarError::Regex("nothing follows '\\'".to_owned()));
        }
        // The whole text is matched in any case.
        let text = text.strip_prefix('^').unwrap_or(text);
        let ends_escaped = text.ends_with("\\$");
        let text = text
            .strip_suffix('$')
            .filter(|_| !ends_escaped)
            .unwrap_or(text);
        let grammar = Grammar(Form::Regex(text.to_owned()));
        let top_level = grammar.top_level(None)?;
        check(top_level).map_err(GrammarError::Regex)?;
        Ok(grammar)
    }

    /// Text that a grammar in GBNF derives.
    ///
    /// # Errors
    /// [`GrammarError::Gbnf`] with the place of what is wrong.
    pub fn gbnf(text: &str) -> Result<Self> {
        let grammar = Grammar(Form::Gbnf(Gbnf::parse(text)?));
        let top_level = grammar.top_level(None)?;
        check(top_level).map_err(GrammarError::TooLarge)?;
        Ok(grammar)
    }

    fn top_level(&self, vocabulary: Option<&GrammarVocabulary>) -> Result<TopLevelGrammar> {
        Ok(match &self.0 {
            Form::Schema(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            Form::Regex(text) => TopLevelGrammar::from_regex(text),
            Form::Gbnf(gbnf) => {
                let tokenizer = vocabulary.map(|vocabulary| &**vocabulary.tokenizer());
                TopLevelGrammar::from_lark(gbnf.to_lark(tokenizer)?)
            }
        })
    }

    /// The grammar at the beginning of a text in tokens of this vocabulary.
    ///
    /// # Errors
    /// If it names tokens that the vocabulary does not have, or is too large for the engine.
    pub fn constraint(&self, vocabulary: &GrammarVocabulary) -> Result<GrammarConstraint> {
        let grammar = self.top_level(Some(vocabulary))?;
        let matcher = start(&vocabulary.shared().factory, grammar);
        let matcher = matcher.map_err(GrammarError::TooLarge)?;
        let is_schema = matches!(self.0, Form::Schema(_));
        Ok(GrammarConstraint::new(vocabulary, matcher, is_schema))
    }
}

/// Whether the engine takes a grammar, where no vocabulary is known.
fn check(grammar: TopLevelGrammar) -> Result<(), String> {
    start(&byte_factory()?, grammar).map(drop)
}

/// A parser of a grammar at the beginning of a text.
pub(crate) fn start(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<Matcher, String> {
    let parser = std::panic::AssertUnwindSafe(|| factory.create_parser(grammar));
    let parser = panic_utils::catch_unwind(parser).map_err(|error| {
        let message = format!("{error:#}");
        message.lines().next().unwrap_or_default().to_owned()
    })?;
    Ok(Matcher::new(Ok(parser)))
}
