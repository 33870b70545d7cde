
// Of four elements, number `k` of a block: the word with their coordinates.
fn point_{{name}}(at: u32, k: u32) -> u32 {
    let high = (byte_{{name}}(at + 66u + k / 8u) >> (k % 8u)) & 1u;
    return byte_{{name}}(at + 2u + k) | (high << 8u);
}

// A bit for each of eight elements, number `n` of a block.
fn marks_{{name}}(at: u32, n: u32) -> u32 {
    return byte_{{name}}(at + 74u + n);
}

// Of 16 elements, `d (2 s + 1)`.
fn scale_{{name}}(at: u32, group: u32) -> f32 {
    let s = (byte_{{name}}(at + 106u + group / 4u) >> (group / 2u % 2u * 4u)) & 15u;
    return f32(2u * s + 1u) * from_f16(half_{{name}}(at));
}
{{>types/marks_are_signs}}{{>types/codebook}}
