//! Grammars.

use super::make;
use super::own::{NativeSampler, SamplerStage};
use crate::entry::{Failure, Outcome, array, export, required_text, text};
use crate::layout::{Opaque, Sampler};
use crate::model::model;
use samite_grammar::{Grammar, GrammarVocabulary, Lazy, Trigger};
use samite_text::{Candidates, Constraint, Tokenizer};
use std::ffi::c_char;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of candidates to check one by one.
const FEW: usize = 16;

/// State of a text that a grammar constrains.
#[derive(Clone)]
pub struct GrammarStage(Box<dyn Constraint>);

impl GrammarStage {
    /// Removes the candidates that the grammar does not allow: they can never be chosen.
    pub fn apply(&mut self, candidates: &mut Candidates) -> Outcome<()> {
        let ids = candidates.as_slice().iter().map(|kept| kept.id);
        if candidates.as_slice().len() <= FEW {
            let ids: Vec<u32> = ids.collect();
            let mut refused = Vec::new();
            for id in ids {
                if !self.0.allows(id)? {
                    refused.push(id);
                }
            }
            candidates.forbid(|id| refused.contains(&id));
        } else {
            let mask = self.0.mask()?;
            let word = |id: u32| mask.get(id as usize / 32).copied().unwrap_or(0);
            candidates.forbid(|id| word(id) >> (id % 32) & 1 == 0);
        }
        Ok(())
    }

    /// Advances the state by a token.
    pub fn accept(&mut self, token: u32) -> Outcome<()> {
        Ok(self.0.accept(token)?)
    }

    /// Resets the state.
    pub fn reset(&mut self) -> Outcome<()> {
        Ok(self.0.reset()?)
    }
}

/// Cache of vocabularies for grammars, because building one takes a while.
static VOCABULARIES: Mutex<Vec<GrammarVocabulary>> = Mutex::new(Vec::new());

/// Removes the vocabularies of models that are gone.
pub fn forget_unused() {
    let mut known = VOCABULARIES.lock().unwrap_or_else(PoisonError::into_inner);
    // Each vocabulary holds one reference to its tokenizer.
    known.retain(|vocabulary| Arc::strong_count(vocabulary.tokenizer()) > 1);
}

fn vocabulary_of(tokenizer: &Arc<Tokenizer>) -> Outcome<GrammarVocabulary> {
    let mut known = VOCABULARIES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = known.iter();
    if let Some(found) = all.find(|known| Arc::ptr_eq(known.tokenizer(), tokenizer)) {
        return Ok(found.clone());
    }
    let vocabulary = GrammarVocabulary::new(tokenizer)?;
    known.push(vocabulary.clone());
    Ok(vocabulary)
}

/// Returns a grammar whose start rule is `root` instead of "root".
fn rooted(source: &str, root: &str) -> Outcome<String> {
    if root == "root" {
        return Ok(source.to_owned());
    }
    let defines_root = source.lines().any(|line| {
        let rest = line.trim_start().strip_prefix("root");
        rest.is_some_and(|rest| rest.trim_start().starts_with("::="))
    });
    if defines_root {
        Err(Failure::unsupported(
            "a grammar with a rule \"root\" that does not begin with it",
        ))
    } else {
        Ok(format!("{source}\nroot ::= {root}\n"))
    }
}

/// Creates a sampler for a grammar. Without a text, the sampler does nothing.
///
/// # Safety
/// The contract of the header applies.
unsafe fn init(
    vocab: *const Opaque,
    source: *const c_char,
    root: *const c_char,
    triggers: Option<Vec<Trigger>>,
) -> Outcome<*mut Sampler> {
    let model = model(vocab)?;
    // SAFETY: the caller upholds the header's contract.
    let is_empty = unsafe { text(source) }.is_none_or(|source| source.is_empty());
    if is_empty {
        return Ok(make(NativeSampler::new(
            c"grammar",
            None,
            SamplerStage::Nothing,
        )));
    }
    // SAFETY: as above.
    let (source, root) = unsafe {
        (
            required_text("grammar", source)?,
            required_text("root", root)?,
        )
    };
    let tokenizer = &model.vocabulary()?.tokenizer;
    let grammar = Grammar::gbnf(&rooted(source, root)?)?;
    let constraint = grammar.constraint(&vocabulary_of(tokenizer)?)?;
    let constraint: Box<dyn Constraint> = match triggers {
        Some(triggers) => Box::new(Lazy::new(constraint, &triggers)?),
        None => Box::new(constraint),
    };
    Ok(make(NativeSampler::new(
        c"grammar",
        None,
        SamplerStage::Grammar(GrammarStage(constraint)),
    )))
}

/// Reads the triggers of a caller.
///
/// # Safety
/// The contract of the header applies.
unsafe fn triggers(
    texts: *const *const c_char,
    n_texts: usize,
    tokens: *const i32,
    n_tokens: usize,
    make: impl Fn(String) -> Trigger,
) -> Outcome<Vec<Trigger>> {
    // SAFETY: the caller upholds the header's contract.
    let (texts, tokens) = unsafe {
        (
            array("triggers", texts, n_texts)?,
            array("trigger_tokens", tokens, n_tokens)?,
        )
    };
    let mut all = Vec::new();
    for &trigger in texts {
        // SAFETY: as above.
        all.push(make(
            unsafe { required_text("trigger", trigger) }?.to_owned(),
        ));
    }
    let tokens = tokens.iter().filter_map(|&token| u32::try_from(token).ok());
    all.extend(tokens.map(Trigger::Token));
    Ok(all)
}

export! {
    /// Creates a sampler for a grammar in GBNF.
    fn llama_sampler_init_grammar(vocab: *const Opaque, source: *const c_char,
        root: *const c_char) -> *mut Sampler, or std::ptr::null_mut(); {
        // SAFETY: the caller upholds the header's contract.
        unsafe { init(vocab, source, root, None) }
    }

    /// Creates a sampler for a grammar that applies from a word or token on.
    fn llama_sampler_init_grammar_lazy(
        vocab: *const Opaque, source: *const c_char, root: *const c_char,
        words: *const *const c_char, n_words: usize,
        tokens: *const i32, n_tokens: usize
    ) -> *mut Sampler, or std::ptr::null_mut(); {
        // SAFETY: the caller upholds the header's contract.
        unsafe {
            let triggers = triggers(words, n_words, tokens, n_tokens, Trigger::Word)?;
            init(vocab, source, root, Some(triggers))
        }
    }

    /// Creates a sampler for a grammar that applies from the first group of a regular expression,
    /// or a token, on.
    fn llama_sampler_init_grammar_lazy_patterns(
        vocab: *const Opaque, source: *const c_char, root: *const c_char,
        patterns: *const *const c_char, n_patterns: usize,
        tokens: *const i32, n_tokens: usize
    ) -> *mut Sampler, or std::ptr::null_mut(); {
        // SAFETY: the caller upholds the header's contract.
        unsafe {
            let triggers = triggers(patterns, n_patterns, tokens, n_tokens, Trigger::Pattern)?;
            init(vocab, source, root, Some(triggers))
        }
    }
}
