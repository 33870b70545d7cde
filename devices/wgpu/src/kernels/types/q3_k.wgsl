
// The scale of 16 elements.
fn scale_{{name}}(at: u32, group: u32) -> f32 {
    let scale_low = (byte_{{name}}(at + 96u + group % 8u) >> (group / 8u * 4u)) & 15u;
    let scale_high = (byte_{{name}}(at + 104u + group % 4u) >> (group / 4u * 2u)) & 3u;
    return (f32(scale_low | (scale_high << 4u)) - 32.0) * from_f16(half_{{name}}(at + 108u));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: `d (s - 32) (q - 4)`, with `s` of 16 elements.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let low = (word_{{name}}(at + 32u + (j / 128u) * 32u + j % 32u) >> ((j % 128u) / 32u * 2u)) & 0x03030303u;
    let high = (word_{{name}}(at + j % 32u) >> (j / 32u)) & 0x01010101u;
    return (unsigned4(low | (high << 2u)) - 4.0) * scale_{{name}}(at, j / 16u);
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let shift = vec4<u32>((j % 128u) / 32u * 2u);
    let bit = vec4<u32>(j / 32u);
    let codes = at + 32u + (j / 128u) * 32u;
    let first = ((words4_{{name}}(codes) >> shift) & vec4<u32>(0x03030303u)) | (((words4_{{name}}(at) >> bit) & vec4<u32>(0x01010101u)) << vec4<u32>(2u));
    let second = ((words4_{{name}}(codes + 16u) >> shift) & vec4<u32>(0x03030303u)) | (((words4_{{name}}(at + 16u) >> bit) & vec4<u32>(0x01010101u)) << vec4<u32>(2u));
    let d = vec2<f32>(scale_{{name}}(at, j / 16u), scale_{{name}}(at, j / 16u + 1u));
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = (unsigned4(first[k]) - 4.0) * d.x;
        (*w)[k + 4u] = (unsigned4(second[k]) - 4.0) * d.y;
    }
}
