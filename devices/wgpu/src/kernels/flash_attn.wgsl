
// Attention: one workgroup for each query of each head. It takes as many keys at a time as it has invocations: each makes one logit; then all
// of them add up values, {{per_invocation}} elements each. Sums are rescaled when a larger logit comes. Where there are few queries and many keys, several
// workgroups share the keys, and leave what `flash_attn_combine` needs in scratch memory.

// Invocations for all elements of a value, and how many add up the same elements, of different values.
const WIDE: u32 = ({{value_size}}u + {{per_invocation}}u - 1u) / {{per_invocation}}u;
const SUMS: u32 = {{group_size}}u / WIDE;

var<workgroup> weights: array<f32, {{group_size}}>;
{{>slope}}
{{loads}}
{{declarations}}
var<workgroup> parts: array<Sum, {{group_size}}>;

@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    let number = group_number(group, groups);
    let queries = shape_a();
    let keys = shape_b();
    let values = shape_c();
    if number >= queries.y * queries.z * queries.w * {{shares}}u {
        return;
    }
    let query_number = number / {{shares}}u;
    let head = query_number % queries.z;
    let token = query_number / queries.z % queries.y;
    let batch = query_number / (queries.y * queries.z);
    // The keys of this workgroup, in whole steps.
    let part = (keys.y + {{shares}}u * {{group_size}}u - 1u) / ({{shares}}u * {{group_size}}u) * {{group_size}}u;
    let begin = number % {{shares}}u * part;
    let end = min(begin + part, keys.y);
    let kv_head = head / (queries.z / keys.z);
    let p = parameters.floats[0];
    let factor = slope(head);
    keep_query(vec3<u32>(token, head, batch), local);
    // Who adds up which elements of which values.
    let mine = local % WIDE * {{per_invocation}}u;
    let share = local / WIDE;
    var largest = LOWEST;
    var total = 0.0;
    var sum = Sum();
    for (var first = begin; first < end; first += {{group_size}}u) {
        workgroupBarrier();
        let key = first + local;
        var logit = LOWEST;
        if key < end {
            let mask = {{mask_value}};
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
            sum = with_values(sum, vec3<u32>(first, kv_head, batch), mine, share, min({{group_size}}u, end - first));
        }
    }
    total = sum_all(total, place);
    parts[local] = sum;
    workgroupBarrier();
    if share == 0u {
        for (var j = 1u; j < SUMS; j++) {
            sum += parts[j * WIDE + local];
        }
        {{finish}};
    }
    {{at_the_end}}
}
