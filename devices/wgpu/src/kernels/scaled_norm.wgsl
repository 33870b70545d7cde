
// Rows scaled by what their elements are together, times one row; where SUMMED, of a sum, which is written, too. One workgroup for each row, whose invocations
// take four elements each. Where QUANTIZED, the results are made 8-bit numbers as well.
QUANTIZE_FUNCTION
fn four(row: vec3<u32>, k: u32) -> vec4<f32> {
    return LOADED_A;
}

fn factor4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return LOADED_B;
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32PLACE_PARAMETERS,
) {
    let place = PLACE;
    let number = group_number(group, groups);
    let shape = shape_y();
    if number >= rows_of(shape) {
        return;
    }
    let row = row_indices(number, shape);
    var squares = 0.0;
    for (var k = local * 4u; k < shape.x; k += 1024u) {
        let x = SUM_OF_FOUR;
        squares += dot(x, x);
    }
    squares = sum_all(squares, place);
    let scale = 1.0 / sqrt(squares / f32(shape.x) + parameters.floats[0].x);
    for (var first = 0u; first < shape.x; first += 1024u) {
        let k = first + local * 4u;
        var x = vec4<f32>(0.0);
        if k < shape.x {
            x = AGAIN * scale * factor4(vec3<u32>(0u), k);
            EACH(j, 4) { put_y(vec4<u32>(k + #ju, row), x[#j]);
            }
        }
        QUANTIZED;
    }
}
