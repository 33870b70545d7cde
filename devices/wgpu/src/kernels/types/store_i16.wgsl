
// Sets two bytes at an even place; others may set the other half of the word.
fn store_half_$(at: u32, bits: u32) {
    let shift = (at & 2u) * 8u;
    atomicAnd(&buffer_$[at >> 2u], ~(0xffffu << shift));
    atomicOr(&buffer_$[at >> 2u], bits << shift);
}

fn store_int_$(at: u32, x: i32) {
    store_half_$(at, bitcast<u32>(x) & 0xffffu);
}

fn put_$(i: vec4<u32>, x: f32) {
    store_int_$(at_$(i), i32(x));
}
