
// The results of one query's head, until they are made 8-bit numbers: for the product behind attention.
var<workgroup> results: array<f32, {{value_size}}>;

fn quantize_results(head: u32, token: u32, local: u32) {
    workgroupBarrier();
    let k = 4u * local;
    let is_mine = k < {{value_size}}u;
    var x = vec4<f32>(0.0);
    if is_mine {
        {{#j 4}} x[{{j}}] = results[k + {{j}}u];
        {{/j}}
    }
    quantize(x, select({{column_length}}u, head * {{value_size}}u + k, is_mine), token, {{column_length}}u, {{column_count}}u, local);
}
