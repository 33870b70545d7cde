
// A gated unit of two operands, whose results are made 8-bit numbers as well: one invocation for each four elements.
{{>q8}}
{{>functions}}
@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let number = group_number(group, groups);
    let shape = shape_y();
    let pieces = (shape.x + 1023u) / 1024u;
    let column = number / pieces;
    if column >= shape.y {
        return;
    }
    let k = number % pieces * 1024u + local * 4u;
    var x = vec4<f32>(0.0);
    if k < shape.x {
        let n = column * shape.x + k;
        {{#j 4}}
            let i{{j}} = vec4<u32>(k + {{j}}u, column, 0u, 0u);
            x[{{j}}] = function(get_a(i{{j}}), get_b(i{{j}}), i{{j}}, n + {{j}}u);
        {{/j}}
        {{#j 4}} put_y(i{{j}}, x[{{j}}]);
        {{/j}}
    }
    quantize(x, k, column, shape.x, shape.y, local);
}
