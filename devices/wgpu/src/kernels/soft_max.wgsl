
// Softmax of scaled and masked rows: one workgroup for each row.
{{>slope}}
// A logit and its mask. What is hidden may be NaN.
fn masked(x: f32, mask: f32, factor: f32) -> f32 {
    return select(x + factor * max(mask, LOWEST), LOWEST, is_masked(mask));
}

fn logit(i: vec4<u32>, factor: f32) -> f32 {
    let x = get_a(i) * parameters.floats[0].x;
    return max({{masked}}, LOWEST);
}

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
    let factor = slope(row.y);
    var largest = LOWEST;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        largest = max(largest, logit(vec4<u32>(j, row), factor));
    }
    largest = max_all(largest, place);
    let sink = {{sink}};
    largest = max(largest, sink);
    var sum = 0.0;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        sum += exp(logit(vec4<u32>(j, row), factor) - largest);
    }
    sum = sum_all(sum, place) + select(exp(sink - largest), 0.0, is_masked(sink));
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        let i = vec4<u32>(j, row);
        put_y(i, exp(logit(i, factor) - largest) / sum);
    }
}
