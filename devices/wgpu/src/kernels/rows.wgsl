
// The sum of so many elements, in logical order, times a factor: one workgroup for each sum. The last one may be of fewer.

@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    let number = group_number(group, groups);
    // Elements of a sum, sums, elements in all.
    let k = parameters.ints[0];
    if number >= k.y {
        return;
    }
    let count = min(k.x, k.z - number * k.x);
    var sum = 0.0;
    for (var j = local; j < count; j += {{group_size}}u) {
        sum += get_a(indices(number * k.x + j, shape_a()));
    }
    sum = sum_all(sum, place);
    if local == 0u {
        put_y(indices(number, shape_y()), sum * parameters.floats[0].x);
    }
}
