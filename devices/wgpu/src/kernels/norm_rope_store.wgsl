// Keys are done as queries are, and written where numbers of rows say; so are values, an element by each invocation.
    let keys = shape_k();
    let values = shape_v();
    if number < rows_of(queries) + rows_of(keys) {
        let row = row_indices(number - rows_of(queries), keys);
        let scale = scale_k(row, parameters.floats[2].y, local, place);
        let cell = index_n(at_n(vec4<u32>(row.y, 0u, 0u, 0u)), shape_t().y);
        if cell >= shape_t().y {
            fail();
            return;
        }
        let head = row.x * keys.x;
        for (var t = local; t < per_row; t += GROUP_SIZEu) {
            let pair = pair_of(t, pairs, row.y);
            let x = scaled_k(vec4<u32>(pair.first, row), scale);
            let z = scaled_k(vec4<u32>(pair.second, row), scale);
            put_t(vec4<u32>(head + pair.first, cell, 0u, 0u), x * pair.turn.x - z * pair.turn.y);
            if pair.is_turned {
                put_t(vec4<u32>(head + pair.second, cell, 0u, 0u), x * pair.turn.y + z * pair.turn.x);
            }
        }
        return;
    }
    let element = (number - rows_of(queries) - rows_of(keys)) * GROUP_SIZEu + local;
    if element >= elements_of(values) {
        return;
    }
    let i = indices(element, values);
    let row = index_n(at_n(vec4<u32>(i.y, 0u, 0u, 0u)), shape_u().y);
    if row >= shape_u().y {
        fail();
        return;
    }
    put_u(vec4<u32>(i.x, row, 0u, 0u), get_v(i))
