
// What four codes, one in each byte, stand for.
fn values_{{name}}(codes: u32) -> vec4<f32> {
    var table = array<u32, 4>(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);
    let q = unpack4xU8(codes);
    let words = vec4<u32>(table[q.x >> 2u], table[q.y >> 2u], table[q.z >> 2u], table[q.w >> 2u]);
    return vec4<f32>(bitcast<vec4<i32>>((words >> ((q & vec4<u32>(3u)) * 8u)) << vec4<u32>(24u)) >> vec4<u32>(24u));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: a float of eight bits for each 16 times a small float, from a table of doubles.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 64u) * {{block_bytes}}u;
    let j = i % 64u;
    let group = j / 16u;
    let codes = (word_{{name}}(at + 4u + group * 8u + (j & 7u)) >> (((j >> 3u) & 1u) * 4u)) & 0x0f0f0f0fu;
    let x = byte_{{name}}(at + group);
    let exponent = (x >> 3u) & 15u;
    let normal = bitcast<f32>(((exponent + 119u) << 23u) | ((x & 7u) << 20u));
    let d = select(normal, f32(x & 7u) / 1024.0, exponent == 0u);
    return values_{{name}}(codes) * select(d, 0.0, x == 127u);
}

{{>types/get}}

{{>types/load32}}
