
// What four codes, one in each byte, stand for.
fn values_{{name}}(codes: u32) -> vec4<f32> {
    var table = array<u32, 4>(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);
    let q = unpack4xU8(codes);
    let words = vec4<u32>(table[q.x >> 2u], table[q.y >> 2u], table[q.z >> 2u], table[q.w >> 2u]);
    return vec4<f32>(bitcast<vec4<i32>>((words >> ((q & vec4<u32>(3u)) * 8u)) << vec4<u32>(24u)) >> vec4<u32>(24u));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: `d T[q]`.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let j = i % 32u;
    let codes = (word_{{name}}(at + 2u + (j & 15u)) >> ((j >> 4u) * 4u)) & 0x0f0f0f0fu;
    return values_{{name}}(codes) * from_f16(half_{{name}}(at));
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 32u) * {{block_bytes}}u;
    let d = from_f16(half_{{name}}(at));
    let q = words4_{{name}}(at + 2u);
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = values_{{name}}(q[k] & 0x0f0f0f0fu) * d;
        (*w)[k + 4u] = values_{{name}}((q[k] >> 4u) & 0x0f0f0f0fu) * d;
    }
}
