
// Rows scaled by what their elements are together: one workgroup for each row.

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
    let count = f32(shape.x);
    let eps = parameters.floats[0].x;
    var mean = 0.0;
    if {{centered}} {
        var sum = 0.0;
        for (var j = local; j < shape.x; j += {{group_size}}u) {
            sum += get_a(vec4<u32>(j, row));
        }
        mean = sum_all(sum, place) / count;
    }
    var squares = 0.0;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        let x = get_a(vec4<u32>(j, row)) - mean;
        squares += x * x;
    }
    squares = sum_all(squares, place);
    let scale = {{scale}};
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        put_y(vec4<u32>(j, row), (get_a(vec4<u32>(j, row)) - mean) * scale);
    }
}
