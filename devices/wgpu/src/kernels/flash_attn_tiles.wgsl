
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
var<workgroup> of_rows: array<vec2<f32>, GROUP_SIZE>;
var<workgroup> live: f32;
SLOPE
fn query4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return LOADED_QUERY;
}

LOADS
// The largest, or the sum, of what the eight invocations of a query have, for both of its queries.
fn largest_of_rows(x: vec2<f32>, local: u32) -> vec2<f32> {
    workgroupBarrier();
    of_rows[local] = x;
    workgroupBarrier();
    var y = x;
    EACH(j, 8) { y = max(y, of_rows[(local & ~7u) + #ju]);
    }
    return y;
}

fn sum_of_rows(x: vec2<f32>, local: u32) -> vec2<f32> {
    workgroupBarrier();
    of_rows[local] = x;
    workgroupBarrier();
    var y = vec2<f32>(0.0);
    EACH(j, 8) { y += of_rows[(local & ~7u) + #ju];
    }
    return y;
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
    EACH(c, VALUE_CHUNKS) { EACH(q, 2) { var sum#c_#q = vec4<f32>(0.0);
    } }
    for (var first = 0u; first < keys.y; first += TILE) {
        var is_live = false;
        EACH(q, 2) { EACH(k, 4) {
            var mask#q_#k = LOWEST;
            {
                let token = first_query + mine + #qu;
                let key = first + own + #ku;
                if token < queries.y && key < keys.y {
                    mask#q_#k = MASK_VALUE;
                }
                is_live = is_live || !is_masked(mask#q_#k);
            }
        } }
        let found = max_all(select(0.0, 1.0, is_live), place);
        if local == 0u {
            live = found;
        }
        // Nobody looks at these keys.
        if workgroupUniformLoad(&live) == 0.0 {
            continue;
        }
        EACH(q, 2) { EACH(k, 4) { var logit#q_#k = 0.0;
        } }
        for (var start = 0u; start < queries.x; start += 4u * DEPTH) {
            workgroupBarrier();
            let at = start + 4u * depth;
            var z = mat2x4<f32>();
            if first + loaded < keys.y {
                z = key8(vec3<u32>(first + loaded, kv_head, batch), at);
            }
            EACH(j, 2) {
                var x#j = vec4<f32>(0.0);
                if at + 4u * #ju < queries.x && first_query + loaded < queries.y {
                    x#j = query4(vec3<u32>(first_query + loaded, head, batch), at + 4u * #ju);
                }
                tile_a[loaded * STRIDE + depth + #ju] = x#j;
                tile_b[loaded * STRIDE + depth + #ju] = z[#j];
            }
            workgroupBarrier();
            for (var d = 0u; d < DEPTH; d++) {
                EACH(q, 2) { let a#q = tile_a[(mine + #qu) * STRIDE + d];
                }
                EACH(k, 4) { let b#k = tile_b[(own + #ku) * STRIDE + d];
                }
                EACH(q, 2) { EACH(k, 4) { logit#q_#k += dot(a#q, b#k);
                } }
            }
        }
        var most = largest;
        EACH(q, 2) { EACH(k, 4) {
            logit#q_#k *= p.x;
            if p.z != 0.0 {
                logit#q_#k = p.z * tanh(clamp(logit#q_#k / p.z, -15.0, 15.0));
            }
            logit#q_#k = select(logit#q_#k + factor * mask#q_#k, LOWEST, is_masked(mask#q_#k));
            most[#q] = max(most[#q], logit#q_#k);
        } }
        let next = largest_of_rows(most, local);
        EACH(q, 2) {
            let rescale#q = select(exp(largest[#q] - next[#q]), 0.0, is_masked(largest[#q]));
            total[#q] *= rescale#q;
            EACH(k, 4) {
                let weight#q_#k = select(exp(logit#q_#k - next[#q]), 0.0, is_masked(logit#q_#k));
                weights[(mine + #qu) * WEIGHTS + own + #ku] = weight#q_#k;
                total[#q] += weight#q_#k;
            }
            EACH(c, VALUE_CHUNKS) { sum#c_#q *= rescale#q;
            }
        }
        largest = next;
        EACH(c, VALUE_CHUNKS) {
            workgroupBarrier();
            var y#c = mat2x4<f32>();
            if first + loaded < keys.y {
                y#c = value8(vec3<u32>(first + loaded, kv_head, batch), 4u * (#cu * DEPTH + depth));
            }
            EACH(j, 2) { tile_b[loaded * STRIDE + depth + #ju] = y#c[#j];
            }
            workgroupBarrier();
            for (var k = 0u; k < TILE; k++) {
                let y = tile_b[k * STRIDE + local % 8u];
                EACH(q, 2) {
                    let w#q = weights[(mine + #qu) * WEIGHTS + k];
                    // What lies in cells that a query does not look at does not matter.
                    if w#q != 0.0 {
                        sum#c_#q += w#q * y;
                    }
                }
            }
        }
    }
    total = sum_of_rows(total, local);
    let sink = SINK;
    EACH(q, 2) {
        let token#q = first_query + mine + #qu;
        let last#q = max(largest[#q], sink);
        let rescale#q = exp(largest[#q] - last#q);
        let all#q = total[#q] * rescale#q + select(exp(sink - last#q), 0.0, is_masked(sink));
        // Nothing is looked at: zeros.
        let scale#q = select(rescale#q / all#q, 0.0, is_masked(largest[#q]));
        if token#q < queries.y {
            EACH(c, VALUE_CHUNKS) { EACH(e, 4) {
                if 32u * #cu + own + #eu < values.x {
                    put_y(vec4<u32>(32u * #cu + own + #eu, head, token#q, batch), sum#c_#q[#e] * scale#q);
                }
            } }
        }
    }
}
