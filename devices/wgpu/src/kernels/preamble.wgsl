// What every kernel has: parameters, the word for failures, and how invocations are numbered.

struct Tensor {
    shape: vec4<u32>,
    // In bytes; the first one is the distance of elements, or of blocks.
    strides: vec4<u32>,
    // Byte of the first element in the binding.
    start: u32,
}

struct Parameters {
    // What goes to `failure` if a value from outside is wrong.
    node: u32,
    ints: array<vec4<u32>, 3>,
    floats: array<vec4<f32>, 4>,
    tensors: array<Tensor, 11>,
}

@group(0) @binding(0) var<uniform> parameters: Parameters;
@group(0) @binding(1) var<storage, read_write> failure: atomic<u32>;

fn fail() {
    atomicMax(&failure, parameters.node);
}

// Workgroups are dispatched in lines along x.
fn group_number(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.y * groups.x + group.x;
}

// The indices of element `n`, or of row `n` for a shape without its first extent.
fn indices(n: u32, shape: vec4<u32>) -> vec4<u32> {
    let n1 = n / shape.x;
    let n2 = n1 / shape.y;
    let n3 = n2 / shape.z;
    return vec4<u32>(n % shape.x, n1 % shape.y, n2 % shape.z, n3);
}

fn row_indices(n: u32, shape: vec4<u32>) -> vec3<u32> {
    let n2 = n / shape.y;
    return vec3<u32>(n % shape.y, n2 % shape.z, n2 / shape.z);
}

fn elements_of(shape: vec4<u32>) -> u32 {
    return shape.x * shape.y * shape.z * shape.w;
}

fn rows_of(shape: vec4<u32>) -> u32 {
    return shape.y * shape.z * shape.w;
}

// Stands for minus infinity: in WGSL, infinities may be assumed away.
const LOWEST: f32 = -3.0e38;

// Whether a logit is masked: minus infinity, or so low that nothing is left of it.
fn is_masked(x: f32) -> bool {
    return x < -1.0e38;
}

// Float bits with the upper half of a float as bfloat16, rounded to even; not a number stays so.
fn to_bf16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (bits & 0x7fffffffu) > 0x7f800000u {
        return (bits >> 16u) | 64u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

// A half-precision float, rounded to even; what is too large becomes infinite, not a number stays so. The built-in function leaves
// rounding and range open.
fn to_f16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if magnitude > 0x7f800000u {
        return sign | 0x7e00u;
    }
    if magnitude >= 0x477ff000u {
        return sign | 0x7c00u;
    }
    if magnitude >= 0x38800000u {
        let rounded = magnitude + 0xfffu + ((magnitude >> 13u) & 1u);
        return sign | ((rounded - 0x38000000u) >> 13u);
    }
    if magnitude < 0x33000000u {
        return sign;
    }
    // Subnormal: the mantissa with its leading one, shifted.
    let shift = 126u - (magnitude >> 23u);
    let mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    let kept = mantissa >> shift;
    let rest = mantissa & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    let up = rest > half || (rest == half && (kept & 1u) == 1u);
    return sign | (kept + select(0u, 1u, up));
}

fn from_f16(half: u32) -> f32 {
    return unpack2x16float(half).x;
}

// The four bytes of a word as signed numbers.
fn signed4(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(word));
}

fn unsigned4(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(word));
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 {
        return x;
    }
    // log(1 + e) for small e, where 1 + e has lost most of it.
    let e = exp(x);
    return select(log(1.0 + e), e * (1.0 - e * (0.5 - e / 3.0)), e < 0.01);
}

// Weights of packed rows that go together: two times 16 codes, their scales, and what to subtract from each weight.
struct Unit {
    low: vec4<u32>,
    high: vec4<u32>,
    scales: vec2<f32>,
    offsets: vec2<f32>,
}
