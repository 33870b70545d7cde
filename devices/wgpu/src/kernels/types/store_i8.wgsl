
// Sets a byte; others may set the rest of the word.
fn store_byte_{{name}}(at: u32, bits: u32) {
    let shift = (at & 3u) * 8u;
    atomicAnd(&{{buffer}}[at >> 2u], ~(0xffu << shift));
    atomicOr(&{{buffer}}[at >> 2u], bits << shift);
}

fn store_int_{{name}}(at: u32, x: i32) {
    store_byte_{{name}}(at, bitcast<u32>(x) & 0xffu);
}

fn put_{{name}}(i: vec4<u32>, x: f32) {
    store_int_{{name}}(at_{{name}}(i), i32(x));
}
