//! Masks, softmax, attention.

use crate::call::Call;
use crate::value::{positions, rows};
use samite_core::Result;

/// `value` right of the diagonal.
pub fn diag_mask(call: &Call, past: usize, value: f64) -> Result<()> {
    let x = call.numbers(0)?;
    let values: Vec<_> = positions(x.shape)
        .map(|position| {
            if position[0] > past.saturating_add(position[1]) {
                value
            } else {
                x.at(position)
            }
        })
        .collect();
    call.store(&values)
}

/// The factor of the mask for one head: a geometric series for the first power of two of all heads, and in between for
/// the rest ([Press et al. 2022](https://arxiv.org/abs/2108.12409)).
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

/// `exp(logit) / sum(exp)`, where `sink` is one more logit in the sum.
pub fn weights(logits: &[f64], sink: Option<f64>) -> Vec<f64> {
    let largest = logits
        .iter()
        .copied()
        .chain(sink)
        .fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<_> = logits.iter().map(|x| (x - largest).exp()).collect();
    let sum = exps.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
    exps.into_iter().map(|e| e / sum).collect()
}

/// Softmax of each row, scaled and masked.
pub fn soft_max(call: &Call, scale: f64, max_bias: f64) -> Result<()> {
    let x = call.numbers(0)?;
    let (mask, sinks) = (call.optional_numbers(1)?, call.optional_numbers(2)?);
    let heads = x.shape[2];
    let mut values = Vec::with_capacity(x.values.len());
    for [i1, head, i3] in rows(x.shape) {
        let mut logits: Vec<_> = x.row([i1, head, i3]).iter().map(|x| x * scale).collect();
        if let Some(mask) = &mask {
            let slope = alibi_slope(head, heads, max_bias);
            let row = mask.row([i1, head % mask.shape[2], i3 % mask.shape[3]]);
            logits
                .iter_mut()
                .zip(row)
                .for_each(|(x, m)| *x += slope * m);
        }
        let sink = sinks.as_ref().map(|sinks| sinks.values[head]);
        values.extend(weights(&logits, sink));
    }
    call.store(&values)
}

/// Attention: softmax of scaled, capped and masked logits, times the values. A token whose keys are all masked gets zeros.
pub fn flash(call: &Call, scale: f64, max_bias: f64, softcap: f64) -> Result<()> {
    let (q, k, v) = (call.numbers(0)?, call.numbers(1)?, call.numbers(2)?);
    let (mask, sinks) = (call.optional_numbers(3)?, call.optional_numbers(4)?);
    let [_, tokens, heads, batch] = q.shape;
    let [_, kv, kv_heads, _] = k.shape;
    let dv = v.shape[0];
    let mut values = Vec::new();
    // The result is [dv, heads, tokens, batch].
    for [head, token, b] in rows([dv, heads, tokens, batch]) {
        let kv_head = head / (heads / kv_heads);
        let slope = alibi_slope(head, heads, max_bias);
        let query = q.row([token, head, b]);
        let logits: Vec<_> = (0..kv)
            .map(|key| {
                let dot: f64 = query
                    .iter()
                    .zip(k.row([key, kv_head, b]))
                    .map(|(q, k)| q * k)
                    .sum();
                let mut logit = dot * scale;
                if softcap != 0.0 {
                    logit = softcap * (logit / softcap).tanh();
                }
                let masked = mask.as_ref().map_or(0.0, |m| {
                    m.at([key, token, head % m.shape[2], b % m.shape[3]])
                });
                logit + slope * masked
            })
            .collect();
        let mut sum = vec![0.0; dv];
        if logits.iter().any(|&x| x != f64::NEG_INFINITY) {
            let sink = sinks.as_ref().map(|sinks| sinks.values[head]);
            for (key, weight) in weights(&logits, sink).into_iter().enumerate() {
                if logits[key] == f64::NEG_INFINITY {
                    continue; // what lies in unused cells of a cache does not matter, be it NaN
                }
                let value = v.row([key, kv_head, b]);
                sum.iter_mut()
                    .zip(value)
                    .for_each(|(sum, v)| *sum += weight * v);
            }
        }
        values.extend(sum);
    }
    call.store(&values)
}

/// The gradients of attention with respect to queries, keys and values, one after the other.
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
    let [mut of_q, mut of_k, mut of_v] = [&q, &k, &v].map(|x| vec![0.0; x.values.len()]);
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
        let logits: Vec<_> = (0..keys)
            .map(|key| {
                let masked = mask.as_ref().map_or(0.0, |m| {
                    m.at([key, token, head % m.shape[2], b % m.shape[3]])
                });
                dot(query, k.row([key, kv_head, b])) * scale + masked
            })
            .collect();
        if logits.iter().all(|&x| x == f64::NEG_INFINITY) {
            continue;
        }
        let shares = weights(&logits, None);
        let of_shares: Vec<_> = (0..keys)
            .map(|key| dot(gradient, v.row([key, kv_head, b])))
            .collect();
        let mean = dot(&shares, &of_shares);
        for key in 0..keys {
            let of_logit = shares[key] * (of_shares[key] - mean) * scale;
            let place = [kv_head, key, b];
            add(
                &mut of_q,
                sizes[0],
                heads,
                tokens,
                [head, token, b],
                of_logit,
                k.row([key, kv_head, b]),
            );
            add(&mut of_k, sizes[1], kv_heads, keys, place, of_logit, query);
            add(
                &mut of_v,
                sizes[2],
                kv_heads,
                keys,
                place,
                shares[key],
                gradient,
            );
        }
    }
    call.store(&[of_q, of_k, of_v].concat())
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
