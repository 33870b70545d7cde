
{{>types/store_half}}

fn store_{{name}}(at: u32, x: f32) {
    store_half_{{name}}(at, to_f16(x));
}

fn put_{{name}}(i: vec4<u32>, x: f32) {
    store_{{name}}(at_{{name}}(i), x);
}
