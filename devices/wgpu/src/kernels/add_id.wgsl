
// To each row, the row of an expert: one invocation for each element.

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
    let i = indices(n, shape);
    let experts = shape_b().y;
    // The number -1 adds nothing.
    if int_c(at_c(vec4<u32>(i.y, i.z, 0u, 0u))) == -1 {
        put_y(i, get_a(i));
        return;
    }
    let expert = index_c(at_c(vec4<u32>(i.y, i.z, 0u, 0u)), experts);
    if expert >= experts {
        fail();
        return;
    }
    put_y(i, get_a(i) + get_b(vec4<u32>(i.x, expert, 0u, 0u)));
}
