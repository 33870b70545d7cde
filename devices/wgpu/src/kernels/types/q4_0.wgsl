
// Elements `i` to `i + 3`, `i` a multiple of 4: `d (q - 8)`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let j = i % 32u;
    let codes = (word_{{name}}(at + 2u + (j & 15u)) >> ((j >> 4u) * 4u)) & 0x0f0f0f0fu;
    return (unsigned4(codes) - 8.0) * from_f16(half_{{name}}(at));
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let d = from_f16(half_{{name}}(at));
    let q = words4_{{name}}(at + 2u);
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = (unsigned4(q[k] & 0x0f0f0f0fu) - 8.0) * d;
        (*w)[k + 4u] = (unsigned4((q[k] >> 4u) & 0x0f0f0f0fu) - 8.0) * d;
    }
}
