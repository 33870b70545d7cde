
fn summed(row: vec3<u32>, k: u32) -> vec4<f32> {
    let x = four(row, k);
    {{#j 4}} put_s(vec4<u32>(k + {{j}}u, row), x[{{j}}]);
    {{/j}}
    return x;
}

fn again(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_sum}};
}
