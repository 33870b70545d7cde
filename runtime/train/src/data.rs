//! Datasets: texts as tokens, and the order in which they are used for training.

use crate::error::{Error, Result};
use samite_text::{Rng, Tokenizer};

/// Concatenated texts, each from its BOS token to its EOS token.
#[derive(Clone, Debug)]
pub struct Dataset {
    tokens: Vec<u32>,
    /// Starts of texts that are followed by at least one window.
    starts: Vec<usize>,
    window: usize,
}

impl Dataset {
    /// Creates a dataset from the texts in `text`, one per line, for windows of `context` tokens
    /// and the next one.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if there are not enough tokens for one window, or if the tokenizer
    /// cannot be used.
    pub fn from_lines(text: &str, tokenizer: &Tokenizer, context: usize) -> Result<Self> {
        let (mut tokens, mut starts) = (Vec::new(), Vec::new());
        let (Some(begin), Some(end)) = (tokenizer.bos(), tokenizer.eos()) else {
            return Err(Error::data("the tokenizer has no begin or end token"));
        };
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let ids = tokenizer.tokenize(line, false, false);
            let ids = ids.map_err(|error| Error::data(error.to_string()))?;
            let reserved = starts.try_reserve(1);
            let reserved = reserved.and_then(|()| tokens.try_reserve(ids.len() + 2));
            reserved.map_err(|_| {
                let all = tokens.len() + ids.len();
                Error::data(format!(
                    "there is no memory for {all} tokens: learn from less"
                ))
            })?;
            starts.push(tokens.len());
            tokens.push(begin);
            tokens.extend(ids);
            tokens.push(end);
        }
        Self::new(tokens, starts, context)
    }

    /// Creates a dataset from tokens. Its windows have `context` tokens and the next one, and start
    /// at `starts`.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if no window is complete.
    pub fn new(tokens: Vec<u32>, mut starts: Vec<usize>, context: usize) -> Result<Self> {
        let window = context + 1;
        starts.retain(|&start| {
            start
                .checked_add(window)
                .is_some_and(|end| end <= tokens.len())
        });
        if starts.is_empty() {
            return Err(Error::data(format!(
                "the data has {} tokens, too few for one text of {window}",
                tokens.len()
            )));
        }
        Ok(Dataset {
            tokens,
            starts,
            window,
        })
    }

    /// Returns the total number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Returns a hash of the data.
    pub fn fingerprint(&self) -> u64 {
        // FNV-1a.
        let tokens = self.tokens.iter().map(|&token| u64::from(token));
        let starts = self.starts.iter().map(|&start| start as u64);
        tokens.chain(starts).fold(0xcbf2_9ce4_8422_2325, |hash, x| {
            (hash ^ x).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    /// Returns the number of windows, which is one epoch.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Returns whether there are no windows, which does not happen.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Returns window `index`, in the order of the texts: the context's tokens and the next one.
    /// Wraps around after the last window.
    pub fn window(&self, index: usize) -> &[u32] {
        let start = self.starts[index % self.starts.len()];
        &self.tokens[start..start + self.window]
    }
}

/// Order of the windows of a dataset: reshuffled in each epoch, and a function of only seed and
/// position.
#[derive(Clone, Debug)]
pub struct Order {
    seed: u64,
    len: usize,
    epoch: Option<u64>,
    order: Vec<usize>,
}

impl Order {
    /// Creates the order of `len` windows.
    pub fn new(seed: u64, len: usize) -> Self {
        Order {
            seed,
            len: len.max(1),
            epoch: None,
            order: Vec::new(),
        }
    }

    /// Returns the index of the window at `position`, counted over all epochs.
    pub fn at(&mut self, position: u64) -> usize {
        let (epoch, index) = (position / self.len as u64, position % self.len as u64);
        if self.epoch != Some(epoch) {
            let mut rng = Rng::new(self.seed ^ epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            self.order = (0..self.len).collect();
            for last in (1..self.len).rev() {
                let other = rng.below(last + 1);
                self.order.swap(last, other);
            }
            self.epoch = Some(epoch);
        }
        self.order[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_shuffles_all_windows() {
        let mut order = Order::new(7, 50);
        let epoch = |order: &mut Order, number: u64| -> Vec<usize> {
            (number * 50..(number + 1) * 50)
                .map(|i| order.at(i))
                .collect()
        };
        let (first, second) = (epoch(&mut order, 0), epoch(&mut order, 1));
        assert_ne!(first, second);
        for mut windows in [first.clone(), second] {
            windows.sort_unstable();
            assert_eq!(windows, (0..50).collect::<Vec<_>>());
        }
        // The order is the same from any start position.
        let mut again = Order::new(7, 50);
        assert_eq!(again.at(17), first[17]);
        assert_eq!(epoch(&mut again, 0), first);
        assert_ne!(epoch(&mut Order::new(8, 50), 0), first);
    }

    #[test]
    fn windows_start_at_texts_and_are_complete() {
        let data = Dataset::new((0..10).collect(), vec![0, 3, 6, 9], 4).unwrap();
        assert_eq!(data.len(), 2);
        assert_eq!(data.window(1), [3, 4, 5, 6, 7]);
        assert_eq!(data.window(2), data.window(0));
        let error = Dataset::new(vec![1, 2], vec![0], 4).unwrap_err();
        assert!(error.to_string().contains("too few"), "{error}");
    }
}
