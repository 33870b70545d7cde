
// Scale and minimum, 0 to 63, of group `g`; they lie packed from byte `at` on.
fn scale_and_minimum_{{name}}(at: u32, g: u32) -> vec2<f32> {
    if g < 4u {
        return vec2<f32>(f32(byte_{{name}}(at + g) & 63u), f32(byte_{{name}}(at + g + 4u) & 63u));
    }
    let low = byte_{{name}}(at + g + 4u);
    let scale = (low & 15u) | ((byte_{{name}}(at + g - 4u) >> 6u) << 4u);
    let minimum = (low >> 4u) | ((byte_{{name}}(at + g) >> 6u) << 4u);
    return vec2<f32>(f32(scale), f32(minimum));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: `d s q - dmin m`, with `s` and `m` of 32 elements.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let group = j / 32u;
    let codes = (aligned_{{name}}((at + 16u + group / 2u * 32u + j % 32u) >> 2u) >> ((group & 1u) * 4u)) & 0x0f0f0f0fu;
    let scales = unpack2x16float(aligned_{{name}}(at >> 2u)) * scale_and_minimum_{{name}}(at + 4u, group);
    return unsigned4(codes) * scales.x - scales.y;
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let group = j / 32u;
    let shift = vec4<u32>((group & 1u) * 4u);
    let codes = at + 16u + group / 2u * 32u;
    let first = (words4_{{name}}(codes) >> shift) & vec4<u32>(0x0f0f0f0fu);
    let second = (words4_{{name}}(codes + 16u) >> shift) & vec4<u32>(0x0f0f0f0fu);
    let scales = unpack2x16float(aligned_{{name}}(at >> 2u)) * scale_and_minimum_{{name}}(at + 4u, group);
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = unsigned4(first[k]) * scales.x - scales.y;
        (*w)[k + 4u] = unsigned4(second[k]) * scales.x - scales.y;
    }
}
