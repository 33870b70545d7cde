
fn load_$(at: u32) -> f32 {
    return bitcast<f32>(aligned_$(at >> 2u));
}

fn get_$(i: vec4<u32>) -> f32 {
    return load_$(at_$(i));
}

// Elements `i` to `i + 3` of the row at byte `row`, which has no gaps.
fn load4_$(row: u32, i: u32) -> vec4<f32> {
    let w = (row >> 2u) + i;
    return bitcast<vec4<f32>>(vec4<u32>(aligned_$(w), aligned_$(w + 1u), aligned_$(w + 2u), aligned_$(w + 3u)));
}
