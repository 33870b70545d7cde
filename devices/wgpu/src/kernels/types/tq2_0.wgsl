
// Elements `i` to `i + 3`, `i` a multiple of 4: `d (q - 1)`.
fn load4_$(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * BLOCK_BYTESu;
    let j = i % 256u;
    let codes = (word_$(at + (j / 128u) * 32u + j % 32u) >> ((j % 128u) / 32u * 2u)) & 0x03030303u;
    return (unsigned4(codes) - 1.0) * from_f16(half_$(at + 64u));
}

fn get_$(i: vec4<u32>) -> f32 {
    return load4_$(row_$(i.yzw), i.x & ~3u)[i.x & 3u];
}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_$(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    for (var k = 0u; k < 8u; k++) {
        (*w)[k] = load4_$(row, i + 4u * k);
    }
}
