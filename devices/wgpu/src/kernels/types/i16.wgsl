
fn int_{{name}}(at: u32) -> i32 {
    return bitcast<i32>(half_{{name}}(at) << 16u) >> 16u;
}

fn get_{{name}}(i: vec4<u32>) -> f32 {
    return f32(int_{{name}}(at_{{name}}(i)));
}
