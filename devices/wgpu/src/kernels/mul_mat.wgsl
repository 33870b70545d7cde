
// Products of matrices: one workgroup for a tile of 64 rows and 64 columns, four by four for each invocation. Both operands come through workgroup
// memory, decoded, 32 elements of their length at a time: half of the invocations load weights, the others columns, four elements of four rows each.

const TILE: u32 = 64u;
const DEPTH: u32 = 32u;

{{tiles}}
// For each element of the length, 16 vectors of four rows.
var<workgroup> tile_a: array<vec4<f32>, 512>;
var<workgroup> tile_b: array<vec4<f32>, 512>;

fn weights4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_a}};
}

fn columns4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_b}};
}
@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let weights = shape_a();
    let columns = shape_b();
    let tiles_m = (weights.y + TILE - 1u) / TILE;
    let number = group_number(group, groups);
    let first_m = number % tiles_m * TILE;
    let tile = find_tile(number / tiles_m, local);
    // The first column, how many there are, and which matrix.
    let first_n = tile.x;
    let count = tile.y;
    if first_n >= count {
        return;
    }
    let matrix = matrix_of(tile);
    // What this invocation loads: these four rows of an operand, and these four elements of a step.
    let loaded = local % 16u;
    let depth = local % 128u / 16u * 4u;
    // What it computes.
    let m = local % 16u;
    let n = local / 16u;
    {{#j 4}} var sum{{j}} = vec4<f32>(0.0);
    {{/j}}
    for (var start = 0u; start < weights.x; start += DEPTH) {
        let k = start + depth;
        {{#j 4}} var x{{j}} = vec4<f32>(0.0);
        {{/j}}
        if k < weights.x {
            if local < 128u {
                {{#j 4}}
                if first_m + loaded * 4u + {{j}}u < weights.y {
                    x{{j}} = weights4(vec3<u32>(first_m + loaded * 4u + {{j}}u, matrix), k);
                } {{/j}}
            } else {
                {{#j 4}}
                if first_n + loaded * 4u + {{j}}u < count {
                    x{{j}} = columns4(column_row(first_n + loaded * 4u + {{j}}u, tile), k);
                } {{/j}}
            }
        }
        workgroupBarrier();
        let at = depth * 16u + loaded;
        if local < 128u {
            {{#j 4}} tile_a[at + 16u * {{j}}u] = vec4<f32>(x0[{{j}}], x1[{{j}}], x2[{{j}}], x3[{{j}}]);
            {{/j}}
        } else {
            {{#j 4}} tile_b[at + 16u * {{j}}u] = vec4<f32>(x0[{{j}}], x1[{{j}}], x2[{{j}}], x3[{{j}}]);
            {{/j}}
        }
        workgroupBarrier();
        for (var step = 0u; step < 512u; step += 64u) {
            {{#s 4}}
                let a{{s}} = tile_a[step + {{s}}u * 16u + m];
                let b{{s}} = tile_b[step + {{s}}u * 16u + n];
                {{#j 4}} sum{{j}} += a{{s}} * b{{s}}[{{j}}];
                {{/j}}
            {{/s}}
        }
    }
    {{#j 4}}
        let column{{j}} = first_n + n * 4u + {{j}}u;
        if column{{j}} < count {
            {{#i 4}}
            if first_m + m * 4u + {{i}}u < weights.y {
                put_y(vec4<u32>(first_m + m * 4u + {{i}}u, column_place(column{{j}}, tile)), sum{{j}}[{{i}}]);
            } {{/i}}
        }
    {{/j}}
}
