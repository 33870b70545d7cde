
// Elements `i` to `i + 3`, `i` a multiple of 4: `d q`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let j = i % 32u;
    return signed4(word_{{name}}(at + 2u + j)) * from_f16(half_{{name}}(at));
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let d = from_f16(half_{{name}}(at));
    let first = words4_{{name}}(at + 2u);
    let second = words4_{{name}}(at + 18u);
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = signed4(first[k]) * d;
        (*w)[k + 4u] = signed4(second[k]) * d;
    }
}
