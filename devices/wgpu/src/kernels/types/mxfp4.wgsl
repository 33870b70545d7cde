
// What four codes, one in each byte, stand for.
fn values_{{name}}(codes: u32) -> vec4<f32> {
    var table = array<u32, 4>(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);
    let q = unpack4xU8(codes);
    let words = vec4<u32>(table[q.x >> 2u], table[q.y >> 2u], table[q.z >> 2u], table[q.w >> 2u]);
    return vec4<f32>(bitcast<vec4<i32>>((words >> ((q & vec4<u32>(3u)) * 8u)) << vec4<u32>(24u)) >> vec4<u32>(24u));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: a power of two times a small float, from a table of doubles.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let j = i % 32u;
    let codes = (word_{{name}}(at + 1u + (j & 15u)) >> ((j >> 4u) * 4u)) & 0x0f0f0f0fu;
    let e = byte_{{name}}(at);
    // Half of 2^(e - 127). What is subnormal there counts as nothing on adapters without subnormal numbers.
    let bits = select((e - 1u) << 23u, 0x00200000u << e, e < 2u);
    return values_{{name}}(codes) * bitcast<f32>(bits);
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let e = byte_{{name}}(at);
    let d = bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
    let q = words4_{{name}}(at + 1u);
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = values_{{name}}(q[k] & 0x0f0f0f0fu) * d;
        (*w)[k + 4u] = values_{{name}}((q[k] >> 4u) & 0x0f0f0f0fu) * d;
    }
}
