
// Running sums along rows: one workgroup for each row, one invocation for each of 256 pieces of it.

var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let number = group_number(group, groups);
    let shape = shape_y();
    if number >= rows_of(shape) {
        return;
    }
    let row = row_indices(number, shape);
    let piece = (shape.x + 255u) / 256u;
    let first = min(local * piece, shape.x);
    let last = min(first + piece, shape.x);
    var sum = 0.0;
    for (var j = first; j < last; j++) {
        sum += get_a(vec4<u32>(j, row));
    }
    sums[local] = sum;
    workgroupBarrier();
    sum = 0.0;
    for (var j = 0u; j < local; j++) {
        sum += sums[j];
    }
    for (var j = first; j < last; j++) {
        sum += get_a(vec4<u32>(j, row));
        put_y(vec4<u32>(j, row), sum);
    }
}
