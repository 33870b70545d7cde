// Copies of blocks between tensors of one type.
#include "prelude.h"

// y = the blocks of `a` in logical order. Blocks of ints[0] elements consist of ints[1] units of
// ints[2] bytes: 1, 2 or 4. A thread copies a unit.
KERNEL THREADS(256) copy_blocks(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    u32 units = p.ints[1], unit = p.ints[2];
    u32 to_blocks = p.t[0].shape[0] / p.ints[0], from_blocks = p.t[1].shape[0] / p.ints[0];
    u64 items = (u64)to_blocks * units * ROWS(p.t[0]);
#pragma unroll 1
    for (u64 item = global_id(); item < items; item += global_count()) {
        u64 block = item / units, offset = item % units * unit;
        ROW_INDICES((u32)(block / to_blocks), p.t[0].shape, i1, i2, i3);
        ROW_INDICES((u32)(block / from_blocks), p.t[1].shape, a1, a2, a3);
        GLOBAL u8 *to = y + AT(p.t[0], block % to_blocks, i1, i2, i3) + offset;
        const GLOBAL u8 *from = a + AT(p.t[1], block % from_blocks, a1, a2, a3) + offset;
        if (unit == 4) *(GLOBAL u32 *)to = *(const GLOBAL u32 *)from;
        else if (unit == 2) *(GLOBAL u16 *)to = *(const GLOBAL u16 *)from;
        else *to = *from;
    }
}
