// Norms of rows: one group per row.
#include "int8.h"

// y = a row of `a`, less its mean if ints[0], times a factor. The factor is 1 / sqrt(mean square +
// eps), or 1 / max(sqrt(sum of squares), eps) if ints[1].
KERNEL THREADS(1024) norm(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    wait_for_earlier();
    SHARED float scratch[32];
    u32 count = p.t[0].shape[0];
#pragma unroll 1
    for (u32 row = group_id(); row < ROWS(p.t[0]); row += group_count()) {
        ROW_INDICES(row, p.t[0].shape, i1, i2, i3);
        const GLOBAL u8 *from = a + AT(p.t[1], 0, i1, i2, i3);
        GLOBAL u8 *to = y + AT(p.t[0], 0, i1, i2, i3);
        float mean = 0;
        if (p.ints[0]) {
            float sum = 0;
#pragma unroll 1
            for (u32 i = thread_id(); i < count; i += thread_count())
                sum += get_float(from + i * p.t[1].strides[0], p.t[1].type);
            mean = group_sum(sum, scratch) / (float)count;
        }
        float squares = 0;
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count()) {
            float v = get_float(from + i * p.t[1].strides[0], p.t[1].type) - mean;
            squares += v * v;
        }
        squares = group_sum(squares, scratch);
        float eps = p.floats[0];
        float factor = 1.0f / (p.ints[1] ? max_float(sqrt_float(squares), eps)
                                         : sqrt_float(squares / (float)count + eps));
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count()) {
            float v = get_float(from + i * p.t[1].strides[0], p.t[1].type) - mean;
            set_float(to + i * p.t[0].strides[0], p.t[0].type, v * factor);
        }
    }
}

// y = RMS norm of the rows of `a`, or of the sum of `a` and `b`, times the row `factors`. A sum is
// stored in `sum`, which may be one of its terms. `b` and `sum` are null without an addition.
// Unless `codes` is null, y is also stored as 8-bit numbers, with ints[0] bytes before the scales.
KERNEL THREADS(1024) scaled_norm(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *factors,
                                 const GLOBAL u8 *b, GLOBAL u8 *sum, GLOBAL u8 *codes, COMMON) {
    wait_for_earlier();
    SHARED float scratch[32];
    u32 count = p.t[0].shape[0], own = 4 * thread_id(), step = 4 * thread_count();
#pragma unroll 1
    for (u32 row = group_id(); row < ROWS(p.t[0]); row += group_count()) {
        ROW_INDICES(row, p.t[0].shape, i1, i2, i3);
        const GLOBAL u8 *from = a + AT(p.t[1], 0, i1, i2, i3);
        const GLOBAL u8 *other = b + AT(p.t[3], 0, i1, i2, i3);
        GLOBAL u8 *kept = sum + AT(p.t[4], 0, i1, i2, i3);
        GLOBAL u8 *to = y + AT(p.t[0], 0, i1, i2, i3);
        f32x4 first = {0, 0, 0, 0};
        float squares = 0;
#pragma unroll 1
        for (u32 k = own; k < count; k += step) {
            f32x4 v = get_four(from, &p.t[1], k);
            if (sum) {
                v += get_four(other, &p.t[3], k);
                set_four(kept, &p.t[4], k, v);
                // The norm is that of the stored sum.
                if (p.t[4].type != F32) v = get_four(kept, &p.t[4], k);
            }
            if (k == own) first = v;
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        squares = group_sum(squares, scratch);
        float factor = 1.0f / sqrt_float(squares / (float)count + p.floats[0]);
        // The lanes of a warp go along together.
#pragma unroll 1
        for (u32 k = own; (k & ~127u) < count; k += step) {
            f32x4 v = first;
            if (k != own)
                v = sum ? get_four(kept, &p.t[4], k) : get_four(from, &p.t[1], k);
            v *= factor * get_four(factors, &p.t[2], k);
            set_four(to, &p.t[0], k, v);
            if (codes) store_int8(codes, p.ints[0], count, row, k, count, v);
        }
    }
}
