
// The first of the largest elements of each row: one workgroup for each row.

var<workgroup> values: array<f32, 256>;
var<workgroup> places: array<u32, 256>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let number = group_number(group, groups);
    let shape = shape_a();
    if number >= rows_of(shape) {
        return;
    }
    let row = row_indices(number, shape);
    // Of few elements, the last one may be looked at by several invocations.
    var best = min(local, shape.x - 1u);
    var value = get_a(vec4<u32>(best, row));
    for (var j = local + 256u; j < shape.x; j += 256u) {
        let x = get_a(vec4<u32>(j, row));
        if x > value {
            value = x;
            best = j;
        }
    }
    values[local] = value;
    places[local] = best;
    for (var half = 128u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if local < half {
            let x = values[local + half];
            let j = places[local + half];
            if x > values[local] || (x == values[local] && j < places[local]) {
                values[local] = x;
                places[local] = j;
            }
        }
    }
    if local == 0u {
        store_int_y(at_y(vec4<u32>(number, 0u, 0u, 0u)), i32(places[0]));
    }
}
