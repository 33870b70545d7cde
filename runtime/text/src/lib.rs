//! Text in, tokens out, and back again: tokenizers, samplers, incremental UTF-8 and stop sequences.
//!
//! This crate stands between people and the model. It knows nothing of tensors, devices or files: a
//! loader hands it the vocabulary as plain data ([`VocabData`]) and logits as a slice of `f32`, and
//! gets token ids and bytes. It has no global state, prints nothing, and never panics on what comes
//! from outside.
//!
//! # Tokens
//!
//! [`Tokenizer::new`] validates a vocabulary once, completely: array lengths, special ids, byte
//! tokens, duplicates. Every [`VocabError`] names the GGUF key at fault. After that, only two
//! things can go wrong: a text that is too long, or a token id that the vocabulary does not have
//! ([`TokenizeError`]).
//!
//! The results are those of the models' own tokenizers; `docs/tokenizers.md` says where llama.cpp's differ. Each kind has a file, behind the
//! one enum of `model.rs`:
//!
//! - **SentencePiece style** (`"llama"`, `spm.rs`): spaces become `▁`, neighbours merge in the order of their
//!   scores, and what no token covers falls back to byte tokens such as `<0x0A>`.
//! - **BPE** (`"gpt2"`, `bpe.rs`; `"gemma4"`, `"hybriddna"` and `"whitespace"` stand on it): a [`PreTokenizer`] cuts the text into words, and inside
//!   each word neighbours merge in the order of the merge list. The expressions that cut are data, compiled to automata (`pattern.rs`).
//! - **WordPiece** (`"bert"`, `wpm.rs`), **unigrams** (`"t5"`, `ugm.rs`), **RWKV** (`rwkv.rs`) and **PLaMo 2** (`plamo2.rs`) look tokens up in a
//!   trie (`trie.rs`).
//! - **Special tokens** are cut out of the text first, the longest first; control tokens only where
//!   the caller asks for it.
//!
//! Time is bounded for hostile text too: splitting is linear, merging is O(n log n) in the length
//! of the word, so a megabyte of one letter is as harmless as a megabyte of prose. Memory is
//! proportional to the text; [`Tokenizer::stream`] takes texts that come in pieces and keeps none of them.
//!
//! Text is bytes inside: [`Tokenizer::detokenize`] returns bytes, because a token may end in the
//! middle of a character. [`Utf8Stream`] turns a stream of such pieces into text without loss, and
//! [`StopSequences`] watches the same stream for strings that end a generation.
//!
//! # Sampling
//!
//! [`Sampler`] is a chain of stages ([`Stage`]), each with a file in `sampler/`: llama.cpp's, with its defaults, in any order.
//! Stages that look back know the text by `accept`. A [`Constraint`] says which tokens may come at all; the crate
//! `samite-grammar` makes them from schemas and grammars. Parameters are checked at construction and errors name the parameter
//! ([`SamplerError`]). Logits may be anything: NaN counts as "never", infinities are clamped, and
//! only logits without a single usable token are an error.
//!
//! The same parameters, seed and logits give the same token on every machine: the generator
//! ([`Rng`]) is fixed, and exponential and logarithm are `libm`'s, made of operations that IEEE 754
//! defines exactly; the standard library leaves them to the platform, whose last bits differ.
#![forbid(unsafe_code)]

mod bpe;
mod error;
mod gemma;
mod hybrid_dna;
mod merge;
mod model;
mod pattern;
mod plamo2;
mod pretokenize;
mod rwkv;
mod sampler;
mod spm;
mod stop;
mod tokenizer;
mod trie;
mod ugm;
mod utf8;
mod vocab;
mod whitespace;
mod word_cache;
mod wpm;

pub use error::{TokenizeError, VocabError};
pub use pretokenize::PreTokenizer;
pub use sampler::{
    AdaptiveP, Breakers, Candidate, Candidates, Constraint, ConstraintError, Dry, DryParams,
    Generator, LogProbabilities, Mirostat, Penalties, Rng, Sampler, SamplerError, SamplerParams,
    SamplerState, Stage,
};
pub use stop::{StopError, StopSequences, StopStep};
pub use tokenizer::{TokenStream, Tokenizer};
pub use utf8::Utf8Stream;
pub use vocab::{TokenAttributes, TokenizerModel, VocabData};
