    // Stores a block of 32 elements of a value.
    var x: array<f32, 32>;
    for (var j = 0u; j < 32u; j++) {
        x[j] = get_v(vec4<u32>(i.x * 32u + j, i.yzw));
    }
    encode_u(row_u(vec3<u32>(row, 0u, 0u)) + i.x * parameters.tensors[{{cache}}].strides.x, &x);
