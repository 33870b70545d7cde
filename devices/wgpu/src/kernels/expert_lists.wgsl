
// Which columns go to which expert: one workgroup for each expert, one invocation for each of 256 pieces of all choices. Scratch memory holds the number of
// columns of each expert, then a list for each of as many places as there are choices. Rows of the
// result whose choice is -1 are in no list and become zero.

var<workgroup> counts: array<u32, 256>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let expert = group_number(group, groups);
    let experts = parameters.ints[0].x;
    if expert >= experts {
        return;
    }
    // Choices of a token, tokens.
    let chosen = shape_c();
    let choices = chosen.x * chosen.y;
    let piece = (choices + 255u) / 256u;
    let first = min(local * piece, choices);
    let last = min(first + piece, choices);
    var count = 0u;
    for (var n = first; n < last; n++) {
        let number = index_c(at_c(vec4<u32>(n % chosen.x, n / chosen.x, 0u, 0u)), experts);
        if number == expert {
            count++;
        }
        if number >= experts && int_c(at_c(vec4<u32>(n % chosen.x, n / chosen.x, 0u, 0u))) != -1 {
            fail();
        }
    }
    counts[local] = count;
    workgroupBarrier();
    var place = 0u;
    for (var j = 0u; j < local; j++) {
        place += counts[j];
    }
    let list = experts + expert * choices;
    for (var n = first; n < last; n++) {
        if index_c(at_c(vec4<u32>(n % chosen.x, n / chosen.x, 0u, 0u)), experts) == expert {
            store_int_w(at_w(vec4<u32>(list + place, 0u, 0u, 0u)), i32(n));
            place++;
        }
    }
    if local == 255u {
        store_int_w(at_w(vec4<u32>(expert, 0u, 0u, 0u)), i32(place));
    }
    for (var n = expert; n < choices; n += experts) {
        let choice = vec2<u32>(n % chosen.x, n / chosen.x);
        if int_c(at_c(vec4<u32>(choice, 0u, 0u))) == -1 {
            for (var row = local; row < shape_y().x; row += 256u) {
                put_y(vec4<u32>(row, choice, 0u), 0.0);
            }
        }
    }
}
