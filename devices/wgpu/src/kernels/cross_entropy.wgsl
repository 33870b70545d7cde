
// The loss of the logits of each row against the probabilities that they should have: one workgroup for each row.

@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    let number = group_number(group, groups);
    let shape = shape_a();
    if number >= rows_of(shape) {
        return;
    }
    let row = row_indices(number, shape);
    var largest = LOWEST;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        largest = max(largest, get_a(vec4<u32>(j, row)));
    }
    largest = max_all(largest, place);
    var sum = 0.0;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        sum += exp(get_a(vec4<u32>(j, row)) - largest);
    }
    let log_total = largest + log(sum_all(sum, place));
    var loss = 0.0;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        loss += get_b(vec4<u32>(j, row)) * (get_a(vec4<u32>(j, row)) - log_total);
    }
    loss = sum_all(loss, place);
    if local == 0u {
        put_y(vec4<u32>(number, 0u, 0u, 0u), -loss);
    }
}
