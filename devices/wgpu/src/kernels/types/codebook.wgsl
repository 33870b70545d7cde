
// Four coordinates of a point, of which the bits of `marks` mark some.
fn coordinates_$(point: u32, marks: u32) -> vec4<f32> {
    let bits = (vec4<u32>(marks) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(1u);
    return marked_$(signed4(grids[FIRST_WORDu + point]), vec4<f32>(bits));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: coordinates of points of a grid, with a scale for each 16.
fn load4_$(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * BLOCK_BYTESu;
    let k = i % 256u / 4u;
    let marks = marks_$(at, k / 2u) >> (k % 2u * 4u);
    return coordinates_$(point_$(at, k), marks) * scale_$(at, k / 4u);
}

fn get_$(i: vec4<u32>) -> f32 {
    return load4_$(row_$(i.yzw), i.x & ~3u)[i.x & 3u];
}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_$(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 256u) * BLOCK_BYTESu;
    let k = i % 256u / 4u;
    for (var j = 0u; j < 8u; j += 2u) {
        let scale = scale_$(at, (k + j) / 4u);
        let marks = marks_$(at, (k + j) / 2u);
        (*w)[j] = coordinates_$(point_$(at, k + j), marks) * scale;
        (*w)[j + 1u] = coordinates_$(point_$(at, k + j + 1u), marks >> 4u) * scale;
    }
}
