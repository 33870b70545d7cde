
// Four bits, one in each byte.
fn spread_{{name}}(bits: u32) -> u32 {
    return (bits & 1u) | ((bits & 2u) << 7u) | ((bits & 4u) << 14u) | ((bits & 8u) << 21u);
}

// Elements `i` to `i + 3`, `i` a multiple of 4: `d (q - 16)`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let j = i % 32u;
    let codes = (word_{{name}}(at + 6u + (j & 15u)) >> ((j >> 4u) * 4u)) & 0x0f0f0f0fu;
    let high = spread_{{name}}(word_{{name}}(at + 2u) >> j) << 4u;
    return (unsigned4(codes | high) - 16.0) * from_f16(half_{{name}}(at));
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let d = from_f16(half_{{name}}(at));
    let high = word_{{name}}(at + 2u);
    let q = words4_{{name}}(at + 6u);
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = (unsigned4((q[k] & 0x0f0f0f0fu) | (spread_{{name}}(high >> (4u * k)) << 4u)) - 16.0) * d;
        (*w)[k + 4u] = (unsigned4(((q[k] >> 4u) & 0x0f0f0f0fu) | (spread_{{name}}(high >> (4u * k + 16u)) << 4u)) - 16.0) * d;
    }
}
