
// Elements `i` to `i + 3` of the row at byte `row`, at multiples of 16 bytes.
fn vector4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(wide_{{name}}((row + i * 4u) >> 4u));
}
