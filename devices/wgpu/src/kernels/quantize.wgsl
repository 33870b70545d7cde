
// Columns as 8-bit numbers, for products with packed weights: one invocation for each four elements.
{{>q8}}
@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let number = group_number(group, groups);
    let shape = shape_b();
    let pieces = (shape.x + 1023u) / 1024u;
    let column = number / pieces;
    if column >= shape.y {
        return;
    }
    let k = number % pieces * 1024u + local * 4u;
    var x = vec4<f32>(0.0);
    if k < shape.x {
        let row = vec3<u32>(column, 0u, 0u);
        x = {{loaded_b}};
    }
    quantize(x, k, column, shape.x, shape.y, local);
}
