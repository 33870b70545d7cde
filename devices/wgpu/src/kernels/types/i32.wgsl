
fn int_$(at: u32) -> i32 {
    return bitcast<i32>(aligned_$(at >> 2u));
}

// The number if it is from 0 to `count - 1`; otherwise `count`.
fn index_$(at: u32, count: u32) -> u32 {
    return min(aligned_$(at >> 2u), count);
}

fn get_$(i: vec4<u32>) -> f32 {
    return f32(int_$(at_$(i)));
}
