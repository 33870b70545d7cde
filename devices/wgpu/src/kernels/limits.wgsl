// What a device can do at most: kernels that do nothing else.

struct Amount {
    // Vectors of four words that are read; or steps of arithmetic.
    count: u32,
    // Invocations of all workgroups.
    stride: u32,
}

@group(0) @binding(0) var<uniform> amount: Amount;
@group(0) @binding(1) var<storage, read_write> data: array<vec4<u32>>;

fn number(group: vec3<u32>, local: u32) -> u32 {
    return group.x * 256u + local;
}

// Numbers without order: zeros take less power, and may take less memory.
@compute @workgroup_size(256)
fn fill(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    for (var i = number(group, local); i < amount.count; i += amount.stride) {
        data[i] = vec4<u32>(i, i ^ 0x5bd1e995u, i + 77u, ~i) * 2654435761u;
    }
}

@compute @workgroup_size(256)
fn read(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let first = number(group, local);
    var sum = vec4<u32>(0u);
    // Eight loads that do not wait for each other.
    for (var i = first; i < amount.count; i += 8u * amount.stride) {
        {{#j 8}} let x{{j}} = data[min(i + {{j}}u * amount.stride, amount.count - 1u)];
        {{/j}}
        {{#j 8}} sum += x{{j}};
        {{/j}}
    }
    // Never so: but a compiler cannot know.
    if all(sum == vec4<u32>(amount.count)) {
        data[first] = sum;
    }
}

// Eight sums that do not wait for each other, of four numbers each.
@compute @workgroup_size(256)
fn multiply(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let first = number(group, local);
    let x = vec4<f32>(unpack4x8unorm(data[local].x)) * 0.5 + 0.25;
    var s0 = x;
    var s1 = x + 0.1;
    var s2 = x + 0.2;
    var s3 = x + 0.3;
    var s4 = x + 0.4;
    var s5 = x + 0.5;
    var s6 = x + 0.6;
    var s7 = x + 0.7;
    for (var i = 0u; i < amount.count; i++) {
        s0 = fma(s0, x, x);
        s1 = fma(s1, x, x);
        s2 = fma(s2, x, x);
        s3 = fma(s3, x, x);
        s4 = fma(s4, x, x);
        s5 = fma(s5, x, x);
        s6 = fma(s6, x, x);
        s7 = fma(s7, x, x);
    }
    let sum = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7;
    if all(sum == vec4<f32>(f32(amount.count))) {
        data[first % 256u] = bitcast<vec4<u32>>(sum);
    }
}
