
// Elements `k` to `k + 3` of a row that may have gaps; 0 for those behind its end.
fn guarded4_{{name}}(row: vec3<u32>, k: u32) -> vec4<f32> {
    var x = vec4<f32>(0.0);
    for (var j = 0u; j < 4u; j++) {
        if k + j < shape_{{name}}().x {
            x[j] = get_{{name}}(vec4<u32>(k + j, row));
        }
    }
    return x;
}
