
// What four codes, one in each byte, stand for.
fn values_{{name}}(codes: u32) -> vec4<f32> {
    var table = array<u32, 4>(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);
    let q = unpack4xU8(codes);
    let words = vec4<u32>(table[q.x >> 2u], table[q.y >> 2u], table[q.z >> 2u], table[q.w >> 2u]);
    return vec4<f32>(bitcast<vec4<i32>>((words >> ((q & vec4<u32>(3u)) * 8u)) << vec4<u32>(24u)) >> vec4<u32>(24u));
}

// Elements `i` to `i + 3`, `i` a multiple of 4: `d (s - 32) T[q]`, with `s` of 32 elements.
fn load4_{{name}}(row: u32, i: u32) -> vec4<f32> {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let group = j / 32u;
    let codes = (aligned_{{name}}((at + 8u + group * 16u + (j & 15u)) >> 2u) >> (((j >> 4u) & 1u) * 4u)) & 0x0f0f0f0fu;
    let low = (byte_{{name}}(at + 4u + group / 2u) >> ((group & 1u) * 4u)) & 15u;
    let high = (half_{{name}}(at + 2u) >> (group * 2u)) & 3u;
    return values_{{name}}(codes) * ((f32(low | (high << 4u)) - 32.0) * from_f16(half_{{name}}(at)));
}

{{>types/get}}

// Elements `i` to `i + 31`, `i` a multiple of 32.
fn load32_{{name}}(row: u32, i: u32, w: ptr<function, array<vec4<f32>, 8>>) {
    let at = row + (i / 256u) * {{block_bytes}}u;
    let j = i % 256u;
    let group = j / 32u;
    let low = (byte_{{name}}(at + 4u + group / 2u) >> ((group & 1u) * 4u)) & 15u;
    let high = (half_{{name}}(at + 2u) >> (group * 2u)) & 3u;
    let d = (f32(low | (high << 4u)) - 32.0) * from_f16(half_{{name}}(at));
    let q = words4_{{name}}(at + 8u + group * 16u);
    for (var k = 0u; k < 4u; k++) {
        (*w)[k] = values_{{name}}(q[k] & 0x0f0f0f0fu) * d;
        (*w)[k + 4u] = values_{{name}}((q[k] >> 4u) & 0x0f0f0f0fu) * d;
    }
}
