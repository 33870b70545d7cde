// Products of packed weights with COLUMNS columns of 8-bit numbers. A warp has ROWS rows.
// Included once for each number of columns.

#define mul_mat_int8 PASTE(mul_mat_int8_, COLUMNS)

KERNEL THREADS(256) mul_mat_int8(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x, COMMON) {
    u32 lane = thread_id() & 31, warps = thread_count() >> 5;
    u32 length = p.t[1].shape[0], rows = p.t[1].shape[1], units = length / 32;
    u32 per_column = length / 16, distance = GROUP_DISTANCE(units);
    const GLOBAL f32x2 *scales = (const GLOBAL f32x2 *)(x + p.ints[0]);
#pragma unroll 1
    for (u32 first = (group_id() * warps + (thread_id() >> 5)) * ROWS_PER_WARP; first < rows;
         first += group_count() * warps * ROWS_PER_WARP) {
        const GLOBAL u8 *row[ROWS_PER_WARP];
        float sums[ROWS_PER_WARP][COLUMNS];
#pragma unroll
        for (u32 r = 0; r < ROWS_PER_WARP; r++) {
            row[r] = a + min_u32(first + r, rows - 1) * p.t[1].strides[1];
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) sums[r][c] = 0;
        }
#pragma unroll 1
        for (u32 u = lane; u < units; u += 32) {
            Unit unit[ROWS_PER_WARP];
#pragma unroll
            for (u32 r = 0; r < ROWS_PER_WARP; r++) unit[r] = load_unit(row[r], u, units);
            u32 group = FIRST_GROUP(u);
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) {
                u32 at[2] = {c * per_column + group, c * per_column + group + distance};
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    u32x4 v = load_u32x4(x + 16 * (u64)at[half]);
                    f32x2 s = scales[at[half]];
#pragma unroll
                    for (u32 r = 0; r < ROWS_PER_WARP; r++) {
                        u32x4 w = unit[r].codes[half];
                        i32 sum = dot4(w.x, v.x, dot4(w.y, v.y, dot4(w.z, v.z, dot4(w.w, v.w, 0))));
                        sums[r][c] += unit[r].scales[half] * (float)sum * s.x -
                                      unit[r].offsets[half] * s.y;
                    }
                }
            }
        }
#pragma unroll
        for (u32 r = 0; r < ROWS_PER_WARP; r++)
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) {
                float sum = warp_sum(sums[r][c]);
                if (lane == 0 && first + r < rows)
                    *(GLOBAL float *)(y + (first + r) * p.t[0].strides[0] +
                                      c * p.t[0].strides[1]) = sum;
            }
    }
}

#undef mul_mat_int8
#undef COLUMNS
#undef ROWS_PER_WARP
