//! Token texts in the form that the engine requires, computed once for a vocabulary.

use crate::error::{GrammarError, Result};
use crate::parts::control_tokens;
use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie,
};
use samite_text::{TokenAttributes, Tokenizer};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Maximum length of a token in a constrained text: the depth of the engine's trie.
const MAX_TOKEN_LEN: usize = 1023;
/// Capacity of the engine's trie.
const MAX_BYTES: usize = 4_000_000;
const MAX_TOKENS: usize = 1 << 23;

/// A vocabulary for grammars. Clones share its data.
#[derive(Clone)]
pub struct GrammarVocabulary(Arc<Shared>);

pub(crate) struct Shared {
    pub factory: ParserFactory,
    pub tokenizer: Arc<Tokenizer>,
    pub controls: Vec<(String, u32)>,
    /// Tokens with the same text as an earlier one, mapped to that one.
    pub twins: BTreeMap<u32, u32>,
}

impl fmt::Debug for GrammarVocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GrammarVocabulary")
            .field(&self.0.tokenizer.vocab_size())
            .finish()
    }
}

impl GrammarVocabulary {
    /// Collects the texts of all tokens, which takes about a tenth of a second for 100,000 of them.
    ///
    /// # Errors
    /// [`GrammarError::Vocabulary`] if there are too many tokens or their texts are too long.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Result<Self> {
        let count = tokenizer.vocab_size();
        let mut words = Vec::with_capacity(count);
        let mut twins = BTreeMap::new();
        let mut first = BTreeMap::new();
        for id in 0..count as u32 {
            let mut text = text_of(tokenizer, id);
            if !text.is_empty() {
                match first.get(text) {
                    None => drop(first.insert(text, id)),
                    Some(&twin) => {
                        twins.insert(id, twin);
                        text = &[];
                    }
                }
            }
            words.push(text.to_vec());
        }
        let bytes: usize = words.iter().map(Vec::len).sum();
        if count == 0 || count > MAX_TOKENS || bytes > MAX_BYTES {
            return Err(GrammarError::Vocabulary(format!(
                "{count} tokens with texts of {bytes} bytes; there may be up to {MAX_TOKENS} tokens with texts of {MAX_BYTES} bytes",
            )));
        }
        let ends = tokenizer.eog_tokens();
        let end = ends.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(count as u32, end), &words);
        if !ends.is_empty() {
            trie = trie.with_eos_tokens(ends);
        }
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let factory = factory(&environment, &SlicedBiasComputer::general_slices());
        Ok(GrammarVocabulary(Arc::new(Shared {
            factory: factory.map_err(GrammarError::Vocabulary)?,
            tokenizer: Arc::clone(tokenizer),
            controls: control_tokens(tokenizer),
            twins,
        })))
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.0.tokenizer
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0
    }
}

/// Returns the bytes that a token adds to a constrained text: none for a special token, which a
/// grammar names.
pub(crate) fn text_of(tokenizer: &Tokenizer, id: u32) -> &[u8] {
    let no_text = TokenAttributes::CONTROL
        .union(TokenAttributes::UNKNOWN)
        .union(TokenAttributes::UNUSED);
    let attributes = tokenizer.attributes(id).unwrap_or_default();
    if attributes.intersects(no_text) || tokenizer.is_eog(id) {
        return &[];
    }
    let text = tokenizer.token_to_piece(id, false).unwrap_or_default();
    // UTF-8 never contains this byte, with which the engine marks tokens that are not text.
    let is_marked = text.contains(&TokTrie::SPECIAL_TOKEN_MARKER);
    if is_marked || text.len() > MAX_TOKEN_LEN {
        return &[];
    }
    text
}

/// Creates a silent parser factory that stops if a grammar takes too long.
fn factory(environment: &TokEnv, slices: &[String]) -> Result<ParserFactory, String> {
    let mut factory = ParserFactory::new(environment, InferenceCapabilities::default(), slices)
        .map_err(|error| error.to_string())?;
    factory.quiet();
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// Creates a parser factory over single bytes, to check grammars before a vocabulary is known.
pub(crate) fn byte_factory() -> Result<ParserFactory, String> {
    factory(&ApproximateTokEnv::single_byte_env(), &[])
}
