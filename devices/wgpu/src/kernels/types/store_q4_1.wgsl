
{{>types/store_own_half}}

// Writes the block of 32 elements `d q + m` at byte `at`.
fn encode_{{name}}(at: u32, x: ptr<function, array<f32, 32>>) {
    var lowest = (*x)[0];
    var highest = (*x)[0];
    for (var i = 1u; i < 32u; i++) {
        lowest = min(lowest, (*x)[i]);
        highest = max(highest, (*x)[i]);
    }
    let d = (highest - lowest) / 15.0;
    let inverse = select(0.0, 1.0 / d, d != 0.0);
    store_half_{{name}}(at, to_f16(d));
    store_half_{{name}}(at + 2u, to_f16(lowest));
    for (var i = 0u; i < 16u; i += 2u) {
        var pair = 0u;
        for (var k = 0u; k < 2u; k++) {
            let low_code = min(u32(((*x)[i + k] - lowest) * inverse + 0.5), 15u);
            let high_code = min(u32(((*x)[i + k + 16u] - lowest) * inverse + 0.5), 15u);
            pair |= ((low_code & 15u) | ((high_code & 15u) << 4u)) << (8u * k);
        }
        store_half_{{name}}(at + 4u + i, pair);
    }
}
