
// Products of matrices: one workgroup for a tile of 64 rows and 64 columns, four by four for each invocation. Both operands come through workgroup
// memory, decoded, 16 elements of their length at a time.

const TILE: u32 = 64u;
const DEPTH: u32 = 16u;

var<workgroup> tile_a: array<f32, DEPTH * TILE>;
var<workgroup> tile_b: array<f32, DEPTH * TILE>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let weights = shape_a();
    let columns = shape_b();
    let tiles_m = (weights.y + TILE - 1u) / TILE;
    let tiles_n = (columns.y + TILE - 1u) / TILE;
    let number = group_number(group, groups);
    if number >= tiles_m * tiles_n * columns.z * columns.w {
        return;
    }
    let first_m = number % tiles_m * TILE;
    let first_n = number / tiles_m % tiles_n * TILE;
    let batch = number / (tiles_m * tiles_n);
    let b2 = batch % columns.z;
    let b3 = batch / columns.z;
    // Consecutive matrices of columns share one of weights.
    let a2 = b2 / (columns.z / weights.z);
    let a3 = b3 / (columns.w / weights.w);
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
                let row = vec3<u32>(first_m + loaded, a2, a3);
                w = LOADED_A;
            }
            if first_n + loaded < columns.y {
                let row = vec3<u32>(first_n + loaded, b2, b3);
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
        for (var i = 0u; i < 4u; i++) {
            if first_m + m + i < weights.y && first_n + n + j < columns.y {
                put_y(vec4<u32>(first_m + m + i, first_n + n + j, b2, b3), sums[j][i]);
            }
        }
    }
}
