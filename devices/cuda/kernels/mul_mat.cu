// Matrix products with weights of one type. Weights are decoded to f32.
#include "matrix.h"

#define WARPS 8
// Floats between groups of a column in shared memory, so that lanes read from different banks.
#define PADDED 36

// Larger products: a group computes tiles of 64 rows and 64 columns, 4 by 4 per thread.
#define TILE 64
#define DEPTH 64
// Floats between the rows of a tile, whose columns are rows of weights.
#define TILE_ROW (TILE + 4)
#define TILE_FLOATS (DEPTH * TILE_ROW)
// Columns that are multiplied with weights.
typedef struct {
    const GLOBAL u8 *first;
    u64 stride, column_stride;
    u32 type;
} Columns;
#define COLUMNS_OF(x) {(x), p.t[2].strides[0], p.t[2].strides[1], p.t[2].type}

// Loads 4 elements from `k` on of a column of `length` elements, with 0 past the end.
INLINE f32x4 load4(const GLOBAL u8 *column, u64 stride, u32 type, u32 k, u32 length) {
    const GLOBAL u8 *at = column + k * stride;
    if (type == F32 && stride == 4 && k + 4 <= length && is_aligned(at, 16))
        return *(const GLOBAL f32x4 *)at;
    f32x4 v;
#pragma unroll
    for (u32 i = 0; i < 4; i++) v[i] = k + i < length ? get_float(at + i * stride, type) : 0.0f;
    return v;
}

// Loads 32 elements from `k` on of a column into a column of a tile.
INLINE void load_column32(const Columns *x, const GLOBAL u8 *column, u32 k, u32 length,
                          LOCAL float *to) {
    const GLOBAL f32x4 *at = (const GLOBAL f32x4 *)(column + k * x->stride);
    if (x->type == F32 && x->stride == 4 && k + GROUP <= length &&
        is_aligned((const GLOBAL u8 *)at, 16)) {
#pragma unroll
        for (u32 i = 0; i < GROUP / 4; i++) {
            f32x4 v = at[i];
#pragma unroll
            for (u32 j = 0; j < 4; j++) to[(4 * i + j) * TILE_ROW] = v[j];
        }
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < GROUP; i++, k++)
        to[i * TILE_ROW] = k < length ? get_float(column + k * x->stride, x->type) : 0.0f;
}

// Loads `groups` groups of a column from element `first` on into shared memory.
INLINE void load_column(const Columns *x, u32 column, u32 first, u32 groups, u32 length,
                        LOCAL float *to) {
    const GLOBAL u8 *from = x->first + column * x->column_stride;
#pragma unroll 1
    for (u32 i = thread_id(); i < groups * (GROUP / 4); i += thread_count())
        *(LOCAL f32x4 *)(to + i / 8 * PADDED + (i & 7) * 4) =
            load4(from, x->stride, x->type, first + 4 * i, length);
}

#define COLUMNS 1
#define ROWS_PER_WARP 2
#define STEP 128
#include "mul_mat_vec.h"
#define COLUMNS 4
#define ROWS_PER_WARP 1
#define STEP 64
#include "mul_mat_vec.h"
#define COLUMNS 8
#define ROWS_PER_WARP 1
#define STEP 32
#include "mul_mat_vec.h"

// Computes the tile of rows from `first` on. `column_x` and `column_y` have the byte offsets of 64
// columns of operand and result. Columns with `NO_COLUMN` in `column_y` are not stored.
INLINE void tile_product(const Matrix *a, u32 first, const Columns *x, GLOBAL u8 *y,
                         const LOCAL u64 *column_x, const LOCAL u64 *column_y,
                         LOCAL float *tile_a, LOCAL float *tile_b, const GLOBAL u8 *tables) {
    u32 thread = thread_id();
    // The first four warps load weights, the others columns: 32 elements per thread. Threads
    // without a row load the last one again, whose products are not stored.
    u32 loaded = thread & 63, half = thread >> 6 & 1;
    const GLOBAL u8 *row = a->first + min_u32(first + loaded, a->rows - 1) * a->row_stride;
    const GLOBAL u8 *column = x->first + column_x[loaded];
    LOCAL float *to = (thread < 128 ? tile_a : tile_b) + half * GROUP * TILE_ROW + loaded;
    u32 m = (thread & 15) * 4, n = (thread >> 4) * 4;
    float sums[4][4] = {{0}};
#pragma unroll 1
    for (u32 start = 0; start < a->length; start += DEPTH) {
        u32 k = start + half * GROUP;
        barrier_local();
        if (k < a->length) {
            if (thread < 128) {
                float w[GROUP];
                decode32(row, a->stride, k / GROUP, a->length, w, tables);
#pragma unroll
                for (u32 i = 0; i < GROUP; i++) to[i * TILE_ROW] = w[i];
            } else {
                load_column32(x, column, k, a->length, to);
            }
        }
        barrier_local();
        u32 depth = min_u32(DEPTH, a->length - start);
#pragma unroll 4
        for (u32 i = 0; i < depth; i++) {
            f32x4 w = *(const LOCAL f32x4 *)(tile_a + i * TILE_ROW + m);
            f32x4 c = *(const LOCAL f32x4 *)(tile_b + i * TILE_ROW + n);
#pragma unroll
            for (u32 j = 0; j < 4; j++)
#pragma unroll
                for (u32 r = 0; r < 4; r++) sums[j][r] += w[r] * c[j];
        }
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        if (column_y[n + j] == NO_COLUMN) continue;
        GLOBAL float *to = (GLOBAL float *)(y + column_y[n + j]);
#pragma unroll
        for (u32 r = 0; r < 4; r++)
            if (first + m + r < a->rows) to[first + m + r] = sums[j][r];
    }
    barrier_warp();
    barrier_local();
}

// y = products of the rows of `a` with the columns of `x`.
KERNEL THREADS(256) mul_mat_tiles(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x, COMMON) {
    SHARED float tile_a[TILE_FLOATS] __attribute__((aligned(16)));
    SHARED float tile_b[TILE_FLOATS] __attribute__((aligned(16)));
    SHARED u64 column_x[TILE], column_y[TILE];
    u32 tiles_m = (p.t[1].shape[1] + TILE - 1) / TILE;
    u32 tiles_n = (p.t[2].shape[1] + TILE - 1) / TILE;
    u32 items = tiles_m * tiles_n * p.t[2].shape[2] * p.t[2].shape[3];
#pragma unroll 1
    for (u32 item = group_id(); item < items; item += group_count()) {
        u32 batch = item / (tiles_m * tiles_n);
        u32 i2 = batch % p.t[2].shape[2], i3 = batch / p.t[2].shape[2];
        Matrix matrix = MATRIX(a, i2 / (p.t[2].shape[2] / p.t[1].shape[2]),
                               i3 / (p.t[2].shape[3] / p.t[1].shape[3]));
        Columns from = COLUMNS_OF(x + i2 * p.t[2].strides[2] + i3 * p.t[2].strides[3]);
        GLOBAL u8 *to = y + i2 * p.t[0].strides[2] + i3 * p.t[0].strides[3];
        if (thread_id() < TILE) {
            u32 column = item / tiles_m % tiles_n * TILE + thread_id();
            u32 last = p.t[2].shape[1] - 1;
            column_x[thread_id()] = min_u32(column, last) * p.t[2].strides[1];
            column_y[thread_id()] = column <= last ? column * p.t[0].strides[1] : NO_COLUMN;
        }
        barrier_local();
        tile_product(&matrix, item % tiles_m * TILE, &from, to, column_x, column_y, tile_a, tile_b,
                     tables);
    }
}

// y = products of each token with the experts that `ids` names. Few tokens: a column per group.
KERNEL THREADS(256) mul_mat_id_vec(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x,
                                   const GLOBAL u8 *ids, COMMON) {
    SHARED float columns[128 * PADDED] __attribute__((aligned(16)));
    u32 blocks = (p.t[1].shape[1] + 2 * WARPS - 1) / (2 * WARPS);
    u32 used = p.t[3].shape[0], items = blocks * used * p.t[3].shape[1];
#pragma unroll 1
    for (u32 item = group_id(); item < items; item += group_count()) {
        u32 first = item % blocks * 2 * WARPS;
        u32 slot = item / blocks % used, token = item / (blocks * used);
        i32 expert = *(const GLOBAL i32 *)(ids + AT(p.t[3], slot, token, 0, 0));
        GLOBAL u8 *to = y + AT(p.t[0], 0, slot, token, 0);
        if (expert == -1) {
            u32 row = first + thread_id();
            if (thread_id() < 2 * WARPS && row < p.t[1].shape[1]) ((GLOBAL float *)to)[row] = 0;
            continue;
        }
        if ((u32)expert >= p.t[1].shape[2]) {
            if (thread_id() == 0) fail();
            continue;
        }
        Matrix matrix = MATRIX(a, (u32)expert, 0);
        Columns from = COLUMNS_OF(x + AT(p.t[2], 0, slot % p.t[2].shape[1], token, 0));
        vec_product_1(&matrix, first, &from, 1, to, 0, columns, tables);
    }
}

// As `mul_mat_id_vec`, for many tokens. `lists` has the number of choices of each expert, then for
// each expert their list.
KERNEL THREADS(256) mul_mat_id_tiles(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x,
                                     const GLOBAL u8 *ids, const GLOBAL u8 *lists, COMMON) {
    SHARED float tile_a[TILE_FLOATS] __attribute__((aligned(16)));
    SHARED float tile_b[TILE_FLOATS] __attribute__((aligned(16)));
    SHARED u64 column_x[TILE], column_y[TILE];
    const GLOBAL u32 *counts = (const GLOBAL u32 *)lists;
    u32 experts = p.t[1].shape[2], used = p.t[3].shape[0], choices = used * p.t[3].shape[1];
    u32 tiles_m = (p.t[1].shape[1] + TILE - 1) / TILE;
    // The last tile of each expert may be partial.
    u32 items = tiles_m * ((choices + TILE - 1) / TILE + experts);
#pragma unroll 1
    for (u32 item = group_id(); item < items; item += group_count()) {
        ExpertTile tile = expert_tile(counts, experts, item / tiles_m, TILE);
        if (tile.expert == experts) return;
        Matrix matrix = MATRIX(a, tile.expert, 0);
        Columns from = COLUMNS_OF(x);
        if (thread_id() < TILE) {
            u32 n = tile.number * TILE + thread_id();
            const GLOBAL u32 *list = counts + experts + (u64)tile.expert * choices;
            u32 choice = list[min_u32(n, tile.count - 1)];
            u32 slot = choice % used, token = choice / used;
            column_x[thread_id()] = AT(p.t[2], 0, slot % p.t[2].shape[1], token, 0);
            column_y[thread_id()] = n < tile.count ? AT(p.t[0], 0, slot, token, 0) : NO_COLUMN;
        }
        barrier_local();
        tile_product(&matrix, item % tiles_m * TILE, &from, y, column_x, column_y, tile_a, tile_b,
                     tables);
    }
}

// y = sum over k of column k of `a` times column k of `b`. A thread computes 32 elements.
KERNEL THREADS(128) out_prod(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *b, COMMON) {
    u32 length = p.t[1].shape[0], groups = (length + GROUP - 1) / GROUP;
    u64 items = (u64)groups * p.t[0].shape[1] * p.t[0].shape[2] * p.t[0].shape[3];
#pragma unroll 1
    for (u64 item = global_id(); item < items; item += global_count()) {
        u32 g = (u32)(item % groups);
        ROW_INDICES((u32)(item / groups), p.t[0].shape, i1, i2, i3);
        const GLOBAL u8 *rows = a + i2 / (p.t[2].shape[2] / p.t[1].shape[2]) * p.t[1].strides[2] +
                                i3 / (p.t[2].shape[3] / p.t[1].shape[3]) * p.t[1].strides[3];
        const GLOBAL u8 *factors = b + AT(p.t[2], i1, 0, i2, i3);
        float sums[GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) sums[i] = 0;
#pragma unroll 1
        for (u32 k = 0; k < p.t[1].shape[1]; k++) {
            float w[GROUP];
            decode32(rows + k * p.t[1].strides[1], p.t[1].strides[0], g, length, w, tables);
            float factor = get_float(factors + k * p.t[2].strides[1], p.t[2].type);
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) sums[i] += w[i] * factor;
        }
        GLOBAL u8 *to = y + AT(p.t[0], 0, i1, i2, i3) + (u64)(GROUP * g) * p.t[0].strides[0];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            if (GROUP * g + i < length) *(GLOBAL float *)(to + i * p.t[0].strides[0]) = sums[i];
    }
}
