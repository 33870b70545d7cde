
// Rotary position embedding: one invocation for each pair, and for each element that is in none.

// Cosine and sine, times the magnitude, of the angle by which pair number `pair` turns at `position`.
fn rotation(pair: u32, position: f32) -> vec2<f32> {
    // Powers of two per pair, in two parts; scale, mix of extrapolation; low, high, magnitude, direction.
    let p = parameters.floats[0];
    let q = parameters.floats[1];
    let exponent = f32(pair) * p.x + f32(pair) * p.y;
    // In turns, so that whole turns fall away exactly.
    let frequency = exp2(exponent) * 0.15915494309 DIVIDED;
    let extrapolated = turns(position, frequency);
    var angle = turns(position, frequency * p.z);
    if p.w != 0.0 {
        let ramp = (f32(pair) - q.x) / max(q.y - q.x, 0.001);
        let mix = (1.0 - clamp(ramp, 0.0, 1.0)) * p.w;
        angle = turns(position, frequency * p.z * (1.0 - mix) + frequency * mix);
    }
    let radians = angle * 6.28318530718;
    return vec2<f32>(cos(radians), sin(radians) * q.w) * q.z;
}

// The fraction of a turn, from -1/2 to 1/2, of a whole position times a frequency: the position is cut, so that both products are nearly exact.
fn turns(position: f32, frequency: f32) -> f32 {
    let high = floor(position / 256.0);
    let low = position - high * 256.0;
    let step = frequency * 256.0;
    let a = high * (step - round(step));
    let b = low * frequency;
    let sum = (a - round(a)) + (b - round(b));
    return sum - round(sum);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_number(group, groups) * 256u + local;
    let shape = shape_y();
    // The first rotated element, how many there are, distance of partners, distance of pairs.
    let k = parameters.ints[0];
    let pairs = k.y / 2u;
    let per_row = pairs + shape.x - k.y;
    if n >= per_row * rows_of(shape) {
        return;
    }
    let row = row_indices(n / per_row, shape);
    let t = n % per_row;
    if t >= pairs {
        let rest = t - pairs;
        let i = vec4<u32>(select(rest + k.y, rest, rest < k.x), row);
        put_y(i, get_a(i));
        return;
    }
    let position = f32(int_b(at_b(vec4<u32>(row.y, 0u, 0u, 0u))));
    let turn = rotation(t, position);
    let first = vec4<u32>(k.x + t * k.w, row);
    let second = vec4<u32>(first.x + k.z, row);
    let x = get_a(first);
    let z = get_a(second);
    put_y(first, x * turn.x - z * turn.y);
    put_y(second, x * turn.y + z * turn.x);
}
