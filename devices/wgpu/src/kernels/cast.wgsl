
// Elements of one type as another, in logical order: one invocation for each.

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    let shape = shape_y();
    if n >= elements_of(shape) {
        return;
    }
    {{conversion}};
}
