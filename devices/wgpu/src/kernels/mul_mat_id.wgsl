
// Products with chosen experts: one workgroup for four rows of one expert and one column, over whose length its invocations go together.

const ROWS: u32 = 4u;
// Vectors of four elements that an invocation takes at a time.
const WIDE: u32 = {{wide_count}}u;
const STEP: u32 = 4u * WIDE;

var<workgroup> partials: array<f32, ROWS * {{group_size}}u>;

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
    let chosen = shape_c();
    let blocks = (weights.y + ROWS - 1u) / ROWS;
    if number >= blocks * chosen.x * chosen.y {
        return;
    }
    let first = number % blocks * ROWS;
    let slot = number / blocks % chosen.x;
    let token = number / (blocks * chosen.x);
    // The weights may be those of a part of all experts: number of the first, how many there are in all.
    let experts = parameters.ints[0].xy;
    let chosen_expert = index_c(at_c(vec4<u32>(slot, token, 0u, 0u)), experts.y);
    // The number -1 skips the product.
    let is_skipped = int_c(at_c(vec4<u32>(slot, token, 0u, 0u))) == -1;
    if chosen_expert >= experts.y && !is_skipped {
        fail();
    }
    // Those before the first are above all.
    let expert = chosen_expert - experts.x;
    // All invocations go on, since compilers must see that they meet at the barrier.
    let is_here = expert < weights.z && chosen_expert < experts.y;
    let length = select(0u, weights.x, is_here);
    var sums: array<f32, ROWS>;
    for (var i = 0u; i < ROWS; i++) {
        sums[i] = 0.0;
    }
    for (var k = local * STEP; k < length; k += {{group_size}}u * STEP) {
        var row = vec3<u32>(slot % shape_b().y, token, 0u);
        var x: array<vec4<f32>, WIDE>;
        for (var j = 0u; j < WIDE; j++) {
            x[j] = column4(row, k + 4u * j);
        }
        var w: array<vec4<f32>, WIDE>;
        for (var r = 0u; r < ROWS; r++) {
            row = vec3<u32>(min(first + r, weights.y - 1u), min(expert, weights.z - 1u), 0u);
            {{loaded_a}};
            for (var j = 0u; j < WIDE; j++) {
                sums[r] += dot(w[j], x[j]);
            }
        }
    }
    let slots = partial_slots(place);
    for (var i = 0u; i < ROWS; i++) {
        let partial = partial_sum(sums[i]);
        if has_partial(place) {
            partials[i * slots + partial_slot(place)] = partial;
        }
    }
    workgroupBarrier();
    if (is_here || is_skipped) && local < ROWS && first + local < weights.y {
        var sum = 0.0;
        for (var j = 0u; j < slots; j++) {
            sum += partials[local * slots + j];
        }
        put_y(vec4<u32>(first + local, slot, token, 0u), sum);
    }
}
