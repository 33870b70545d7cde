
{{>types/store_half}}

// To the nearest whole number, halves away from zero.
fn rounded_{{name}}(x: f32) -> i32 {
    return i32(sign(x) * floor(abs(x) + 0.5));
}

// Writes the block of 32 elements `d q` at byte `at`.
fn encode_{{name}}(at: u32, x: ptr<function, array<f32, 32>>) {
    var largest = 0.0;
    for (var i = 0u; i < 32u; i++) {
        largest = max(largest, abs((*x)[i]));
    }
    let d = largest / 127.0;
    let inverse = select(0.0, 1.0 / d, d != 0.0);
    store_half_{{name}}(at, to_f16(d));
    for (var i = 0u; i < 32u; i += 2u) {
        let first = bitcast<u32>(clamp(rounded_{{name}}((*x)[i] * inverse), -127, 127)) & 255u;
        let second = bitcast<u32>(clamp(rounded_{{name}}((*x)[i + 1u] * inverse), -127, 127)) & 255u;
        store_half_{{name}}(at + 2u + i, first | (second << 8u));
    }
}
