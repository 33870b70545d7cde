
// Rotary position embedding: one invocation for each pair, and for each element that is in none.
{{>rotation}}
@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    let shape = shape_y();
    // The first rotated element, how many there are, distance of partners, distance of pairs.
    let k = parameters.ints[0];
    let pairs = k.y / 2u;
    let per_row = pairs + shape.x - k.y;
    if n >= per_row * rows_of(shape) {
        return;
    }
    let row = row_indices(n / per_row, shape);
    let t = n % per_row;
    if t >= pairs {
        let rest = t - pairs;
        let i = vec4<u32>(select(rest + k.y, rest, rest < k.x), row);
        put_y(i, get_a(i));
        return;
    }
    let position = f32(int_b(at_b(vec4<u32>(row.y, 0u, 0u, 0u))));
    let turn = rotation(t, position);
    let first = vec4<u32>(k.x + t * k.w, row);
    let second = vec4<u32>(first.x + k.z, row);
    let x = get_a(first);
    let z = get_a(second);
    put_y(first, x * turn.x - z * turn.y);
    put_y(second, x * turn.y + z * turn.x);
}
