
fn four_{{heads}}(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_row}};
}

// What the elements of a head are multiplied with.
fn scale_{{heads}}(row: vec3<u32>, eps: f32, local: u32, place: Place) -> f32 {
    let length = shape_{{heads}}().x;
    var squares = 0.0;
    for (var k = local * 4u; k < length; k += 4u * {{group_size}}u) {
        let x = four_{{heads}}(row, k);
        squares += dot(x, x);
    }
    return 1.0 / sqrt(sum_all(squares, place) / f32(length) + eps);
}

fn scaled_{{heads}}(i: vec4<u32>, scale: f32) -> f32 {
    return get_{{heads}}(i) * scale * get_{{factor}}(vec4<u32>(i.x, 0u, 0u, 0u));
}
