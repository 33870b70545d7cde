
// A step of AdamW: one invocation for each weight.

fn rule(k: u32) -> f32 {
    return get_e(vec4<u32>(k, 0u, 0u, 0u));
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    if n >= elements_of(shape_a()) {
        return;
    }
    let i = indices(n, shape_a());
    let g = get_b(i);
    let m = get_c(i) * rule(1u) + g * (1.0 - rule(1u));
    let v = get_d(i) * rule(2u) + g * g * (1.0 - rule(2u));
    let step = m * rule(5u) / (sqrt(v * rule(6u)) + rule(3u));
    put_a(i, get_a(i) * (1.0 - rule(0u) * rule(4u)) - rule(0u) * step);
    put_c(i, m);
    put_d(i, v);
}
