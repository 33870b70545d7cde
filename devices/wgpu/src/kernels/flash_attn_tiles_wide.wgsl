
// Keys and values in halves at multiples of 16 bytes: eight elements of a row, 0 for those behind its end.
fn key8(row: vec3<u32>, k: u32) -> mat2x4<f32> {
    if k >= shape_b().x {
        return mat2x4<f32>();
    }
    return load8_b(row_b(row), k);
}

fn value8(row: vec3<u32>, k: u32) -> mat2x4<f32> {
    if k >= shape_c().x {
        return mat2x4<f32>();
    }
    return load8_c(row_c(row), k);
}
