
// Keys and values of any type: eight elements of a row, 0 for those behind its end.
fn key4(row: vec3<u32>, k: u32) -> vec4<f32> {
    if k >= shape_b().x {
        return vec4<f32>(0.0);
    }
    return {{loaded_key}};
}

fn value4(row: vec3<u32>, k: u32) -> vec4<f32> {
    if k >= shape_c().x {
        return vec4<f32>(0.0);
    }
    return {{loaded_value}};
}

fn key8(row: vec3<u32>, k: u32) -> mat2x4<f32> {
    return mat2x4<f32>(key4(row, k), key4(row, k + 4u));
}

fn value8(row: vec3<u32>, k: u32) -> mat2x4<f32> {
    return mat2x4<f32>(value4(row, k), value4(row, k + 4u));
}
