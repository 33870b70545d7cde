
// Elements `i` to `i + 3`, `i` a multiple of 4: `d s q - dmin m`, with `s` and `m` of 16 elements.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let codes = (word_{{name}}(at + 16u + (j / 128u) * 32u + j % 32u) >> ((j % 128u) / 32u * 2u)) & 0x03030303u;
    let scale = byte_{{name}}(at + j / 16u);
    let scales = unpack2x16float(word_{{name}}(at + 80u)) * vec2<f32>(f32(scale & 15u), f32(scale >> 4u));
    return unsigned4(codes) * scales.x - scales.y;
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let shift = vec4<u32>((j % 128u) / 32u * 2u);
    let mask = vec4<u32>(0x03030303u);
    let codes = at + 16u + (j / 128u) * 32u;
    let first = (words4_{{name}}(codes) >> shift) & mask;
    let second = (words4_{{name}}(codes + 16u) >> shift) & mask;
    let scale = half_{{name}}(at + j / 16u);
    let scales = unpack2x16float(word_{{name}}(at + 80u));
    let d = scales.x * vec2<f32>(f32(scale & 15u), f32((scale >> 8u) & 15u));
    let m = scales.y * vec2<f32>(f32((scale >> 4u) & 15u), f32(scale >> 12u));
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = unsigned4(first[k]) * d.x - m.x;
        (*w)[k + 4u] = unsigned4(second[k]) * d.y - m.y;
    }
}
