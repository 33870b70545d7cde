// Columns as halves, for products with tensor cores.
#include "prelude.h"

// Writes the elements of each row of `x` as halves, with zeros up to ints[0] elements. They are
// bf16 if ints[2], otherwise f16, times a power of two that puts the largest magnitude between 2^14
// and 2^15. `to` starts with the inverse power of each row. The halves start at byte ints[1]. One
// group per row.
KERNEL THREADS(256) halves(GLOBAL u8 *to, const GLOBAL u8 *x, COMMON) {
    SHARED float scratch[32];
    u32 length = p.t[1].shape[0], padded = p.ints[0];
    u64 stride = p.t[1].strides[0];
#pragma unroll 1
    for (u32 row = group_id(); row < ROWS(p.t[1]); row += group_count()) {
        ROW_INDICES(row, p.t[1].shape, i1, i2, i3);
        const GLOBAL u8 *from = x + AT(p.t[1], 0, i1, i2, i3);
        float largest = 0;
#pragma unroll 1
        for (u32 k = thread_id(); k < length; k += thread_count())
            largest = max_float(largest, abs_float(get_float(from + k * stride, p.t[1].type)));
        largest = group_max(largest, scratch);
        // Biased exponents of the power and its inverse.
        u32 exponent = p.ints[2] ? 127 : min_u32(268 - (float_bits(largest) >> 23), 253);
        float factor = bits_float(exponent << 23);
        if (thread_id() == 0) ((GLOBAL float *)to)[row] = bits_float((254 - exponent) << 23);
        GLOBAL u32 *pairs = (GLOBAL u32 *)(to + p.ints[1] + (u64)row * padded * 2);
#pragma unroll 1
        for (u32 k = 2 * thread_id(); k < padded; k += 2 * thread_count()) {
            u32 pair = 0;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                if (k + i >= length) break;
                float v = get_float(from + (k + i) * stride, p.t[1].type) * factor;
                pair |= (u32)(p.ints[2] ? float_bf16(v) : float_half(v)) << (16 * i);
            }
            pairs[k / 2] = pair;
        }
    }
}

// y = the sum of ints[0] parts, each as large as y without gaps. A thread adds up an element.
KERNEL THREADS(256) sum_parts(GLOBAL u8 *y, const GLOBAL u8 *parts, COMMON) {
    u64 count = ELEMENTS(p.t[0]);
#pragma unroll 1
    for (u64 n = global_id(); n < count; n += global_count()) {
        float sum = 0;
#pragma unroll 4
        for (u32 i = 0; i < p.ints[0]; i++) sum += ((const GLOBAL float *)parts)[i * count + n];
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        *(GLOBAL float *)(y + AT(p.t[0], i0, i1, i2, i3)) = sum;
    }
}
