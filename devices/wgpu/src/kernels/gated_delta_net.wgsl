
// The gated delta rule: one invocation for each column of the matrix of each head of each sequence, which it keeps while it goes through the tokens.

const SIZE: u32 = {{state_size}}u;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    // Columns of a matrix, heads, tokens, sequences.
    let shape = shape_c();
    let k = parameters.ints[0];
    if n >= shape.x * shape.y * shape.w {
        return;
    }
    let column = n % shape.x;
    let head = n / shape.x % shape.y;
    let sequence = n / (shape.x * shape.y);
    var state: array<f32, SIZE>;
    for (var j = 0u; j < SIZE; j++) {
        state[j] = get_f(vec4<u32>(j, column, head, sequence));
    }
    let outputs = shape.x * shape.y * shape.z * shape.w;
    let matrices = SIZE * shape.x * shape.y * shape.w;
    // Where the column lies in a snapshot.
    let kept = outputs + ((sequence * shape.y + head) * shape.x + column) * SIZE;
    for (var slot = shape.z; slot < k.x; slot++) {
        for (var j = 0u; j < SIZE; j++) {
            put_result(kept + slot * matrices + j, state[j]);
        }
    }
    let of_query = vec2<u32>(head % shape_a().y, sequence / (shape.w / shape_a().w));
    let of_key = vec2<u32>(head % shape_b().y, sequence / (shape.w / shape_b().w));
    for (var token = 0u; token < shape.z; token++) {
        let beta = get_e(vec4<u32>(0u, head, token, sequence));
        var found = 0.0;
        for (var j = 0u; j < SIZE; j++) {
            state[j] *= exp(get_d(vec4<u32>(j % shape_d().x, head, token, sequence)));
            found += state[j] * get_b(vec4<u32>(j, of_key.x, token, of_key.y));
        }
        let delta = (get_c(vec4<u32>(column, head, token, sequence)) - found) * beta;
        var sum = 0.0;
        for (var j = 0u; j < SIZE; j++) {
            state[j] += get_b(vec4<u32>(j, of_key.x, token, of_key.y)) * delta;
            sum += state[j] * get_a(vec4<u32>(j, of_query.x, token, of_query.y));
        }
        put_result(((sequence * shape.z + token) * shape.y + head) * shape.x + column, sum * inverseSqrt(f32(SIZE)));
        let slot = shape.z - 1u - token;
        if slot < k.x {
            for (var j = 0u; j < SIZE; j++) {
                put_result(kept + slot * matrices + j, state[j]);
            }
        }
    }
}

// The result is one piece.
fn put_result(n: u32, x: f32) {
    put_y(indices(n, shape_y()), x);
}
