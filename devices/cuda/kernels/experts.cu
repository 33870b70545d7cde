// Lists of the columns that each expert multiplies.
#include "prelude.h"

// Writes the number of choices of each expert, then for each expert the list of its choices, to
// `lists`. Choices are numbered slot first. The order of a list is that of the numbers. Rows of `y`
// without an expert become 0. One group per expert.
KERNEL THREADS(256) expert_lists(GLOBAL u8 *y, const GLOBAL u8 *ids, GLOBAL u8 *lists, COMMON) {
    SHARED u32 counts[256];
    u32 experts = p.ints[0], used = p.t[1].shape[0], choices = used * p.t[1].shape[1];
    u32 share = (choices + 255) / 256;
    u32 first = min_u32(thread_id() * share, choices), last = min_u32(first + share, choices);
#pragma unroll 1
    for (u32 expert = group_id(); expert < experts; expert += group_count()) {
        u32 count = 0;
#pragma unroll 1
        for (u32 n = first; n < last; n++) {
            i32 id = *(const GLOBAL i32 *)(ids + AT(p.t[1], n % used, n / used, 0, 0));
            count += (u32)id == expert;
            if ((u32)id >= experts && id != -1) fail();
        }
        barrier_local();
        counts[thread_id()] = count;
        barrier_local();
        u32 place = 0;
#pragma unroll 1
        for (u32 i = 0; i < thread_id(); i++) place += counts[i];
        GLOBAL u32 *list = (GLOBAL u32 *)lists + experts + (u64)expert * choices;
#pragma unroll 1
        for (u32 n = first; n < last; n++) {
            i32 id = *(const GLOBAL i32 *)(ids + AT(p.t[1], n % used, n / used, 0, 0));
            if ((u32)id == expert) list[place++] = n;
        }
        if (thread_id() == 255) ((GLOBAL u32 *)lists)[expert] = place;
#pragma unroll 1
        for (u32 n = expert; n < choices; n += experts) {
            u32 slot = n % used, token = n / used;
            if (*(const GLOBAL i32 *)(ids + AT(p.t[1], slot, token, 0, 0)) != -1) continue;
            GLOBAL float *to = (GLOBAL float *)(y + AT(p.t[0], 0, slot, token, 0));
            for (u32 row = thread_id(); row < p.t[0].shape[0]; row += 256) to[row] = 0;
        }
    }
}
