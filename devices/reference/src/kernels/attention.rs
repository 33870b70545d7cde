//! Masks, softmax, attention.

use crate::call::Call;
use crate::value::{positions, room, rows, zeros};
use samite_core::{DIMS, Result};

/// Writes `value` right of the diagonal.
pub fn diag_mask(call: &Call, past: usize, value: f64) -> Result<()> {
    let x = call.numbers(0)?;
    let is_masked = |[i0, i1, ..]: [usize; DIMS]| i0 > past.saturating_add(i1);
    call.store_all(positions(x.shape).map(|position| {
        if is_masked(position) {
            value
        } else {
            x.at(position)
        }
    }))
}

/// Returns the ALiBi slope of one head: a geometric series for the largest power of two of heads,
/// and intermediate values for the rest ([Press et al. 2022](https://arxiv.org/abs/2108.12409)).
fn alibi_slope(head: usize, heads: usize, max_bias: f64) -> f64 {
    if max_bias <= 0.0 {
        return 1.0;
    }
    let power = 1usize << heads.max(1).ilog2();
    if head < power {
        2f64.powf(-max_bias / power as f64 * (head + 1) as f64)
    } else {
        2f64.powf(-max_bias / 2.0 / power as f64 * (2 * (head - power) + 1) as f64)
    }
}

/// Adds the mask to a logit. A hidden key has the logit minus infinity, even if its product is NaN:
/// its cell belongs to another sequence, or is free.
fn masked(logit: f64, slope: f64, mask: f64) -> f64 {
    if mask == f64::NEG_INFINITY {
        mask
    } else {
        logit + slope * mask
    }
}

/// Replaces each logit by `exp(logit) / sum(exp)`. `sink` is one more logit in the sum.
pub fn weigh(logits: &mut [f64], sink: Option<f64>) {
    let largest = logits
        .iter()
        .copied()
        .chain(sink)
        .fold(f64::NEG_INFINITY, f64::max);
    logits.iter_mut().for_each(|x| *x = (*x - largest).exp());
    let sum = logits.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
    logits.iter_mut().for_each(|x| *x /= sum);
}

/// Computes the softmax of each row, scaled and masked.
pub fn soft_max(call: &Call, scale: f64, max_bias: f64) -> Result<()> {
    let x = call.numbers(0)?;
    let (mask, sinks) = (call.optional_numbers(1)?, call.optional_numbers(2)?);
    let heads = x.shape[2];
    let mut values = call.room()?;
    for [i1, head, i3] in rows(x.shape) {
        let at = values.len();
        values.extend(x.row([i1, head, i3]).iter().map(|x| x * scale));
        let logits = &mut values[at..];
        if let Some(mask) = &mask {
            let slope = alibi_slope(head, heads, max_bias);
            let row = mask.row([i1, head % mask.shape[2], i3 % mask.shape[3]]);
            logits
                .iter_mut()
                .zip(row)
                .for_each(|(x, m)| *x = masked(*x, slope, *m));
        }
        let sink = sinks.as_ref().map(|sinks| sinks.values[head]);
        weigh(logits, sink);
    }
    call.store(&values)
}

/// Computes attention: softmax of scaled, capped and masked logits, times the values. A token whose
/// keys are all masked gets zeros.
pub fn flash(call: &Call, scale: f64, max_bias: f64, softcap: f64) -> Result<()> {
    let (q, k, v) = (call.numbers(0)?, call.numbers(1)?, call.numbers(2)?);
    let (mask, sinks) = (call.optional_numbers(3)?, call.optional_numbers(4)?);
    let [_, tokens, heads, batch] = q.shape;
    let [_, kv, kv_heads, _] = k.shape;
    let dv = v.shape[0];
    let mut values = call.room()?;
    let (mut logits, mut weights) = (room::<f64>(kv)?, room::<f64>(kv)?);
    // The result is [dv, heads, tokens, batch].
    for [head, token, b] in rows([dv, heads, tokens, batch]) {
        let kv_head = head / (heads / kv_heads);
        let slope = alibi_slope(head, heads, max_bias);
        let query = q.row([token, head, b]);
        logits.clear();
        logits.extend((0..kv).map(|key| {
            let dot: f64 = query
                .iter()
                .zip(k.row([key, kv_head, b]))
                .map(|(q, k)| q * k)
                .sum();
            let mut logit = dot * scale;
            if softcap != 0.0 {
                logit = softcap * (logit / softcap).tanh();
            }
            let mask = mask.as_ref().map_or(0.0, |m| {
                m.at([key, token, head % m.shape[2], b % m.shape[3]])
            });
            masked(logit, slope, mask)
        }));
        let at = values.len();
        values.resize(at + dv, 0.0);
        let sum = &mut values[at..];
        if logits.iter().any(|&x| x != f64::NEG_INFINITY) {
            let sink = sinks.as_ref().map(|sinks| sinks.values[head]);
            weights.clone_from(&logits);
            weigh(&mut weights, sink);
            for (key, weight) in weights.iter().enumerate() {
                if logits[key] == f64::NEG_INFINITY {
                    continue; // unused cells of a cache may hold anything, even NaN
                }
                let value = v.row([key, kv_head, b]);
                sum.iter_mut()
                    .zip(value)
                    .for_each(|(sum, v)| *sum += weight * v);
            }
        }
    }
    call.store(&values)
}

/// Returns the gradients of attention with respect to queries, keys and values, one after the
/// other.
pub fn flash_back(call: &Call, scale: f64) -> Result<()> {
    let (g, q, k, v) = (
        call.numbers(0)?,
        call.numbers(1)?,
        call.numbers(2)?,
        call.numbers(3)?,
    );
    let mask = call.optional_numbers(4)?;
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let [_, tokens, heads, batch] = q.shape;
    let [_, keys, kv_heads, _] = k.shape;
    let sizes = [q.shape[0], k.shape[0], v.shape[0]];
    let counts = [&q, &k, &v].map(|x| x.values.len());
    let mut gradients = zeros(counts.iter().sum())?;
    let (of_q, others) = gradients.split_at_mut(counts[0]);
    let (of_k, of_v) = others.split_at_mut(counts[1]);
    let (mut shares, mut of_shares) = (room(keys)?, room(keys)?);
    // Adds `factor * x` to row `[head, i, b]` of gradients.
    let add = |to: &mut [f64],
               size: usize,
               heads: usize,
               rows: usize,
               [head, i, b]: [usize; 3],
               factor: f64,
               x: &[f64]| {
        let first = size * (head + heads * (i + rows * b));
        let to = &mut to[first..first + size];
        to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
    };
    for [head, token, b] in rows([1, heads, tokens, batch]) {
        let kv_head = head / (heads / kv_heads);
        let (query, gradient) = (q.row([token, head, b]), g.row([head, token, b]));
        shares.clear();
        shares.extend((0..keys).map(|key| {
            let masked = mask.as_ref().map_or(0.0, |m| {
                m.at([key, token, head % m.shape[2], b % m.shape[3]])
            });
            dot(query, k.row([key, kv_head, b])) * scale + masked
        }));
        if shares.iter().all(|&x| x == f64::NEG_INFINITY) {
            continue;
        }
        weigh(&mut shares, None);
        of_shares.clear();
        of_shares.extend((0..keys).map(|key| dot(gradient, v.row([key, kv_head, b]))));
        let mean = dot(&shares, &of_shares);
        for key in 0..keys {
            let of_logit = shares[key] * (of_shares[key] - mean) * scale;
            let place = [kv_head, key, b];
            add(
                of_q,
                sizes[0],
                heads,
                tokens,
                [head, token, b],
                of_logit,
                k.row([key, kv_head, b]),
            );
            add(of_k, sizes[1], kv_heads, keys, place, of_logit, query);
            add(of_v, sizes[2], kv_heads, keys, place, shares[key], gradient);
        }
    }
    call.store(&gradients)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alibi_slopes_round_the_heads_down_to_a_power_of_two() {
        assert_eq!(alibi_slope(0, 8, 8.0), 0.5);
        assert_eq!(alibi_slope(7, 8, 8.0), 1.0 / 256.0);
        // 12 heads: eight slopes of 8 heads, then every second one of 16 heads.
        assert_eq!(alibi_slope(7, 12, 8.0), 1.0 / 256.0);
        assert_eq!(alibi_slope(8, 12, 8.0), 2f64.powf(-0.5));
        assert_eq!(alibi_slope(9, 12, 8.0), 2f64.powf(-1.5));
        assert_eq!(alibi_slope(3, 12, 0.0), 1.0);
    }
}
