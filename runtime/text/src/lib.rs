//! Tokenizers, samplers, incremental UTF-8 decoding and stop sequences.
//!
//! This crate is the layer between text and the model. It does not depend on tensors, devices or
//! files: a loader passes the vocabulary as plain data ([`VocabData`]) and logits as a slice of
//! `f32`, and gets token ids and bytes. The crate has no global state, prints nothing, and never
//! panics on external input.
//!
//! # Tokens
//!
//! [`Tokenizer::new`] validates a vocabulary once, completely: array lengths, special ids, byte
//! tokens, duplicates. Every [`VocabError`] names the GGUF key at fault. After that, only two
//! errors are possible: a text that is too long, or a token id that the vocabulary does not have
//! ([`TokenizeError`]).
//!
//! The results are those of the models' own tokenizers; `docs/tokenizers.md` lists the differences
//! from llama.cpp. Each kind has its own file, behind the enum in `model.rs`:
//!
//! - **SentencePiece style** (`"llama"`, `spm.rs`): spaces become `▁`, adjacent symbols merge in
//!   the order of their scores, and text without a token falls back to byte tokens such as
//!   `<0x0A>`.
//! - **BPE** (`"gpt2"`, `bpe.rs`; the base of `"gemma4"`, `"hybriddna"` and `"whitespace"`): a
//!   [`PreTokenizer`] splits the text into words, and inside each word adjacent symbols merge in
//!   the order of the merge list. The regular expressions for splitting are data, which is compiled
//!   to automata (`pattern.rs`).
//! - **WordPiece** (`"bert"`, `wpm.rs`), **unigrams** (`"t5"`, `ugm.rs`), **RWKV** (`rwkv.rs`) and
//!   **PLaMo 2** (`plamo2.rs`) look tokens up in a trie (`trie.rs`).
//! - **Special tokens** are split off first, the longest ones before others; control tokens only if
//!   the caller requests it.
//!
//! Time is bounded for hostile text as well: splitting is linear, and merging is O(n log n) in the
//! length of the word. A megabyte of one letter is as harmless as a megabyte of prose. Memory is
//! proportional to the text; [`Tokenizer::stream`] accepts texts in pieces and does not keep them.
//!
//! Text consists of bytes internally: [`Tokenizer::detokenize`] returns bytes, because a token may
//! end in the middle of a character. [`Utf8Stream`] converts a stream of such pieces to text
//! without loss, and [`StopSequences`] searches the same stream for strings that end a generation.
//!
//! # Sampling
//!
//! [`Sampler`] is a chain of stages ([`Stage`]), each with its own file in `sampler/`: those of
//! llama.cpp, with its defaults, in any order. Stages that depend on earlier tokens get the text
//! through `accept`. A [`Constraint`] restricts the possible tokens; the crate `samite-grammar`
//! creates constraints from schemas and grammars. Parameters are checked at construction, and
//! errors name the parameter ([`SamplerError`]). Logits may have any values: NaN is treated as
//! "never", infinities are clamped, and only logits without a single usable token are an error.
//!
//! The same parameters, seed and logits result in the same token on every machine. The generator
//! ([`Rng`]) is fixed, and the exponential and the logarithm come from `libm`, which uses only
//! operations that IEEE 754 defines exactly. The standard library's versions depend on the platform
//! and differ in the last bits.
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
