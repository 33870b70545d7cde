
// Elements `i` to `i + 3`, `i` a multiple of 4: `d` where the bit is set, else `-d`.
fn load4_$(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 128u) * BLOCK_BYTESu;
    let bits = vec4<u32>(byte_$(at + 2u + i % 128u / 8u) >> (i & 4u)) >> vec4<u32>(0u, 1u, 2u, 3u);
    return (vec4<f32>(bits & vec4<u32>(1u)) * 2.0 - 1.0) * from_f16(half_$(at));
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
