// Instructions of tensor cores, for compute capability 8.0 or higher.
#pragma once
#include "blocks.h"

// Weights with the range of f32 are multiplied as bf16, all others as f16.
#if WEIGHT == BF16 || WEIGHT == MXFP4
#define HALF "bf16"
#else
#define HALF "f16"
#endif

// Two floats as halves, the first one lowest.
INLINE u32 halves_of(float low, float high) {
    u32 r;
    asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// Adds the product of 16 rows and 8 columns of 16 halves.
INLINE void multiply_add(float *d, const u32 *a, const u32 *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." HALF "." HALF ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
