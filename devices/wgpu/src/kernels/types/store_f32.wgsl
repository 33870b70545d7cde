
fn store_{{name}}(at: u32, x: f32) {
    {{buffer}}[at >> 2u] = bitcast<u32>(x);
}

fn put_{{name}}(i: vec4<u32>, x: f32) {
    store_{{name}}(at_{{name}}(i), x);
}
