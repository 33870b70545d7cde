//! Operations that carry a state from token to token.

use crate::call::Call;
use crate::value::{positions, rows};
use samite_core::Result;

/// Computes a convolution over time, channel by channel.
pub fn conv(call: &Call) -> Result<()> {
    let (x, weights) = (call.numbers(0)?, call.numbers(1)?);
    let width = weights.shape[0];
    let [length, channels, sequences, _] = x.shape;
    let shape = [channels, length + 1 - width, sequences, 1];
    call.store_all(positions(shape).map(|[channel, token, sequence, _]| {
        let seen = &x.row([channel, sequence, 0])[token..token + width];
        let weights = weights.row([channel, 0, 0]);
        seen.iter().zip(weights).map(|(x, w)| x * w).sum()
    }))
}

/// Computes the gated delta rule.
pub fn delta_net(call: &Call, snapshots: usize) -> Result<()> {
    let (q, k, v) = (call.numbers(0)?, call.numbers(1)?, call.numbers(2)?);
    let (decays, betas, start) = (call.numbers(3)?, call.numbers(4)?, call.numbers(5)?);
    let [size, heads, tokens, sequences] = v.shape;
    let scale = 1.0 / (size as f64).sqrt();
    let mut values = call.room()?;
    let outputs = size * heads * tokens * sequences;
    let matrices = size * size * heads * sequences;
    values.resize(outputs + snapshots * matrices, 0.0);
    for [head, sequence, _] in rows([1, heads, sequences, 1]) {
        let place =
            |slot: usize| outputs + slot * matrices + (sequence * heads + head) * size * size;
        // Row j of the transposed matrix is column j of the matrix.
        let mut state: Vec<f64> = Vec::new();
        for column in 0..size {
            state.extend_from_slice(start.row([column, head, sequence]));
        }
        let keep = |state: &[f64], slot: usize, values: &mut [f64]| {
            if slot < snapshots {
                values[place(slot)..place(slot) + size * size].copy_from_slice(state);
            }
        };
        (tokens..snapshots).for_each(|slot| keep(&state, slot, &mut values));
        for token in 0..tokens {
            let at = |shared: usize, sequences_there: usize| {
                [
                    head % shared,
                    token,
                    sequence / (sequences / sequences_there),
                ]
            };
            let query = q.row(at(q.shape[1], q.shape[3]));
            let key = k.row(at(k.shape[1], k.shape[3]));
            let decay = decays.row([head, token, sequence]);
            let beta = betas.row([head, token, sequence])[0];
            for (column, row) in state.chunks_exact_mut(size).enumerate() {
                for (i, x) in row.iter_mut().enumerate() {
                    *x *= decay[i % decay.len()].exp();
                }
                let found: f64 = row.iter().zip(key).map(|(x, k)| x * k).sum();
                let delta = (v.row([head, token, sequence])[column] - found) * beta;
                row.iter_mut().zip(key).for_each(|(x, k)| *x += k * delta);
                let sum: f64 = row.iter().zip(query).map(|(x, q)| x * q).sum();
                let to = ((sequence * tokens + token) * heads + head) * size + column;
                values[to] = sum * scale;
            }
            keep(&state, tokens - 1 - token, &mut values);
        }
    }
    call.store(&values)
}

/// Computes a selective state space model.
pub fn scan(call: &Call, snapshots: usize) -> Result<()> {
    let (start, x, steps) = (call.numbers(0)?, call.numbers(1)?, call.numbers(2)?);
    let (rates, b, c) = (call.numbers(3)?, call.numbers(4)?, call.numbers(5)?);
    let places = call.integers(6)?;
    let [size, heads, tokens, sequences] = x.shape;
    let n = start.shape[0];
    let mut values = call.room()?;
    let outputs = size * heads * tokens * sequences;
    let matrices = n * size * heads * sequences;
    values.resize(outputs + snapshots * matrices, 0.0);
    for [head, sequence, _] in rows([1, heads, sequences, 1]) {
        let place = |slot: usize| outputs + slot * matrices + (sequence * heads + head) * n * size;
        let row = call.index(places.at([sequence, 0, 0, 0]), start.shape[3], 6)?;
        let mut state: Vec<f64> = Vec::new();
        for i in 0..size {
            state.extend_from_slice(start.row([i, head, row]));
        }
        let keep = |state: &[f64], slot: usize, values: &mut [f64]| {
            if slot < snapshots {
                values[place(slot)..place(slot) + n * size].copy_from_slice(state);
            }
        };
        (tokens..snapshots).for_each(|slot| keep(&state, slot, &mut values));
        let group = head / (heads / b.shape[1]);
        for token in 0..tokens {
            let step = steps.row([token, sequence, 0])[head];
            let step = if step > 20.0 {
                step
            } else {
                step.exp().ln_1p()
            };
            let rates = rates.row([head, 0, 0]);
            let (b, c) = (
                b.row([group, token, sequence]),
                c.row([group, token, sequence]),
            );
            let x = x.row([head, token, sequence]);
            for (i, row) in state.chunks_exact_mut(n).enumerate() {
                for (j, s) in row.iter_mut().enumerate() {
                    *s = *s * (step * rates[j % rates.len()]).exp() + step * x[i] * b[j];
                }
                let to = ((sequence * tokens + token) * heads + head) * size + i;
                values[to] = row.iter().zip(c).map(|(s, c)| s * c).sum();
            }
            keep(&state, tokens - 1 - token, &mut values);
        }
    }
    call.store(&values)
}
