// Sums, positions of the largest elements, and running sums of rows.
#include "math.h"

// Sums of pieces of `a` in logical order, times floats[0]. ints: 0 elements of a sum, 1 sums, 2, 3
// the number of all elements in two words. The last sum may have fewer.
KERNEL THREADS(256) sums(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    SHARED float scratch[32];
    u64 all = (u64)p.ints[2] | (u64)p.ints[3] << 32;
#pragma unroll 1
    for (u32 number = group_id(); number < p.ints[1]; number += group_count()) {
        u64 first = (u64)number * p.ints[0], left = all - first;
        u32 count = left < p.ints[0] ? (u32)left : p.ints[0];
        float sum = 0;
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count()) {
            INDICES(first + i, p.t[1].shape, i0, i1, i2, i3);
            sum += get_float(a + AT(p.t[1], i0, i1, i2, i3), p.t[1].type);
        }
        sum = group_sum(sum, scratch);
        if (thread_id() == 0) {
            INDICES(number, p.t[0].shape, i0, i1, i2, i3);
            set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, sum * p.floats[0]);
        }
    }
}

// Running sums of rows: a thread has a piece of a row.
KERNEL THREADS(256) running_sums(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    SHARED float sums_of_pieces[256];
    u32 count = p.t[0].shape[0], piece = (count + 255) / 256;
#pragma unroll 1
    for (u32 row = group_id(); row < ROWS(p.t[0]); row += group_count()) {
        ROW_INDICES(row, p.t[0].shape, i1, i2, i3);
        const GLOBAL u8 *from = a + AT(p.t[1], 0, i1, i2, i3);
        GLOBAL u8 *to = y + AT(p.t[0], 0, i1, i2, i3);
        u32 first = min_u32(thread_id() * piece, count), last = min_u32(first + piece, count);
        float sum = 0;
#pragma unroll 1
        for (u32 i = first; i < last; i++)
            sum += get_float(from + i * p.t[1].strides[0], p.t[1].type);
        barrier_local();
        sums_of_pieces[thread_id()] = sum;
        barrier_local();
        sum = 0;
#pragma unroll 1
        for (u32 i = 0; i < thread_id(); i++) sum += sums_of_pieces[i];
#pragma unroll 1
        for (u32 i = first; i < last; i++) {
            sum += get_float(from + i * p.t[1].strides[0], p.t[1].type);
            set_float(to + i * p.t[0].strides[0], p.t[0].type, sum);
        }
    }
}

// Rank and position in one number, so that the greatest is the first of the largest.
INLINE u64 candidate(float x, u32 i) { return (u64)rank(x) << 32 | (u32)~i; }

// y = position of the first of the largest elements of each row.
KERNEL THREADS(1024) argmax(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    SHARED u64 best[1024];
    u32 count = p.t[1].shape[0], thread = thread_id();
#pragma unroll 1
    for (u32 row = group_id(); row < ROWS(p.t[1]); row += group_count()) {
        ROW_INDICES(row, p.t[1].shape, i1, i2, i3);
        const GLOBAL u8 *from = a + AT(p.t[1], 0, i1, i2, i3);
        u64 most = 0;
#pragma unroll 1
        for (u32 i = thread; i < count; i += thread_count()) {
            u64 own = candidate(get_float(from + i * p.t[1].strides[0], p.t[1].type), i);
            if (own > most) most = own;
        }
        barrier_local();
        best[thread] = most;
        barrier_local();
#pragma unroll 1
        for (u32 half = thread_count() / 2; half; half /= 2) {
            if (thread < half && best[thread + half] > best[thread])
                best[thread] = best[thread + half];
            barrier_local();
        }
        if (thread == 0) *(GLOBAL u32 *)(y + (u64)row * p.t[0].strides[0]) = ~(u32)best[0];
    }
}
