// Columns as 8-bit numbers, for products with packed weights. All codes come first, column after
// column; then, for each 16 elements, the scale and the scale times the sum of the codes. 32
// elements share a scale.
#pragma once
#include "prelude.h"

// Stores elements k to k + 3 of a column of `length` elements. Lanes of a warp have neighbouring
// elements, the first ones at a multiple of 32. All lanes take part; those from `end` on store
// nothing. The scales begin at byte `scales`.
INLINE void store_int8(GLOBAL u8 *to, u32 scales, u32 length, u32 column, u32 k, u32 end, f32x4 v) {
    u32 is_inside = k < end;
    float largest = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (!is_inside) v[i] = 0;
        largest = max_float(largest, abs_float(v[i]));
    }
#pragma unroll
    for (u32 mask = 4; mask; mask >>= 1) largest = max_float(largest, shuffle_xor(largest, mask));
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
    float nan = 0 * v.x + 0 * v.y + 0 * v.z + 0 * v.w;
#pragma unroll
    for (u32 mask = 4; mask; mask >>= 1) nan += shuffle_xor(nan, mask);
    scale += nan;
    if (!is_inside) return;
    *(GLOBAL u32 *)(to + (u64)column * length + k) = codes;
    if ((k & 15) == 0) {
        u64 group = (u64)column * (length / 16) + k / 16;
        f32x2 both = {scale, scale * (float)sum};
        ((GLOBAL f32x2 *)(to + scales))[group] = both;
    }
}
