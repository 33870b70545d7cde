
{{>types/store_half}}

// Writes the block of 32 elements `d (q - 8)` at byte `at`.
fn encode_{{name}}(at: u32, x: ptr<function, array<f32, 32>>) {
    // The first element of largest magnitude gets code 0.
    var largest = 0.0;
    for (var i = 0u; i < 32u; i++) {
        if abs((*x)[i]) > abs(largest) {
            largest = (*x)[i];
        }
    }
    let d = largest / -8.0;
    let inverse = select(0.0, 1.0 / d, d != 0.0);
    store_half_{{name}}(at, to_f16(d));
    for (var i = 0u; i < 16u; i += 2u) {
        var pair = 0u;
        for (var k = 0u; k < 2u; k++) {
            let low_code = min(u32(max((*x)[i + k] * inverse + 8.5, 0.0)), 15u);
            let high_code = min(u32(max((*x)[i + k + 16u] * inverse + 8.5, 0.0)), 15u);
            pair |= ((low_code & 15u) | ((high_code & 15u) << 4u)) << (8u * k);
        }
        store_half_{{name}}(at + 2u + i, pair);
    }
}
