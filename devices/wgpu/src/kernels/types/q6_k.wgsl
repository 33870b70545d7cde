
// Elements `i` to `i + 3`, `i` a multiple of 4: `d s (q - 32)`, with `s` of 16 elements.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let half = j / 128u;
    let k = j % 128u;
    let low = (word_{{name}}(at + half * 64u + k % 64u) >> (k / 64u * 4u)) & 0x0f0f0f0fu;
    let high = (word_{{name}}(at + 128u + half * 32u + k % 32u) >> (k / 32u * 2u)) & 0x03030303u;
    let scale = bitcast<i32>(byte_{{name}}(at + 192u + j / 16u) << 24u) >> 24u;
    return (unsigned4(low | (high << 4u)) - 32.0) * (f32(scale) * from_f16(half_{{name}}(at + 208u)));
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let half = j / 128u;
    let n = j % 128u;
    let shift = vec4<u32>(n / 64u * 4u);
    let shift_high = vec4<u32>(n / 32u * 2u);
    let codes = at + half * 64u + n % 64u;
    let highs = at + 128u + half * 32u;
    let first = ((words4_{{name}}(codes) >> shift) & vec4<u32>(0x0f0f0f0fu)) | (((words4_{{name}}(highs) >> shift_high) & vec4<u32>(0x03030303u)) << vec4<u32>(4u));
    let second = ((words4_{{name}}(codes + 16u) >> shift) & vec4<u32>(0x0f0f0f0fu)) | (((words4_{{name}}(highs + 16u) >> shift_high) & vec4<u32>(0x03030303u)) << vec4<u32>(4u));
    let scale = half_{{name}}(at + 192u + j / 16u);
    let scales = vec2<i32>(bitcast<i32>(scale << 24u) >> 24u, bitcast<i32>(scale << 16u) >> 24u);
    let d = vec2<f32>(scales) * from_f16(half_{{name}}(at + 208u));
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = (unsigned4(first[k]) - 32.0) * d.x;
        (*w)[k + 4u] = (unsigned4(second[k]) - 32.0) * d.y;
    }
}
