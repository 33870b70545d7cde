//! Grammars that a text can be constrained to.

use crate::constraint::GrammarConstraint;
use crate::error::{GrammarError, Result};
use crate::gbnf::Gbnf;
use crate::parts::{self, GrammarPart};
use crate::schema;
use crate::vocabulary::{GrammarVocabulary, byte_factory};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory, panic_utils};
use serde_json::Value;

/// Maximum length of a regular expression in bytes.
const MAX_REGEX_LEN: usize = 1 << 16;

/// A grammar. Everything that does not need the engine has been validated; the engine validates the
/// rest in [`constraint`](Self::constraint), or earlier in [`check`](Self::check).
///
/// ```
/// use samite_grammar::Grammar;
///
/// Grammar::json_schema(r#"{"type": "object", "properties": {"age": {"type": "integer"}}}"#)?;
/// Grammar::regex("[a-z]+@[a-z]+")?;
/// let error = Grammar::gbnf(r#"root ::= "yes" | answer"#).unwrap_err();
/// assert!(error.to_string().contains("answer"));
/// # Ok::<_, samite_grammar::GrammarError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Grammar(Form);

#[derive(Clone, Debug)]
enum Form {
    Schema(Value),
    Regex(String),
    Gbnf(Gbnf),
    Parts(GrammarPart),
}

impl Grammar {
    /// Creates a grammar for JSON that conforms to a schema. Members of objects come in the
    /// schema's order.
    ///
    /// # Errors
    /// [`GrammarError::Schema`] if the schema is invalid or has a part that cannot be enforced.
    pub fn json_schema(text: &str) -> Result<Self> {
        schema::prepare(text).map(|schema| Grammar(Form::Schema(schema)))
    }

    /// Creates a grammar for text that a regular expression matches as a whole. The syntax is that
    /// of the crate `regex`, without look-around and back-references.
    ///
    /// # Errors
    /// [`GrammarError::Regex`].
    pub fn regex(text: &str) -> Result<Self> {
        if text.len() > MAX_REGEX_LEN {
            let message = format!("it has {} bytes; {MAX_REGEX_LEN} are allowed", text.len());
            return Err(GrammarError::Regex(message));
        }
        let escapes = text.len() - text.trim_end_matches('\\').len();
        if !escapes.is_multiple_of(2) {
            return Err(GrammarError::Regex("nothing follows '\\'".to_owned()));
        }
        // The whole text is matched in any case, so these anchors are redundant.
        let text = text.strip_prefix('^').unwrap_or(text);
        let is_anchor = |before: &&str| {
            let escapes = before.len() - before.trim_end_matches('\\').len();
            escapes.is_multiple_of(2)
        };
        let unanchored = text.strip_suffix('$').filter(is_anchor);
        Ok(Grammar(Form::Regex(unanchored.unwrap_or(text).to_owned())))
    }

    /// Creates a grammar from GBNF.
    ///
    /// # Errors
    /// [`GrammarError::Gbnf`] with the position of the problem.
    pub fn gbnf(text: &str) -> Result<Self> {
        Ok(Grammar(Form::Gbnf(Gbnf::parse(text)?)))
    }

    /// Creates a grammar composed of parts.
    pub fn parts(part: GrammarPart) -> Self {
        Grammar(Form::Parts(part))
    }

    /// Returns a grammar for texts of this one and for texts of `part`. Returns `None` if this one
    /// was not made from parts.
    pub fn or(self, part: GrammarPart) -> Option<Self> {
        match self.0 {
            Form::Parts(own) => Some(Self::parts(GrammarPart::OneOf(vec![own, part]))),
            _ => None,
        }
    }

    /// Checks that the engine accepts the grammar, without a vocabulary.
    ///
    /// # Errors
    /// If the grammar contradicts itself, is too large, or allows no first token.
    pub fn check(&self) -> Result<()> {
        let factory = byte_factory().map_err(GrammarError::TooLarge)?;
        let first = self.begin(&factory, None)?.compute_mask_or_eos();
        first.map(drop).map_err(|error| {
            let message = match error.to_string() {
                message if message.contains("NoExtensionBias") => {
                    "no text can begin: do references go around in circles?".to_owned()
                }
                message => message,
            };
            match self.0 {
                Form::Schema(_) => schema::refuse("#", message),
                Form::Regex(_) => GrammarError::Regex(message),
                Form::Gbnf(_) | Form::Parts(_) => GrammarError::TooLarge(message),
            }
        })
    }

    /// Returns the grammar's constraint at the start of a text in tokens of this vocabulary.
    ///
    /// # Errors
    /// Fails like [`check`](Self::check); also if it names tokens that the vocabulary does not
    /// have.
    pub fn constraint(&self, vocabulary: &GrammarVocabulary) -> Result<GrammarConstraint> {
        let matcher = self.begin(&vocabulary.shared().factory, Some(vocabulary))?;
        let is_schema = matches!(self.0, Form::Schema(_));
        let has_json = match &self.0 {
            Form::Schema(_) => true,
            Form::Parts(part) => part.is_json(),
            Form::Regex(_) | Form::Gbnf(_) => false,
        };
        Ok(GrammarConstraint::new(
            vocabulary, matcher, is_schema, has_json,
        ))
    }

    fn begin(
        &self,
        factory: &ParserFactory,
        vocabulary: Option<&GrammarVocabulary>,
    ) -> Result<Matcher> {
        let grammar = match &self.0 {
            Form::Schema(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            Form::Regex(text) => TopLevelGrammar::from_regex(text),
            Form::Gbnf(gbnf) => {
                let tokenizer = vocabulary.map(|vocabulary| &**vocabulary.tokenizer());
                // Otherwise the engine would write out a text that has only one continuation at
                // once, and a few rules can produce texts of any length.
                let forces_nothing = "%llguidance {\"no_forcing\": true}\n";
                TopLevelGrammar::from_lark(forces_nothing.to_owned() + &gbnf.to_lark(tokenizer)?)
            }
            Form::Parts(part) => {
                let controls = vocabulary.map_or(&[][..], |found| &found.shared().controls);
                TopLevelGrammar::from_lark(parts::to_lark(part, controls)?)
            }
        };
        start(factory, grammar).map_err(|message| match &self.0 {
            Form::Schema(schema) => schema::refusal(factory, schema, message),
            Form::Regex(_) => GrammarError::Regex(message),
            Form::Gbnf(_) | Form::Parts(_) => GrammarError::TooLarge(message),
        })
    }
}

/// Creates a parser at the start of a text.
pub(crate) fn start(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<Matcher, String> {
    let parser = std::panic::AssertUnwindSafe(|| factory.create_parser(grammar));
    let parser =
        panic_utils::catch_unwind(parser).map_err(|error| in_one_line(&format!("{error:#}")))?;
    Ok(Matcher::new(Ok(parser)))
}

/// Returns the first line of an engine message. For an invalid expression, which the engine quotes
/// below, adds the reason.
fn in_one_line(message: &str) -> String {
    let first = message.lines().next().unwrap_or_default();
    let reason = message
        .lines()
        .find_map(|line| line.strip_prefix("error: "));
    match reason.filter(|_| first.ends_with(':')) {
        Some(reason) => format!("{first} {reason}"),
        None => first.to_owned(),
    }
}
