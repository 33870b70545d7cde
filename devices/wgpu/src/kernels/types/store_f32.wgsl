
fn store_$(at: u32, x: f32) {
    buffer_$[at >> 2u] = bitcast<u32>(x);
}

fn put_$(i: vec4<u32>, x: f32) {
    store_$(at_$(i), x);
}
