
// What a repetition spread out, summed: one invocation for each element of the result.

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
    let times = shape_a() / shape;
    var sum = 0.0;
    for (var t = 0u; t < elements_of(times); t++) {
        sum += get_a(i + indices(t, times) * shape);
    }
    put_y(i, sum);
}
