
// What four codes, one in each byte, stand for.
fn values_$(codes: u32) -> vec4<f32> {
    var table = array<u32, 4>(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);
    let q = unpack4xU8(codes);
    let words = vec4<u32>(table[q.x >> 2u], table[q.y >> 2u], table[q.z >> 2u], table[q.w >> 2u]);
    return vec4<f32>(bitcast<vec4<i32>>((words >> ((q & vec4<u32>(3u)) * 8u)) << vec4<u32>(24u)) >> vec4<u32>(24u));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: a float of eight bits for each 16 times a small float, from a table of doubles.
fn load4_$(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 64u) * BLOCK_BYTESu;
    let j = i % 64u;
    let group = j / 16u;
    let codes = (word_$(at + 4u + group * 8u + (j & 7u)) >> (((j >> 3u) & 1u) * 4u)) & 0x0f0f0f0fu;
    let x = byte_$(at + group);
    let exponent = (x >> 3u) & 15u;
    let normal = bitcast<f32>(((exponent + 119u) << 23u) | ((x & 7u) << 20u));
    let d = select(normal, f32(x & 7u) / 1024.0, exponent == 0u);
    return values_$(codes) * select(d, 0.0, x == 127u);
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
