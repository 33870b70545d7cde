// Matrix instructions and asynchronous copies.
#include "base.h"

DEVICE u32 shared_address(const void *p) {
    u64 a;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(a) : "l"(p));
    return (u32)a;
}

// y[16][8] = a[16][16] * b[8][16], of f16, in f32.
KERNEL product_f16(float *y, const u16 *a, const u16 *b) {
    SHARED u16 left[16 * 16];
    SHARED u16 right[8 * 16];
    u32 i = tid();
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(left + 8 * i)), "l"(a + 8 * i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (i < 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(right + 8 * i)), "l"(b + 8 * i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    barrier();
    u32 p[4], q[2];
    u32 row = (i & 7) + (i & 8), column = i >> 4 << 3;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p[0]), "=r"(p[1]), "=r"(p[2]), "=r"(p[3]) : "r"(shared_address(left + row * 16 + column)) : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(q[0]), "=r"(q[1]) : "r"(shared_address(right + (i & 7) * 16 + (i >> 3 & 1) * 8)) : "memory");
    float c[4] = {0, 0, 0, 0};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(q[0]), "r"(q[1]));
    float *to = y + (i >> 2) * 8 + (i & 3) * 2;
    to[0] = c[0]; to[1] = c[1]; to[64] = c[2]; to[65] = c[3];
}

// y[16][8] = a[16][32] * b[8][32], of signed bytes.
KERNEL product_s8(int *y, const u32 *a, const u32 *b) {
    u32 g = tid() >> 2, t = tid() & 3;
    int c[4] = {1, 2, 3, 4};
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[g * 8 + t]), "r"(a[g * 8 + 64 + t]), "r"(a[g * 8 + t + 4]), "r"(a[g * 8 + 64 + t + 4]), "r"(b[g * 8 + t]), "r"(b[g * 8 + t + 4]));
    int *to = y + g * 8 + t * 2;
    to[0] = c[0]; to[1] = c[1]; to[64] = c[2]; to[65] = c[3];
}

// y[16][8] = a[16][8] * b[8][8], of tf32.
KERNEL product_tf32(float *y, const u32 *a, const u32 *b) {
    u32 g = tid() >> 2, t = tid() & 3;
    float c[4] = {0, 0, 0, 0};
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[g * 8 + t]), "r"(a[g * 8 + 64 + t]), "r"(a[g * 8 + t + 4]), "r"(a[g * 8 + 64 + t + 4]), "r"(b[g * 8 + t]), "r"(b[g * 8 + t + 4]));
    float *to = y + g * 8 + t * 2;
    to[0] = c[0]; to[1] = c[1]; to[64] = c[2]; to[65] = c[3];
}

KERNEL transposed(u32 *y, const u16 *a) {
    SHARED u16 tile[64];
    u32 i = tid(), r;
    tile[i] = a[i]; tile[i + 32] = a[i + 32];
    asm volatile("bar.warp.sync -1;" ::: "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(shared_address(tile + (i & 7) * 8)) : "memory");
    y[i] = r;
}

// The wait is missing.
KERNEL unawaited(u32 *y, const u32 *a) {
    SHARED u32 values[128];
    u32 i = tid();
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(values + 4 * i)), "l"(a + 4 * i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    barrier();
    y[i] = values[4 * i];
}
