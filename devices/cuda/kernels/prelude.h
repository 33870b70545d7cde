// Names that every kernel uses. Kernels are written in a dialect that is both CUDA C++ and OpenCL C
// 1.2: no templates, no references, no overloads. Only this file, `math.h` and files for tensor
// cores may contain inline PTX.
#pragma once

#define GLOBAL
#define KERNEL extern "C" __attribute__((global)) void
#define SHARED __attribute__((shared)) // declares memory of a group
#define LOCAL // qualifies pointers to it
#define INLINE __attribute__((device, always_inline)) static inline
#define THREADS(n) __attribute__((launch_bounds(n)))

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;
typedef u32 u32x4 __attribute__((ext_vector_type(4)));
typedef u32 u32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x2 __attribute__((ext_vector_type(2)));

// Names of kernels that a header makes for each size.
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define PASTE3(a, b, c) PASTE(PASTE(a, b), PASTE(_, c))

// Number of operands that `Params` describes. Kernels know the layouts of further ones.
#define MAX_OPERANDS 10

// Layout of one operand. Strides are in bytes; the first one is the distance of elements or blocks.
typedef struct {
    u64 strides[4];
    u32 shape[4];
    u32 type; // ggml's number of the type
    u32 unused;
} Tensor;

// Parameters of a launch, by value. `plan.rs` has the same structure.
typedef struct {
    Tensor t[MAX_OPERANDS];
    u32 ints[12];
    float floats[16];
    u32 node; // number that `fail` reports
    u32 unused;
} Params;

// Parameters that follow the operands of every kernel. A missing operand is a null pointer.
#define COMMON GLOBAL u32 *failure, const GLOBAL u8 *tables, const Params p

// ggml's numbers of types.
#define F32 0
#define F16 1
#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q2_K 10
#define Q3_K 11
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define IQ2_XXS 16
#define IQ2_XS 17
#define IQ3_XXS 18
#define IQ1_S 19
#define IQ4_NL 20
#define IQ3_S 21
#define IQ2_S 22
#define IQ4_XS 23
#define I8 24
#define I16 25
#define I32 26
#define I64 27
#define F64 28
#define IQ1_M 29
#define BF16 30
#define TQ1_0 34
#define TQ2_0 35
#define MXFP4 39
#define NVFP4 40
#define Q1_0 41
#define Q2_0 42
#define F8_E4M3 43

// Places in the grid. All grids have one dimension, as have all groups of threads.
INLINE u32 thread_id(void) { u32 r; asm("mov.u32 %0, %%tid.x;" : "=r"(r)); return r; }
INLINE u32 thread_count(void) { u32 r; asm("mov.u32 %0, %%ntid.x;" : "=r"(r)); return r; }
INLINE u32 group_id(void) { u32 r; asm("mov.u32 %0, %%ctaid.x;" : "=r"(r)); return r; }
INLINE u32 group_count(void) { u32 r; asm("mov.u32 %0, %%nctaid.x;" : "=r"(r)); return r; }
INLINE u64 global_id(void) { return (u64)group_id() * thread_count() + thread_id(); }
INLINE u64 global_count(void) { return (u64)group_count() * thread_count(); }

// Kernels for compute capability 9.0 and later start while the ones before them end. Each calls
// this before it reads what another kernel wrote, and before it writes. Weights may be read
// earlier.
#if __CUDA_ARCH__ >= 900
INLINE void wait_for_earlier(void) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Starts loading the cache line of an address.
INLINE void prefetch(const GLOBAL u8 *at) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at));
}
#else
INLINE void wait_for_earlier(void) {}
INLINE void prefetch(const GLOBAL u8 *at) { (void)at; }
#endif

INLINE void barrier_local(void) { asm volatile("bar.sync 0;" ::: "memory"); }
INLINE void barrier_warp(void) { asm volatile("bar.warp.sync -1;" ::: "memory"); }

// Values of other lanes of a warp of 32. All lanes take part.
INLINE float shuffle_xor(float v, u32 mask) {
    float r;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=f"(r) : "f"(v), "r"(mask));
    return r;
}
INLINE u32 shuffle_xor_u32(u32 v, u32 mask) {
    u32 r;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=r"(r) : "r"(v), "r"(mask));
    return r;
}

// 1 if a lane of the warp has a number other than 0.
INLINE u32 any_warp(u32 v) {
    u32 r;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, -1; }"
                 : "=r"(r) : "r"(v));
    return r != 0;
}

INLINE u32 float_bits(float x) { u32 r; asm("mov.b32 %0, %1;" : "=r"(r) : "f"(x)); return r; }
INLINE float bits_float(u32 x) { float r; asm("mov.b32 %0, %1;" : "=f"(r) : "r"(x)); return r; }
INLINE float half_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
INLINE u16 float_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
INLINE float bf16_float(u16 h) { return bits_float((u32)h << 16); }
// Rounds to even. NaN stays NaN.
INLINE u16 float_bf16(float f) {
    u32 bits = float_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 64u);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
INLINE float max_float(float a, float b) {
    float r;
    asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
INLINE float min_float(float a, float b) {
    float r;
    asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
INLINE float abs_float(float a) { return bits_float(float_bits(a) & 0x7fffffffu); }
INLINE float fma_float(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
INLINE float sqrt_float(float a) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
INLINE float floor_float(float a) {
    float r;
    asm("cvt.rmi.f32.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
INLINE float ceil_float(float a) {
    float r;
    asm("cvt.rpi.f32.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
INLINE float trunc_float(float a) {
    float r;
    asm("cvt.rzi.f32.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
INLINE float round_even(float a) {
    float r;
    asm("cvt.rni.f32.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
INLINE i32 round_even_i32(float a) {
    i32 r;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(r) : "f"(a));
    return r;
}
// Powers of 2 and logarithms to base 2 by the special function unit, with errors of about 2^-22.
INLINE float exp2_fast(float a) {
    float r;
    asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
INLINE float log2_fast(float a) {
    float r;
    asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
// The ALiBi slope of a head: a geometric series for the first `power` heads, the largest power of
// two of all, and in between for the rest.
INLINE float alibi_slope(u32 head, u32 power, float max_bias) {
    if (max_bias <= 0) return 1;
    if (head < power) return exp2_fast(-max_bias / (float)power * (float)(head + 1));
    return exp2_fast(-max_bias / 2 / (float)power * (float)(2 * (head - power) + 1));
}

INLINE u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
INLINE u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }

// Sum of products of four signed bytes.
INLINE i32 dot4(u32 a, u32 b, i32 c) {
    i32 d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

INLINE u32 min_atomic(GLOBAL u32 *to, u32 v) {
    u32 r;
    asm volatile("atom.global.min.u32 %0, [%1], %2;" : "=r"(r) : "l"(to), "r"(v) : "memory");
    return r;
}
// Reports a row or expert number that is out of range. The first node of a stream's work wins.
#define fail() min_atomic(failure, p.node)

// Numbers of element `n` of a tensor, in order of memory of a contiguous one.
#define INDICES(n, shape, i0, i1, i2, i3)                                                          \
    u32 i0, i1, i2, i3;                                                                            \
    { u64 n_ = (n); i0 = (u32)(n_ % (shape)[0]); n_ /= (shape)[0]; i1 = (u32)(n_ % (shape)[1]);    \
      n_ /= (shape)[1]; i2 = (u32)(n_ % (shape)[2]); i3 = (u32)(n_ / (shape)[2]); }
// Numbers of row `n`.
#define ROW_INDICES(n, shape, i1, i2, i3)                                                          \
    u32 i1, i2, i3;                                                                                \
    { u32 n_ = (n); i1 = n_ % (shape)[1]; n_ /= (shape)[1]; i2 = n_ % (shape)[2];                 \
      i3 = n_ / (shape)[2]; }
// Byte of an element or block, relative to the first.
#define AT(t, i0, i1, i2, i3)                                                                      \
    ((u64)(i0) * (t).strides[0] + (u64)(i1) * (t).strides[1] + (u64)(i2) * (t).strides[2] +        \
     (u64)(i3) * (t).strides[3])
#define ELEMENTS(t) ((u64)(t).shape[0] * (t).shape[1] * (t).shape[2] * (t).shape[3])
#define ROWS(t) ((t).shape[1] * (t).shape[2] * (t).shape[3])

// Row or expert number in i32 or i64.
INLINE i64 row_number(const GLOBAL u8 *at, u32 type) {
    return type == I64 ? *(const GLOBAL i64 *)at : *(const GLOBAL i32 *)at;
}

// Elements of the types that all kernels read and write: f32, f16 and bf16.
INLINE float get_float(const GLOBAL u8 *at, u32 type) {
    if (type == F32) return *(const GLOBAL float *)at;
    u16 h = *(const GLOBAL u16 *)at;
    return type == F16 ? half_float(h) : bf16_float(h);
}
INLINE void set_float(GLOBAL u8 *at, u32 type, float v) {
    if (type == F32) *(GLOBAL float *)at = v;
    else *(GLOBAL u16 *)at = type == F16 ? float_half(v) : float_bf16(v);
}

// Elements k to k + 3 of a row, with 0 past its end.
INLINE f32x4 get_four(const GLOBAL u8 *row, const Tensor *t, u32 k) {
    const GLOBAL u8 *at = row + k * t->strides[0];
    if (t->type == F32 && t->strides[0] == 4 && k + 4 <= t->shape[0] && ((u64)at & 15) == 0)
        return *(const GLOBAL f32x4 *)at;
    f32x4 v = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (k + i < t->shape[0]) v[i] = get_float(at + i * t->strides[0], t->type);
    return v;
}
INLINE void set_four(GLOBAL u8 *row, const Tensor *t, u32 k, f32x4 v) {
    GLOBAL u8 *at = row + k * t->strides[0];
    if (t->type == F32 && t->strides[0] == 4 && k + 4 <= t->shape[0] && ((u64)at & 15) == 0) {
        *(GLOBAL f32x4 *)at = v;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (k + i < t->shape[0]) set_float(at + i * t->strides[0], t->type, v[i]);
}

INLINE float warp_sum(float v) {
    for (u32 mask = 16; mask; mask >>= 1) v += shuffle_xor(v, mask);
    return v;
}
INLINE float warp_max(float v) {
    for (u32 mask = 16; mask; mask >>= 1) v = max_float(v, shuffle_xor(v, mask));
    return v;
}
// Sum over all threads of a group of at most 1024, a multiple of 32, in every thread. `scratch` has
// room for 32 floats. The order of additions depends on the number of threads only.
INLINE float group_sum(float v, LOCAL float *scratch) {
    v = warp_sum(v);
    barrier_local();
    if ((thread_id() & 31) == 0) scratch[thread_id() >> 5] = v;
    barrier_local();
    u32 lane = thread_id() & 31;
    return warp_sum(lane < thread_count() >> 5 ? scratch[lane] : 0.0f);
}
INLINE float group_max(float v, LOCAL float *scratch) {
    v = warp_max(v);
    barrier_local();
    if ((thread_id() & 31) == 0) scratch[thread_id() >> 5] = v;
    barrier_local();
    u32 lane = thread_id() & 31;
    return warp_max(scratch[lane < thread_count() >> 5 ? lane : 0]);
}
