//! Texts that are evaluated in chunks.

use crate::failure::{CommandError, CommandResult};
use crate::files::TextSource;
use crate::shown::counted;
use samite::text::Tokenizer;

/// Default tokens per chunk, unless the model was trained on shorter contexts.
pub const DEFAULT_CHUNK: usize = 512;

/// Maximum number of tokens to read without an explicit limit: as many take weeks.
const MAX_TOKENS: usize = 1 << 26;

/// The part of a text to evaluate.
pub struct ChunkRange {
    /// Tokens per chunk.
    pub chunk: usize,
    /// Number of chunks to skip at the start.
    pub from_chunk: u32,
    /// Maximum number of chunks.
    pub chunks: Option<u32>,
    /// True if names of special tokens in the text are parsed as these tokens.
    pub parse_special: bool,
}

impl ChunkRange {
    /// Returns the tokens of this part, at least those of one chunk.
    pub fn tokens(&self, source: TextSource, tokenizer: &Tokenizer) -> CommandResult<Vec<u32>> {
        let name = source.name().to_owned();
        let chunk = self.chunk;
        let left_out = chunk.saturating_mul(self.from_chunk as usize);
        let wanted = self
            .chunks
            .map(|chunks| chunk.saturating_mul(chunks as usize));
        let most = wanted.map_or(MAX_TOKENS, |wanted| left_out.saturating_add(wanted));
        let mut tokens = source.tokens(tokenizer, self.parse_special, most, |_| {})?;
        if wanted.is_none() && tokens.len() > most {
            return Err(CommandError::error(format_args!(
                "{name}: has more than {most} tokens: choose how many of them with --chunks"
            )));
        }
        tokens.truncate(most);
        let count = tokens.len();
        tokens.drain(..left_out.min(count));
        if tokens.len() < chunk {
            let without = match left_out {
                0 => String::new(),
                left_out => format!(" of which {left_out} are left out, and"),
            };
            return Err(CommandError::error(format_args!(
                "{name}: has {},{without} one chunk needs {chunk}: take a longer text or a smaller --ctx-size",
                counted(count, "token")
            )));
        }
        Ok(tokens)
    }
}
