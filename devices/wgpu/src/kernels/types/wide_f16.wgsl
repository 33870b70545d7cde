
// Elements `i` to `i + 7` of the row at byte `row`, at multiples of 16 bytes.
fn load8_{{name}}(row: u32, i: u32) -> mat2x4<f32> {
    let w = wide_{{name}}((row + i * 2u) >> 4u);
    return mat2x4<f32>(
        vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)),
        vec4<f32>(unpack2x16float(w.z), unpack2x16float(w.w)),
    );
}
