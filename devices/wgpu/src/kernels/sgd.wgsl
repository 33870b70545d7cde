
// A step of gradient descent: one invocation for each weight.

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    if n >= elements_of(shape_a()) {
        return;
    }
    let i = indices(n, shape_a());
    let rate = get_c(vec4<u32>(0u));
    let decay = get_c(vec4<u32>(1u, 0u, 0u, 0u));
    put_a(i, get_a(i) * (1.0 - rate * decay) - rate * get_b(i));
}
