//! Vocabularies, and texts in their tokens.

use samite_grammar::{Grammar, GrammarConstraint, GrammarVocabulary, Result};
use samite_text::{Constraint, Rng, Tokenizer, TokenizerModel, VocabData};
use std::sync::Arc;

/// End of text; a control token used by name; another one.
pub const END: u32 = 2;
pub const CALL: u32 = 3;
pub const OTHER: u32 = 4;

/// Returns the grammar if the engine accepts it.
pub fn checked(grammar: Result<Grammar>) -> Result<Grammar> {
    let grammar = grammar?;
    grammar.check()?;
    Ok(grammar)
}

/// Creates a vocabulary with control tokens, every byte, and `words`.
pub fn tokenizer(words: &[&str]) -> Arc<Tokenizer> {
    let control = ["<unk>", "<s>", "</s>", "<call>", "<other>"];
    let mut texts: Vec<Vec<u8>> = control
        .iter()
        .map(|text| text.as_bytes().to_vec())
        .collect();
    let mut types = vec![2, 3, 3, 3, 3];
    for byte in 0..=255 {
        texts.push(format!("<0x{byte:02X}>").into_bytes());
        types.push(6);
    }
    for word in words {
        let text = word.replace(' ', "▁").into_bytes();
        if !texts.contains(&text) {
            texts.push(text);
            types.push(1);
        }
    }
    let mut data = VocabData::new(TokenizerModel::Llama, texts);
    data.token_types = Some(types);
    data.add_space_prefix = Some(false);
    Arc::new(Tokenizer::new(data).unwrap())
}

/// Creates a vocabulary of pieces of `texts`, up to `longest` characters long.
pub fn vocabulary_of(texts: &[String], longest: usize, rng: &mut Rng) -> GrammarVocabulary {
    let mut words: Vec<String> = Vec::new();
    for text in texts {
        let characters: Vec<char> = text.chars().collect();
        for _ in 0..3 {
            let start = rng.below(characters.len().max(1));
            let end = (start + 1 + rng.below(longest)).min(characters.len());
            words.push(characters[start.min(end)..end].iter().collect());
        }
    }
    words.sort();
    words.dedup();
    words.retain(|word| !word.is_empty() && !word.contains('▁') && !word.starts_with('<'));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    GrammarVocabulary::new(&tokenizer(&words)).unwrap()
}

/// Returns a token's text.
pub fn piece(vocabulary: &GrammarVocabulary, token: u32) -> Vec<u8> {
    vocabulary
        .tokenizer()
        .token_to_piece(token, false)
        .unwrap()
        .to_vec()
}

/// Tokenizes a text, choosing a random matching token at each position.
pub fn tokens(vocabulary: &GrammarVocabulary, text: &[u8], rng: &mut Rng) -> Vec<u32> {
    let count = vocabulary.tokenizer().vocab_size() as u32;
    let mut tokens = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let fitting: Vec<u32> = (5..count)
            .filter(|&token| rest.starts_with(&piece(vocabulary, token)))
            .collect();
        let token = fitting[rng.below(fitting.len())];
        rest = &rest[piece(vocabulary, token).len()..];
        tokens.push(token);
    }
    tokens
}

/// Returns whether a mask contains a token.
pub fn has(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32)
        .is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Returns a constraint over single bytes.
pub fn over_bytes(grammar: &Grammar) -> GrammarConstraint {
    let vocabulary = GrammarVocabulary::new(&tokenizer(&[])).unwrap();
    grammar.constraint(&vocabulary).unwrap()
}

/// Returns whether a constraint over single bytes accepts a text as a whole from its current state.
pub fn takes(constraint: &GrammarConstraint, text: &str) -> bool {
    let mut constraint = constraint.clone();
    let goes_on = text
        .bytes()
        .all(|byte| constraint.accept(5 + u32::from(byte)).is_ok());
    goes_on && constraint.is_complete()
}
