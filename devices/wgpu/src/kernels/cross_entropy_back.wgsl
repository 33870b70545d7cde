
// The gradient of the loss with respect to logits: one workgroup for each row.

@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    let number = group_number(group, groups);
    let shape = shape_y();
    if number >= rows_of(shape) {
        return;
    }
    let row = row_indices(number, shape);
    var largest = LOWEST;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        largest = max(largest, get_b(vec4<u32>(j, row)));
    }
    largest = max_all(largest, place);
    var sum = 0.0;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        sum += exp(get_b(vec4<u32>(j, row)) - largest);
    }
    sum = sum_all(sum, place);
    let factor = get_a(vec4<u32>(0u)) / parameters.floats[0].x;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        let i = vec4<u32>(j, row);
        put_y(i, factor * (exp(get_b(i) - largest) / sum - get_c(i)));
    }
}
