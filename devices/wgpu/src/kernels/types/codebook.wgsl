
// Four coordinates of a point, of which the bits of `marks` mark some.
fn coordinates_{{name}}(point: u32, marks: u32) -> vec4<f32> {
    let bits = (vec4<u32>(marks) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(1u);
    return marked_{{name}}(signed4(grids[{{first_word}}u + point]), vec4<f32>(bits));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: coordinates of points of a grid, with a scale for each 16.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let k = i % 256u / 4u;
    let marks = marks_{{name}}(at, k / 2u) >> (k % 2u * 4u);
    return coordinates_{{name}}(point_{{name}}(at, k), marks) * scale_{{name}}(at, k / 4u);
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let k = i % 256u / 4u;
    for (var j = 0u; j < 8u; j += 2u) {
        let scale = scale_{{name}}(at, (k + j) / 4u);
        let marks = marks_{{name}}(at, (k + j) / 2u);
        (*w)[j] = coordinates_{{name}}(point_{{name}}(at, k + j), marks) * scale;
        (*w)[j + 1u] = coordinates_{{name}}(point_{{name}}(at, k + j + 1u), marks >> 4u) * scale;
    }
}
