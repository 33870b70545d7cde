
// Products of matrices by cooperative matrices of 16 x 16 halves, summed as floats: one workgroup for a tile of ROW_TILE rows and COLUMN_TILE columns, for
// which its eight subgroups of 32 stand four by two. Both operands come through workgroup memory, as halves, 32 elements of their length at a time; what comes
// next is loaded while products are made.

const TILE: u32 = COLUMN_TILEu;
// Vectors of four halves from one row of a tile to the next: some are unused, so that rows begin in different banks.
const STRIDE: u32 = 10u;

var<workgroup> tile_a: array<vec4<f16>, ROW_TILEu * STRIDE>;
var<workgroup> tile_b: array<vec4<f16>, COLUMN_TILEu * STRIDE>;
var<workgroup> results: array<f32, 2048>;
var<workgroup> found: vec4<f32>;

fn weights4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return LOADED_A;
}

fn columns4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return LOADED_B;
}

fn halves(x: vec4<f32>) -> vec4<f16> {
    return vec4<f16>(clamp(x, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}
TILES
@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32PLACE_PARAMETERS,
) {
    let place = PLACE;
    let own_subgroup = place.subgroup;
    let own_lane = place.lane;
    let weights = shape_a();
    let tiles_m = (weights.y + ROW_TILEu - 1u) / ROW_TILEu;
    let number = group_number(group, groups);
    let first_m = number % tiles_m * ROW_TILEu;
    let tile = find_tile(number / tiles_m, local);
    // The first column, how many there are, and which matrix.
    let first_n = tile.x;
    let count = tile.y;
    // No return here: all invocations must meet at matrices, for all that compilers see.
    let length = select(0u, weights.x, first_n < count);
    let matrix = matrix_of(tile);
    // What this invocation loads of a step: some vectors of one row of each operand.
    let loaded_a = local / (8u / PIECES_Au);
    let depth_a = local % (8u / PIECES_Au) * PIECES_Au;
    let loaded_b = local / (8u / PIECES_Bu);
    let depth_b = local % (8u / PIECES_Bu) * PIECES_Bu;
    let weights_row = vec3<u32>(min(first_m + loaded_a, weights.y - 1u), matrix);
    let columns_row = column_row(min(first_n + loaded_b, max(count, 1u) - 1u), tile);
    // What this subgroup computes.
    let m = own_subgroup / 2u * (ROW_TILEu / 4u);
    let n = own_subgroup % 2u * (COLUMN_TILEu / 2u);
    EACH(i, FRAGMENTS_M) { EACH(j, FRAGMENTS_N) { var sum#i_#j = coop_mat16x16<f32, C>();
    } }
    // The length is a multiple of a step's.
    EACH(i, PIECES_A) { var w#i = vec4<f16>();
    }
    EACH(i, PIECES_B) { var x#i = vec4<f16>();
    }
    {
        let k = 4u * depth_a;
        LOADED_PIECES;
        EACH(i, PIECES_B) { x#i = halves(columns4(columns_row, 4u * (depth_b + #iu)));
        }
    }
    for (var start = 0u; start < length; start += 32u) {
        workgroupBarrier();
        EACH(i, PIECES_A) { tile_a[loaded_a * STRIDE + depth_a + #iu] = w#i;
        }
        EACH(i, PIECES_B) { tile_b[loaded_b * STRIDE + depth_b + #iu] = x#i;
        }
        workgroupBarrier();
        let next = start + 32u;
        if next < length {
            let k = next + 4u * depth_a;
            LOADED_PIECES;
            EACH(i, PIECES_B) { x#i = halves(columns4(columns_row, next + 4u * (depth_b + #iu)));
            }
        }
        EACH(k, 2) {
            EACH(i, FRAGMENTS_M) { let a#k_#i = coopLoadT<coop_mat16x16<f16, A>>(&tile_a[(m + 16u * #iu) * STRIDE + 4u * #ku], STRIDE);
            }
            EACH(j, FRAGMENTS_N) { let b#k_#j = coopLoad<coop_mat16x16<f16, B>>(&tile_b[(n + 16u * #ju) * STRIDE + 4u * #ku], STRIDE);
            }
            EACH(i, FRAGMENTS_M) { EACH(j, FRAGMENTS_N) { sum#i_#j = coopMultiplyAdd(a#k_#i, b#k_#j, sum#i_#j);
            } }
        }
    }
    let area = own_subgroup * 256u;
    EACH(i, FRAGMENTS_M) { EACH(j, FRAGMENTS_N) {
        workgroupBarrier();
        coopStore(sum#i_#j, &results[area], 16u);
        workgroupBarrier();
        EACH(e, 8) {
            let row#i_#j_#e = first_m + m + 16u * #iu + own_lane % 16u;
            let column#i_#j_#e = first_n + n + 16u * #ju + own_lane / 16u + 2u * #eu;
            if row#i_#j_#e < weights.y && column#i_#j_#e < count {
                put_y(vec4<u32>(row#i_#j_#e, column_place(column#i_#j_#e, tile)), results[area + own_lane + 32u * #eu]);
            }
        }
    } }
}
