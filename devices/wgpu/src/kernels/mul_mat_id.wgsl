
// Products with chosen experts: one workgroup for four rows of one expert and one column, over whose length its invocations go together.

const ROWS: u32 = 4u;

var<workgroup> partials: array<f32, ROWS * GROUP_SIZEu>;

@compute @workgroup_size(GROUP_SIZE)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32PLACE_PARAMETERS,
) {
    let place = PLACE;
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
    let experts = weights.z;
    let expert = index_c(at_c(vec4<u32>(slot, token, 0u, 0u)), experts);
    if expert >= experts {
        fail();
        return;
    }
    var sums: array<f32, ROWS>;
    for (var i = 0u; i < ROWS; i++) {
        sums[i] = 0.0;
    }
    for (var k = local * STEP; k < weights.x; k += GROUP_SIZEu * STEP) {
        var row = vec3<u32>(slot % shape_b().y, token, 0u);
        let x = LOADED_B;
        for (var r = 0u; r < ROWS; r++) {
            row = vec3<u32>(min(first + r, weights.y - 1u), expert, 0u);
            sums[r] += dot(LOADED_A, x);
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
    if local < ROWS && first + local < weights.y {
        var sum = 0.0;
        for (var j = 0u; j < slots; j++) {
            sum += partials[local * slots + j];
        }
        put_y(vec4<u32>(first + local, slot, token, 0u), sum);
    }
}
