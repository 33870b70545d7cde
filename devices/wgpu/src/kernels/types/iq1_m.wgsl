
// Of eight elements, number `n` of a block: the high bits of their point, and their mark.
fn bits_{{name}}(at: u32, n: u32) -> u32 {
    return byte_{{name}}(at + 32u + n / 2u) >> (n % 2u * 4u);
}

// Of four elements, number `k` of a block: the word with their coordinates.
fn point_{{name}}(at: u32, k: u32) -> u32 {
    let n = k / 2u;
    return (byte_{{name}}(at + n) | ((bits_{{name}}(at, n) & 7u) << 8u)) * 2u + (k & 1u);
}

// A bit for each of eight elements, number `n` of a block.
fn marks_{{name}}(at: u32, n: u32) -> u32 {
    return ((bits_{{name}}(at, n) >> 3u) & 1u) * 255u;
}

// Of 16 elements, `d (2 s + 1) / 8`: coordinates are eighths. Four bits of `d` lie above each four `s`.
fn scale_{{name}}(at: u32, group: u32) -> f32 {
    let low = word_{{name}}(at + 48u);
    let high = word_{{name}}(at + 52u);
    let d = ((low >> 12u) & 0xfu) | ((low >> 24u) & 0xf0u) | ((high >> 4u) & 0xf00u) | ((high >> 16u) & 0xf000u);
    let s = (half_{{name}}(at + 48u + group / 4u * 2u) >> (group % 4u * 3u)) & 7u;
    return f32(2u * s + 1u) * 0.125 * from_f16(d);
}
{{>types/marks_are_shifts}}{{>types/codebook}}
