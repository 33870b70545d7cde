// Kernels with planted bugs.
#include "base.h"

// A reduction without the barrier of its loop.
KERNEL sum_unsynchronized(float *y, const float *a) {
    SHARED float partial[128];
    partial[tid()] = a[bid() * 128 + tid()];
    barrier();
    for (u32 half = 64; half; half >>= 1) {
        if (tid() < half) partial[tid()] += partial[tid() + half];
        asm volatile("" ::: "memory");
    }
    if (tid() == 0) y[bid()] = partial[0];
}

// Reads one column too far.
KERNEL transpose_off(float *y, const float *a) {
    SHARED float tile[32 * 33];
    u32 x = tid() & 31, row = tid() >> 5;
    for (u32 r = row; r < 32; r += 8) tile[r * 33 + x] = a[r * 32 + x];
    barrier();
    for (u32 r = row; r < 32; r += 8) y[r * 32 + x] = tile[(x + 1) * 33 + r];
}

KERNEL misaligned(float *y, const float *a) {
    float v[4];
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(a + 1));
    y[tid()] = v[tid() & 3];
}

KERNEL beyond(float *y, const float *a, u32 n) {
    u32 i = bid() * block_size() + tid();
    if (i <= n) y[i] = a[i];
}

// Each block reads what the block before it wrote.
KERNEL block_order(u32 *y) {
    if (tid() == 0) y[bid() + 1] = y[bid()] + 1;
}

KERNEL divergent_barrier(u32 *y) {
    if (tid() < 16) barrier();
    y[tid()] = 1;
}

KERNEL missing_lane(u32 *y) {
    u32 v = tid();
    if (tid() < 31) asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;" : "+r"(v));
    y[tid()] = v;
}

KERNEL uninitialized(u32 *y) {
    SHARED u32 values[64];
    if (tid() < 63) values[tid()] = tid();
    barrier();
    y[tid()] = values[63 - tid()];
}

KERNEL trap_if(u32 *y) {
    if (tid() == 5) asm volatile("trap;");
    y[tid()] = 0;
}

KERNEL endless(u32 *y) {
    while (*(volatile u32 *)y == 0) {}
}

KERNEL same_address(u32 *y) { y[0] = tid(); }

KERNEL constant_read(u32 *y) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(y + tid()) : "memory");
    y[tid()] = v + 1;
}

// The fence is missing.
KERNEL last_block_unfenced(u32 *y, u32 *partial, u32 *counter) {
    if (tid() != 0) return;
    partial[bid()] = 1;
    if (add_atomic(counter, 1) == blocks() - 1) {
        u32 sum = 0;
        for (u32 b = 0; b < blocks(); b++) sum += partial[b];
        y[0] = sum;
    }
}
