
// Of four elements, number `k` of a block: the word with their coordinates.
fn point_{{name}}(at: u32, k: u32) -> u32 {
    return byte_{{name}}(at + 2u + k);
}

// A bit for each of eight elements, number `n` of a block.
fn marks_{{name}}(at: u32, n: u32) -> u32 {
    return even_{{name}}(word_{{name}}(at + 66u + n / 4u * 4u) >> (n % 4u * 7u));
}

// Of 16 elements, `d (s + 1/2) / 2`.
fn scale_{{name}}(at: u32, group: u32) -> f32 {
    let s = byte_{{name}}(at + 69u + group / 2u * 4u) >> 4u;
    return (f32(s) + 0.5) * 0.5 * from_f16(half_{{name}}(at));
}
{{>types/marks_are_signs}}{{>types/codebook}}
