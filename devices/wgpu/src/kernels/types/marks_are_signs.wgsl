
// Coordinates, negated where they are marked.
fn marked_{{name}}(x: vec4<f32>, marks: vec4<f32>) -> vec4<f32> {
    return x * (1.0 - 2.0 * marks);
}

// Eight signs of which seven are stored: the number of negative ones is even.
fn even_{{name}}(stored: u32) -> u32 {
    let signs = stored & 127u;
    return signs | ((countOneBits(signs) & 1u) << 7u);
}
