
// Sets two bytes at an even place of a block that no other invocation writes to.
fn store_half_$(at: u32, bits: u32) {
    let shift = (at & 2u) * 8u;
    let old = buffer_$[at >> 2u];
    buffer_$[at >> 2u] = (old & ~(0xffffu << shift)) | (bits << shift);
}

// Writes the block of 32 elements `d q + m` at byte `at`.
fn encode_$(at: u32, x: ptr<function, array<f32, 32>>) {
    var lowest = (*x)[0];
    var highest = (*x)[0];
    for (var i = 1u; i < 32u; i++) {
        lowest = min(lowest, (*x)[i]);
        highest = max(highest, (*x)[i]);
    }
    let d = (highest - lowest) / 15.0;
    let inverse = select(0.0, 1.0 / d, d != 0.0);
    store_half_$(at, to_f16(d));
    store_half_$(at + 2u, to_f16(lowest));
    for (var i = 0u; i < 16u; i += 2u) {
        var pair = 0u;
        for (var k = 0u; k < 2u; k++) {
            let low_code = min(u32(((*x)[i + k] - lowest) * inverse + 0.5), 15u);
            let high_code = min(u32(((*x)[i + k + 16u] - lowest) * inverse + 0.5), 15u);
            pair |= ((low_code & 15u) | ((high_code & 15u) << 4u)) << (8u * k);
        }
        store_half_$(at + 4u + i, pair);
    }
}
