
// A packed row: 16 bytes of codes for each block, then all scales.

fn scale_{{name}}(row: u32, block: u32) -> f32 {
    return from_f16(half_{{name}}(row + shape_{{name}}().x / 2u + block * 2u));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: `d (q - 8)`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let j = i % 32u;
    let codes = (aligned_{{name}}((row + i / 32u * 16u + (j & 15u)) >> 2u) >> ((j >> 4u) * 4u)) & 0x0f0f0f0fu;
    return (unsigned4(codes) - 8.0) * scale_{{name}}(row, i / 32u);
}

{{>types/get}}

// Which groups of 16 elements are in a unit.
fn groups_{{name}}(u: u32, units: u32) -> vec2<u32> {
    return vec2<u32>(2u * u, 2u * u + 1u);
}

fn unit_{{name}}(row: u32, u: u32, units: u32) -> Unit {
    let codes = wide_{{name}}((row >> 4u) + u);
    let mask = vec4<u32>(0x0f0f0f0fu);
    let d = vec2<f32>(scale_{{name}}(row, u));
    return Unit(codes & mask, (codes >> vec4<u32>(4u)) & mask, d, 8.0 * d);
}

// Elements `i` to `i + 15`, `i` a multiple of 16.
fn load16_{{name}}(row: u32, i: u32) -> mat4x4<f32> {
    let codes = (wide_{{name}}((row >> 4u) + i / 32u) >> vec4<u32>((i & 16u) / 4u)) & vec4<u32>(0x0f0f0f0fu);
    let d = scale_{{name}}(row, i / 32u);
    let m = vec4<f32>(8.0 * d);
    return mat4x4<f32>(unsigned4(codes.x) * d - m, unsigned4(codes.y) * d - m, unsigned4(codes.z) * d - m, unsigned4(codes.w) * d - m);
}
