
{{>types/store_half}}

fn store_int_{{name}}(at: u32, x: i32) {
    store_half_{{name}}(at, bitcast<u32>(x) & 0xffffu);
}

fn put_{{name}}(i: vec4<u32>, x: f32) {
    store_int_{{name}}(at_{{name}}(i), i32(x));
}
