
// A packed row: 128 bytes of low codes for each block, 64 bytes of high ones for each, 16 scales for each, then what all scales of a block are multiplied by.

// The scale of group `g` of 16 elements.
fn scale_{{name}}(row: u32, g: u32) -> f32 {
    let k = shape_{{name}}().x;
    let scale = bitcast<i32>(byte_{{name}}(row + k / 4u * 3u + g) << 24u) >> 24u;
    return f32(scale) * from_f16(half_{{name}}(row + k / 16u * 13u + g / 16u * 2u));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: `d s (q - 32)`, with `s` of 16 elements.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let j = i % 256u;
    let half = j / 128u;
    let k = j % 128u;
    let low = (aligned_{{name}}((row + i / 256u * 128u + half * 64u + k % 64u) >> 2u) >> (k / 64u * 4u)) & 0x0f0f0f0fu;
    let high = (aligned_{{name}}((row + shape_{{name}}().x / 2u + i / 256u * 64u + half * 32u + k % 32u) >> 2u) >> (k / 32u * 2u)) & 0x03030303u;
    return (unsigned4(low | (high << 4u)) - 32.0) * scale_{{name}}(row, i / 16u);
}

{{>types/get}}

// Which groups of 16 elements are in a unit.
fn groups_{{name}}(u: u32, units: u32) -> vec2<u32> {
    let first = u / 4u * 8u + u % 4u;
    return vec2<u32>(first, first + 4u);
}

fn unit_{{name}}(row: u32, u: u32, units: u32) -> Unit {
    let codes = wide_{{name}}((row >> 4u) + u);
    let high = wide_{{name}}(((row + shape_{{name}}().x / 2u) >> 4u) + u / 4u * 2u + u % 2u) >> vec4<u32>(u % 4u / 2u * 2u);
    let mask = vec4<u32>(0x0f0f0f0fu);
    let bits = vec4<u32>(0x30303030u);
    let first = (codes & mask) | ((high << vec4<u32>(4u)) & bits);
    let second = ((codes >> vec4<u32>(4u)) & mask) | (high & bits);
    let g = groups_{{name}}(u, units);
    let scales = vec2<f32>(scale_{{name}}(row, g.x), scale_{{name}}(row, g.y));
    return Unit(first, second, scales, 32.0 * scales);
}

// Elements `i` to `i + 15`, `i` a multiple of 16.
fn load16_{{name}}(row: u32, i: u32) -> mat4x4<f32> {
    let half = i % 256u / 128u;
    let k = i % 128u;
    let low = (wide_{{name}}((row + i / 256u * 128u + half * 64u + k % 64u) >> 4u) >> vec4<u32>(k / 64u * 4u)) & vec4<u32>(0x0f0f0f0fu);
    let high = (wide_{{name}}((row + shape_{{name}}().x / 2u + i / 256u * 64u + half * 32u + k % 32u) >> 4u) >> vec4<u32>(k / 32u * 2u)) & vec4<u32>(0x03030303u);
    let codes = low | (high << vec4<u32>(4u));
    let d = scale_{{name}}(row, i / 16u);
    let m = vec4<f32>(32.0 * d);
    return mat4x4<f32>(unsigned4(codes.x) * d - m, unsigned4(codes.y) * d - m, unsigned4(codes.z) * d - m, unsigned4(codes.w) * d - m);
}
