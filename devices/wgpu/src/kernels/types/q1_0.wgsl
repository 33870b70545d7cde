
// Elements `i` to `i + 3`, `i` a multiple of 4: `d` where the bit is set, else `-d`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 128u) * {{block_bytes}}u;
    let bits = vec4<u32>(byte_{{name}}(at + 2u + i % 128u / 8u) >> (i & 4u)) >> vec4<u32>(0u, 1u, 2u, 3u);
    return (vec4<f32>(bits & vec4<u32>(1u)) * 2.0 - 1.0) * from_f16(half_{{name}}(at));
}

{{>types/get}}

{{>types/load32}}
