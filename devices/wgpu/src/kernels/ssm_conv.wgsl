
// A convolution over time, channel by channel: one invocation for each element of the result.

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
    for (var k = 0u; k < shape_b().x; k++) {
        sum += get_a(vec4<u32>(i.y + k, i.x, i.z, 0u)) * get_b(vec4<u32>(k, i.x, 0u, 0u));
    }
    put_y(i, sum);
}
