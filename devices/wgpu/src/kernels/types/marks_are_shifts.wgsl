
// Coordinates, less two where they are marked.
fn marked_{{name}}(x: vec4<f32>, marks: vec4<f32>) -> vec4<f32> {
    return x - 2.0 * marks;
}
