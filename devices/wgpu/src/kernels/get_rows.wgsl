
// Rows by number: one invocation for each element of the result. A table that is larger than a binding comes in parts, of which `k.x` is
// the first row of this one and `k.y` the number of rows of all.

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    let shape = shape_y();
    if n >= elements_of(shape) {
        return;
    }
    let i = indices(n, shape);
    let k = parameters.ints[0];
    let number = index_b(at_b(vec4<u32>(i.yzw, 0u)), k.y);
    if number >= k.y {
        fail();
        return;
    }
    // A row of an earlier part becomes very large.
    let row = number - k.x;
    if row >= shape_a().y {
        return;
    }
    let source = vec4<u32>(i.x, row, i.zw);
    {{found}};
}
