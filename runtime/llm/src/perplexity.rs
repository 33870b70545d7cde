//! Perplexity: how surprised a model is by a text.

use crate::batch::Batch;
use crate::context::Context;
use crate::error::{Error, Result};

/// How surprised a model was.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Perplexity {
    /// Mean negative log likelihood of each chunk's scored tokens, in nats.
    pub chunks: Vec<f64>,
    /// Tokens that were scored.
    pub tokens: usize,
    /// `exp` of the mean negative log likelihood.
    pub value: f64,
    /// Standard error of `value`.
    pub error: f64,
}

/// Negative log likelihood of `token` in nats.
fn surprise(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|&logit| f64::from(logit - max).exp())
        .sum();
    let logit = logits
        .get(token as usize)
        .copied()
        .unwrap_or(f32::NEG_INFINITY);
    f64::from(max) + sum.ln() - f64::from(logit)
}

/// Measures `tokens` in chunks of `chunk`, each on its own in sequence 0: the first half of a chunk is context, the second
/// is scored. If the model begins texts with a token of its own, that replaces the first of each chunk. This is what
/// llama.cpp's perplexity tool does by default. `on_chunk` is told the result so far.
///
/// # Errors
/// [`Error::InvalidArgument`] if `tokens` are fewer than a chunk, or a chunk does not fit into the context;
/// [`Error::Model`] if the model's results are not finite; as [`Context::decode`].
pub fn perplexity(
    context: &mut Context,
    tokens: &[u32],
    chunk: usize,
    mut on_chunk: impl FnMut(&Perplexity),
) -> Result<Perplexity> {
    measure(context, tokens, chunk, false, |so_far| {
        on_chunk(so_far);
        Ok(())
    })
}

/// [`perplexity`], where every token goes through all of the model if `whole`, although not all are scored, and `on_chunk` may stop it.
pub(crate) fn measure(
    context: &mut Context,
    tokens: &[u32],
    chunk: usize,
    whole: bool,
    mut on_chunk: impl FnMut(&Perplexity) -> Result<()>,
) -> Result<Perplexity> {
    if context.model().spec().sees_later() {
        return Err(Error::invalid(
            "this model's tokens look at later ones: it does not predict what comes next",
        ));
    }
    if chunk < 4 || chunk > context.n_ctx() {
        return Err(Error::invalid(format!(
            "chunks of {chunk} tokens: must be 4 to the context size {}",
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
                let scored = scored.contains(&at).then(|| context.logits(at - start));
                let Some(logits) = scored.flatten() else {
                    continue;
                };
                let nats = surprise(logits, part[at + 1]);
                if !nats.is_finite() {
                    return Err(Error::model(format!(
                        "in chunk {}, the surprise at token {at} is {nats}: the model computes no probabilities; is it damaged?",
                        result.chunks.len() + 1
                    )));
                }
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
        on_chunk(&result)?;
    }
    context.clear()?;
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surprise_is_the_logarithm_of_the_probability() {
        let logits = [1.0f32, 2.0, 3.0];
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        for (token, &logit) in logits.iter().enumerate() {
            let expected = -(f64::from(logit).exp() / total).ln();
            assert!((surprise(&logits, token as u32) - expected).abs() < 1e-12);
        }
        assert!((surprise(&[5.0; 8], 3) - 8f64.ln()).abs() < 1e-12);
        assert_eq!(surprise(&logits, 9), f64::INFINITY);
    }
}
