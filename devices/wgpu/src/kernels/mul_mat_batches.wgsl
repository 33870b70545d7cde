
// Tiles of batches of matrices: first column, number of columns, batch.
fn find_tile(number: u32, local: u32) -> vec4<u32> {
    let columns = shape_b();
    let tiles = (columns.y + TILE - 1u) / TILE;
    let batch = number / tiles;
    if batch >= columns.z * columns.w {
        return vec4<u32>(0u);
    }
    return vec4<u32>(number % tiles * TILE, columns.y, batch % columns.z, batch / columns.z);
}

// Consecutive matrices of columns share one of weights.
fn matrix_of(tile: vec4<u32>) -> vec2<u32> {
    return tile.zw / (shape_b().zw / shape_a().zw);
}

fn column_row(n: u32, tile: vec4<u32>) -> vec3<u32> {
    return vec3<u32>(n, tile.zw);
}

fn column_place(n: u32, tile: vec4<u32>) -> vec3<u32> {
    return vec3<u32>(n, tile.zw);
}
