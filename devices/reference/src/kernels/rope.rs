//! Rotary position embedding.

use crate::call::Call;
use crate::value::{Grid, rows};
use samite_core::{Result, Rope, RopeAngle, RopeMode};
use std::f64::consts::PI;

/// Returns the pair number at which a dimension makes `rotations` turns over the original context.
fn correction(rope: &Rope, rotations: f64) -> f64 {
    let turns = rope.original_context as f64 / (rotations * 2.0 * PI);
    rope.dims as f64 * turns.ln() / (2.0 * f64::from(rope.freq_base).ln())
}

/// Returns how much pair number `pair` extrapolates, from 0 to 1.
fn extrapolation(rope: &Rope, pair: usize) -> f64 {
    let low = correction(rope, rope.beta_fast.into()).floor().max(0.0);
    let high = correction(rope, rope.beta_slow.into())
        .ceil()
        .min(rope.dims as f64 - 1.0);
    let ramp = (pair as f64 - low) / (high - low).max(0.001);
    (1.0 - ramp.clamp(0.0, 1.0)) * f64::from(rope.ext_factor)
}

/// Returns cosine and sine, times the magnitude, of the rotation angle of pair number `pair` at
/// `position`, `step` steps down the frequencies.
fn rotation(rope: &Rope, pair: usize, step: usize, position: f64, divisor: f64) -> (f64, f64) {
    let exponent = -2.0 * step as f64 / rope.dims as f64;
    let extrapolated = position * f64::from(rope.freq_base).powf(exponent) / divisor;
    let interpolated = f64::from(rope.freq_scale) * extrapolated;
    let (mut angle, mut magnitude) = (interpolated, f64::from(rope.attn_factor));
    if rope.ext_factor != 0.0 {
        let mix = extrapolation(rope, pair);
        angle = interpolated * (1.0 - mix) + extrapolated * mix;
        magnitude *= 1.0 + 0.1 * (1.0 / f64::from(rope.freq_scale)).ln();
    }
    (angle.cos() * magnitude, angle.sin() * magnitude)
}

/// Rotates the pairs of each head. Other elements stay. With `direction` -1, pairs rotate in the
/// opposite direction with the same magnitude: the transposed matrix, not the inverse.
pub fn rope(call: &Call, rope: Rope, direction: f64) -> Result<()> {
    let (x, positions) = (call.numbers(0)?, call.integers(1)?);
    let divisors = call.optional_numbers(2)?;
    let Grid { shape, mut values } = x;
    let n0 = shape[0];
    for (row, [_, token, _]) in rows(shape).enumerate() {
        let head = &mut values[row * n0..][..n0];
        for pair in 0..rope.pairs() {
            let divisor = divisors.as_ref().map_or(1.0, |d| d.values[pair]);
            let RopeAngle { axis, step } = rope.turn(pair);
            let position = positions.values[axis * shape[2] + token] as f64;
            let (cos, sin) = rotation(&rope, pair, step, position, divisor);
            let sin = direction * sin;
            let (i, j) = match rope.mode {
                RopeMode::Normal => (2 * pair, 2 * pair + 1),
                _ => (pair, pair + rope.pairs()),
            };
            let (i, j) = (rope.offset + i, rope.offset + j);
            (head[i], head[j]) = (head[i] * cos - head[j] * sin, head[i] * sin + head[j] * cos);
        }
    }
    call.store(&values)
}
