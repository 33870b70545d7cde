        let cell = index_n(at_n(vec4<u32>(row.y, 0u, 0u, 0u)), shape_t().y);
        if cell >= shape_t().y {
            fail();
            return;
        }
        let head = row.x * keys.x;
        for (var t = local; t < per_row; t += {{group_size}}u) {
            let pair = pair_of(t, pairs, row.y);
            let x = scaled_k(vec4<u32>(pair.first, row), scale);
            let z = scaled_k(vec4<u32>(pair.second, row), scale);
            put_t(vec4<u32>(head + pair.first, cell, 0u, 0u), x * pair.turn.x - z * pair.turn.y);
            if pair.is_turned {
                put_t(vec4<u32>(head + pair.second, cell, 0u, 0u), x * pair.turn.y + z * pair.turn.x);
            }
        }
