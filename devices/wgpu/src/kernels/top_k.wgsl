
// The indices of the largest elements of each row, among those of its pieces, which `sort` found: one invocation for each of these, which counts the others
// that are larger.

// A number in the order of floats.
fn key(j: u32, row: vec3<u32>) -> u32 {
    let bits = bitcast<u32>(get_a(vec4<u32>(j, row)));
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    let shape = shape_a();
    // How many are wanted, elements of a piece, pieces.
    let sizes = parameters.ints[0].xyz;
    let candidates = sizes.x * sizes.z;
    let number = n / candidates;
    if number >= rows_of(shape) {
        return;
    }
    let row = row_indices(number, shape);
    let first = number * candidates;
    // The last piece may have fewer.
    let end = first + candidates - sizes.x + min(sizes.x, shape.x - (sizes.z - 1u) * sizes.y);
    if n >= end {
        return;
    }
    let index = u32(int_w(at_w(vec4<u32>(n, 0u, 0u, 0u))));
    let mine = key(index, row);
    var before = 0u;
    for (var m = first; m < end; m++) {
        let other = key(u32(int_w(at_w(vec4<u32>(m, 0u, 0u, 0u)))), row);
        // Of equals, those of a piece are in order, and so are pieces.
        before += select(0u, 1u, other > mine || (other == mine && m < n));
    }
    if before < sizes.x {
        store_int_y(at_y(vec4<u32>(before, row)), i32(index));
    }
}
