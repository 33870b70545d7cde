
// Elements `i` to `i + 3`, `i` a multiple of 4: `d s q - dmin m`, with `s` and `m` of 16 elements.
fn load4_$(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * BLOCK_BYTESu;
    let j = i % 256u;
    let codes = (word_$(at + 16u + (j / 128u) * 32u + j % 32u) >> ((j % 128u) / 32u * 2u)) & 0x03030303u;
    let scale = byte_$(at + j / 16u);
    let scales = unpack2x16float(word_$(at + 80u)) * vec2<f32>(f32(scale & 15u), f32(scale >> 4u));
    return unsigned4(codes) * scales.x - scales.y;
}

fn get_$(i: vec4<u32>) -> f32 {
    return load4_$(row_$(i.yzw), i.x & ~3u)[i.x & 3u];
}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_$(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 256u) * BLOCK_BYTESu;
    let j = i % 256u;
    let shift = vec4<u32>((j % 128u) / 32u * 2u);
    let mask = vec4<u32>(0x03030303u);
    let codes = at + 16u + (j / 128u) * 32u;
    let first = (words4_$(codes) >> shift) & mask;
    let second = (words4_$(codes + 16u) >> shift) & mask;
    let scale = half_$(at + j / 16u);
    let scales = unpack2x16float(word_$(at + 80u));
    let d = scales.x * vec2<f32>(f32(scale & 15u), f32((scale >> 8u) & 15u));
    let m = scales.y * vec2<f32>(f32((scale >> 4u) & 15u), f32(scale >> 12u));
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = unsigned4(first[k]) * d.x - m.x;
        (*w)[k + 4u] = unsigned4(second[k]) * d.y - m.y;
    }
}
