
// Attention: one workgroup for each query of each head. It takes as many keys at a time as it has invocations: each makes one logit; then all
// of them add up values, PER_INVOCATION elements each. Sums are rescaled when a larger logit comes. Where there are few queries and many keys, several
// workgroups share the keys, and leave what `flash_attn_combine` needs in scratch memory.

// Invocations for all elements of a value, and how many add up the same elements, of different values.
const WIDE: u32 = (VALUE_SIZEu + PER_INVOCATIONu - 1u) / PER_INVOCATIONu;
const SUMS: u32 = GROUP_SIZEu / WIDE;

var<workgroup> weights: array<f32, GROUP_SIZE>;
SLOPE
LOADS
DECLARATIONS
var<workgroup> parts: array<Sum, GROUP_SIZE>;

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
    keep_query(vec3<u32>(token, head, batch), local);
    // Who adds up which elements of which values.
    let mine = local % WIDE * PER_INVOCATIONu;
    let share = local / WIDE;
    var largest = LOWEST;
    var total = 0.0;
    var sum = Sum();
    for (var first = begin; first < end; first += GROUP_SIZEu) {
        workgroupBarrier();
        let key = first + local;
        var logit = LOWEST;
        if key < end {
            let mask = MASK_VALUE;
            if !is_masked(mask) {
                logit = product(vec3<u32>(key, kv_head, batch)) * p.x;
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
            sum = with_values(sum, vec3<u32>(first, kv_head, batch), mine, share, min(GROUP_SIZEu, end - first));
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
    AT_THE_END;
}
