
// Attention of many queries by cooperative matrices of 16 x 16 halves, summed as floats: one workgroup for 64 queries of a head, which goes along the keys, 32 at a
// time. Its eight subgroups of 32 stand four by two: each makes logits of 16 queries and 16 keys, and adds up a half of the values of its queries, in ordinary
// numbers, since they are rescaled when a larger logit comes. In between, four invocations have a query, and eight of its keys each.

const QUERIES: u32 = 64u;
const KEYS: u32 = 32u;
// Vectors of four halves from one row of a tile to the next: some are unused, so that rows begin in different banks.
const STRIDE: u32 = {{head_size}}u / 4u + 2u;
const KEY_STRIDE: u32 = 10u;

var<workgroup> tile_a: array<vec4<f16>, QUERIES * STRIDE>;
// Keys, and then values.
var<workgroup> tile_b: array<vec4<f16>, KEYS * STRIDE>;
var<workgroup> weights: array<vec4<f16>, QUERIES * KEY_STRIDE>;
// Of each subgroup, a matrix, column after column.
var<workgroup> results: array<f32, 2048>;
var<workgroup> of_rows: array<f32, 256>;
// What a query's sums are multiplied with.
var<workgroup> factors: array<f32, QUERIES>;
// Which keys somebody looks at.
var<workgroup> seen: array<atomic<u32>, KEYS>;
// Rows of matrices begin at multiples of 16 bytes only if the size of each variable is one.
var<workgroup> live: vec4<f32>;
{{>slope}}
fn query4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_query}};
}

fn halves(x: vec4<f32>) -> vec4<f16> {
    let y = clamp(x, vec4<f32>(-65504.0), vec4<f32>(65504.0));
    return vec4<f16>(y);
}

// Values as halves. A weight of 0 times what is not a number would not be 0: zeros replace that.
fn value_halves(x: vec4<f32>) -> vec4<f16> {
    let is_number = (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) <= vec4<u32>(0x7f800000u);
    return halves(select(vec4<f32>(0.0), x, is_number));
}

@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    let own_subgroup = place.subgroup;
    let own_lane = place.lane;
    let number = group_number(group, groups);
    let queries = shape_a();
    let keys = shape_b();
    let values = shape_c();
    let tiles = (queries.y + QUERIES - 1u) / QUERIES;
    let first_query = number % tiles * QUERIES;
    let head = number / tiles % queries.z;
    let batch = number / (tiles * queries.z);
    // No return here: all invocations must meet at matrices, for all that compilers see.
    let count = select(0u, keys.y, batch < queries.w);
    let kv_head = head / (queries.z / keys.z);
    let p = parameters.floats[0];
    let factor = slope(head);
    // The query of this invocation and the first of its keys, in a tile.
    let mine = local / 4u;
    let own = local % 4u * 8u;
    let token = first_query + mine;
    // What its subgroup computes: of these queries, these keys and this half of values.
    let m = own_subgroup / 2u * 16u;
    let n = own_subgroup % 2u;
    let area = own_subgroup * 256u;
    for (var i = local; i < QUERIES * ({{key_size}}u / 4u); i += {{group_size}}u) {
        let row = i / ({{key_size}}u / 4u);
        let k = i % ({{key_size}}u / 4u);
        let at = min(first_query + row, queries.y - 1u);
        tile_a[row * STRIDE + k] = halves(query4(vec3<u32>(at, head, min(batch, queries.w - 1u)), 4u * k));
    }
    var largest = LOWEST;
    var total = 0.0;
    {{#c value_chunks}} {{#e 8}} var sum{{c}}_{{e}} = 0.0;
    {{/e}} {{/c}}
    for (var first = 0u; first < count; first += KEYS) {
        var is_live = false;
        {{#k 8}}
            var mask{{k}} = LOWEST;
            {
                let key = first + own + {{k}}u;
                if token < queries.y && key < keys.y {
                    mask{{k}} = {{mask_value}};
                }
                is_live = is_live || !is_masked(mask{{k}});
            }
        {{/k}}
        let found = max_all(select(0.0, 1.0, is_live), place);
        if local == 0u {
            live.x = found;
        }
        // Nobody looks at these keys.
        if workgroupUniformLoad(&live).x == 0.0 {
            continue;
        }
        if local < KEYS {
            atomicStore(&seen[local], 0u);
        }
        for (var i = local; i < KEYS * ({{key_size}}u / 8u); i += {{group_size}}u) {
            let row = i / ({{key_size}}u / 8u);
            let k = i % ({{key_size}}u / 8u);
            let x = load8_b(row_b(vec3<u32>(min(first + row, keys.y - 1u), kv_head, batch)), 8u * k);
            tile_b[row * STRIDE + 2u * k] = halves(x[0]);
            tile_b[row * STRIDE + 2u * k + 1u] = halves(x[1]);
        }
        workgroupBarrier();
        var logits = coop_mat16x16<f32, C>();
        {{#k key_steps}}
            let a{{k}} = coopLoadT<coop_mat16x16<f16, A>>(&tile_a[m * STRIDE + 4u * {{k}}u], STRIDE);
            let b{{k}} = coopLoad<coop_mat16x16<f16, B>>(&tile_b[16u * n * STRIDE + 4u * {{k}}u], STRIDE);
            logits = coopMultiplyAdd(a{{k}}, b{{k}}, logits);
        {{/k}}
        coopStore(logits, &results[area], 16u);
        workgroupBarrier();
        // Barriers need not order stores of matrices for other subgroups: these read ordinary stores.
        {{#e 8}} let scaled{{e}} = results[area + own_lane + 32u * {{e}}u] * p.x;
        {{/e}}
        workgroupBarrier();
        {{#e 8}} results[area + own_lane + 32u * {{e}}u] = scaled{{e}};
        {{/e}}
        workgroupBarrier();
        var next = largest;
        {{#k 8}}
            var logit{{k}} = LOWEST;
            {
                let key = own + {{k}}u;
                if !is_masked(mask{{k}}) {
                    logit{{k}} = results[(mine / 16u * 2u + key / 16u) * 256u + key % 16u * 16u + mine % 16u];
                    if p.z != 0.0 {
                        logit{{k}} = p.z * tanh(clamp(logit{{k}} / p.z, -15.0, 15.0));
                    }
                    logit{{k}} += factor * mask{{k}};
                }
                next = max(next, logit{{k}});
            }
        {{/k}}
        of_rows[local] = next;
        workgroupBarrier();
        {{#j 4}} next = max(next, of_rows[(local & ~3u) + {{j}}u]);
        {{/j}}
        let rescale = select(exp(largest - next), 0.0, is_masked(largest));
        total *= rescale;
        largest = next;
        {{#k 8}}
            let weight{{k}} = select(exp(logit{{k}} - next), 0.0, is_masked(logit{{k}}));
            total += weight{{k}};
            if weight{{k}} != 0.0 {
                atomicOr(&seen[own + {{k}}u], 1u);
            }
        {{/k}}
        weights[mine * KEY_STRIDE + own / 4u] = halves(vec4<f32>(weight0, weight1, weight2, weight3));
        weights[mine * KEY_STRIDE + own / 4u + 1u] = halves(vec4<f32>(weight4, weight5, weight6, weight7));
        if local % 4u == 0u {
            factors[mine] = rescale;
        }
        workgroupBarrier();
        for (var i = local; i < KEYS * ({{value_size}}u / 8u); i += {{group_size}}u) {
            let row = i / ({{value_size}}u / 8u);
            let k = i % ({{value_size}}u / 8u);
            var x = mat2x4<f32>();
            // What lies in cells that nobody looks at does not matter: what is no number there need not become one when it is clamped.
            if atomicLoad(&seen[row]) != 0u {
                x = load8_c(row_c(vec3<u32>(min(first + row, keys.y - 1u), kv_head, batch)), 8u * k);
            }
            tile_b[row * STRIDE + 2u * k] = value_halves(x[0]);
            tile_b[row * STRIDE + 2u * k + 1u] = value_halves(x[1]);
        }
        workgroupBarrier();
        let scale = factors[m + own_lane % 16u];
        {{#c value_chunks}}
            var products{{c}} = coop_mat16x16<f32, C>();
            {{#k 2}}
                let w{{c}}_{{k}} = coopLoadT<coop_mat16x16<f16, A>>(&weights[m * KEY_STRIDE + 4u * {{k}}u], KEY_STRIDE);
                let v{{c}}_{{k}} = coopLoadT<coop_mat16x16<f16, B>>(&tile_b[16u * {{k}}u * STRIDE + 4u * (n * {{value_chunks}}u + {{c}}u)], STRIDE);
                products{{c}} = coopMultiplyAdd(w{{c}}_{{k}}, v{{c}}_{{k}}, products{{c}});
            {{/k}}
            coopStore(products{{c}}, &results[area], 16u);
            workgroupBarrier();
            {{#e 8}} sum{{c}}_{{e}} = sum{{c}}_{{e}} * scale + results[area + own_lane + 32u * {{e}}u];
            {{/e}}
            workgroupBarrier();
        {{/c}}
    }
    workgroupBarrier();
    of_rows[local] = total;
    workgroupBarrier();
    if local % 4u == 0u {
        var all = 0.0;
        {{#j 4}} all += of_rows[local + {{j}}u];
        {{/j}}
        let sink = {{sink}};
        let last = max(largest, sink);
        let rescale = exp(largest - last);
        all = all * rescale + select(exp(sink - last), 0.0, is_masked(sink));
        // Nothing is looked at: zeros.
        factors[mine] = select(rescale / all, 0.0, is_masked(largest));
    }
    workgroupBarrier();
    let row = m + own_lane % 16u;
    if first_query + row < queries.y && batch < queries.w {
        {{#c value_chunks}} {{#e 8}}
            put_y(vec4<u32>(16u * (n * {{value_chunks}}u + {{c}}u) + own_lane / 16u + 2u * {{e}}u, head, first_query + row, batch), sum{{c}}_{{e}} * factors[row]);
        {{/e}} {{/c}}
    }
}
