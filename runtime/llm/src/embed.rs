//! Embeddings of texts: batched, normalized and truncated.

use crate::arch::Output;
use crate::arch::spec::{Pooling, Spec};
use crate::batch::Batch;
use crate::context::{Context, ContextOptions, pools_by_mean};
use crate::error::{Error, Result};

/// Normalization of an embedding; numbered like llama.cpp's `--embd-normalize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalization {
    /// -1: none.
    None,
    /// 0: the largest element becomes 32760, so that all elements fit into 16 bits.
    Largest,
    /// 2, or another number: the norm of this power becomes 1.
    Norm(u32),
}

impl Normalization {
    /// Returns the normalization with this number, which is at least -1.
    pub fn from_number(number: i32) -> Option<Self> {
        match number {
            -1 => Some(Normalization::None),
            0 => Some(Normalization::Largest),
            power => u32::try_from(power).ok().map(Normalization::Norm),
        }
    }

    /// Normalizes an embedding; zeros stay zeros.
    pub fn apply(self, embedding: &mut [f32]) {
        let absolute = |x: &f32| f64::from(x.abs());
        let norm = match self {
            Normalization::None => return,
            Normalization::Largest => embedding.iter().map(absolute).fold(0.0, f64::max) / 32760.0,
            Normalization::Norm(2) => {
                let squares = embedding.iter().map(|x| f64::from(*x).powi(2));
                squares.sum::<f64>().sqrt()
            }
            Normalization::Norm(power) => {
                let power = f64::from(power);
                let powers = embedding.iter().map(|x| absolute(x).powf(power));
                powers.sum::<f64>().powf(power.recip())
            }
        };
        let factor = if norm > 0.0 { norm.recip() } else { 0.0 };
        for x in embedding {
            *x = (f64::from(*x) * factor) as f32;
        }
    }
}

/// Returns the cosine similarity of two embeddings; 0 if one of them is zero, 1 if both are.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let product = |a: &[f32], b: &[f32]| {
        let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
        products.sum::<f64>()
    };
    let [aa, bb] = [product(a, a), product(b, b)];
    if aa == 0.0 || bb == 0.0 {
        return if aa == bb { 1.0 } else { 0.0 };
    }
    product(a, b) / (aa.sqrt() * bb.sqrt())
}

/// Maximum number of texts in one batch that [`fit_to`] makes room for.
const MAX_TEXTS: usize = 64;

/// Sizes `options` for texts with these numbers of tokens: for the longest one, or for several
/// shorter ones at once.
pub fn fit_to(options: &mut ContextOptions, spec: &Spec, pooling: Pooling, lengths: &[usize]) {
    let longest = lengths.iter().copied().max().unwrap_or(1);
    let total = lengths.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
    let room = longest.max(options.n_ubatch.min(total)).max(1);
    options.output = Output::Embeddings(pooling);
    options.n_batch = room;
    options.n_ctx = Some(options.n_ctx.unwrap_or(room).min(room));
    // A mean needs all tokens at once; other kinds of pooling can be computed in pieces.
    if pools_by_mean(options.output, spec) {
        options.n_ubatch = room;
    }
    options.n_seq = if spec.has_state() {
        1
    } else {
        lengths.len().clamp(1, MAX_TEXTS)
    };
}

/// Computes the embeddings of texts, with as many texts in one batch as fit. Calls `each` with the
/// index of a text and its embedding, text by text. If the context computes embeddings of tokens,
/// it calls `each` for each token. Removes all sequences of the context.
///
/// # Errors
/// Returns [`Error::InvalidArgument`] for a text that has no tokens or does not fit. Also fails
/// like [`Context::decode`], and with the errors of `each`.
pub fn embed<E: From<Error>>(
    context: &mut Context,
    texts: &[Vec<u32>],
    mut each: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let options = context.options();
    let Output::Embeddings(pooling) = options.output else {
        return Err(Error::invalid("the context computes logits, not embeddings").into());
    };
    let most_texts = options.n_seq;
    let room = options.n_batch.min(context.n_ctx());
    let room = if context.pools_by_mean() {
        room.min(options.n_ubatch)
    } else {
        room
    };
    let mut batch = Batch::new();
    let mut first = 0;
    while first < texts.len() {
        batch.clear();
        let mut end = first;
        while let Some(text) = texts.get(end) {
            if text.is_empty() {
                return Err(Error::invalid(format!("text {end} has no tokens")).into());
            }
            if text.len() > room {
                return Err(Error::invalid(format!(
                    "text {end} has {} tokens, and there is room for {room} at once: take a larger context (--ctx-size), or a shorter text",
                    text.len()
                ))
                .into());
            }
            if end - first >= most_texts || batch.len() + text.len() > room {
                break;
            }
            let sequence = (end - first) as u32;
            for (position, &id) in text.iter().enumerate() {
                // Positions are limited by the size of the context.
                batch.add(id, position as i32, &[sequence], true);
            }
            end += 1;
        }
        // The previous batch may have had more texts than this one.
        context.clear()?;
        context.decode(&batch)?;
        let missing = || Error::invalid("an embedding is not there");
        let mut token = 0;
        for (sequence, text) in texts[first..end].iter().enumerate() {
            if pooling == Pooling::None {
                for row in token..token + text.len() {
                    each(
                        first + sequence,
                        context.embedding(row).ok_or_else(missing)?,
                    )?;
                }
                token += text.len();
            } else {
                let row = context.pooled(sequence as u32);
                each(first + sequence, row.ok_or_else(missing)?)?;
            }
        }
        first = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaled(number: i32, embedding: &[f32]) -> Vec<f32> {
        let mut embedding = embedding.to_vec();
        let normalization = Normalization::from_number(number).unwrap();
        normalization.apply(&mut embedding);
        embedding
    }

    #[test]
    fn embeddings_are_scaled_as_in_llama_cpp() {
        let embedding = [3.0, -4.0, 0.0];
        assert_eq!(scaled(-1, &embedding), embedding);
        assert_eq!(scaled(0, &embedding), [24570.0, -32760.0, 0.0]);
        assert_eq!(scaled(1, &embedding), [3.0 / 7.0, -4.0 / 7.0, 0.0]);
        assert_eq!(scaled(2, &embedding), [0.6, -0.8, 0.0]);
        let cube = 91f64.cbrt();
        assert_eq!(scaled(3, &embedding)[0], (3.0 / cube) as f32);
        for number in [-1, 0, 1, 2, 5] {
            assert_eq!(scaled(number, &[0.0, 0.0]), [0.0, 0.0]);
        }
        assert_eq!(Normalization::from_number(-2), None);
    }

    #[test]
    fn cosine_similarity_does_not_depend_on_length() {
        assert!((cosine(&[1.0, 0.0], &[3.0, 3.0]) - 0.5f64.sqrt()).abs() < 1e-12);
        assert_eq!(cosine(&[1.0, 2.0], &[0.0, 0.0]), 0.0);
        assert_eq!(cosine(&[0.0], &[0.0]), 1.0);
    }
}
