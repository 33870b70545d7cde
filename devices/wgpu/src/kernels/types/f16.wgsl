
fn load_{{name}}(at: u32) -> f32 {
    return from_f16(half_{{name}}(at));
}

fn get_{{name}}(i: vec4<u32>) -> f32 {
    return load_{{name}}(at_{{name}}(i));
}

// Elements `i` to `i + 3` of the row at byte `row`, which has no gaps.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + i * 2u;
    return vec4<f32>(unpack2x16float(word_{{name}}(at)), unpack2x16float(word_{{name}}(at + 4u)));
}
