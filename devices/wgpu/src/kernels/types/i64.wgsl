
// The lower half, with the sign of the whole.
fn int_{{name}}(at: u32) -> i32 {
    return bitcast<i32>(aligned_{{name}}(at >> 2u));
}

// The number if it is from 0 to `count - 1`; otherwise `count`.
fn index_{{name}}(at: u32, count: u32) -> u32 {
    if aligned_{{name}}((at >> 2u) + 1u) != 0u {
        return count;
    }
    return min(aligned_{{name}}(at >> 2u), count);
}

fn get_{{name}}(i: vec4<u32>) -> f32 {
    return f32(int_{{name}}(at_{{name}}(i)));
}
