
// Products with chosen experts, for many tokens: as `mul_mat`, where the columns of a tile are those that one expert's list names.

const TILE: u32 = 64u;
const DEPTH: u32 = 16u;

var<workgroup> tile_a: array<f32, DEPTH * TILE>;
var<workgroup> tile_b: array<f32, DEPTH * TILE>;
// The expert of this workgroup's tile, how many columns it has, and which of its tiles this is: the same for all invocations, which compilers
// must see where there are barriers.
var<workgroup> found: vec3<u32>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let weights = shape_a();
    let columns = shape_b();
    let chosen = shape_c();
    let choices = chosen.x * chosen.y;
    let experts = weights.z;
    let tiles_m = (weights.y + TILE - 1u) / TILE;
    let number = group_number(group, groups);
    let first_m = number % tiles_m * TILE;
    // The expert to which this tile of columns belongs, and where in its list it begins.
    if local == 0u {
        var tile = number / tiles_m;
        var expert = 0u;
        var count = 0u;
        for (; expert < experts; expert++) {
            count = u32(int_w(at_w(vec4<u32>(expert, 0u, 0u, 0u))));
            let tiles = (count + TILE - 1u) / TILE;
            if tile < tiles {
                break;
            }
            tile -= tiles;
        }
        found = vec3<u32>(expert, count, tile);
    }
    let mine = workgroupUniformLoad(&found);
    let expert = mine.x;
    let count = mine.y;
    if expert >= experts {
        return;
    }
    let first_n = mine.z * TILE;
    let list = experts + expert * choices;
    // What this invocation loads: four elements of one row of each operand.
    let loaded = local / 4u;
    let depth = local % 4u * 4u;
    // What it computes.
    let m = local % 16u * 4u;
    let n = local / 16u * 4u;
    var sums: array<vec4<f32>, 4>;
    for (var j = 0u; j < 4u; j++) {
        sums[j] = vec4<f32>(0.0);
    }
    for (var start = 0u; start < weights.x; start += DEPTH) {
        let k = start + depth;
        var w = vec4<f32>(0.0);
        var x = vec4<f32>(0.0);
        if k < weights.x {
            if first_m + loaded < weights.y {
                let row = vec3<u32>(first_m + loaded, expert, 0u);
                w = LOADED_A;
            }
            if first_n + loaded < count {
                let choice = u32(int_w(at_w(vec4<u32>(list + first_n + loaded, 0u, 0u, 0u))));
                let row = vec3<u32>(choice % chosen.x % columns.y, choice / chosen.x, 0u);
                x = LOADED_B;
            }
        }
        workgroupBarrier();
        for (var j = 0u; j < 4u; j++) {
            tile_a[(depth + j) * TILE + loaded] = w[j];
            tile_b[(depth + j) * TILE + loaded] = x[j];
        }
        workgroupBarrier();
        for (var j = 0u; j < DEPTH; j++) {
            let at = j * TILE;
            let a = vec4<f32>(tile_a[at + m], tile_a[at + m + 1u], tile_a[at + m + 2u], tile_a[at + m + 3u]);
            sums[0] += a * tile_b[at + n];
            sums[1] += a * tile_b[at + n + 1u];
            sums[2] += a * tile_b[at + n + 2u];
            sums[3] += a * tile_b[at + n + 3u];
        }
    }
    for (var j = 0u; j < 4u; j++) {
        if first_n + n + j < count {
            let choice = u32(int_w(at_w(vec4<u32>(list + first_n + n + j, 0u, 0u, 0u))));
            for (var i = 0u; i < 4u; i++) {
                if first_m + m + i < weights.y {
                    put_y(vec4<u32>(first_m + m + i, choice % chosen.x, choice / chosen.x, 0u), sums[j][i]);
                }
            }
        }
    }
}
