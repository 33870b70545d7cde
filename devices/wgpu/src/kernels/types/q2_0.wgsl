
// Elements `i` to `i + 3`, `i` a multiple of 4: `d (q - 1)`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 64u) * {{block_bytes}}u;
    let codes = vec4<u32>(byte_{{name}}(at + 2u + i % 64u / 4u)) >> vec4<u32>(0u, 2u, 4u, 6u);
    return (vec4<f32>(codes & vec4<u32>(3u)) - 1.0) * from_f16(half_{{name}}(at));
}

{{>types/get}}

{{>types/load32}}
