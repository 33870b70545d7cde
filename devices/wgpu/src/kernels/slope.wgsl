
// The factor of the mask for one head: a geometric series for the first power of two of all heads, and in between for the rest.
fn slope(head: u32) -> f32 {
    let bias = parameters.floats[0].y;
    if bias <= 0.0 {
        return 1.0;
    }
    let power = parameters.ints[0].x;
    if head < power {
        return exp2(-bias / f32(power) * f32(head + 1u));
    }
    return exp2(-bias / 2.0 / f32(power) * f32(2u * (head - power) + 1u));
}
