//! A minimum number of generated tokens: vLLM's `min_tokens`.

use samite_text::{Constraint, ConstraintError, Tokenizer};
use std::sync::Arc;

/// A constraint that allows no end-of-generation token before a number of tokens, unless another
/// constraint allows nothing else. Otherwise it allows the tokens of that constraint.
#[derive(Clone, Debug)]
pub struct MinTokens {
    inner: Option<Box<dyn Constraint>>,
    tokenizer: Arc<Tokenizer>,
    least: usize,
    generated: usize,
    /// Mask of all tokens, and the mask of the allowed ones.
    all: Vec<u32>,
    allowed: Vec<u32>,
}

impl MinTokens {
    pub fn new(
        inner: Option<Box<dyn Constraint>>,
        tokenizer: &Arc<Tokenizer>,
        least: usize,
    ) -> Self {
        let words = tokenizer.vocab_size().div_ceil(32);
        MinTokens {
            inner,
            tokenizer: Arc::clone(tokenizer),
            least,
            generated: 0,
            all: vec![u32::MAX; words],
            allowed: Vec::new(),
        }
    }
}

impl Constraint for MinTokens {
    fn allows(&mut self, token: u32) -> Result<bool, ConstraintError> {
        if self.generated < self.least && self.tokenizer.is_eog(token) {
            let mask = self.mask()?;
            let word = mask.get(token as usize / 32).copied();
            return Ok(word.unwrap_or(0) >> (token % 32) & 1 == 1);
        }
        match &mut self.inner {
            Some(inner) => inner.allows(token),
            None => Ok((token as usize) < self.tokenizer.vocab_size()),
        }
    }

    fn mask(&mut self) -> Result<&[u32], ConstraintError> {
        let mask = match &mut self.inner {
            Some(inner) => inner.mask()?,
            None => &self.all,
        };
        if self.generated >= self.least {
            return Ok(mask);
        }
        self.allowed.clear();
        self.allowed.extend_from_slice(mask);
        for &end in self.tokenizer.eog_tokens() {
            if let Some(word) = self.allowed.get_mut(end as usize / 32) {
                *word &= !(1 << (end % 32));
            }
        }
        if self.allowed.iter().all(|&word| word == 0) {
            return Ok(mask);
        }
        Ok(&self.allowed)
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.generated += 1;
        match &mut self.inner {
            Some(inner) => inner.accept(token),
            None => Ok(()),
        }
    }

    fn is_complete(&mut self) -> bool {
        match &mut self.inner {
            Some(inner) => inner.is_complete(),
            None => self.generated >= self.least,
        }
    }

    fn is_finished(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.is_finished())
    }

    fn reset(&mut self) -> Result<(), ConstraintError> {
        self.generated = 0;
        match &mut self.inner {
            Some(inner) => inner.reset(),
            None => Ok(()),
        }
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
