
// Products of a matrix with up to eight columns: one workgroup for four rows, over whose length its invocations go together.

const ROWS: u32 = 4u;
const COLUMNS: u32 = {{column_count}}u;
const SUMS: u32 = ROWS * COLUMNS;
// Vectors of four elements that an invocation takes at a time.
const WIDE: u32 = {{wide_count}}u;
const STEP: u32 = 4u * WIDE;

var<workgroup> partials: array<f32, SUMS * {{group_size}}u>;

fn column4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_b}};
}

@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    let number = group_number(group, groups);
    let weights = shape_a();
    let columns = shape_b();
    let blocks = (weights.y + ROWS - 1u) / ROWS;
    if number >= blocks * columns.z * columns.w {
        return;
    }
    let first = number % blocks * ROWS;
    let batch = number / blocks;
    let b2 = batch % columns.z;
    let b3 = batch / columns.z;
    // Consecutive matrices of columns share one of weights.
    let a2 = b2 / (columns.z / weights.z);
    let a3 = b3 / (columns.w / weights.w);
    var sums: array<f32, SUMS>;
    for (var i = 0u; i < SUMS; i++) {
        sums[i] = 0.0;
    }
    for (var k = local * STEP; k < weights.x; k += {{group_size}}u * STEP) {
        var x: array<vec4<f32>, COLUMNS * WIDE>;
        for (var c = 0u; c < COLUMNS; c++) {
            let row = vec3<u32>(c, b2, b3);
            for (var j = 0u; j < WIDE; j++) {
                x[c * WIDE + j] = column4(row, k + 4u * j);
            }
        }
        var w: array<vec4<f32>, WIDE>;
        for (var r = 0u; r < ROWS; r++) {
            let row = vec3<u32>(min(first + r, weights.y - 1u), a2, a3);
            {{loaded_a}};
            for (var c = 0u; c < COLUMNS; c++) {
                var sum = 0.0;
                for (var j = 0u; j < WIDE; j++) {
                    sum += dot(w[j], x[c * WIDE + j]);
                }
                sums[r * COLUMNS + c] += sum;
            }
        }
    }
    let slots = partial_slots(place);
    for (var i = 0u; i < SUMS; i++) {
        let partial = partial_sum(sums[i]);
        if has_partial(place) {
            partials[i * slots + partial_slot(place)] = partial;
        }
    }
    workgroupBarrier();
    for (var i = local; i < SUMS; i += {{group_size}}u) {
        let row = first + i / COLUMNS;
        if row < weights.y {
            var sum = 0.0;
            for (var j = 0u; j < slots; j++) {
                sum += partials[i * slots + j];
            }
            put_y(vec4<u32>(row, i % COLUMNS, b2, b3), sum);
        }
    }
}
