// Columns as 8-bit numbers, for products with packed weights. All codes come first, column after
// column; then, for each 16 elements, the scale and the scale times the sum of the codes. 32
// elements share a scale.
#include "prelude.h"

// ints[0]: bytes before the scales. A warp quantizes 128 elements.
KERNEL THREADS(256) quantize(GLOBAL u8 *to, const GLOBAL u8 *x, COMMON) {
    u32 length = p.t[1].shape[0], lane = thread_id() & 31;
    u32 pieces = (length + 127) / 128, items = pieces * ROWS(p.t[1]);
    u32 warps = thread_count() >> 5;
#pragma unroll 1
    for (u32 item = group_id() * warps + (thread_id() >> 5); item < items;
         item += group_count() * warps) {
        u32 column = item / pieces, k = item % pieces * 128 + 4 * lane;
        ROW_INDICES(column, p.t[1].shape, i1, i2, i3);
        const GLOBAL u8 *from = x + AT(p.t[1], k, i1, i2, i3);
        float v[4] = {0, 0, 0, 0}, largest = 0;
        if (k < length)
#pragma unroll
            for (u32 i = 0; i < 4; i++) v[i] = get_float(from + i * p.t[1].strides[0], p.t[1].type);
#pragma unroll
        for (u32 i = 0; i < 4; i++) largest = max_float(largest, abs_float(v[i]));
#pragma unroll
        for (u32 mask = 4; mask; mask >>= 1)
            largest = max_float(largest, shuffle_xor(largest, mask));
        float scale = largest / 127.0f, factor = largest > 0 ? 127.0f / largest : 0;
        u32 codes = 0;
        i32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            i32 code = round_even_i32(v[i] * factor);
            codes |= ((u32)code & 255) << (8 * i);
            sum += code;
        }
        sum += (i32)shuffle_xor_u32((u32)sum, 1);
        sum += (i32)shuffle_xor_u32((u32)sum, 2);
        // `max` drops NaN. A sum of the products with 0 keeps it.
        float nan = 0 * v[0] + 0 * v[1] + 0 * v[2] + 0 * v[3];
#pragma unroll
        for (u32 mask = 4; mask; mask >>= 1) nan += shuffle_xor(nan, mask);
        scale += nan;
        if (k < length) {
            *(GLOBAL u32 *)(to + (u64)column * length + k) = codes;
            if ((lane & 3) == 0) {
                u64 group = (u64)column * (length / 16) + k / 16;
                GLOBAL float *scales = (GLOBAL float *)(to + p.ints[0]) + 2 * group;
                scales[0] = scale;
                scales[1] = scale * (float)sum;
            }
        }
    }
}
