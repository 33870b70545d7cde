
// Four words at once: those from word `4 i` on.
fn wide_{{name}}(i: u32) -> vec4<u32> {
    return {{buffer}}[i];
}
