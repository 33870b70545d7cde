
{{>types/store_half}}

// The code of the nearest value; of two equally near ones the higher.
fn code_{{name}}(x: f32) -> u32 {
    var midpoints = array<f32, 15>(-115.5, -93.5, -74.0, -57.0, -42.0, -28.5, -16.0, -4.5, 7.0, 19.0, 31.5, 45.5, 61.0, 79.0, 101.0);
    var code = 0u;
    for (var i = 0u; i < 15u; i++) {
        code += select(0u, 1u, x >= midpoints[i]);
    }
    return code;
}

// Writes the block of 32 elements `d T[q]` at byte `at`: the scale that fits best once the codes are chosen.
fn encode_{{name}}(at: u32, x: ptr<function, array<f32, 32>>) {
    var values = array<f32, 16>(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0);
    var largest = 0.0;
    for (var i = 0u; i < 32u; i++) {
        if abs((*x)[i]) > abs(largest) {
            largest = (*x)[i];
        }
    }
    var inverse = 0.0;
    var scale = 0.0;
    if abs(largest) >= 1e-15 {
        inverse = 1.0 / (largest / -127.0);
        var products = 0.0;
        var squares = 0.0;
        for (var i = 0u; i < 32u; i++) {
            let v = (*x)[i];
            let t = values[code_{{name}}(inverse * v)];
            products += v * v * t * v;
            squares += v * v * t * t;
        }
        scale = select(0.0, products / squares, squares > 0.0);
    }
    if scale == 0.0 {
        inverse = 0.0;
    }
    store_half_{{name}}(at, to_f16(scale));
    for (var i = 0u; i < 16u; i += 2u) {
        let first = code_{{name}}(inverse * (*x)[i]) | (code_{{name}}(inverse * (*x)[i + 16u]) << 4u);
        let second = code_{{name}}(inverse * (*x)[i + 1u]) | (code_{{name}}(inverse * (*x)[i + 17u]) << 4u);
        store_half_{{name}}(at + 2u + i, first | (second << 8u));
    }
}
