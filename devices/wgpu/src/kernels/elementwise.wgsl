
// A function of each element, of one or two operands or of its place: one invocation for each.

{{>functions}}
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
    put_y(i, function({{first_value}}, {{second_value}}, i, n));
}
