
fn four_A(row: vec3<u32>, k: u32) -> vec4<f32> {
    return LOADED_ROW;
}

// What the elements of a head are multiplied with.
fn scale_A(row: vec3<u32>, eps: f32, local: u32, place: Place) -> f32 {
    let length = shape_A().x;
    var squares = 0.0;
    for (var k = local * 4u; k < length; k += 4u * GROUP_SIZEu) {
        let x = four_A(row, k);
        squares += dot(x, x);
    }
    return 1.0 / sqrt(sum_all(squares, place) / f32(length) + eps);
}

fn scaled_A(i: vec4<u32>, scale: f32) -> f32 {
    return get_A(i) * scale * get_F(vec4<u32>(i.x, 0u, 0u, 0u));
}
