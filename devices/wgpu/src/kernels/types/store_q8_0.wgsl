
// Sets two bytes at an even place; others may set the other half of the word.
fn store_half_$(at: u32, bits: u32) {
    let shift = (at & 2u) * 8u;
    atomicAnd(&buffer_$[at >> 2u], ~(0xffffu << shift));
    atomicOr(&buffer_$[at >> 2u], bits << shift);
}

// To the nearest whole number, halves away from zero.
fn rounded_$(x: f32) -> i32 {
    return i32(sign(x) * floor(abs(x) + 0.5));
}

// Writes the block of 32 elements `d q` at byte `at`.
fn encode_$(at: u32, x: ptr<function, array<f32, 32>>) {
    var largest = 0.0;
    for (var i = 0u; i < 32u; i++) {
        largest = max(largest, abs((*x)[i]));
    }
    let d = largest / 127.0;
    let inverse = select(0.0, 1.0 / d, d != 0.0);
    store_half_$(at, to_f16(d));
    for (var i = 0u; i < 32u; i += 2u) {
        let first = bitcast<u32>(clamp(rounded_$((*x)[i] * inverse), -127, 127)) & 255u;
        let second = bitcast<u32>(clamp(rounded_$((*x)[i + 1u] * inverse), -127, 127)) & 255u;
        store_half_$(at + 2u + i, first | (second << 8u));
    }
}
