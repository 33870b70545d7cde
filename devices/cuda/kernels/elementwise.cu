// Functions of elements. ints[0] selects the function; all threads take the same branch.
#include "int8.h"
#include "math.h"

enum {
    ADD, SUB, MUL, DIV,
    SCALE, SQR, SQRT, LOG, CLAMP, SIN, COS, LEAKY_RELU,
    ABS, SGN, NEG, STEP, TANH, ELU, RELU, SIGMOID, GELU, GELU_QUICK, SILU, HARD_SWISH, HARD_SIGMOID,
    EXP, EXPM1, SOFTPLUS, GELU_ERF, XIELU, FLOOR, CEIL, ROUND, TRUNC,
    FILL, ARANGE,
    REGLU, GEGLU, SWIGLU, SWIGLU_OAI, GEGLU_ERF, GEGLU_QUICK, SWIGLU_CLAMP, SILU_BACK
};

// Comparisons that keep NaN, unlike `max` and `min`.
INLINE float at_least(float x, float low) { return x < low ? low : x; }
INLINE float at_most(float x, float high) { return x > high ? high : x; }

INLINE float unary(u32 function, float x, const float *f, u64 n) {
    float s, c;
    switch (function) {
    case SCALE: return f[0] * x + f[1];
    case SQR: return x * x;
    case SQRT: return sqrt_float(x);
    case LOG: return log_float(x);
    case CLAMP: return at_least(at_most(x, f[1]), f[0]);
    case SIN: sin_cos(x, &s, &c); return s;
    case COS: sin_cos(x, &s, &c); return c;
    case LEAKY_RELU: return x > 0 ? x : f[0] * x;
    case ABS: return abs_float(x);
    case SGN: return x > 0 ? 1.0f : x < 0 ? -1.0f : x;
    case NEG: return -x;
    case STEP: return x > 0 ? 1.0f : 0.0f;
    case TANH: return tanh_float(x);
    case ELU: return x > 0 ? x : expm1_float(x);
    case RELU: return at_least(x, 0);
    case SIGMOID: return sigmoid(x);
    case GELU: return gelu(x);
    case GELU_QUICK: return gelu_quick(x);
    case SILU: return silu(x);
    case HARD_SWISH: return x * at_most(at_least((x + 3.0f) / 6.0f, 0), 1.0f);
    case HARD_SIGMOID: return at_most(at_least((x + 3.0f) / 6.0f, 0), 1.0f);
    case EXP: return exp_float(x);
    case EXPM1: return expm1_float(x);
    case SOFTPLUS: return softplus(x);
    case GELU_ERF: return gelu_erf(x);
    case XIELU:
        if (x > 0) return f[1] * x * x + f[2] * x;
        return (expm1_float(at_most(x, f[3])) - x) * f[0] + f[2] * x;
    case FLOOR: return floor_float(x);
    case CEIL: return ceil_float(x);
    case ROUND: {
        // Halves away from zero. Integers stay, because adding a half to a large one rounds it.
        float a = floor_float(abs_float(x) + 0.5f);
        return trunc_float(x) == x || is_nan(x) ? x : x < 0 ? -a : a;
    }
    case TRUNC: return trunc_float(x);
    case FILL: return f[0];
    default: return f[0] + f[1] * (float)n;
    }
}

INLINE float binary(u32 function, float x, float z, const float *f) {
    switch (function) {
    case ADD: return x + z;
    case SUB: return x - z;
    case MUL: return x * z;
    case DIV: return x / z;
    case REGLU: return at_least(x, 0) * z;
    case GEGLU: return gelu(x) * z;
    case SWIGLU: return silu(x) * z;
    case SWIGLU_OAI:
        x = at_most(x, f[1]);
        return x * sigmoid(f[0] * x) * (1.0f + at_least(at_most(z, f[1]), -f[1]));
    case GEGLU_ERF: return gelu_erf(x) * z;
    case GEGLU_QUICK: return gelu_quick(x) * z;
    case SWIGLU_CLAMP:
        return silu(at_most(x, f[1])) * at_least(at_most(z, f[1]), -f[1]);
    default: {
        float s = sigmoid(z);
        return x * s * (1.0f + z * (1.0f - s));
    }
    }
}

// y = function(a). `a` is missing for functions of the index.
KERNEL THREADS(256) unary_elements(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    wait_for_earlier();
    u32 function = p.ints[0];
    float f[4] = {p.floats[0], p.floats[1], p.floats[2], p.floats[3]};
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        float x = a ? get_float(a + AT(p.t[1], i0, i1, i2, i3), p.t[1].type) : 0;
        set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, unary(function, x, f, n));
    }
}

// y = function(a, b). `b` repeats. ints[1], ints[2]: elements of a row before those of `a` and `b`.
KERNEL THREADS(256) binary_elements(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *b, COMMON) {
    wait_for_earlier();
    u32 function = p.ints[0];
    float f[2] = {p.floats[0], p.floats[1]};
    const u32 *shape = p.t[2].shape;
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        float x = get_float(a + AT(p.t[1], i0 + p.ints[1], i1, i2, i3), p.t[1].type);
        u64 other = AT(p.t[2], (i0 + p.ints[2]) % shape[0], i1 % shape[1], i2 % shape[2],
                       i3 % shape[3]);
        float z = get_float(b + other, p.t[2].type);
        set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, binary(function, x, z, f));
    }
}

// y = a gated unit of `a` and `b`, which is also stored as 8-bit numbers, with ints[1] bytes before
// the scales. A warp has 128 elements.
KERNEL THREADS(256) gated_int8(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *b,
                               GLOBAL u8 *codes, COMMON) {
    wait_for_earlier();
    u32 length = p.t[0].shape[0], pieces = (length + 127) / 128, items = pieces * ROWS(p.t[0]);
    u32 warps = thread_count() >> 5;
    float f[2] = {p.floats[0], p.floats[1]};
#pragma unroll 1
    for (u32 item = group_id() * warps + (thread_id() >> 5); item < items;
         item += group_count() * warps) {
        u32 row = item / pieces, k = item % pieces * 128 + 4 * (thread_id() & 31);
        ROW_INDICES(row, p.t[0].shape, i1, i2, i3);
        f32x4 v = get_four(a + AT(p.t[1], 0, i1, i2, i3), &p.t[1], k);
        f32x4 z = get_four(b + AT(p.t[2], 0, i1, i2, i3), &p.t[2], k);
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[i] = binary(p.ints[0], v[i], z[i], f);
        set_four(y + AT(p.t[0], 0, i1, i2, i3), &p.t[0], k, v);
        store_int8(codes, p.ints[1], length, row, k, length, v);
    }
}

// y = a with ints[0..4] zeros before it along each dimension, and zeros behind it.
KERNEL THREADS(256) pad(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    wait_for_earlier();
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        // An index before the source wraps to a huge one.
        u32 a0 = i0 - p.ints[0], a1 = i1 - p.ints[1], a2 = i2 - p.ints[2], a3 = i3 - p.ints[3];
        float x = 0;
        if (a0 < p.t[1].shape[0] && a1 < p.t[1].shape[1] && a2 < p.t[1].shape[2] &&
            a3 < p.t[1].shape[3])
            x = get_float(a + AT(p.t[1], a0, a1, a2, a3), p.t[1].type);
        set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, x);
    }
}

// y = a, with floats[0] right of the diagonal that begins at column ints[0].
KERNEL THREADS(256) diag_mask(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    wait_for_earlier();
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        float x = get_float(a + AT(p.t[1], i0, i1, i2, i3), p.t[1].type);
        if (i0 > (u64)p.ints[0] + i1) x = p.floats[0];
        set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, x);
    }
}
