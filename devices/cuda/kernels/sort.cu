// Positions of the elements of rows in order: a bitonic sort of pieces in shared memory.
#include "math.h"

// Elements of a piece.
#define PIECE 2048

// Sorts numbers in shared memory so that they descend.
INLINE void sort_piece(LOCAL u64 *keys) {
#pragma unroll 1
    for (u32 size = 2; size <= PIECE; size *= 2) {
#pragma unroll 1
        for (u32 step = size / 2; step; step /= 2) {
            barrier_local();
#pragma unroll 1
            for (u32 pair = thread_id(); pair < PIECE / 2; pair += thread_count()) {
                u32 i = pair / step * 2 * step + pair % step, j = i + step;
                u32 ascends = i & size;
                u64 x = keys[i], z = keys[j];
                if ((x < z) != (ascends != 0)) {
                    keys[i] = z;
                    keys[j] = x;
                }
            }
        }
    }
    barrier_local();
}

// Sorts pieces of rows, or candidates of earlier pieces. ints: 0 pieces of a row, 1 elements of the
// result of a piece, 2: 1 to sort from the smallest. `found` has the positions of the candidates of
// each row one after the other, ints[3] in all; null for the elements themselves. The result of a
// piece goes to `y`, or to `kept` if that is not null.
KERNEL THREADS(512) sort(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *found, GLOBAL u8 *kept,
                         COMMON) {
    SHARED u64 keys[PIECE];
    u32 pieces = p.ints[0], items = pieces * ROWS(p.t[1]);
    u32 count = found ? p.ints[3] : p.t[1].shape[0];
#pragma unroll 1
    for (u32 item = group_id(); item < items; item += group_count()) {
        u32 row = item / pieces, piece = item % pieces;
        ROW_INDICES(row, p.t[1].shape, i1, i2, i3);
        const GLOBAL u8 *from = a + AT(p.t[1], 0, i1, i2, i3);
        const GLOBAL u32 *candidates = (const GLOBAL u32 *)found + (u64)row * count;
        barrier_local();
#pragma unroll 1
        for (u32 i = thread_id(); i < PIECE; i += thread_count()) {
            u32 at = piece * PIECE + i;
            u64 key = 0;
            if (at < count) {
                u32 place = found ? candidates[at] : at;
                // Candidates of a short piece may be none.
                if (place < p.t[1].shape[0]) {
                    u32 own = rank(get_float(from + place * p.t[1].strides[0], p.t[1].type));
                    if (p.ints[2]) own = ~own;
                    key = (u64)own << 32 | (u32)~place;
                }
            }
            keys[i] = key;
        }
        sort_piece(keys);
#pragma unroll 1
        for (u32 i = thread_id(); i < p.ints[1] && i < PIECE; i += thread_count()) {
            u32 place = keys[i] ? ~(u32)keys[i] : 0xffffffffu;
            if (kept) {
                ((GLOBAL u32 *)kept)[((u64)row * pieces + piece) * p.ints[1] + i] = place;
            } else {
                *(GLOBAL u32 *)(y + AT(p.t[0], i, i1, i2, i3)) = place;
            }
        }
    }
}

// Sorts rows that are too long for shared memory: the position of an element is the number of
// elements before it. ints[2]: 1 to sort from the smallest.
KERNEL THREADS(256) sort_long(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    u32 count = p.t[1].shape[0];
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[1]); n += global_count()) {
        INDICES(n, p.t[1].shape, i0, i1, i2, i3);
        const GLOBAL u8 *from = a + AT(p.t[1], 0, i1, i2, i3);
        u32 own = rank(get_float(from + i0 * p.t[1].strides[0], p.t[1].type)), before = 0;
        if (p.ints[2]) own = ~own;
#pragma unroll 1
        for (u32 i = 0; i < count; i++) {
            u32 other = rank(get_float(from + i * p.t[1].strides[0], p.t[1].type));
            if (p.ints[2]) other = ~other;
            before += other > own || (other == own && i < i0);
        }
        *(GLOBAL u32 *)(y + AT(p.t[0], before, i1, i2, i3)) = i0;
    }
}
