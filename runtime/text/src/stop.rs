//! Stop strings, which end a generation when they occur in the stream.

use aho_corasick::Anchored;
use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::contiguous::NFA;
use std::collections::BTreeMap;
use std::ops::Range;

/// Searches a stream of bytes for stop strings, and returns which bytes may be shown.
///
/// Bytes that could be the start of a stop string are held back until they are one, or cannot
/// become one. The first complete stop string ends the stream; if several are complete at the same
/// byte, the longest one does. The cost of a byte is constant for any number of strings (Aho and
/// Corasick's automaton), and nothing is allocated once the buffer has its size.
///
/// ```
/// use samite_text::StopSequences;
///
/// # fn main() -> Result<(), samite_text::StopError> {
/// let mut stop = StopSequences::new(["</answer>"])?;
/// assert_eq!(stop.push(b"42 <").emit, b"42 ");
/// assert_eq!(stop.push(b"b></ans").emit, b"<b>");
/// let step = stop.push(b"wer> and more");
/// assert_eq!((step.emit, step.stopped), (b"".as_slice(), Some(0)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct StopSequences {
    automaton: NFA,
    /// Index in the caller's list, by the number of the automaton's pattern.
    places: Vec<usize>,
    /// Number of bytes at the end of the stream that can start a stop string, by the automaton's
    /// state.
    depths: BTreeMap<StateID, usize>,
    start: StateID,
    state: StateID,
    /// Received bytes; those before `emitted` have been returned.
    buffer: Vec<u8>,
    emitted: usize,
    stopped: Option<usize>,
}

/// The stop strings exceed the size of an automaton.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the stop strings cannot be watched for: {0}; use fewer or shorter ones")]
pub struct StopError(String);

/// Result of a [`StopSequences::push`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopStep<'a> {
    /// Bytes that may be shown now, because they are not part of a stop string.
    pub emit: &'a [u8],
    /// Index of the stop string that ended the stream, in the list passed to
    /// [`StopSequences::new`].
    pub stopped: Option<usize>,
}

impl StopSequences {
    /// Searches for `patterns`. Empty strings would stop everything and are ignored.
    ///
    /// # Errors
    /// Returns [`StopError`] if the strings have some 2^31 bytes in total.
    pub fn new<P: AsRef<[u8]>>(patterns: impl IntoIterator<Item = P>) -> Result<Self, StopError> {
        let (places, patterns): (Vec<usize>, Vec<P>) = patterns
            .into_iter()
            .enumerate()
            .filter(|(_, pattern)| !pattern.as_ref().is_empty())
            .unzip();
        let automaton = NFA::new(&patterns).map_err(|error| StopError(error.to_string()))?;
        let start = automaton
            .start_state(Anchored::No)
            .map_err(|error| StopError(error.to_string()))?;
        // From the start state, the first bytes of a pattern lead to the state that represents
        // them.
        let mut depths = BTreeMap::new();
        for pattern in &patterns {
            let mut state = start;
            for (count, &byte) in (1..).zip(pattern.as_ref()) {
                state = automaton.next_state(Anchored::No, state, byte);
                depths.insert(state, count);
            }
        }
        Ok(Self {
            automaton,
            places,
            depths,
            start,
            state: start,
            buffer: Vec::new(),
            emitted: 0,
            stopped: None,
        })
    }

    /// Processes the next bytes of the stream. After a stop string, further bytes are ignored.
    pub fn push(&mut self, bytes: &[u8]) -> StopStep<'_> {
        self.buffer.drain(..self.emitted);
        self.emitted = 0;
        if self.stopped.is_some() {
            return self.emit(0..0);
        }
        for &byte in bytes {
            self.buffer.push(byte);
            self.state = self.automaton.next_state(Anchored::No, self.state, byte);
            if let Some((place, length)) = self.complete() {
                let end = self.buffer.len() - length;
                self.stopped = Some(place);
                self.buffer.truncate(end);
                return self.emit(0..end);
            }
        }
        let held = self.depths.get(&self.state).copied().unwrap_or(0);
        self.emit(0..self.buffer.len() - held)
    }

    /// Returns the index and the length of the longest string that is complete at the last byte.
    fn complete(&self) -> Option<(usize, usize)> {
        if !self.automaton.is_match(self.state) {
            return None;
        }
        let ids = (0..self.automaton.match_len(self.state))
            .map(|number| self.automaton.match_pattern(self.state, number));
        let longest = ids.max_by_key(|&id| self.automaton.pattern_len(id))?;
        let place = *self.places.get(longest.as_usize())?;
        Some((place, self.automaton.pattern_len(longest)))
    }

    /// Ends the stream and returns the bytes held back, because no stop string can be completed.
    pub fn finish(&mut self) -> &[u8] {
        let held = self.emitted..self.buffer.len();
        self.state = self.start;
        self.emit(held).emit
    }

    /// Resets the stream, to search another one for the same strings.
    pub fn reset(&mut self) {
        self.buffer.clear();
        self.emitted = 0;
        self.stopped = None;
        self.state = self.start;
    }

    /// Returns the stop string that ended the stream, if there was one.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    fn emit(&mut self, range: Range<usize>) -> StopStep<'_> {
        self.emitted = range.end;
        StopStep {
            emit: &self.buffer[range],
            stopped: self.stopped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn partial_matches_are_held_and_released() {
        let mut stop = StopSequences::new(["aab"]).unwrap();
        assert_eq!(stop.push(b"xa").emit, b"x");
        assert_eq!(stop.push(b"aa").emit, b"a");
        assert_eq!(stop.finish(), b"aa");
        assert_eq!(stop.finish(), b"");
    }

    #[test]
    fn the_longest_stop_string_with_the_same_end_wins() {
        let mut stop = StopSequences::new(["", "b", "ab"]).unwrap();
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
    fn partial_matches_do_not_carry_over_to_the_next_stream() {
        let mut stop = StopSequences::new(["ab"]).unwrap();
        let nothing_stops = |emit| StopStep {
            emit,
            stopped: None,
        };
        assert_eq!(stop.push(b"xa").emit, b"x");
        assert_eq!(stop.finish(), b"a");
        assert_eq!(stop.push(b"b"), nothing_stops(b"b"));
        assert_eq!(stop.push(b"a").emit, b"");
        stop.reset();
        assert_eq!(stop.push(b"b"), nothing_stops(b"b"));
    }

    #[test]
    fn without_strings_everything_passes() {
        let mut stop = StopSequences::new(Vec::<String>::new()).unwrap();
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
        let mut stop = StopSequences::new([&pattern]).unwrap();
        let mut emitted = 0;
        for _ in 0..1_000 {
            emitted += stop.push(&[b'a'; 1_000]).emit.len();
        }
        assert_eq!(emitted, 900_000);
        assert_eq!(stop.push(b"b").stopped, Some(0));
    }

    proptest! {
        #[test]
        fn streamed_stops_match_a_search_in_the_whole_text(
            text in prop::collection::vec(b'a'..b'd', 0..40),
            patterns in prop::collection::vec(prop::collection::vec(b'a'..b'd', 1..5), 0..4),
            size in 1..6usize,
        ) {
            // The earliest end; among equal ends, the earliest start.
            let expected = (0..=text.len()).find_map(|end| {
                patterns
                    .iter()
                    .filter(|pattern| text[..end].ends_with(pattern))
                    .map(|pattern| end - pattern.len())
                    .min()
            });
            let mut stop = StopSequences::new(&patterns).unwrap();
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
