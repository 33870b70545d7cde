
// The gradient of a lookup: one invocation for each element of the result, which adds up what came from its row.

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
    var sum = 0.0;
    for (var r = 0u; r < shape_a().y; r++) {
        let row = index_b(at_b(vec4<u32>(r, 0u, 0u, 0u)), shape.y);
        if row >= shape.y {
            fail();
        } else if row == i.y {
            sum += get_a(vec4<u32>(i.x, r, 0u, 0u));
        }
    }
    put_y(i, sum);
}
