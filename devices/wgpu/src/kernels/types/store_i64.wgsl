
fn store_int_$(at: u32, x: i32) {
    buffer_$[at >> 2u] = bitcast<u32>(x);
    buffer_$[(at >> 2u) + 1u] = select(0u, 0xffffffffu, x < 0);
}

fn put_$(i: vec4<u32>, x: f32) {
    store_int_$(at_$(i), i32(x));
}
