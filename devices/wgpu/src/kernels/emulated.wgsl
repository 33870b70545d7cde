
// A matrix in workgroup memory: which tile it is in, whether its rows lie there one after the other (or else its columns), where it begins, and how far it is from one to
// the next, both in vectors of four.
struct Emulated {
    tile: u32,
    in_rows: bool,
    first: u32,
    stride: u32,
}

var<private> emulated_lane: u32;

fn emulated_element(m: Emulated, row: u32, column: u32) -> f32 {
    let j = select(row, column, m.in_rows);
    let at = m.first + select(column, row, m.in_rows) * m.stride + j / 4u;
    if m.tile == 0u {
        return tile_a[at][j % 4u];
    }
    if m.tile == 1u {
        return tile_b[at][j % 4u];
    }
    return {{weight}};
}

fn emulated_product(a: Emulated, b: Emulated, c: array<f32, 8>) -> array<f32, 8> {
    var sum = c;
    for (var e = 0u; e < 8u; e++) {
        let i = emulated_lane + 32u * e;
        for (var k = 0u; k < 16u; k++) {
            sum[e] += emulated_element(a, i % 16u, k) * emulated_element(b, k, i / 16u);
        }
    }
    return sum;
}

// Column after column.
fn emulated_store(m: array<f32, 8>, area: u32) {
    for (var e = 0u; e < 8u; e++) {
        results[area + emulated_lane + 32u * e] = m[e];
    }
}
