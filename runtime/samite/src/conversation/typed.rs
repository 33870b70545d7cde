//! Answers constrained to a schema or grammar.

use super::{Conversation, ConversationError, Result, ToolChoice};
use crate::chat::Content;
use crate::grammar::{Grammar, GrammarVocabulary, Lazy, Trigger, close_objects};
use crate::llm::Finish;
use crate::text::Constraint;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use std::ops::ControlFlow;

impl Conversation {
    /// Asks a question and returns the answer as a value of type `T`, constrained to its JSON
    /// schema. The question should explain the meaning of the fields.
    ///
    /// ```no_run
    /// #[derive(serde::Deserialize, schemars::JsonSchema)]
    /// struct City {
    ///     name: String,
    ///     inhabitants: u64,
    /// }
    ///
    /// let mut chat = samite::Conversation::open("model.gguf")?;
    /// let city: City =
    ///     chat.ask_for("The largest city of Norway, with its inhabitants, as JSON.")?;
    /// # Ok::<_, samite::ConversationError>(())
    /// ```
    ///
    /// # Errors
    /// Fails like [`answer`](Self::answer); also if the schema contains something that cannot be
    /// enforced, or if the answer was cut off.
    pub fn ask_for<T: DeserializeOwned + JsonSchema>(
        &mut self,
        content: impl Into<Content>,
    ) -> Result<T> {
        let mut schema = schemars::schema_for!(T).to_value();
        close_objects(&mut schema);
        let grammar = Grammar::json_schema(&schema.to_string())?;
        let before = self.messages.len();
        let other = self.options.keeps_to.replace(grammar);
        let reply = self.ask_with(content, |_| ControlFlow::Continue(()));
        self.options.keeps_to = other;
        let reply = reply?;
        serde_json::from_str(&reply.answer.content).map_err(|error| {
            self.messages.truncate(before);
            let why = match reply.generation.map(|generation| generation.finish) {
                None => "it was cancelled".to_owned(),
                Some(Finish::MaxTokens) => "it was cut off at max_tokens".to_owned(),
                Some(Finish::ContextFull) => "the context is full".to_owned(),
                Some(_) => error.to_string(),
            };
            ConversationError::NotTyped {
                wanted: std::any::type_name::<T>(),
                why,
                text: reply.answer.content,
            }
        })
    }

    /// Returns the sampler's constraint for the next answer. Its content starts after the marker
    /// `before_content`, if there is one.
    pub(super) fn constraint(
        &mut self,
        before_content: Option<&str>,
    ) -> Result<Option<Box<dyn Constraint>>> {
        let has_tools = !self.tools.is_empty();
        let is_required = has_tools && self.options.tool_choice == ToolChoice::Required;
        let (grammar, triggers) = match &self.options.keeps_to {
            Some(_) if has_tools => return Err(ConversationError::ToolsAndGrammar),
            Some(grammar) => (grammar.clone(), Vec::new()),
            None => {
                let format = self.template.format(has_tools);
                match format.call_grammar(&self.tools.list(), true) {
                    Some(calls) if is_required => (calls.grammar, Vec::new()),
                    Some(calls) => (calls.grammar, calls.triggers),
                    None if is_required => return Err(ConversationError::NoCalls(format.name)),
                    None => return Ok(None),
                }
            }
        };
        let vocabulary = match &self.vocabulary {
            Some(vocabulary) => vocabulary,
            None => self
                .vocabulary
                .insert(GrammarVocabulary::new(self.session.tokenizer())?),
        };
        let constraint = grammar.constraint(vocabulary)?;
        Ok(Some(match before_content {
            None if triggers.is_empty() => Box::new(constraint),
            Some(mark) if triggers.is_empty() => {
                Box::new(Lazy::new(constraint, &[Trigger::After(mark.to_owned())])?)
            }
            mark => {
                Box::new(Lazy::new(constraint, &triggers)?.sleep_until(mark.unwrap_or_default()))
            }
        }))
    }
}
