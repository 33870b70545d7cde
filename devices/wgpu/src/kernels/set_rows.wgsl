
// Writes rows to where numbers say: one invocation for each element of the source, or for each block of the target.

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    let shape = shape_a() / vec4<u32>(PER_INVOCATIONu, 1u, 1u, 1u);
    if n >= elements_of(shape) {
        return;
    }
    let i = indices(n, shape);
    let numbers = shape_b();
    let rows = shape_y().y;
    let row = index_b(at_b(vec4<u32>(i.y, i.z % numbers.y, i.w % numbers.z, 0u)), rows);
    if row >= rows {
        fail();
        return;
    }
    let to = vec4<u32>(i.x, row, i.zw);
    STORED;
}
