// Products of packed weights with up to eight columns of 8-bit numbers (`int8.h`).
// ints[0]: bytes before the scales of the columns.
#include "packed.h"

// Adds the products of a row's unit with group `group` of a column, and with the group `distance`
// after it.
INLINE void add_unit(const Unit *unit, const GLOBAL u8 *x, const GLOBAL f32x2 *scales, u32 group,
                     u32 distance, float *sum) {
    i32 sums[2];
    f32x2 s[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 at = group + half * distance;
        u32x4 v = load_u32x4(x + 16 * (u64)at), w = unit->codes[half];
        s[half] = scales[at];
        sums[half] = dot4(w.x, v.x, dot4(w.y, v.y, dot4(w.z, v.z, dot4(w.w, v.w, 0))));
    }
#if WEIGHT == Q4_0
    // Both groups share the scales of the weights and of the column.
    *sum += unit->scales[0] * (float)(sums[0] + sums[1]) * s[0].x;
    *sum -= unit->offsets[0] * (s[0].y + s[1].y);
#else
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        *sum += unit->scales[half] * (float)sums[half] * s[half].x;
        *sum -= unit->offsets[half] * s[half].y;
    }
#endif
}

#define COLUMNS 1
#define ROWS_PER_WARP 2
#include "mul_mat_int8.h"
#define COLUMNS 2
#define ROWS_PER_WARP 2
#include "mul_mat_int8.h"
#define COLUMNS 3
#define ROWS_PER_WARP 2
#include "mul_mat_int8.h"
#define COLUMNS 4
#define ROWS_PER_WARP 2
#include "mul_mat_int8.h"
#define COLUMNS 5
#define ROWS_PER_WARP 1
#include "mul_mat_int8.h"
#define COLUMNS 6
#define ROWS_PER_WARP 1
#include "mul_mat_int8.h"
#define COLUMNS 7
#define ROWS_PER_WARP 1
#include "mul_mat_int8.h"
#define COLUMNS 8
#define ROWS_PER_WARP 1
#include "mul_mat_int8.h"

// Products with selected experts: operand 3 has their numbers for each token. A warp has two rows
// of one choice. ints[1]: columns of a token, which is 1 if its experts share one.
KERNEL THREADS(256) mul_mat_id_int8(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x,
                                    const GLOBAL u8 *ids, COMMON) {
    u32 length = p.t[1].shape[0], rows = p.t[1].shape[1], warps = thread_count() >> 5;
    u32 groups = (rows + 2 * warps - 1) / (2 * warps), choice = group_id() / groups;
    u32 first = (group_id() % groups * warps + (thread_id() >> 5)) * 2;
    u32 slot = choice % p.t[3].shape[0], token = choice / p.t[3].shape[0];
    wait_for_earlier();
    if (first >= rows) return;
    i64 expert = row_number(ids + AT(p.t[3], slot, token, 0, 0), p.t[3].type);
    GLOBAL u8 *to = y + AT(p.t[0], first, slot, token, 0);
    if (expert == -1) {
        u32 lane = thread_id() & 31;
        if (lane < min_u32(2, rows - first)) ((GLOBAL float *)to)[lane] = 0;
        return;
    }
    if ((u64)expert >= p.t[1].shape[2]) {
        fail();
        return;
    }
    u32 column = token * p.ints[1] + slot % p.ints[1];
    const GLOBAL f32x2 *scales = (const GLOBAL f32x2 *)(x + p.ints[0]);
    const GLOBAL u8 *matrix = a + (u64)expert * p.t[1].strides[2];
    rows_product_1(matrix, p.t[1].strides[1], rows - first, first, length,
                   x + (u64)column * length, scales + (u64)column * (length / 16), to, 0);
}
