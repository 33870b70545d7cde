
// The gradient of attention with respect to queries: one workgroup for each query of each head. It leaves the logarithm of the sum of the
// row's exponentials and the mean of the gradients of its shares for the kernel that follows.

var<workgroup> factors: array<f32, {{group_size}}>;

fn logit(key: u32, token: u32, head: u32, kv_head: u32, batch: u32) -> f32 {
    let mask = {{mask_value}};
    if is_masked(mask) {
        return LOWEST;
    }
    var product = 0.0;
    for (var d = 0u; d < shape_b().x; d++) {
        product += get_b(vec4<u32>(d, token, head, batch)) * get_c(vec4<u32>(d, key, kv_head, batch));
    }
    return product * parameters.floats[0].x + mask;
}

// The gradient of the share of a key.
fn of_share(key: u32, token: u32, head: u32, kv_head: u32, batch: u32) -> f32 {
    var product = 0.0;
    for (var d = 0u; d < shape_d().x; d++) {
        product += get_a(vec4<u32>(d, head, token, batch)) * get_d(vec4<u32>(d, key, kv_head, batch));
    }
    return product;
}

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
    if number >= rows_of(queries) {
        return;
    }
    let head = number % queries.z;
    let token = number / queries.z % queries.y;
    let batch = number / (queries.y * queries.z);
    let kv_head = head / (queries.z / keys.z);
    var largest = LOWEST;
    for (var key = local; key < keys.y; key += {{group_size}}u) {
        largest = max(largest, logit(key, token, head, kv_head, batch));
    }
    largest = max_all(largest, place);
    let any = !is_masked(largest);
    var total = 0.0;
    var mean = 0.0;
    for (var key = local; key < keys.y; key += {{group_size}}u) {
        let x = logit(key, token, head, kv_head, batch);
        if !is_masked(x) {
            let e = exp(x - largest);
            total += e;
            mean += e * of_share(key, token, head, kv_head, batch);
        }
    }
    total = sum_all(total, place);
    mean = sum_all(mean, place) / select(1.0, total, any);
    // No share is left of a row that is masked.
    let logarithm = select(-LOWEST, largest + log(select(1.0, total, any)), any);
    if local == 0u {
        put_w(vec4<u32>(2u * number, 0u, 0u, 0u), logarithm);
        put_w(vec4<u32>(2u * number + 1u, 0u, 0u, 0u), mean);
    }
    var sums: array<f32, {{pieces}}>;
    for (var piece = 0u; piece < {{pieces}}u; piece++) {
        sums[piece] = 0.0;
    }
    for (var first = 0u; first < keys.y; first += {{group_size}}u) {
        workgroupBarrier();
        let key = first + local;
        factors[local] = 0.0;
        if key < keys.y {
            let x = logit(key, token, head, kv_head, batch);
            if !is_masked(x) {
                let gradient = of_share(key, token, head, kv_head, batch) - mean;
                factors[local] = exp(x - logarithm) * gradient * parameters.floats[0].x;
            }
        }
        workgroupBarrier();
        for (var piece = 0u; piece < {{pieces}}u; piece++) {
            let d = piece * {{group_size}}u + local;
            if d < queries.x {
                for (var j = 0u; j < min({{group_size}}u, keys.y - first); j++) {
                    if factors[j] != 0.0 {
                        sums[piece] += factors[j] * get_c(vec4<u32>(d, first + j, kv_head, batch));
                    }
                }
            }
        }
    }
    for (var piece = 0u; piece < {{pieces}}u; piece++) {
        let d = piece * {{group_size}}u + local;
        if d < queries.x {
            put_y(vec4<u32>(number * queries.x + d, 0u, 0u, 0u), sums[piece]);
        }
    }
}
