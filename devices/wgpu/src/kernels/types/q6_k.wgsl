
// Elements `i` to `i + 3`, `i` a multiple of 4: `d s (q - 32)`, with `s` of 16 elements.
fn load4_$(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * BLOCK_BYTESu;
    let j = i % 256u;
    let half = j / 128u;
    let k = j % 128u;
    let low = (word_$(at + half * 64u + k % 64u) >> (k / 64u * 4u)) & 0x0f0f0f0fu;
    let high = (word_$(at + 128u + half * 32u + k % 32u) >> (k / 32u * 2u)) & 0x03030303u;
    let scale = bitcast<i32>(byte_$(at + 192u + j / 16u) << 24u) >> 24u;
    return (unsigned4(low | (high << 4u)) - 32.0) * (f32(scale) * from_f16(half_$(at + 208u)));
}

fn get_$(i: vec4<u32>) -> f32 {
    return load4_$(row_$(i.yzw), i.x & ~3u)[i.x & 3u];
}
