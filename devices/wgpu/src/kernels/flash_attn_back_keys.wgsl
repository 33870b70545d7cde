
// The gradients of attention with respect to keys and values: one workgroup for each key of each head of keys. It goes through the queries
// of all heads that share the key, as many at a time as it has invocations.

var<workgroup> of_logits: array<f32, {{group_size}}>;
var<workgroup> shares: array<f32, {{group_size}}>;

@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    let number = group_number(group, groups);
    // Size, tokens, heads, batch.
    let queries = shape_b();
    let keys = shape_c();
    let values = shape_d();
    if number >= rows_of(keys) {
        return;
    }
    let kv_head = number % keys.z;
    let key = number / keys.z % keys.y;
    let batch = number / (keys.y * keys.z);
    let group_size = queries.z / keys.z;
    let count = group_size * queries.y;
    var of_key: array<f32, {{pieces}}>;
    var of_value: array<f32, {{pieces}}>;
    for (var piece = 0u; piece < {{pieces}}u; piece++) {
        of_key[piece] = 0.0;
        of_value[piece] = 0.0;
    }
    for (var first = 0u; first < count; first += {{group_size}}u) {
        workgroupBarrier();
        let mine = first + local;
        of_logits[local] = 0.0;
        shares[local] = 0.0;
        if mine < count {
            let head = kv_head * group_size + mine % group_size;
            let token = mine / group_size;
            let mask = {{mask_value}};
            if !is_masked(mask) {
                var product = 0.0;
                for (var d = 0u; d < queries.x; d++) {
                    product += get_b(vec4<u32>(d, token, head, batch)) * get_c(vec4<u32>(d, key, kv_head, batch));
                }
                var of_share = 0.0;
                for (var d = 0u; d < values.x; d++) {
                    of_share += get_a(vec4<u32>(d, head, token, batch)) * get_d(vec4<u32>(d, key, kv_head, batch));
                }
                let row = 2u * (head + queries.z * (token + queries.y * batch));
                let logarithm = get_w(vec4<u32>(row, 0u, 0u, 0u));
                let mean = get_w(vec4<u32>(row + 1u, 0u, 0u, 0u));
                let scale = parameters.floats[0].x;
                shares[local] = exp(product * scale + mask - logarithm);
                of_logits[local] = shares[local] * (of_share - mean) * scale;
            }
        }
        workgroupBarrier();
        for (var piece = 0u; piece < {{pieces}}u; piece++) {
            let d = piece * {{group_size}}u + local;
            for (var j = 0u; j < min({{group_size}}u, count - first); j++) {
                let head = kv_head * group_size + (first + j) % group_size;
                let token = (first + j) / group_size;
                if d < queries.x {
                    of_key[piece] += of_logits[j] * get_b(vec4<u32>(d, token, head, batch));
                }
                if d < values.x {
                    of_value[piece] += shares[j] * get_a(vec4<u32>(d, head, token, batch));
                }
            }
        }
    }
    let k = parameters.ints[0];
    for (var piece = 0u; piece < {{pieces}}u; piece++) {
        let d = piece * {{group_size}}u + local;
        if d < queries.x {
            put_y(vec4<u32>(k.x + number * queries.x + d, 0u, 0u, 0u), of_key[piece]);
        }
        if d < values.x {
            put_y(vec4<u32>(k.x + k.y + number * values.x + d, 0u, 0u, 0u), of_value[piece]);
        }
    }
}
