
fn load_$(at: u32) -> f32 {
    return from_f16(half_$(at));
}

fn get_$(i: vec4<u32>) -> f32 {
    return load_$(at_$(i));
}

// Elements `i` to `i + 3` of the row at byte `row`, which has no gaps.
fn load4_$(row: u32, i: u32) -> vec4<f32> {
    let at = row + i * 2u;
    return vec4<f32>(unpack2x16float(word_$(at)), unpack2x16float(word_$(at + 4u)));
}
