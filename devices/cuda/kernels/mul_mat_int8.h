// Products of packed weights with COLUMNS columns of 8-bit numbers. A warp has ROWS_PER_WARP rows.
// Included once for each number of columns.

#define mul_mat_int8 PASTE(mul_mat_int8_, COLUMNS)
#define rows_product PASTE(rows_product_, COLUMNS)
#define add_units PASTE(add_units_, COLUMNS)
// Units whose weights a lane loads at once.
#define UNITS (COLUMNS <= 2 ? 2 : 1)

// Adds the products of units `u` and, if `count` is 2, `u` + 32 of the rows. Loads all weights
// first.
INLINE void add_units(const GLOBAL u8 *const *row, u32 u, u32 count, u32 units, const GLOBAL u8 *x,
                      const GLOBAL f32x2 *scales, float (*sums)[COLUMNS]) {
    Unit unit[UNITS][ROWS_PER_WARP];
#pragma unroll
    for (u32 i = 0; i < count; i++)
#pragma unroll
        for (u32 r = 0; r < ROWS_PER_WARP; r++)
            unit[i][r] = load_unit(row[r], u + 32 * i, units);
#pragma unroll
    for (u32 i = 0; i < count; i++)
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++)
#pragma unroll
            for (u32 r = 0; r < ROWS_PER_WARP; r++)
                add_unit(&unit[i][r], x, scales, c * 2 * units + FIRST_GROUP(u + 32 * i),
                         GROUP_DISTANCE(units), &sums[r][c]);
}

// Computes rows `first` and following of a matrix, `rows` at most. `y` is the first result, and
// `y_column` the distance of columns of results in bytes.
INLINE void rows_product(const GLOBAL u8 *a, u64 row_stride, u32 rows, u32 first, u32 length,
                         const GLOBAL u8 *x, const GLOBAL f32x2 *scales, GLOBAL u8 *y,
                         u64 y_column) {
    u32 lane = thread_id() & 31, units = length / 32, u = lane;
    const GLOBAL u8 *row[ROWS_PER_WARP];
    float sums[ROWS_PER_WARP][COLUMNS];
#pragma unroll
    for (u32 r = 0; r < ROWS_PER_WARP; r++) {
        row[r] = a + (first + min_u32(r, rows - 1)) * row_stride;
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) sums[r][c] = 0;
    }
#pragma unroll 1
    for (; u + 32 * (UNITS - 1) < units; u += 32 * UNITS)
        add_units(row, u, UNITS, units, x, scales, sums);
    if (UNITS > 1 && u < units) add_units(row, u, 1, units, x, scales, sums);
#pragma unroll
    for (u32 r = 0; r < ROWS_PER_WARP; r++)
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) {
            float sum = warp_sum(sums[r][c]);
            if (lane == 0 && r < rows) *(GLOBAL float *)(y + 4 * r + c * y_column) = sum;
        }
}

// Up to three products with the same columns. The first ints[1] groups have the first product, the
// next ints[2] the second.
KERNEL THREADS(256) mul_mat_int8(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x,
                                 GLOBAL u8 *y1, const GLOBAL u8 *a1, GLOBAL u8 *y2,
                                 const GLOBAL u8 *a2, COMMON) {
    u32 group = group_id(), length = p.t[1].shape[0], rows = p.t[1].shape[1];
    u64 row_stride = p.t[1].strides[1], y_column = p.t[0].strides[1];
    if (group >= p.ints[1]) {
        group -= p.ints[1];
        y = y1, a = a1, rows = p.t[4].shape[1], y_column = p.t[3].strides[1];
        if (group >= p.ints[2]) {
            group -= p.ints[2];
            y = y2, a = a2, rows = p.t[6].shape[1], y_column = p.t[5].strides[1];
        }
    }
    u32 first = (group * (thread_count() >> 5) + (thread_id() >> 5)) * ROWS_PER_WARP;
    u32 count = min_u32(first < rows ? rows - first : 0, ROWS_PER_WARP);
#pragma unroll 1
    for (u32 r = 0; r < count; r++)
#pragma unroll 1
        for (u64 i = 128 * (thread_id() & 31); i < row_stride; i += 128 * 32)
            prefetch(a + (first + r) * row_stride + i);
    wait_for_earlier();
    if (count == 0) return;
    rows_product(a, row_stride, rows - first, first, length, x,
                 (const GLOBAL f32x2 *)(x + p.ints[0]), y + 4 * (u64)first, y_column);
}

#undef mul_mat_int8
#undef rows_product
#undef add_units
#undef UNITS
#undef COLUMNS
#undef ROWS_PER_WARP
