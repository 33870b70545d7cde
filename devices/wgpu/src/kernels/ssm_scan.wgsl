
// A selective state space: one invocation for each row of the matrix of each head of each sequence, which it keeps while it goes through the tokens.

const SIZE: u32 = {{state_size}}u;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    // Rows of a matrix, heads, tokens, sequences.
    let shape = shape_b();
    let k = parameters.ints[0];
    if n >= shape.x * shape.y * shape.w {
        return;
    }
    let i = n % shape.x;
    let head = n / shape.x % shape.y;
    let sequence = n / (shape.x * shape.y);
    let rows = shape_a().w;
    let row = index_g(at_g(vec4<u32>(sequence, 0u, 0u, 0u)), rows);
    if row >= rows {
        fail();
        return;
    }
    var state: array<f32, SIZE>;
    for (var j = 0u; j < SIZE; j++) {
        state[j] = get_a(vec4<u32>(j, i, head, row));
    }
    let outputs = shape.x * shape.y * shape.z * shape.w;
    let matrices = SIZE * shape.x * shape.y * shape.w;
    // Where the row lies in a snapshot.
    let kept = outputs + ((sequence * shape.y + head) * shape.x + i) * SIZE;
    for (var slot = shape.z; slot < k.x; slot++) {
        for (var j = 0u; j < SIZE; j++) {
            put_y(vec4<u32>(kept + slot * matrices + j, 0u, 0u, 0u), state[j]);
        }
    }
    let bank = head / (shape.y / shape_e().y);
    for (var token = 0u; token < shape.z; token++) {
        let raw = get_c(vec4<u32>(head, token, sequence, 0u));
        let step = softplus(raw);
        let x = step * get_b(vec4<u32>(i, head, token, sequence));
        var sum = 0.0;
        for (var j = 0u; j < SIZE; j++) {
            let rate = get_d(vec4<u32>(j % shape_d().x, head, 0u, 0u));
            state[j] = state[j] * exp(step * rate) + x * get_e(vec4<u32>(j, bank, token, sequence));
            sum += state[j] * get_f(vec4<u32>(j, bank, token, sequence));
        }
        put_y(vec4<u32>(((sequence * shape.z + token) * shape.y + head) * shape.x + i, 0u, 0u, 0u), sum);
        let slot = shape.z - 1u - token;
        if slot < k.x {
            for (var j = 0u; j < SIZE; j++) {
                put_y(vec4<u32>(kept + slot * matrices + j, 0u, 0u, 0u), state[j]);
            }
        }
    }
}
