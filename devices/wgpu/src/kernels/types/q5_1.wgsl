
// Four bits, one in each byte.
fn spread_{{name}}(bits: u32) -> u32 {
    return (bits & 1u) | ((bits & 2u) << 7u) | ((bits & 4u) << 14u) | ((bits & 8u) << 21u);
}

// Elements `i` to `i + 3`, `i` a multiple of 4: `d q + m`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let j = i % 32u;
    let codes = (word_{{name}}(at + 8u + (j & 15u)) >> ((j >> 4u) * 4u)) & 0x0f0f0f0fu;
    let high = spread_{{name}}(aligned_{{name}}((at >> 2u) + 1u) >> j) << 4u;
    let scales = unpack2x16float(aligned_{{name}}(at >> 2u));
    return unsigned4(codes | high) * scales.x + scales.y;
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let scales = unpack2x16float(aligned_{{name}}(at >> 2u));
    let high = aligned_{{name}}((at >> 2u) + 1u);
    let q = words4_{{name}}(at + 8u);
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = unsigned4((q[k] & 0x0f0f0f0fu) | (spread_{{name}}(high >> (4u * k)) << 4u)) * scales.x + scales.y;
        (*w)[k + 4u] = unsigned4(((q[k] >> 4u) & 0x0f0f0f0fu) | (spread_{{name}}(high >> (4u * k + 16u)) << 4u)) * scales.x + scales.y;
    }
}
