
// Attention: one workgroup for each query of each head. It takes as many keys at a time as it has invocations: each makes one logit; then all
// of them add up values, four elements each. Sums are rescaled when a larger logit comes. Where there are few queries and many keys, several
// workgroups share the keys, and leave what `flash_attn_combine` needs in scratch memory.

var<workgroup> query: array<f32, QUERY_SIZE>;
var<workgroup> weights: array<f32, GROUP_SIZE>;
var<workgroup> parts: array<vec4<f32>, GROUP_SIZE>;
SLOPE
fn key4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return LOADED_KEY;
}

fn value4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return LOADED_VALUE;
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
    for (var i = local; i < QUERY_SIZEu; i += GROUP_SIZEu) {
        query[i] = 0.0;
        if i < queries.x {
            query[i] = get_a(vec4<u32>(i, token, head, batch));
        }
    }
    // Who adds up which elements of which values.
    let wide = (values.x + 3u) / 4u;
    let shares = GROUP_SIZEu / wide;
    let mine = local % wide * 4u;
    let share = local / wide;
    var largest = LOWEST;
    var total = 0.0;
    var sum = vec4<f32>(0.0);
    for (var first = begin; first < end; first += GROUP_SIZEu) {
        workgroupBarrier();
        let key = first + local;
        var logit = LOWEST;
        if key < end {
            let mask = MASK_VALUE;
            if !is_masked(mask) {
                let row = vec3<u32>(key, kv_head, batch);
                var product = 0.0;
                for (var k = 0u; k < queries.x; k += 4u) {
                    product += dot(key4(row, k), vec4<f32>(query[k], query[k + 1u], query[k + 2u], query[k + 3u]));
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
        if share < shares {
            let count = min(GROUP_SIZEu, end - first);
            for (var j = share; j < count; j += shares) {
                let w = weights[j];
                // What lies in unused cells of a cache does not matter.
                if w != 0.0 {
                    sum += w * value4(vec3<u32>(first + j, kv_head, batch), mine);
                }
            }
        }
    }
    total = sum_all(total, place);
    parts[local] = sum;
    workgroupBarrier();
    if share == 0u {
        for (var j = 1u; j < shares; j++) {
            sum += parts[j * wide + local];
        }
        FINISH;
    }
}
