
// Gradients of rows that were normalized together, from sums over both rows: one workgroup for each row.

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
    let p = parameters.floats[0];
    var products = 0.0;
    var squares = 0.0;
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        let x = get_b(vec4<u32>(j, row));
        products += get_a(vec4<u32>(j, row)) * x;
        squares += x * x;
    }
    products = sum_all(products, place);
    squares = sum_all(squares, place);
    let count = f32(shape.x);
    let factor = {{factor}};
    for (var j = local; j < shape.x; j += {{group_size}}u) {
        let i = vec4<u32>(j, row);
        let g = get_a(i);
        let x = get_b(i);
        put_y(i, {{gradient}});
    }
}
