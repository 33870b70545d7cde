
// Products of matrices by cooperative matrices of 16 x 16 halves, summed as floats: one workgroup for a tile of {{row_tile}} rows and {{column_tile}} columns, for
// which its eight subgroups of 32 stand four by two. Both operands come through workgroup memory, as halves, 32 elements of their length at a time; what comes
// next is loaded while products are made.

const TILE: u32 = {{column_tile}}u;
// Vectors of four halves from one row of a tile to the next: some are unused, so that rows begin in different banks.
const STRIDE: u32 = 10u;

var<workgroup> tile_a: array<vec4<f16>, {{row_tile}}u * STRIDE>;
var<workgroup> tile_b: array<vec4<f16>, {{column_tile}}u * STRIDE>;
var<workgroup> results: array<f32, 2048>;
var<workgroup> found: vec4<f32>;

fn weights4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_a}};
}

fn columns4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_b}};
}

// Halves, with numbers beyond their range at its ends. Comparisons keep NaN, which `clamp` may drop.
fn halves(x: vec4<f32>) -> vec4<f16> {
    let largest = vec4<f32>(65504.0);
    let low = select(x, largest, x > largest);
    let y = select(low, -largest, low < -largest);
    return vec4<f16>(y);
}
{{tiles}}
@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    let own_subgroup = place.subgroup;
    let own_lane = place.lane;
    let weights = shape_a();
    let tiles_m = (weights.y + {{row_tile}}u - 1u) / {{row_tile}}u;
    let number = group_number(group, groups);
    let first_m = number % tiles_m * {{row_tile}}u;
    let tile = find_tile(number / tiles_m, local);
    // The first column, how many there are, and which matrix.
    let first_n = tile.x;
    let count = tile.y;
    // No return here: all invocations must meet at matrices, for all that compilers see.
    let length = select(0u, weights.x, first_n < count);
    let matrix = matrix_of(tile);
    // What this invocation loads of a step: some vectors of one row of each operand.
    let loaded_a = local / (8u / {{pieces_a}}u);
    let depth_a = local % (8u / {{pieces_a}}u) * {{pieces_a}}u;
    let loaded_b = local / (8u / {{pieces_b}}u);
    let depth_b = local % (8u / {{pieces_b}}u) * {{pieces_b}}u;
    let weights_row = vec3<u32>(min(first_m + loaded_a, weights.y - 1u), matrix);
    let columns_row = column_row(min(first_n + loaded_b, max(count, 1u) - 1u), tile);
    // What this subgroup computes.
    let m = own_subgroup / 2u * ({{row_tile}}u / 4u);
    let n = own_subgroup % 2u * ({{column_tile}}u / 2u);
    {{#i fragments_m}} {{#j fragments_n}} var sum{{i}}_{{j}} = coop_mat16x16<f32, C>();
    {{/j}} {{/i}}
    // The length is a multiple of a step's.
    {{#i pieces_a}} var w{{i}} = vec4<f16>();
    {{/i}}
    {{#i pieces_b}} var x{{i}} = vec4<f16>();
    {{/i}}
    {
        let k = 4u * depth_a;
        {{loaded_pieces}};
        {{#i pieces_b}} x{{i}} = halves(columns4(columns_row, 4u * (depth_b + {{i}}u)));
        {{/i}}
    }
    for (var start = 0u; start < length; start += 32u) {
        workgroupBarrier();
        {{#i pieces_a}} tile_a[loaded_a * STRIDE + depth_a + {{i}}u] = w{{i}};
        {{/i}}
        {{#i pieces_b}} tile_b[loaded_b * STRIDE + depth_b + {{i}}u] = x{{i}};
        {{/i}}
        workgroupBarrier();
        let next = start + 32u;
        if next < length {
            let k = next + 4u * depth_a;
            {{loaded_pieces}};
            {{#i pieces_b}} x{{i}} = halves(columns4(columns_row, next + 4u * (depth_b + {{i}}u)));
            {{/i}}
        }
        {{#k 2}}
            {{#i fragments_m}} let a{{k}}_{{i}} = coopLoadT<coop_mat16x16<f16, A>>(&tile_a[(m + 16u * {{i}}u) * STRIDE + 4u * {{k}}u], STRIDE);
            {{/i}}
            {{#j fragments_n}} let b{{k}}_{{j}} = coopLoad<coop_mat16x16<f16, B>>(&tile_b[(n + 16u * {{j}}u) * STRIDE + 4u * {{k}}u], STRIDE);
            {{/j}}
            {{#i fragments_m}} {{#j fragments_n}} sum{{i}}_{{j}} = coopMultiplyAdd(a{{k}}_{{i}}, b{{k}}_{{j}}, sum{{i}}_{{j}});
            {{/j}} {{/i}}
        {{/k}}
    }
    let area = own_subgroup * 256u;
    {{#i fragments_m}} {{#j fragments_n}}
        workgroupBarrier();
        coopStore(sum{{i}}_{{j}}, &results[area], 16u);
        workgroupBarrier();
        {{#e 8}}
            let row{{i}}_{{j}}_{{e}} = first_m + m + 16u * {{i}}u + own_lane % 16u;
            let column{{i}}_{{j}}_{{e}} = first_n + n + 16u * {{j}}u + own_lane / 16u + 2u * {{e}}u;
            if row{{i}}_{{j}}_{{e}} < weights.y && column{{i}}_{{j}}_{{e}} < count {
                put_y(vec4<u32>(row{{i}}_{{j}}_{{e}}, column_place(column{{i}}_{{j}}_{{e}}, tile)), results[area + own_lane + 32u * {{e}}u]);
            }
        {{/e}}
    {{/j}} {{/i}}
}
