
// Heads scaled by what their elements are together, times weights, and then turned: one workgroup for each head of a token, whose invocations make sums first, and
// take a pair each then.
{{>rotation}}
{{heads}}
{{memory}}
// Where a pair is in its row, and how it turns. Elements in no pair stand for themselves, twice.
struct Pair {
    first: u32,
    second: u32,
    is_turned: bool,
    turn: vec2<f32>,
}

fn pair_of(t: u32, pairs: u32, token: u32) -> Pair {
    // The first rotated element, how many there are, distance of partners, distance of pairs.
    let k = parameters.ints[0];
    if t < pairs {
        let first = k.x + t * k.w;
        return Pair(first, first + k.z, true, rotation(t, f32(int_b(at_b(vec4<u32>(token, 0u, 0u, 0u))))));
    }
    let rest = t - pairs;
    let place = select(rest + k.y, rest, rest < k.x);
    return Pair(place, place, false, vec2<f32>(1.0, 0.0));
}

@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    let number = group_number(group, groups);
    let queries = shape_y();
    let pairs = parameters.ints[0].y / 2u;
    let per_row = queries.x - pairs;
    if number < rows_of(queries) {
        let row = row_indices(number, queries);
        let scale = scale_a(row, parameters.floats[2].x, local, place);
        for (var t = local; t < per_row; t += {{group_size}}u) {
            let pair = pair_of(t, pairs, row.y);
            let x = scaled_a(vec4<u32>(pair.first, row), scale);
            let z = scaled_a(vec4<u32>(pair.second, row), scale);
            put_y(vec4<u32>(pair.first, row), x * pair.turn.x - z * pair.turn.y);
            if pair.is_turned {
                put_y(vec4<u32>(pair.second, row), x * pair.turn.y + z * pair.turn.x);
            }
        }
        return;
    }
    {{store}}
}
