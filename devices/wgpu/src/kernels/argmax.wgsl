
// The first of the largest elements of each row: one workgroup for each piece of a row, and then one for what these found.

var<workgroup> values: array<u32, 256>;
var<workgroup> places: array<u32, 256>;

// The element that is looked at in place `j` of row `number`.
fn candidate(number: u32, j: u32) -> u32 {
    return {{candidate}};
}

// A number in the order of floats; what is not a number is as minus infinity.
fn key(j: u32, row: vec3<u32>) -> u32 {
    let bits = bitcast<u32>(get_a(vec4<u32>(j, row)));
    if (bits & 0x7fffffffu) > 0x7f800000u {
        return 0x007fffffu;
    }
    // Both zeros are the same number.
    if bits == 0x80000000u {
        return bits;
    }
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    // Elements of a row, of a piece; pieces of a row.
    let sizes = parameters.ints[0].xyz;
    let shape = shape_a();
    let number = group_number(group, groups) / sizes.z;
    let piece = group_number(group, groups) % sizes.z;
    if number >= rows_of(shape) {
        return;
    }
    let row = row_indices(number, shape);
    let first = piece * sizes.y;
    let end = min(first + sizes.y, sizes.x);
    // Of few elements, the last one may be looked at by several invocations.
    var best = candidate(number, min(first + local, end - 1u));
    var value = key(best, row);
    for (var j = first + local + 256u; j < end; j += 256u) {
        let i = candidate(number, j);
        let x = key(i, row);
        if x > value {
            value = x;
            best = i;
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
        store_int_y(at_y(vec4<u32>(number * sizes.z + piece, 0u, 0u, 0u)), i32(places[0]));
    }
}
