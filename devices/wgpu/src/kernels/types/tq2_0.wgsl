
// Elements `i` to `i + 3`, `i` a multiple of 4: `d (q - 1)`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let codes = (word_{{name}}(at + (j / 128u) * 32u + j % 32u) >> ((j % 128u) / 32u * 2u)) & 0x03030303u;
    return (unsigned4(codes) - 1.0) * from_f16(half_{{name}}(at + 64u));
}

{{>types/get}}

{{>types/load32}}
