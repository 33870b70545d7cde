// Kernels that are right.
#include "base.h"

KERNEL add(float *y, const float *a, const float *b, u32 n) {
    u32 i = bid() * block_size() + tid();
    if (i < n) y[i] = a[i] + b[i];
}

KERNEL sum(float *y, const float *a) {
    SHARED float partial[128];
    partial[tid()] = a[bid() * 128 + tid()];
    for (u32 half = 64; half; half >>= 1) {
        barrier();
        if (tid() < half) partial[tid()] += partial[tid() + half];
    }
    if (tid() == 0) y[bid()] = partial[0];
}

KERNEL shuffles(u32 *y) {
    u32 lane = tid() & 31, up, down, across, index, inside;
    asm volatile("shfl.sync.up.b32 %0, %1, 3, 0, -1;" : "=r"(up) : "r"(lane));
    asm volatile("shfl.sync.down.b32 %0, %1, 2, 31, -1;" : "=r"(down) : "r"(lane));
    asm volatile("shfl.sync.bfly.b32 %0, %1, 5, 31, -1;" : "=r"(across) : "r"(lane));
    asm volatile("{ .reg .pred p; shfl.sync.idx.b32 %0|p, %2, 15, 0x180f, -1; selp.u32 %1, 1, 0, p; }"
                 : "=r"(index), "=r"(inside) : "r"(lane));
    u32 *to = y + tid() * 5;
    to[0] = up; to[1] = down; to[2] = across; to[3] = index; to[4] = inside;
}

KERNEL collatz(u32 *y, const u32 *a, u32 n) {
    u32 i = bid() * block_size() + tid();
    if (i >= n) return;
    u64 v = a[i];
    u32 steps = 0;
    while (v != 1) {
        if (v & 1) v = 3 * v + 1;
        else v >>= 1;
        steps++;
    }
    y[i] = steps;
}

KERNEL transpose(float *y, const float *a) {
    SHARED float tile[32 * 33];
    u32 x = tid() & 31, row = tid() >> 5;
    for (u32 r = row; r < 32; r += 8) tile[r * 33 + x] = a[r * 32 + x];
    barrier();
    for (u32 r = row; r < 32; r += 8) y[r * 32 + x] = tile[x * 33 + r];
}

KERNEL local_array(u32 *y, const u32 *order) {
    u32 values[16];
    for (u32 i = 0; i < 16; i++) values[order[i] & 15] = i * i + tid();
    u32 sum = 0;
    for (u32 i = 0; i < 16; i++) sum = sum * 3 + values[(order[i] + tid()) & 15];
    y[tid()] = sum;
}

KERNEL histogram(u32 *y, const u8 *a, u32 n) {
    SHARED u32 counts[256];
    for (u32 i = tid(); i < 256; i += block_size()) counts[i] = 0;
    barrier();
    for (u32 i = bid() * block_size() + tid(); i < n; i += blocks() * block_size())
        __atomic_fetch_add(&counts[a[i]], 1, __ATOMIC_RELAXED);
    barrier();
    for (u32 i = tid(); i < 256; i += block_size())
        if (counts[i]) add_atomic(y + i, counts[i]);
}

// The last block adds up the sums of all blocks.
KERNEL last_block(u32 *y, u32 *partial, u32 *counter, const u32 *a) {
    SHARED u32 is_last;
    u32 i = bid() * block_size() + tid();
    if (tid() == 0) partial[bid()] = a[bid()] * 2;
    if (tid() == 0) {
        fence();
        is_last = add_atomic(counter, 1) == blocks() - 1;
    }
    barrier();
    if (is_last && tid() == 0) {
        u32 sum = 0;
        for (u32 b = 0; b < blocks(); b++) sum += partial[b];
        y[0] = sum + i * 0;
    }
}

KERNEL dots(int *y, const u32 *a, const u32 *b) {
    u32 i = tid();
    int s, u, m;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(s) : "r"(a[i]), "r"(b[i]), "r"(7));
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(u) : "r"(a[i]), "r"(b[i]), "r"(-7));
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(m) : "r"(a[i]), "r"(b[i]), "r"(0));
    y[3 * i] = s; y[3 * i + 1] = u; y[3 * i + 2] = m;
}

CONSTANT u32 squares[8] = {0, 1, 4, 9, 16, 25, 36, 49};
__attribute__((device)) u32 calls = 5;
__attribute__((device)) u32 *pointer = &calls;

KERNEL tables(u32 *y) { y[tid()] = squares[tid() & 7] + *pointer; }

typedef struct { u32 a; float b; u64 c; } Item;
NOINLINE Item step(Item v, u32 n, float *out) {
    *out = v.b * 2;
    v.a += n; v.c *= 3;
    return v;
}
NOINLINE float deeper(Item v, u32 n) {
    float out;
    Item w = step(v, n + 1, &out);
    return out + (float)w.a + (float)w.c;
}

KERNEL functions(float *y, Item item) {
    float out;
    Item v = item;
    v.a += tid();
    if (tid() & 1) {
        v = step(v, 10, &out);
        y[tid()] = out + (float)v.a + (float)v.c;
    } else {
        y[tid()] = deeper(v, tid());
    }
}

// Work for speed measurements: mostly arithmetic, some loads.
KERNEL polynomial(float *y, const float *a, u32 turns) {
    u32 i = bid() * block_size() + tid();
    float x = a[i], sum = 0;
    for (u32 k = 0; k < turns; k++) {
        sum = sum * x + a[(i + k) & 1023];
        sum = sum * 0.5f + (float)(k & 7);
    }
    y[i] = sum;
}
