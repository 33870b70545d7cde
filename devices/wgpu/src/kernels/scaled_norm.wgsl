
// Rows scaled by what their elements are together, times one row. One workgroup handles each row, and its
// invocations take four elements each. A row may be a sum, which is then written as well. The results may also be quantized to 8 bits.
{{quantize_function}}
fn four(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_a}};
}
{{sums}}
fn factor4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_b}};
}

@compute @workgroup_size(256)
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
    var squares = 0.0;
    for (var k = local * 4u; k < shape.x; k += 1024u) {
        let x = {{sum_of_four}};
        squares += dot(x, x);
    }
    squares = sum_all(squares, place);
    let scale = 1.0 / sqrt(squares / f32(shape.x) + parameters.floats[0].x);
    for (var first = 0u; first < shape.x; first += 1024u) {
        let k = first + local * 4u;
        var x = vec4<f32>(0.0);
        if k < shape.x {
            x = {{again}} * scale * factor4(vec3<u32>(0u), k);
            {{#j 4}} put_y(vec4<u32>(k + {{j}}u, row), x[{{j}}]);
            {{/j}}
        }
        {{quantized}};
    }
}
