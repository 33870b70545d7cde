
fn load_{{name}}(at: u32) -> f32 {
    return bitcast<f32>(aligned_{{name}}(at >> 2u));
}

fn get_{{name}}(i: vec4<u32>) -> f32 {
    return load_{{name}}(at_{{name}}(i));
}

// Elements `i` to `i + 3` of the row at byte `row`, which has no gaps.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let w = (row >> 2u) + i;
    return bitcast<vec4<f32>>(vec4<u32>(aligned_{{name}}(w), aligned_{{name}}(w + 1u), aligned_{{name}}(w + 2u), aligned_{{name}}(w + 3u)));
}
