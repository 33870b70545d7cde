// Products of a few columns with rows of weights. Included once for each number of columns, with
// COLUMNS, the rows of a warp (ROWS_PER_WARP) and the groups of 32 elements of a column that shared
// memory holds (STEP).

#define vec_product PASTE(vec_product_, COLUMNS)
#define mul_mat_vec PASTE(mul_mat_vec_, COLUMNS)

// Computes the rows from `first` on that this group has, for `count` columns. `x` and `y` are the
// first column and the first element of its result.
INLINE void vec_product(const Matrix *a, u32 first, const Columns *x, u32 count, GLOBAL u8 *y,
                        u64 y_column, LOCAL float *columns, const GLOBAL u8 *tables) {
    u32 lane = thread_id() & 31;
    first += (thread_id() >> 5) * ROWS_PER_WARP;
    u32 groups = (a->length + GROUP - 1) / GROUP;
    float sums[ROWS_PER_WARP][COLUMNS];
#pragma unroll
    for (u32 r = 0; r < ROWS_PER_WARP; r++)
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) sums[r][c] = 0;
#pragma unroll 1
    for (u32 start = 0; start < groups; start += STEP) {
        u32 here = min_u32(STEP, groups - start);
        barrier_local();
#pragma unroll 1
        for (u32 c = 0; c < count; c++)
            load_column(x, c, start * GROUP, here, a->length, columns + c * STEP * PADDED);
        barrier_local();
#pragma unroll 1
        for (u32 g = lane; g < here; g += 32) {
            const LOCAL f32x4 *values = (const LOCAL f32x4 *)(columns + g * PADDED);
#pragma unroll
            for (u32 r = 0; r < ROWS_PER_WARP; r++) {
                if (first + r >= a->rows) break;
                float w[GROUP];
                decode32(a->first + (first + r) * a->row_stride, a->stride, start + g, a->length,
                         w, tables);
#pragma unroll
                for (u32 c = 0; c < COLUMNS; c++) {
                    if (c >= count) break;
                    float sum = sums[r][c];
#pragma unroll
                    for (u32 i = 0; i < GROUP / 4; i++) {
                        f32x4 v = values[c * (STEP * PADDED / 4) + i];
                        sum += w[4 * i] * v.x;
                        sum += w[4 * i + 1] * v.y;
                        sum += w[4 * i + 2] * v.z;
                        sum += w[4 * i + 3] * v.w;
                    }
                    sums[r][c] = sum;
                }
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < ROWS_PER_WARP; r++)
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) {
            float sum = warp_sum(sums[r][c]);
            if (lane == 0 && c < count && first + r < a->rows)
                *(GLOBAL float *)(y + c * y_column + 4 * (u64)(first + r)) = sum;
        }
}

// y = products of the rows of `a` with at most COLUMNS columns of each matrix of `x`.
KERNEL THREADS(256) mul_mat_vec(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x, COMMON) {
    SHARED float columns[COLUMNS * STEP * PADDED] __attribute__((aligned(16)));
    u32 blocks = (p.t[1].shape[1] + WARPS * ROWS_PER_WARP - 1) / (WARPS * ROWS_PER_WARP);
    u32 items = blocks * p.t[2].shape[2] * p.t[2].shape[3];
#pragma unroll 1
    for (u32 item = group_id(); item < items; item += group_count()) {
        u32 batch = item / blocks;
        u32 i2 = batch % p.t[2].shape[2], i3 = batch / p.t[2].shape[2];
        Matrix matrix = MATRIX(a, i2 / (p.t[2].shape[2] / p.t[1].shape[2]),
                               i3 / (p.t[2].shape[3] / p.t[1].shape[3]));
        Columns from = COLUMNS_OF(x + i2 * p.t[2].strides[2] + i3 * p.t[2].strides[3]);
        GLOBAL u8 *to = y + i2 * p.t[0].strides[2] + i3 * p.t[0].strides[3];
        vec_product(&matrix, item % blocks * WARPS * ROWS_PER_WARP, &from, p.t[2].shape[1], to,
                    p.t[0].strides[1], columns, tables);
    }
}

#undef vec_product
#undef mul_mat_vec
#undef COLUMNS
#undef ROWS_PER_WARP
#undef STEP
