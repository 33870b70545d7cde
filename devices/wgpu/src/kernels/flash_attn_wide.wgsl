
// Attention over halves, for few queries: one workgroup for each query of each head. It takes as many keys at a time as it has invocations: each makes one logit, with
// loads of eight elements; then all of them add up values, eight elements each. Sums are rescaled when a larger logit comes. Where there are few queries and many
// keys, several workgroups share the keys, and leave what `flash_attn_combine` needs in scratch memory.

// Vectors of four elements of a query, and of a value.
const QUERY: u32 = QUERY_SIZEu / 4u;
const WIDE: u32 = VALUE_SIZEu / 8u;
// Invocations that add up the same elements, of different values.
const SUMS: u32 = GROUP_SIZEu / WIDE;

var<workgroup> query: array<vec4<f32>, QUERY>;
var<workgroup> weights: array<f32, GROUP_SIZE>;
var<workgroup> parts: array<mat2x4<f32>, GROUP_SIZE>;
SLOPE
fn query4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return LOADED_QUERY;
}
@compute @workgroup_size(GROUP_SIZE)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32PLACE_PARAMETERS,
) {
    let place = PLACE;
    let number = group_number(group, groups);
    let queries = shape_a();
    let keys = shape_b();
    let values = shape_c();
    if number >= queries.y * queries.z * queries.w * SHARESu {
        return;
    }
    let query_number = number / SHARESu;
    let head = query_number % queries.z;
    let token = query_number / queries.z % queries.y;
    let batch = query_number / (queries.y * queries.z);
    // The keys of this workgroup, in whole steps.
    let part = (keys.y + SHARESu * GROUP_SIZEu - 1u) / (SHARESu * GROUP_SIZEu) * GROUP_SIZEu;
    let begin = number % SHARESu * part;
    let end = min(begin + part, keys.y);
    let kv_head = head / (queries.z / keys.z);
    let p = parameters.floats[0];
    let factor = slope(head);
    for (var i = local; i < QUERY; i += GROUP_SIZEu) {
        query[i] = query4(vec3<u32>(token, head, batch), i * 4u);
    }
    let mine = local % WIDE * 8u;
    let share = local / WIDE;
    var largest = LOWEST;
    var total = 0.0;
    var sum = mat2x4<f32>();
    for (var first = begin; first < end; first += GROUP_SIZEu) {
        workgroupBarrier();
        let key = first + local;
        var logit = LOWEST;
        if key < end {
            let mask = MASK_VALUE;
            if !is_masked(mask) {
                let row = row_b(vec3<u32>(key, kv_head, batch));
                var product = 0.0;
                for (var k = 0u; k < QUERY_SIZEu; k += 8u * CHUNKu) {
                    EACH(j, CHUNK) { let w#j = load8_b(row, k + 8u * #ju);
                    }
                    EACH(j, CHUNK) { product += dot(w#j[0], query[k / 4u + 2u * #ju]) + dot(w#j[1], query[k / 4u + 2u * #ju + 1u]);
                    }
                }
                logit = product * p.x;
                if p.z != 0.0 {
                    logit = p.z * tanh(clamp(logit / p.z, -15.0, 15.0));
                }
                logit += factor * mask;
            }
        }
        let next = max(largest, max_all(logit, place));
        let weight = select(exp(logit - next), 0.0, is_masked(logit));
        let rescale = select(exp(largest - next), 0.0, is_masked(largest));
        weights[local] = weight;
        total = total * rescale + weight;
        largest = next;
        workgroupBarrier();
        sum *= rescale;
        if share < SUMS {
            let count = min(GROUP_SIZEu, end - first);
            for (var j = share; j < count; j += 4u * SUMS) {
                EACH(i, 4) {
                    let j#i = j + #iu * SUMS;
                    let v#i = load8_c(row_c(vec3<u32>(first + min(j#i, count - 1u), kv_head, batch)), mine);
                    let w#i = select(0.0, weights[min(j#i, GROUP_SIZEu - 1u)], j#i < count);
                }
                // What lies in unused cells of a cache does not matter.
                EACH(i, 4) { if w#i != 0.0 {
                    sum += w#i * v#i;
                } }
            }
        }
    }
    total = sum_all(total, place);
    parts[local] = sum;
    workgroupBarrier();
    if share == 0u {
        for (var j = 1u; j < SUMS; j++) {
            sum += parts[j * WIDE + local];
        }
        FINISH;
    }
}
