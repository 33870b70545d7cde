
// Indices in the order of values: one invocation for each element, which counts those of its piece of the row that come before it. The work grows with
// the square of a piece, and needs no memory besides operands.

// A number in the order of floats.
fn key(i: vec4<u32>) -> u32 {
    let bits = bitcast<u32>(get_a(i));
    let ordered = select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
    return select(ordered, ~ordered, parameters.ints[0].y == 1u);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    let shape = shape_a();
    if n >= elements_of(shape) {
        return;
    }
    let i = indices(n, shape);
    let mine = key(i);
    let piece = parameters.ints[0].z;
    let first = i.x / piece * piece;
    let end = min(first + piece, shape.x);
    var before = 0u;
    for (var j = first; j < end; j++) {
        let other = key(vec4<u32>(j, i.yzw));
        before += select(0u, 1u, other < mine || (other == mine && j < i.x));
    }
    let count = parameters.ints[0].x;
    if before < count {
        {{stored}};
    }
}
