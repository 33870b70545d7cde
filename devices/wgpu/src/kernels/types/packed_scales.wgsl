
// The scales and minimums, 0 to 63, of groups `2 q` and `2 q + 1` of 32 elements, from the head of a block.
fn scales_{{name}}(head: vec4<u32>, q: u32) -> vec4<f32> {
    let shift = (q & 1u) * 16u;
    let first = vec2<u32>(head.y >> shift, head.z >> shift);
    let last = head.w >> shift;
    let later = (vec2<u32>(last, last >> 4u) & vec2<u32>(0x0f0fu)) | ((first >> vec2<u32>(2u)) & vec2<u32>(0x3030u));
    let both = select(later, first & vec2<u32>(0x3f3fu), q < 2u);
    let d = unpack2x16float(head.x);
    return vec4<f32>(vec2<f32>(vec2<u32>(both.x & 0xffu, (both.x >> 8u) & 0xffu)) * d.x, vec2<f32>(vec2<u32>(both.y & 0xffu, (both.y >> 8u) & 0xffu)) * d.y);
}
