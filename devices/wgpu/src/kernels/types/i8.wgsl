
fn int_$(at: u32) -> i32 {
    return bitcast<i32>(byte_$(at) << 24u) >> 24u;
}

fn get_$(i: vec4<u32>) -> f32 {
    return f32(int_$(at_$(i)));
}
