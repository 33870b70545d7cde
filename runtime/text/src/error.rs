//! Errors of vocabularies and tokenizers.

/// An unusable vocabulary. The message names the relevant GGUF key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VocabError {
    /// The tokenizer model is not supported.
    #[error(
        "tokenizer.ggml.model: tokenizer '{name}' is not supported; supported are: {supported}"
    )]
    UnknownModel {
        /// Name in the file.
        name: String,
        /// Supported names.
        supported: String,
    },
    /// The pre-tokenizer is not supported.
    #[error(
        "tokenizer.ggml.pre: pre-tokenizer '{name}' is not supported; supported are: {supported}"
    )]
    UnknownPreTokenizer {
        /// Name in the file.
        name: String,
        /// Supported names.
        supported: String,
    },
    /// The vocabulary has no tokens.
    #[error("tokenizer.ggml.tokens: the vocabulary is empty")]
    Empty,
    /// An array has more entries than token ids or ranks can represent.
    #[error("{key}: {count} entries, at most {limit} are possible")]
    TooMany {
        /// The GGUF key.
        key: &'static str,
        /// Number of entries.
        count: usize,
        /// Maximum number of entries.
        limit: usize,
    },
    /// The text of a token is longer than that of any real token.
    #[error("tokenizer.ggml.tokens[{index}]: {length} bytes long, at most {limit} are allowed")]
    TokenTooLong {
        /// Id of the token.
        index: usize,
        /// Length in bytes.
        length: usize,
        /// Maximum length in bytes.
        limit: usize,
    },
    /// Two tokens have the same text, so tokenizing would be ambiguous.
    #[error("tokenizer.ggml.tokens[{second}]: repeats token {first}, '{text}'")]
    DuplicateToken {
        /// The first token with this text.
        first: u32,
        /// Token that repeats it.
        second: usize,
        /// Text, for display.
        text: String,
    },
    /// A per-token array does not cover all tokens.
    #[error("{key}: {length} entries for {tokens} tokens in tokenizer.ggml.tokens")]
    TooShort {
        /// The GGUF key.
        key: &'static str,
        /// Number of entries.
        length: usize,
        /// Required number of entries.
        tokens: usize,
    },
    /// A score is NaN, so merges have no order.
    #[error("tokenizer.ggml.scores[{index}]: the score is not a number")]
    ScoreNotANumber {
        /// Id of the token.
        index: usize,
    },
    /// A token is marked as a byte, but its text does not have the form `<0xHH>`.
    #[error(
        "tokenizer.ggml.tokens[{index}]: '{text}' is marked as a byte in tokenizer.ggml.token_type, but is not of the form <0x00> to <0xFF>"
    )]
    ByteToken {
        /// Id of the token.
        index: usize,
        /// Text, for display.
        text: String,
    },
    /// A special id is outside the vocabulary.
    #[error("{key}: token id {id} is outside the vocabulary of {tokens} tokens")]
    IdOutOfRange {
        /// The GGUF key.
        key: &'static str,
        /// Id in the file.
        id: u32,
        /// Size of the vocabulary.
        tokens: usize,
    },
    /// A flag requires a token that the vocabulary does not define.
    #[error("{flag}: is true, but {id_key} is missing")]
    MissingSpecialToken {
        /// Key of the flag.
        flag: &'static str,
        /// Key of the id that the flag requires.
        id_key: &'static str,
    },
    /// A BPE vocabulary has no merge list.
    #[error("tokenizer.ggml.merges: missing; BPE tokenizers need the list of merges")]
    MissingMerges,
    /// A tokenizer with byte fallback has no token for a byte.
    #[error("{key}: no token <0x{byte:02X}>; the 'plamo2' tokenizer needs one for each byte")]
    MissingByte {
        /// The GGUF key.
        key: &'static str,
        /// The byte.
        byte: u8,
    },
    /// The character map is invalid.
    #[error("{key}: {what}")]
    Charsmap {
        /// The GGUF key.
        key: &'static str,
        /// Description of the problem.
        what: &'static str,
    },
}

/// Error of a tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizeError {
    /// The text, or a part of it that cannot be split, is too long.
    #[error(
        "the text has {length} bytes without a place to cut it, at most {limit} can be tokenized at once"
    )]
    TextTooLong {
        /// Length in bytes.
        length: usize,
        /// Maximum length in bytes.
        limit: usize,
    },
    /// The vocabulary does not have this token id.
    #[error("token id {id} is outside the vocabulary of {tokens} tokens")]
    UnknownToken {
        /// Id from the caller.
        id: u32,
        /// Size of the vocabulary.
        tokens: usize,
    },
}
