
// A packed row: 32 bytes of codes for each block, then all scales.

fn scale_{{name}}(row: u32, block: u32) -> f32 {
    return from_f16(half_{{name}}(row + shape_{{name}}().x + block * 2u));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: `d q`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    return signed4(aligned_{{name}}((row + i) >> 2u)) * scale_{{name}}(row, i / 32u);
}

{{>types/get}}

// Which groups of 16 elements are in a unit: one of each half of the row, so that neighbours load what lies together.
fn groups_{{name}}(u: u32, units: u32) -> vec2<u32> {
    return vec2<u32>(u, u + units);
}

fn unit_{{name}}(row: u32, u: u32, units: u32) -> Unit {
    let at = (row >> 4u) + u;
    let scales = vec2<f32>(scale_{{name}}(row, u / 2u), scale_{{name}}(row, (u + units) / 2u));
    return Unit(wide_{{name}}(at), wide_{{name}}(at + units), scales, vec2<f32>(0.0));
}

// Elements `i` to `i + 15`, `i` a multiple of 16.
fn load16_{{name}}(row: u32, i: u32) -> mat4x4<f32> {
    let codes = wide_{{name}}((row + i) >> 4u);
    let d = scale_{{name}}(row, i / 32u);
    return mat4x4<f32>(signed4(codes.x) * d, signed4(codes.y) * d, signed4(codes.z) * d, signed4(codes.w) * d);
}
