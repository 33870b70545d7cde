//! Constrains generated text to a grammar.
//!
//! A [`Grammar`] is a JSON schema, a regular expression, GBNF (llama.cpp's grammar format), or
//! composed of [`GrammarPart`]s. With a [`GrammarVocabulary`] it becomes a [`GrammarConstraint`],
//! which tells a [`Sampler`](samite_text::Sampler) which tokens may follow:
//!
//! ```
//! use samite_grammar::{Grammar, GrammarVocabulary};
//! use samite_text::{Sampler, SamplerParams};
//! # use samite_text::{Tokenizer, TokenizerModel, VocabData};
//! # let texts = ["<unk>", "<s>", "</s>", "yes", "no", "maybe"];
//! # let texts = texts.map(|text| text.as_bytes().to_vec()).to_vec();
//! # let mut data = VocabData::new(TokenizerModel::Llama, texts);
//! # data.token_types = Some(vec![2, 3, 3, 1, 1, 1]);
//! # let tokenizer = std::sync::Arc::new(Tokenizer::new(data)?);
//!
//! let grammar = Grammar::gbnf(r#"root ::= "yes" | "no""#)?;
//! let vocabulary = GrammarVocabulary::new(&tokenizer)?;
//! let mut sampler = Sampler::new(SamplerParams::greedy())?;
//! sampler.set_constraint(Some(Box::new(grammar.constraint(&vocabulary)?)));
//!
//! // The most probable token is "maybe", which is no answer.
//! let token = sampler.sample(&[0.0, 0.0, 0.0, 1.0, 0.5, 2.0])?;
//! sampler.accept(token)?;
//! assert_eq!(token, 3);
//! assert!(sampler.is_finished());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | content |
//! |---|---|
//! | `grammar.rs` | [`Grammar`]: the grammars that can be enforced |
//! | `schema.rs` | the enforced subset of JSON Schema; rejects other keywords by name |
//! | `closed.rs` | [`close_objects`]: objects with no members but those of the schema |
//! | `gbnf.rs` | [`Gbnf`]: parsed (`parse.rs`) and checked (`check.rs`) |
//! | `gbnf/lexemes.rs`, `gbnf/lark.rs` | splits a grammar into lexemes; prints it for the engine |
//! | `parts.rs` | [`GrammarPart`]: grammars that a program composes of texts and schemas |
//! | `vocabulary.rs` | [`GrammarVocabulary`]: the trie of all tokens, built once |
//! | `constraint.rs` | [`GrammarConstraint`]: the state of a text |
//! | `digits.rs` | limits the digits of numbers in JSON |
//! | `lazy.rs` | [`Lazy`]: a constraint that starts at a trigger |
//!
//! The engine is llguidance. Untrusted grammars are limited in size, depth and compile time, and
//! never cause a panic.
#![forbid(unsafe_code)]

mod closed;
mod constraint;
mod digits;
mod error;
mod gbnf;
mod grammar;
mod lazy;
mod parts;
mod schema;
mod vocabulary;

pub use closed::close_objects;
pub use constraint::GrammarConstraint;
pub use error::{GrammarError, Result};
pub use gbnf::Gbnf;
pub use grammar::Grammar;
pub use lazy::{Lazy, Trigger};
pub use parts::GrammarPart;
pub use vocabulary::GrammarVocabulary;
