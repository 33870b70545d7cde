
// Of four elements, number `k` of a block: the word with their coordinates.
fn point_{{name}}(at: u32, k: u32) -> u32 {
    return byte_{{name}}(at + 2u + k / 8u * 8u + k % 8u / 2u) * 2u + (k & 1u);
}

// A bit for each of eight elements, number `n` of a block.
fn marks_{{name}}(at: u32, n: u32) -> u32 {
    return even_{{name}}(word_{{name}}(at + 6u + n / 4u * 8u) >> (n % 4u * 7u));
}

// Of 16 elements, `d (s + 1/2) / 4`.
fn scale_{{name}}(at: u32, group: u32) -> f32 {
    let s = byte_{{name}}(at + 9u + group / 2u * 8u) >> 4u;
    return (f32(s) + 0.5) * 0.25 * from_f16(half_{{name}}(at));
}
{{>types/marks_are_signs}}{{>types/codebook}}
