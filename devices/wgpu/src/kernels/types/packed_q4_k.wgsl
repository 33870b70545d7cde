{{>types/packed_scales}}
// A packed row: 128 bytes of codes for each block, then the heads of all blocks.

// Elements `i` to `i + 3`, `i` a multiple of 4: `d s q - dmin m`, with `s` and `m` of 32 elements.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let j = i % 256u;
    let group = j / 32u;
    let codes = (aligned_{{name}}((row + i / 256u * 128u + group / 2u * 32u + j % 32u) >> 2u) >> ((group & 1u) * 4u)) & 0x0f0f0f0fu;
    let s = scales_{{name}}(wide_{{name}}(((row + shape_{{name}}().x / 2u) >> 4u) + i / 256u), group / 2u);
    return unsigned4(codes) * s[group & 1u] - s[2u + (group & 1u)];
}

{{>types/get}}

// Which groups of 16 elements are in a unit.
fn groups_{{name}}(u: u32, units: u32) -> vec2<u32> {
    let first = u / 8u * 16u + (u % 8u) / 2u * 4u + u % 2u;
    return vec2<u32>(first, first + 2u);
}

fn unit_{{name}}(row: u32, u: u32, units: u32) -> Unit {
    let codes = wide_{{name}}((row >> 4u) + u);
    let s = scales_{{name}}(wide_{{name}}(((row + shape_{{name}}().x / 2u) >> 4u) + u / 8u), (u % 8u) / 2u);
    let mask = vec4<u32>(0x0f0f0f0fu);
    return Unit(codes & mask, (codes >> vec4<u32>(4u)) & mask, s.xy, s.zw);
}

// Elements `i` to `i + 15`, `i` a multiple of 16.
fn load16_{{name}}(row: u32, i: u32) -> mat4x4<f32> {
    let group = i % 256u / 32u;
    let codes = (wide_{{name}}((row + i / 256u * 128u + group / 2u * 32u + i % 32u) >> 4u) >> vec4<u32>((group & 1u) * 4u)) & vec4<u32>(0x0f0f0f0fu);
    let s = scales_{{name}}(wide_{{name}}(((row + shape_{{name}}().x / 2u) >> 4u) + i / 256u), group / 2u);
    let d = select(s.x, s.y, (group & 1u) == 1u);
    let m = vec4<f32>(select(s.z, s.w, (group & 1u) == 1u));
    return mat4x4<f32>(unsigned4(codes.x) * d - m, unsigned4(codes.y) * d - m, unsigned4(codes.z) * d - m, unsigned4(codes.w) * d - m);
}
