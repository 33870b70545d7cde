// Rows by number.
#include "prelude.h"

INLINE void move_element(GLOBAL u8 *to, u32 to_type, const GLOBAL u8 *from, u32 from_type) {
    if (to_type == I32) *(GLOBAL u32 *)to = *(const GLOBAL u32 *)from;
    else set_float(to, to_type, get_float(from, from_type));
}

// y = the rows of `a` that `numbers` selects.
KERNEL THREADS(256) get_rows(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *numbers, COMMON) {
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        i64 number = row_number(numbers + AT(p.t[2], i1, i2, i3, 0), p.t[2].type);
        if ((u64)number >= p.t[1].shape[1]) {
            fail();
            continue;
        }
        move_element(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type,
                     a + AT(p.t[1], i0, number, i2, i3), p.t[1].type);
    }
}

// Writes the rows of `a` to the rows of `y` that `numbers` selects.
KERNEL THREADS(256) set_rows(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *numbers, COMMON) {
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[1]); n += global_count()) {
        INDICES(n, p.t[1].shape, i0, i1, i2, i3);
        u64 place = AT(p.t[2], i1, i2 % p.t[2].shape[1], i3 % p.t[2].shape[2], 0);
        i64 number = row_number(numbers + place, p.t[2].type);
        if ((u64)number >= p.t[0].shape[1]) {
            fail();
            continue;
        }
        move_element(y + AT(p.t[0], i0, number, i2, i3), p.t[0].type,
                     a + AT(p.t[1], i0, i1, i2, i3), p.t[1].type);
    }
}

// y = `a` plus the rows of `b` that `ids` selects. An id of -1 adds nothing.
KERNEL THREADS(256) add_id(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *b,
                           const GLOBAL u8 *ids, COMMON) {
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        i64 id = row_number(ids + AT(p.t[3], i1, i2, 0, 0), p.t[3].type);
        float x = get_float(a + AT(p.t[1], i0, i1, i2, i3), p.t[1].type);
        if (id != -1) {
            if ((u64)id >= p.t[2].shape[1]) {
                fail();
                continue;
            }
            x += get_float(b + AT(p.t[2], i0, id, 0, 0), p.t[2].type);
        }
        set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, x);
    }
}
