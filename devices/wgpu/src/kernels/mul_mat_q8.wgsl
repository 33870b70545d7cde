
// Products of packed weights with up to eight columns that were made 8-bit numbers: a workgroup for some rows, over whose length its invocations go together.
// Several matrices with the same columns are done at once.

var<workgroup> partials: array<f32, {{row_count}}u * {{column_count}}u * {{group_size}}u>;

// Sixteen products of 8-bit numbers.
fn dot16(a: vec4<u32>, b: vec4<u32>) -> i32 {
    return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

// The products of a unit and the two groups of 16 numbers that go with it; of these, `m` and `n` are what multiplies them, and that times their sums.
fn product(unit: Unit, x: vec4<u32>, z: vec4<u32>, m: vec2<f32>, n: vec2<f32>) -> f32 {
    let sums = vec2<f32>(f32(dot16(unit.low, x)), f32(dot16(unit.high, z)));
    return dot(unit.scales * sums, vec2<f32>(m.x, n.x)) - dot(unit.offsets, vec2<f32>(m.y, n.y));
}

fn scales_of(at: u32) -> vec2<f32> {
    let words = vec2<u32>(aligned_w(at), aligned_w(at + 1u));
    return bitcast<vec2<f32>>(words);
}
{{matrices}}
@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32{{place_parameters}},
) {
    let place = {{place}};
    var number = group_number(group, groups);
{{calls}}
}
