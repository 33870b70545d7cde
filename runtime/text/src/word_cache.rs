//! Cache for the tokens of repeated words.
//!
//! Most words of a text occur repeatedly. The word's position in the text and its range in the
//! output suffice to copy its tokens, so the cache is one small table that exists while a text is
//! tokenized.

/// Maximum length of cached words; few longer words are repeated.
const LONGEST: usize = 64;

/// Minimum length of a text; shorter texts have too few words.
const MIN_TEXT_LEN: usize = 512;

/// Maximum number of entries.
const MOST: usize = 1 << 14;

#[derive(Debug, Clone, Copy)]
struct CachedWord<'t> {
    word: &'t [u8],
    /// Start of its tokens in the output.
    start: usize,
    tokens: usize,
}

/// Words of a text by hash. On a collision, the later word replaces the earlier one.
#[derive(Debug)]
pub(crate) struct WordCache<'t> {
    entries: Vec<CachedWord<'t>>,
}

impl<'t> WordCache<'t> {
    /// Creates a cache for a text of `length` bytes.
    pub(crate) fn new(length: usize) -> Self {
        let entries = match length {
            0..MIN_TEXT_LEN => 0,
            _ => (length / 8).next_power_of_two().min(MOST),
        };
        let empty = CachedWord {
            word: &[],
            start: 0,
            tokens: 0,
        };
        Self {
            entries: vec![empty; entries],
        }
    }

    /// Adds the tokens of a word to `output`: the cached ones, or those that `make` adds.
    #[inline]
    pub(crate) fn tokens_of(
        &mut self,
        word: &'t [u8],
        output: &mut Vec<u32>,
        make: impl FnOnce(&mut Vec<u32>),
    ) {
        if self.entries.is_empty() || word.len() > LONGEST {
            return make(output);
        }
        let index = hash(word) as usize & (self.entries.len() - 1);
        let entry = &mut self.entries[index];
        if entry.word == word {
            let (start, end) = (entry.start, entry.start + entry.tokens);
            if entry.tokens == 1 {
                output.push(output[start]);
            } else {
                output.extend_from_within(start..end);
            }
            return;
        }
        let start = output.len();
        make(output);
        *entry = CachedWord {
            word,
            start,
            tokens: output.len() - start,
        };
    }
}

/// Hashes words. Deliberate collisions only make the cache useless.
#[inline]
fn hash(word: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut state = word.len() as u64;
    let (chunks, rest) = word.as_chunks::<8>();
    for &chunk in chunks {
        state = (state ^ u64::from_le_bytes(chunk)).wrapping_mul(FACTOR);
        state ^= state >> 32;
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    state = (state ^ u64::from_le_bytes(last)).wrapping_mul(FACTOR);
    state ^ state >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More words than the table has entries, each of them more than once.
    #[test]
    fn cached_words_reuse_their_tokens() {
        let words: Vec<String> = (0..3000).map(|i| format!("{}", i * 7919 % 1500)).collect();
        let mut cache = WordCache::new(MIN_TEXT_LEN);
        let (mut output, mut expected, mut made) = (Vec::new(), Vec::new(), 0);
        for word in words.iter().flat_map(|word| [word, word]) {
            let tokens = || word.bytes().map(u32::from);
            expected.extend(tokens());
            cache.tokens_of(word.as_bytes(), &mut output, |output| {
                made += 1;
                output.extend(tokens());
            });
        }
        assert_eq!(output, expected);
        assert!(made <= words.len(), "{made}");
    }
}
