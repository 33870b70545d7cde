
// Cosine and sine, times the magnitude, of the angle by which pair number `pair` turns at `position`.
fn rotation(pair: u32, position: f32) -> vec2<f32> {
    // Powers of two per pair, in two parts; scale, mix of extrapolation; low, high, magnitude, direction.
    let p = parameters.floats[0];
    let q = parameters.floats[1];
    let exponent = f32(pair) * p.x + f32(pair) * p.y;
    // In turns, so that whole turns fall away exactly.
    let frequency = exp2(exponent) * 0.15915494309 {{divided}};
    let extrapolated = turns(position, frequency);
    var angle = turns(position, frequency * p.z);
    if p.w != 0.0 {
        let ramp = (f32(pair) - q.x) / max(q.y - q.x, 0.001);
        let mix = (1.0 - clamp(ramp, 0.0, 1.0)) * p.w;
        angle = turns(position, frequency * p.z * (1.0 - mix) + frequency * mix);
    }
    let radians = angle * 6.28318530718;
    return vec2<f32>(cos(radians), sin(radians) * q.w) * q.z;
}

// The fraction of a turn, from -1/2 to 1/2, of a whole position times a frequency: the position is cut, so that both products are nearly exact.
fn turns(position: f32, frequency: f32) -> f32 {
    let high = floor(position / 256.0);
    let low = position - high * 256.0;
    let step = frequency * 256.0;
    let a = high * (step - round(step));
    let b = low * frequency;
    let sum = (a - round(a)) + (b - round(b));
    return sum - round(sum);
}
