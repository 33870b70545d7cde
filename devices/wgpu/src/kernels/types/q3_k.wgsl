
// Elements `i` to `i + 3`, `i` a multiple of 4: `d (s - 32) (q - 4)`, with `s` of 16 elements.
fn load4_$(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * BLOCK_BYTESu;
    let j = i % 256u;
    let low = (word_$(at + 32u + (j / 128u) * 32u + j % 32u) >> ((j % 128u) / 32u * 2u)) & 0x03030303u;
    let high = (word_$(at + j % 32u) >> (j / 32u)) & 0x01010101u;
    let group = j / 16u;
    let scale_low = (byte_$(at + 96u + group % 8u) >> (group / 8u * 4u)) & 15u;
    let scale_high = (byte_$(at + 104u + group % 4u) >> (group / 4u * 2u)) & 3u;
    let scale = f32(scale_low | (scale_high << 4u)) - 32.0;
    return (unsigned4(low | (high << 2u)) - 4.0) * (scale * from_f16(half_$(at + 108u)));
}

fn get_$(i: vec4<u32>) -> f32 {
    return load4_$(row_$(i.yzw), i.x & ~3u)[i.x & 3u];
}
