
// Elements `i` to `i + 3`, `i` a multiple of 4: `d (q - 1)`, five codes a byte as a fraction in base 3.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    var bytes = j % 32u;
    var digit = j / 32u;
    if j >= 240u {
        bytes = 48u;
        digit = (j - 240u) / 4u;
    } else if j >= 160u {
        bytes = 32u + (j - 160u) % 16u;
        digit = (j - 160u) / 16u;
    }
    var power = array<u32, 5>(1u, 3u, 9u, 27u, 81u);
    let rest = (unpack4xU8(word_{{name}}(at + bytes)) * power[digit]) & vec4<u32>(255u);
    let codes = vec4<f32>((rest * 3u) >> vec4<u32>(8u));
    return (codes - 1.0) * from_f16(half_{{name}}(at + 52u));
}

{{>types/get}}

{{>types/load32}}
