
// Heads without a norm.
fn scale_{{heads}}(row: vec3<u32>, eps: f32, local: u32, place: Place) -> f32 {
    return 1.0;
}

fn scaled_{{heads}}(i: vec4<u32>, scale: f32) -> f32 {
    return get_{{heads}}(i);
}
