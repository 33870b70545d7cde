//! Texts that models read in chunks.

use crate::failure::{Failure, Outcome};
use crate::files::Source;
use crate::shown::counted;
use samite::text::Tokenizer;

/// Tokens of a chunk, unless the flags say otherwise or the model was trained on fewer.
pub const DEFAULT_CHUNK: usize = 512;

/// So many tokens take weeks: more are not read without being asked for.
const MOST_TOKENS: usize = 1 << 26;

/// Which part of a text is read.
pub struct Part {
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Chunks that are left out at its start.
    pub from_chunk: u32,
    /// So many chunks at most.
    pub chunks: Option<u32>,
    /// Names of special tokens in the text are these tokens.
    pub parse_special: bool,
}

impl Part {
    /// The tokens of this part: those of at least one chunk.
    pub fn tokens(&self, source: Source, tokenizer: &Tokenizer) -> Outcome<Vec<u32>> {
        let name = source.name().to_owned();
        let chunk = self.chunk;
        let left_out = chunk.saturating_mul(self.from_chunk as usize);
        let wanted = self
            .chunks
            .map(|chunks| chunk.saturating_mul(chunks as usize));
        let most = wanted.map_or(MOST_TOKENS, |wanted| left_out.saturating_add(wanted));
        let mut tokens = source.tokens(tokenizer, self.parse_special, most, |_| {})?;
        if wanted.is_none() && tokens.len() > most {
            return Err(Failure::error(format_args!(
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
            return Err(Failure::error(format_args!(
                "{name}: has {},{without} one chunk needs {chunk}: take a longer text or a smaller --ctx-size",
                counted(count, "token")
            )));
        }
        Ok(tokens)
    }
}
