        for (var t = local; t < per_row; t += {{group_size}}u) {
            let pair = pair_of(t, pairs, row.y);
            let x = scaled_k(vec4<u32>(pair.first, row), scale);
            let z = scaled_k(vec4<u32>(pair.second, row), scale);
            turned[pair.first] = x * pair.turn.x - z * pair.turn.y;
            if pair.is_turned {
                turned[pair.second] = x * pair.turn.y + z * pair.turn.x;
            }
        }
        workgroupBarrier();
        let cell = index_n(at_n(vec4<u32>(row.y, 0u, 0u, 0u)), shape_t().y);
        if cell >= shape_t().y {
            fail();
            return;
        }
        let blocks = keys.x / 32u;
        for (var n = local; n < blocks; n += {{group_size}}u) {
            var block: array<f32, 32>;
            for (var j = 0u; j < 32u; j++) {
                block[j] = turned[n * 32u + j];
            }
            encode_t(row_t(vec3<u32>(cell, 0u, 0u)) + (row.x * blocks + n) * parameters.tensors[{{cache}}].strides.x, &block);
        }
