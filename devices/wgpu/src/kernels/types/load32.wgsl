// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    for (var k = 0u; k < 8u; k++) {
        (*w)[k] = load4_{{name}}(row, i + 4u * k);
    }
}
