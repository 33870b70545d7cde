
// Sums of outer products: one invocation for each element of the result.

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
    // Consecutive matrices of source 1 share one of source 0.
    let share = shape.zw / shape_a().zw;
    let a = vec2<u32>(i.z / share.x, i.w / share.y);
    var sum = 0.0;
    for (var k = 0u; k < shape_a().y; k++) {
        sum += get_a(vec4<u32>(i.x, k, a)) * get_b(vec4<u32>(i.y, k, i.zw));
    }
    put_y(i, sum);
}
