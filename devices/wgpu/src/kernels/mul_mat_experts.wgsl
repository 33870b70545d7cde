
// Tiles of the columns that one expert's list names: first column in the list, number of columns, expert. The experts may be a part of all, from
// number `ints[0].x` on.
fn search(number: u32) -> vec4<u32> {
    let experts = shape_a().z;
    let first = parameters.ints[0].x;
    var tile = number;
    for (var expert = 0u; expert < experts; expert++) {
        let count = u32(int_w(at_w(vec4<u32>(first + expert, 0u, 0u, 0u))));
        let tiles = (count + TILE - 1u) / TILE;
        if tile < tiles {
            return vec4<u32>(tile * TILE, count, expert, 0u);
        }
        tile -= tiles;
    }
    return vec4<u32>(0u);
}

// The same for all invocations, which compilers must see where there are barriers: by way of memory for floats, since tiles may take all there is.
fn find_tile(number: u32, local: u32) -> vec4<u32> {
    if local == 0u {
        {{found}} = vec4<f32>(search(number));
    }
    return vec4<u32>(workgroupUniformLoad(&{{found}}));
}

fn matrix_of(tile: vec4<u32>) -> vec2<u32> {
    return vec2<u32>(tile.z, 0u);
}

// A choice of a token: which one of its choices, and which token.
fn choice(n: u32, tile: vec4<u32>) -> vec2<u32> {
    let chosen = shape_c();
    let experts = parameters.ints[0].xy;
    let list = experts.y + (experts.x + tile.z) * chosen.x * chosen.y;
    let number = u32(int_w(at_w(vec4<u32>(list + n, 0u, 0u, 0u))));
    return vec2<u32>(number % chosen.x, number / chosen.x);
}

fn column_row(n: u32, tile: vec4<u32>) -> vec3<u32> {
    let place = choice(n, tile);
    return vec3<u32>(place.x % shape_b().y, place.y, 0u);
}

fn column_place(n: u32, tile: vec4<u32>) -> vec3<u32> {
    return vec3<u32>(choice(n, tile), 0u);
}
