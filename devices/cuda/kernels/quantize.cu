// Conversion of columns to 8-bit numbers.
#include "int8.h"

// ints[0]: bytes before the scales. A warp converts 128 elements.
KERNEL THREADS(256) quantize(GLOBAL u8 *to, const GLOBAL u8 *x, COMMON) {
    wait_for_earlier();
    u32 length = p.t[1].shape[0], pieces = (length + 127) / 128, items = pieces * ROWS(p.t[1]);
    u32 warps = thread_count() >> 5;
#pragma unroll 1
    for (u32 item = group_id() * warps + (thread_id() >> 5); item < items;
         item += group_count() * warps) {
        u32 column = item / pieces, k = item % pieces * 128 + 4 * (thread_id() & 31);
        ROW_INDICES(column, p.t[1].shape, i1, i2, i3);
        f32x4 v = get_four(x + AT(p.t[1], 0, i1, i2, i3), &p.t[1], k);
        store_int8(to, p.ints[0], length, column, k, length, v);
    }
}
