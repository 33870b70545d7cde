
fn load_{{name}}(at: u32) -> f32 {
    return bitcast<f32>(half_{{name}}(at) << 16u);
}

fn get_{{name}}(i: vec4<u32>) -> f32 {
    return load_{{name}}(at_{{name}}(i));
}

// Elements `i` to `i + 3` of the row at byte `row`, which has no gaps.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + i * 2u;
    let w = vec2<u32>(word_{{name}}(at), word_{{name}}(at + 4u));
    return bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
}
