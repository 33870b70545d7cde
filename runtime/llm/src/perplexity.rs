//! Perplexity: how well a model predicts a text.

mod divergence;

pub use divergence::{Distribution, Estimate, KlDivergence, kl_divergence};

use crate::batch::Batch;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::log_probs::LogProbsWriter;
use std::io::Write;

/// Minimum number of tokens in a chunk: half of them are context, and the last one predicts
/// nothing.
pub(crate) const MIN_CHUNK: usize = 4;

/// Result of a perplexity measurement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Perplexity {
    /// Mean negative log likelihood of each chunk's scored tokens, in nats.
    pub chunks: Vec<f64>,
    /// Number of scored tokens.
    pub tokens: usize,
    /// `exp` of the mean negative log likelihood.
    pub value: f64,
    /// Standard error of `value`.
    pub error: f64,
}

/// Logits of a position, and the token that follows it in the text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scored<'a> {
    pub logits: &'a [f32],
    /// Position in its chunk.
    pub position: usize,
    /// The token that follows.
    pub next: u32,
    /// Largest logit.
    pub max: f32,
    /// Logarithm of the sum of `exp(logit - max)`.
    pub log_sum_exp: f64,
    /// Negative log-likelihood of `next`, in nats.
    pub nats: f64,
}

impl<'a> Scored<'a> {
    pub fn new(logits: &'a [f32], position: usize, next: u32) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits
            .iter()
            .map(|&logit| f64::from(logit - max).exp())
            .sum();
        let log_sum_exp = sum.ln();
        let logit = logits
            .get(next as usize)
            .copied()
            .unwrap_or(f32::NEG_INFINITY);
        Scored {
            logits,
            position,
            next,
            max,
            log_sum_exp,
            nats: f64::from(max) + log_sum_exp - f64::from(logit),
        }
    }
}

/// Receives the results of [`measure`] as they are computed; an error stops the measurement.
pub(crate) trait Observer {
    /// Called for each scored token, in the order of the text.
    fn on_scored(&mut self, _scored: &Scored<'_>) -> Result<()> {
        Ok(())
    }

    /// Called after each chunk.
    fn on_chunk(&mut self, so_far: &Perplexity) -> Result<()>;
}

impl<F: FnMut(&Perplexity) -> Result<()>> Observer for F {
    fn on_chunk(&mut self, so_far: &Perplexity) -> Result<()> {
        self(so_far)
    }
}

/// Measures `tokens` in chunks of `chunk` tokens, each separately in sequence 0. The first half of
/// a chunk is context, and the second half is scored. If the model adds a BOS token, that replaces
/// the first token of each chunk. llama.cpp's perplexity tool does the same by default. Calls
/// `on_chunk` with the result so far.
///
/// # Errors
/// Returns [`Error::InvalidArgument`] if `tokens` are fewer than a chunk, or if a chunk does not
/// fit into the context. Returns [`Error::Model`] if the model's results are not finite. Also fails
/// like [`Context::decode`].
pub fn perplexity(
    context: &mut Context,
    tokens: &[u32],
    chunk: usize,
    mut on_chunk: impl FnMut(&Perplexity),
) -> Result<Perplexity> {
    measure(context, tokens, chunk, false, &mut |so_far: &Perplexity| {
        on_chunk(so_far);
        Ok(())
    })
}

/// Writes the log-probabilities of each scored token, and reports chunks.
struct Recorder<W, F> {
    writer: LogProbsWriter<W>,
    on_chunk: F,
}

impl<W: Write, F: FnMut(&Perplexity)> Observer for Recorder<W, F> {
    fn on_scored(&mut self, scored: &Scored<'_>) -> Result<()> {
        let Scored {
            logits,
            max,
            log_sum_exp,
            ..
        } = *scored;
        self.writer.write_row(logits, max, log_sum_exp)
    }

    fn on_chunk(&mut self, so_far: &Perplexity) -> Result<()> {
        (self.on_chunk)(so_far);
        Ok(())
    }
}

/// Measures `tokens` like [`perplexity`], and writes the log-probabilities of all scored tokens to
/// `output` in the format of [`log_probs`](crate::log_probs), for [`kl_divergence`].
///
/// Tokens after the last whole chunk are ignored.
///
/// # Errors
/// Returns the errors of [`perplexity`] and [`LogProbsWriter`]. The output is incomplete then.
pub fn record_log_probs(
    context: &mut Context,
    tokens: &[u32],
    chunk: usize,
    output: impl Write,
    on_chunk: impl FnMut(&Perplexity),
) -> Result<Perplexity> {
    let n_vocab = context.model().spec().n_vocab;
    let (chunks, _) = tokens.split_at(tokens.len() - tokens.len() % chunk.max(1));
    let mut recorder = Recorder {
        writer: LogProbsWriter::new(output, chunk, n_vocab, chunks)?,
        on_chunk,
    };
    let result = measure(context, chunks, chunk, false, &mut recorder)?;
    recorder.writer.finish()?;
    Ok(result)
}

/// Measures `tokens` like [`perplexity`], and reports to `observer`.
///
/// If `whole`, every token passes through the output matrix, although only half are scored.
pub(crate) fn measure(
    context: &mut Context,
    tokens: &[u32],
    chunk: usize,
    whole: bool,
    observer: &mut impl Observer,
) -> Result<Perplexity> {
    if context.model().spec().is_bidirectional() {
        return Err(Error::invalid(
            "this model's tokens look at later ones: it does not predict what comes next",
        ));
    }
    if chunk < MIN_CHUNK || chunk > context.n_ctx() {
        return Err(Error::invalid(format!(
            "chunks of {chunk} tokens: must be {MIN_CHUNK} to the context size {}",
            context.n_ctx()
        )));
    }
    if tokens.len() < chunk {
        return Err(Error::invalid(format!(
            "the text has {} tokens, at least one chunk of {chunk} is needed",
            tokens.len()
        )));
    }
    let tokenizer = context.model().tokenizer().ok();
    let bos = tokenizer
        .filter(|tokenizer| tokenizer.adds_bos())
        .and_then(|tokenizer| tokenizer.bos());
    let n_batch = context.options().n_batch;
    let mut result = Perplexity::default();
    let (mut sum, mut squares) = (0.0, 0.0);
    let mut batch = Batch::new();
    for part in tokens.chunks_exact(chunk) {
        context.clear()?;
        let scored = chunk / 2..chunk - 1;
        let before = sum;
        for start in (0..chunk).step_by(n_batch) {
            let end = chunk.min(start + n_batch);
            batch.clear();
            for (at, &token) in part.iter().enumerate().take(end).skip(start) {
                let token = bos.filter(|_| at == 0).unwrap_or(token);
                // A chunk is at most a context, whose size is limited to i32.
                batch.add(token, at as i32, &[0], whole || scored.contains(&at));
            }
            context.decode(&batch)?;
            for at in start..end {
                let logits = scored.contains(&at).then(|| context.logits(at - start));
                let Some(logits) = logits.flatten() else {
                    continue;
                };
                let row = Scored::new(logits, at, part[at + 1]);
                let nats = row.nats;
                if !nats.is_finite() {
                    return Err(Error::model(format!(
                        "in chunk {}, the surprise at token {at} is {nats}: the model computes no probabilities; is it damaged?",
                        result.chunks.len() + 1
                    )));
                }
                observer.on_scored(&row)?;
                sum += nats;
                squares += nats * nats;
            }
        }
        result.tokens += scored.len();
        result.chunks.push((sum - before) / scored.len() as f64);
        let n = result.tokens as f64;
        let mean = sum / n;
        result.value = mean.exp();
        let variance = (squares / n - mean * mean).max(0.0);
        result.error = (variance / (n - 1.0).max(1.0)).sqrt() * result.value;
        observer.on_chunk(&result)?;
    }
    context.clear()?;
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nats_are_the_negative_logarithm_of_the_probability() {
        let nats = |logits: &[f32], token| Scored::new(logits, 0, token).nats;
        let logits = [1.0f32, 2.0, 3.0];
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        for (token, &logit) in logits.iter().enumerate() {
            let expected = -(f64::from(logit).exp() / total).ln();
            assert!((nats(&logits, token as u32) - expected).abs() < 1e-12);
        }
        assert!((nats(&[5.0; 8], 3) - 8f64.ln()).abs() < 1e-12);
        assert_eq!(nats(&logits, 9), f64::INFINITY);
    }
}
