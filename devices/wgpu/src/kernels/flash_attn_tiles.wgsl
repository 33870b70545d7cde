
// Attention of many queries: one workgroup for 32 queries of a head, which goes along the keys, 32 at a time. Its 128 invocations stand 16 by 8: each makes logits
// of two queries and four keys, and adds up four elements of every 32 of the values of these two queries. Heads come through workgroup memory, 32 elements
// of their length at a time.

const TILE: u32 = 32u;
const DEPTH: u32 = 8u;
// In vectors of four elements, of which one is unused, so that rows begin in different banks.
const STRIDE: u32 = 9u;
const WEIGHTS: u32 = 33u;

var<workgroup> tile_a: array<vec4<f32>, 288>;
var<workgroup> tile_b: array<vec4<f32>, 288>;
var<workgroup> weights: array<f32, 1056>;
// Of each query, by the eight invocations that have it.
var<workgroup> of_rows: array<vec2<f32>, {{group_size}}>;
var<workgroup> live: f32;
{{>slope}}
fn query4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_query}};
}

{{loads}}
// The largest, or the sum, of what the eight invocations of a query have, for both of its queries.
fn largest_of_rows(x: vec2<f32>, local: u32) -> vec2<f32> {
    workgroupBarrier();
    of_rows[local] = x;
    workgroupBarrier();
    var y = x;
    {{#j 8}} y = max(y, of_rows[(local & ~7u) + {{j}}u]);
    {{/j}}
    return y;
}

fn sum_of_rows(x: vec2<f32>, local: u32) -> vec2<f32> {
    workgroupBarrier();
    of_rows[local] = x;
    workgroupBarrier();
    var y = vec2<f32>(0.0);
    {{#j 8}} y += of_rows[(local & ~7u) + {{j}}u];
    {{/j}}
    return y;
}

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
    let tiles = (queries.y + TILE - 1u) / TILE;
    if number >= tiles * queries.z * queries.w {
        return;
    }
    let first_query = number % tiles * TILE;
    let head = number / tiles % queries.z;
    let batch = number / (tiles * queries.z);
    let kv_head = head / (queries.z / keys.z);
    let p = parameters.floats[0];
    let factor = slope(head);
    // The first query and the first key of this invocation, in a tile.
    let mine = local / 8u * 2u;
    let own = local % 8u * 4u;
    // What it loads: eight elements of a row.
    let loaded = local / 4u;
    let depth = local % 4u * 2u;
    var largest = vec2<f32>(LOWEST);
    var total = vec2<f32>(0.0);
    {{#c value_chunks}} {{#q 2}} var sum{{c}}_{{q}} = vec4<f32>(0.0);
    {{/q}} {{/c}}
    for (var first = 0u; first < keys.y; first += TILE) {
        var is_live = false;
        {{#q 2}} {{#k 4}}
            var mask{{q}}_{{k}} = LOWEST;
            {
                let token = first_query + mine + {{q}}u;
                let key = first + own + {{k}}u;
                if token < queries.y && key < keys.y {
                    mask{{q}}_{{k}} = {{mask_value}};
                }
                is_live = is_live || !is_masked(mask{{q}}_{{k}});
            }
        {{/k}} {{/q}}
        let found = max_all(select(0.0, 1.0, is_live), place);
        if local == 0u {
            live = found;
        }
        // Nobody looks at these keys.
        if workgroupUniformLoad(&live) == 0.0 {
            continue;
        }
        {{#q 2}} {{#k 4}} var logit{{q}}_{{k}} = 0.0;
        {{/k}} {{/q}}
        for (var start = 0u; start < queries.x; start += 4u * DEPTH) {
            workgroupBarrier();
            let at = start + 4u * depth;
            var z = mat2x4<f32>();
            if first + loaded < keys.y {
                z = key8(vec3<u32>(first + loaded, kv_head, batch), at);
            }
            {{#j 2}}
                var x{{j}} = vec4<f32>(0.0);
                if at + 4u * {{j}}u < queries.x && first_query + loaded < queries.y {
                    x{{j}} = query4(vec3<u32>(first_query + loaded, head, batch), at + 4u * {{j}}u);
                }
                tile_a[loaded * STRIDE + depth + {{j}}u] = x{{j}};
                tile_b[loaded * STRIDE + depth + {{j}}u] = z[{{j}}];
            {{/j}}
            workgroupBarrier();
            for (var d = 0u; d < DEPTH; d++) {
                {{#q 2}} let a{{q}} = tile_a[(mine + {{q}}u) * STRIDE + d];
                {{/q}}
                {{#k 4}} let b{{k}} = tile_b[(own + {{k}}u) * STRIDE + d];
                {{/k}}
                {{#q 2}} {{#k 4}} logit{{q}}_{{k}} += dot(a{{q}}, b{{k}});
                {{/k}} {{/q}}
            }
        }
        var most = largest;
        {{#q 2}} {{#k 4}}
            logit{{q}}_{{k}} *= p.x;
            if p.z != 0.0 {
                logit{{q}}_{{k}} = p.z * tanh(clamp(logit{{q}}_{{k}} / p.z, -15.0, 15.0));
            }
            logit{{q}}_{{k}} = select(logit{{q}}_{{k}} + factor * mask{{q}}_{{k}}, LOWEST, is_masked(mask{{q}}_{{k}}));
            most[{{q}}] = max(most[{{q}}], logit{{q}}_{{k}});
        {{/k}} {{/q}}
        let next = largest_of_rows(most, local);
        {{#q 2}}
            let rescale{{q}} = select(exp(largest[{{q}}] - next[{{q}}]), 0.0, is_masked(largest[{{q}}]));
            total[{{q}}] *= rescale{{q}};
            {{#k 4}}
                let weight{{q}}_{{k}} = select(exp(logit{{q}}_{{k}} - next[{{q}}]), 0.0, is_masked(logit{{q}}_{{k}}));
                weights[(mine + {{q}}u) * WEIGHTS + own + {{k}}u] = weight{{q}}_{{k}};
                total[{{q}}] += weight{{q}}_{{k}};
            {{/k}}
            {{#c value_chunks}} sum{{c}}_{{q}} *= rescale{{q}};
            {{/c}}
        {{/q}}
        largest = next;
        {{#c value_chunks}}
            workgroupBarrier();
            var y{{c}} = mat2x4<f32>();
            if first + loaded < keys.y {
                y{{c}} = value8(vec3<u32>(first + loaded, kv_head, batch), 4u * ({{c}}u * DEPTH + depth));
            }
            {{#j 2}} tile_b[loaded * STRIDE + depth + {{j}}u] = y{{c}}[{{j}}];
            {{/j}}
            workgroupBarrier();
            for (var k = 0u; k < TILE; k++) {
                let y = tile_b[k * STRIDE + local % 8u];
                {{#q 2}}
                    let w{{q}} = weights[(mine + {{q}}u) * WEIGHTS + k];
                    // What lies in cells that a query does not look at does not matter.
                    if w{{q}} != 0.0 {
                        sum{{c}}_{{q}} += w{{q}} * y;
                    }
                {{/q}}
            }
        {{/c}}
    }
    total = sum_of_rows(total, local);
    let sink = {{sink}};
    {{#q 2}}
        let token{{q}} = first_query + mine + {{q}}u;
        let last{{q}} = max(largest[{{q}}], sink);
        let rescale{{q}} = exp(largest[{{q}}] - last{{q}});
        let all{{q}} = total[{{q}}] * rescale{{q}} + select(exp(sink - last{{q}}), 0.0, is_masked(sink));
        // Nothing is looked at: zeros.
        let scale{{q}} = select(rescale{{q}} / all{{q}}, 0.0, is_masked(largest[{{q}}]));
        if token{{q}} < queries.y {
            {{#c value_chunks}} {{#e 4}}
                if 32u * {{c}}u + own + {{e}}u < values.x {
                    put_y(vec4<u32>(32u * {{c}}u + own + {{e}}u, head, token{{q}}, batch), sum{{c}}_{{q}}[{{e}}] * scale{{q}});
                }
            {{/e}} {{/c}}
        }
    {{/q}}
}
