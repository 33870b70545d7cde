
// Of four elements, number `k` of a block: the word with their coordinates.
fn point_{{name}}(at: u32, k: u32) -> u32 {
    let n = k / 2u;
    let high = (half_{{name}}(at + 34u + n / 4u * 2u) >> (n % 4u * 3u)) & 7u;
    return (byte_{{name}}(at + 2u + n) | (high << 8u)) * 2u + (k & 1u);
}

// A bit for each of eight elements, number `n` of a block.
fn marks_{{name}}(at: u32, n: u32) -> u32 {
    return (half_{{name}}(at + 34u + n / 4u * 2u) >> 15u) * 255u;
}

// Of 16 elements, `d (2 s + 1) / 8`: coordinates are eighths.
fn scale_{{name}}(at: u32, group: u32) -> f32 {
    let s = (half_{{name}}(at + 34u + group / 2u * 2u) >> 12u) & 7u;
    return f32(2u * s + 1u) * 0.125 * from_f16(half_{{name}}(at));
}
{{>types/marks_are_shifts}}{{>types/codebook}}
