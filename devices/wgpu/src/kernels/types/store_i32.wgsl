
fn store_int_{{name}}(at: u32, x: i32) {
    {{buffer}}[at >> 2u] = bitcast<u32>(x);
}

fn put_{{name}}(i: vec4<u32>, x: f32) {
    store_int_{{name}}(at_{{name}}(i), i32(x));
}
