
// Puts together what several workgroups made of one query's attention: one workgroup for each query of each head.
{{declarations}}
@compute @workgroup_size({{group_size}})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    // Size of values, heads, tokens, batch.
    let shape = shape_y();
    let number = group_number(group, groups);
    if number >= rows_of(shape) {
        return;
    }
    let row = row_indices(number, shape);
    let head = row.x;
    let token = row.y;
    // A largest logit, a total, and sums, of each share.
    let wide = (shape.x + 3u) / 4u * 4u + 2u;
    var largest = LOWEST;
    for (var s = 0u; s < {{shares}}u; s++) {
        largest = max(largest, get_p(vec4<u32>((number * {{shares}}u + s) * wide, 0u, 0u, 0u)));
    }
    let sink = {{sink}};
    let last = max(largest, sink);
    var total = select(exp(sink - last), 0.0, is_masked(sink));
    for (var s = 0u; s < {{shares}}u; s++) {
        let at = (number * {{shares}}u + s) * wide;
        let own = get_p(vec4<u32>(at, 0u, 0u, 0u));
        total += select(exp(own - last), 0.0, is_masked(own)) * get_p(vec4<u32>(at + 1u, 0u, 0u, 0u));
    }
    for (var i = local; i < shape.x; i += {{group_size}}u) {
        var sum = 0.0;
        for (var s = 0u; s < {{shares}}u; s++) {
            let at = (number * {{shares}}u + s) * wide;
            let own = get_p(vec4<u32>(at, 0u, 0u, 0u));
            sum += select(exp(own - last), 0.0, is_masked(own)) * get_p(vec4<u32>(at + 2u + i, 0u, 0u, 0u));
        }
        let result = select(sum / total, 0.0, is_masked(largest));
        put_y(vec4<u32>(i, row), result);
        {{keep_result}};
    }
    {{at_the_end}}
}
