
// What comes before attention: queries and keys are turned, and keys and values written where numbers of rows say. One invocation for each pair of queries or keys,
// and for each element of a value. Tokens are rows of all three; turned keys are not written anywhere else.
{{>rotation}}
@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    // The first rotated element, how many there are, distance of partners, distance of pairs.
    let k = parameters.ints[0];
    let pairs = k.y / 2u;
    let queries = shape_y();
    let keys = shape_k();
    let values = shape_v();
    let per_query = pairs + queries.x - k.y;
    let of_queries = per_query * rows_of(queries);
    let of_keys = per_query * rows_of(keys);
    if n >= of_queries + of_keys {
        let element = n - of_queries - of_keys;
        if element >= elements_of(values) {
            return;
        }
        let i = indices(element, values);
        let row = index_n(at_n(vec4<u32>(i.y, 0u, 0u, 0u)), shape_u().y);
        if row >= shape_u().y {
            fail();
            return;
        }
        put_u(vec4<u32>(i.x, row, 0u, 0u), get_v(i));
        return;
    }
    let is_key = n >= of_queries;
    let at = select(n, n - of_queries, is_key);
    let row = row_indices(at / per_query, select(queries, keys, is_key));
    let t = at % per_query;
    var first = vec4<u32>(k.x + t * k.w, row);
    var second = vec4<u32>(first.x + k.z, row);
    var turn = vec2<f32>(1.0, 0.0);
    let is_turned = t < pairs;
    if is_turned {
        turn = rotation(t, f32(int_b(at_b(vec4<u32>(row.y, 0u, 0u, 0u)))));
    } else {
        let rest = t - pairs;
        first.x = select(rest + k.y, rest, rest < k.x);
        second.x = first.x;
    }
    if !is_key {
        let x = get_a(first);
        let z = get_a(second);
        put_y(first, x * turn.x - z * turn.y);
        if is_turned {
            put_y(second, x * turn.y + z * turn.x);
        }
        return;
    }
    let x = get_k(first);
    let z = get_k(second);
    let cell = index_n(at_n(vec4<u32>(row.y, 0u, 0u, 0u)), shape_t().y);
    if cell >= shape_t().y {
        fail();
        return;
    }
    let head = row.x * keys.x;
    put_t(vec4<u32>(head + first.x, cell, 0u, 0u), x * turn.x - z * turn.y);
    if is_turned {
        put_t(vec4<u32>(head + second.x, cell, 0u, 0u), x * turn.y + z * turn.x);
    }
}
