
// Elements in logical order as blocks of 32: one invocation for each block.

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    // The shape of a row in blocks.
    let shape = shape_y() / vec4<u32>(32u, 1u, 1u, 1u);
    if n >= elements_of(shape) {
        return;
    }
    let i = indices(n, shape);
    var x: array<f32, 32>;
    for (var j = 0u; j < 32u; j++) {
        x[j] = get_a(indices(n * 32u + j, shape_a()));
    }
    encode_y(row_y(i.yzw) + i.x * parameters.tensors[0].strides.x, &x);
}
