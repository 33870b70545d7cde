//! Strings that end a generation, watched for in a stream.

use std::ops::Range;

/// Watches a stream of bytes for stop strings, and says what may be shown.
///
/// Bytes that could be the beginning of a stop string are held back until they are, or cannot
/// become, one. The first stop string to be complete ends the stream; of several that are complete
/// with the same byte, the longest. The cost is constant for each byte and string (Knuth, Morris
/// and Pratt's automaton), and nothing is allocated once the buffer has its size.
///
/// ```
/// use samite_text::StopSequences;
///
/// let mut stop = StopSequences::new(["</answer>"]);
/// assert_eq!(stop.push(b"42 <").emit, b"42 ");
/// assert_eq!(stop.push(b"b></ans").emit, b"<b>");
/// let step = stop.push(b"wer> and more");
/// assert_eq!((step.emit, step.stopped), (b"".as_slice(), Some(0)));
/// ```
#[derive(Debug, Clone)]
pub struct StopSequences {
    patterns: Vec<Pattern>,
    /// Bytes received; those before `emitted` have been handed out.
    buffer: Vec<u8>,
    emitted: usize,
    stopped: Option<usize>,
}

/// What a [`StopSequences::push`] has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopStep<'a> {
    /// Bytes that may be shown now: they are no part of a stop string.
    pub emit: &'a [u8],
    /// The stop string that ended the stream, by its place in the list given to
    /// [`StopSequences::new`].
    pub stopped: Option<usize>,
}

#[derive(Debug, Clone)]
struct Pattern {
    /// Place in the caller's list.
    index: usize,
    bytes: Vec<u8>,
    /// For each prefix, the length of its longest proper border.
    borders: Vec<usize>,
    /// How many bytes of the pattern the stream ends with.
    matched: usize,
}

impl StopSequences {
    /// Watches for `patterns`. Empty strings would stop everything and are ignored.
    pub fn new<P: AsRef<[u8]>>(patterns: impl IntoIterator<Item = P>) -> Self {
        let patterns = patterns
            .into_iter()
            .enumerate()
            .filter(|(_, pattern)| !pattern.as_ref().is_empty())
            .map(|(index, pattern)| Pattern::new(index, pattern.as_ref().to_vec()))
            .collect();
        Self {
            patterns,
            buffer: Vec::new(),
            emitted: 0,
            stopped: None,
        }
    }

    /// Takes the next bytes of the stream. After a stop string, further bytes are ignored.
    pub fn push(&mut self, bytes: &[u8]) -> StopStep<'_> {
        self.buffer.drain(..self.emitted);
        self.emitted = 0;
        if self.stopped.is_some() {
            return self.emit(0..0);
        }
        for &byte in bytes {
            self.buffer.push(byte);
            let complete = self
                .patterns
                .iter_mut()
                .filter_map(|pattern| pattern.advance(byte))
                .max_by_key(|found| found.1);
            if let Some((index, length)) = complete {
                let end = self.buffer.len() - length;
                self.stopped = Some(index);
                self.buffer.truncate(end);
                return self.emit(0..end);
            }
        }
        let held = self
            .patterns
            .iter()
            .map(|pattern| pattern.matched)
            .max()
            .unwrap_or(0);
        self.emit(0..self.buffer.len() - held)
    }

    /// Ends the stream and returns the bytes held back: no stop string can complete any more.
    pub fn finish(&mut self) -> &[u8] {
        let held = self.emitted..self.buffer.len();
        self.reset_matches();
        self.emit(held).emit
    }

    /// Forgets the stream, to watch another one for the same strings.
    pub fn reset(&mut self) {
        self.buffer.clear();
        self.emitted = 0;
        self.stopped = None;
        self.reset_matches();
    }

    /// The stop string that ended the stream, if one did.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    fn reset_matches(&mut self) {
        for pattern in &mut self.patterns {
            pattern.matched = 0;
        }
    }

    fn emit(&mut self, range: Range<usize>) -> StopStep<'_> {
        self.emitted = range.end;
        StopStep {
            emit: &self.buffer[range],
            stopped: self.stopped,
        }
    }
}

impl Pattern {
    fn new(index: usize, bytes: Vec<u8>) -> Self {
        let mut borders = vec![0; bytes.len()];
        let mut border = 0;
        for end in 1..bytes.len() {
            while border > 0 && bytes[end] != bytes[border] {
                border = borders[border - 1];
            }
            border += usize::from(bytes[end] == bytes[border]);
            borders[end] = border;
        }
        Self {
            index,
            bytes,
            borders,
            matched: 0,
        }
    }

    /// Takes one byte; returns index and length if the pattern is complete. The stream must end
    /// then.
    fn advance(&mut self, byte: u8) -> Option<(usize, usize)> {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        if self.matched < self.bytes.len() {
            return None;
        }
        self.matched = 0;
        Some((self.index, self.bytes.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn partial_matches_are_held_and_given_back() {
        let mut stop = StopSequences::new(["aab"]);
        assert_eq!(stop.push(b"xa").emit, b"x");
        assert_eq!(stop.push(b"aa").emit, b"a");
        assert_eq!(stop.finish(), b"aa");
        assert_eq!(stop.finish(), b"");
    }

    #[test]
    fn the_longest_of_those_that_end_together_wins() {
        let mut stop = StopSequences::new(["", "b", "ab"]);
        let step = stop.push(b"xabc");
        assert_eq!((step.emit, step.stopped), (b"x".as_slice(), Some(2)));
        assert_eq!(
            stop.push(b"more"),
            StopStep {
                emit: b"",
                stopped: Some(2)
            }
        );
        assert_eq!(stop.finish(), b"");
        stop.reset();
        assert_eq!(stop.push(b"b").stopped, Some(1));
    }

    #[test]
    fn without_strings_everything_passes() {
        let mut stop = StopSequences::new(Vec::<String>::new());
        assert_eq!(
            stop.push(b"abc"),
            StopStep {
                emit: b"abc",
                stopped: None
            }
        );
        assert_eq!(stop.push(b"d").emit, b"d");
    }

    #[test]
    fn self_similar_strings_take_linear_time() {
        let mut pattern = vec![b'a'; 100_000];
        pattern.push(b'b');
        let mut stop = StopSequences::new([&pattern]);
        let mut emitted = 0;
        for _ in 0..1_000 {
            emitted += stop.push(&[b'a'; 1_000]).emit.len();
        }
        assert_eq!(emitted, 900_000);
        assert_eq!(stop.push(b"b").stopped, Some(0));
    }

    proptest! {
        #[test]
        fn equals_a_search_in_the_whole_text(
            text in prop::collection::vec(b'a'..b'd', 0..40),
            patterns in prop::collection::vec(prop::collection::vec(b'a'..b'd', 1..5), 0..4),
            size in 1..6usize,
        ) {
            // The earliest end; of equal ends the earliest start.
            let expected = (0..=text.len()).find_map(|end| {
                patterns.iter().filter(|pattern| text[..end].ends_with(pattern)).map(|pattern| end - pattern.len()).min()
            });
            let mut stop = StopSequences::new(&patterns);
            let mut emitted = Vec::new();
            for piece in text.chunks(size) {
                emitted.extend_from_slice(stop.push(piece).emit);
            }
            emitted.extend_from_slice(stop.finish());
            prop_assert_eq!(stop.stopped().is_some(), expected.is_some());
            prop_assert_eq!(&emitted[..], &text[..expected.unwrap_or(text.len())]);
        }
    }
}
