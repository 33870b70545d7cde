
// Elements `i` to `i + 3`, `i` a multiple of 4: `d q + m`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let j = i % 32u;
    let codes = (word_{{name}}(at + 4u + (j & 15u)) >> ((j >> 4u) * 4u)) & 0x0f0f0f0fu;
    let scales = unpack2x16float(aligned_{{name}}(at >> 2u));
    return unsigned4(codes) * scales.x + scales.y;
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let scales = unpack2x16float(aligned_{{name}}(at >> 2u));
    let q = words4_{{name}}(at + 4u);
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = unsigned4(q[k] & 0x0f0f0f0fu) * scales.x + scales.y;
        (*w)[k + 4u] = unsigned4((q[k] >> 4u) & 0x0f0f0f0fu) * scales.x + scales.y;
    }
}
