
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
