//! Errors of vocabularies and tokenizers.

/// A vocabulary that cannot be used. The message names the GGUF key to look at.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VocabError {
    /// The tokenizer model is not one that this crate implements.
    #[error(
        "tokenizer.ggml.model: tokenizer '{name}' is not supported; supported are: {supported}"
    )]
    UnknownModel {
        /// The name found.
        name: String,
        /// The names that are known.
        supported: String,
    },
    /// The pre-tokenizer is not one that this crate implements.
    #[error(
        "tokenizer.ggml.pre: pre-tokenizer '{name}' is not supported; supported are: {supported}"
    )]
    UnknownPreTokenizer {
        /// The name found.
        name: String,
        /// The names that are known.
        supported: String,
    },
    /// There is no token at all.
    #[error("tokenizer.ggml.tokens: the vocabulary is empty")]
    Empty,
    /// An array has more entries than token ids or ranks can count.
    #[error("{key}: {count} entries, at most {limit} are possible")]
    TooMany {
        /// The GGUF key.
        key: &'static str,
        /// Entries found.
        count: usize,
        /// Most entries allowed.
        limit: usize,
    },
    /// A token's text is longer than any real token.
    #[error("tokenizer.ggml.tokens[{index}]: {length} bytes long, at most {limit} are allowed")]
    TokenTooLong {
        /// The token's id.
        index: usize,
        /// Bytes found.
        length: usize,
        /// Most bytes allowed.
        limit: usize,
    },
    /// Two tokens have the same text, so that tokenizing would be ambiguous.
    #[error("tokenizer.ggml.tokens[{second}]: repeats token {first}, '{text}'")]
    DuplicateToken {
        /// The first token with this text.
        first: u32,
        /// The token that repeats it.
        second: usize,
        /// The text, for display.
        text: String,
    },
    /// A per-token array does not cover all tokens.
    #[error("{key}: {length} entries for {tokens} tokens in tokenizer.ggml.tokens")]
    TooShort {
        /// The GGUF key.
        key: &'static str,
        /// Entries found.
        length: usize,
        /// Entries needed.
        tokens: usize,
    },
    /// A score is not a number, so that merges have no order.
    #[error("tokenizer.ggml.scores[{index}]: the score is not a number")]
    ScoreNotANumber {
        /// The token's id.
        index: usize,
    },
    /// A token is marked as a byte, but its text is not of the form `<0xHH>`.
    #[error(
        "tokenizer.ggml.tokens[{index}]: '{text}' is marked as a byte in tokenizer.ggml.token_type, but is not of the form <0x00> to <0xFF>"
    )]
    ByteToken {
        /// The token's id.
        index: usize,
        /// The text, for display.
        text: String,
    },
    /// A special id points outside the vocabulary.
    #[error("{key}: token id {id} is outside the vocabulary of {tokens} tokens")]
    IdOutOfRange {
        /// The GGUF key.
        key: &'static str,
        /// The id found.
        id: u32,
        /// Size of the vocabulary.
        tokens: usize,
    },
    /// A flag asks for a token that the vocabulary does not name.
    #[error("{flag}: is true, but {id_key} is missing")]
    MissingSpecialToken {
        /// The key of the flag.
        flag: &'static str,
        /// The key of the id that the flag needs.
        id_key: &'static str,
    },
    /// BPE without its merge list.
    #[error("tokenizer.ggml.merges: missing; BPE tokenizers need the list of merges")]
    MissingMerges,
    /// A kind that falls back to bytes has none for one of them.
    #[error("{key}: no token <0x{byte:02X}>; the 'plamo2' tokenizer needs one for each byte")]
    MissingByte {
        /// The GGUF key.
        key: &'static str,
        /// The byte.
        byte: u8,
    },
    /// The map of characters is broken.
    #[error("{key}: {what}")]
    Charsmap {
        /// The GGUF key.
        key: &'static str,
        /// What is wrong.
        what: &'static str,
    },
}

/// A request that a tokenizer refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizeError {
    /// The text, or what of it must stay together, is too long.
    #[error(
        "the text has {length} bytes without a place to cut it, at most {limit} can be tokenized at once"
    )]
    TextTooLong {
        /// Bytes found.
        length: usize,
        /// Most bytes allowed.
        limit: usize,
    },
    /// A token id that the vocabulary does not have.
    #[error("token id {id} is outside the vocabulary of {tokens} tokens")]
    UnknownToken {
        /// The id given.
        id: u32,
        /// Size of the vocabulary.
        tokens: usize,
    },
}
