// Attention with keys and values of one type.
#include "attention.h"
#include "blocks.h"

// Keys of a tile.
#define KEYS 32
// Elements of a key or value that a tile holds, and groups of 32.
#define CHUNK 128
#define CHUNK_GROUPS 4
// Floats between groups and between keys in shared memory, so that threads use different banks.
#define PADDED 36
#define KEY_ROW 148
#define WEIGHT_ROW 36

// Loads four groups of 32 elements of 32 rows, a group per thread, with 0 for rows from `end` on.
// Groups past the end of rows stay as they are. Returns 1 if an element is not finite.
INLINE u32 load_tile(const GLOBAL u8 *rows, u64 row_stride, u32 first, u32 end, u32 start,
                     u32 length, LOCAL float *tile, const GLOBAL u8 *tables) {
    u32 i = thread_id() / CHUNK_GROUPS, g = thread_id() % CHUNK_GROUPS;
    LOCAL f32x4 *to = (LOCAL f32x4 *)(tile + i * KEY_ROW + g * PADDED);
    if ((start + g) * GROUP >= length) return 0;
    float w[GROUP];
    if (first + i < end) {
#if IS_PLAIN
        u64 stride = ELEMENT_BYTES;
#else
        u64 stride = 0;
#endif
        decode32(rows + (first + i) * row_stride, stride, start + g, length, w, tables);
    } else {
#pragma unroll
        for (u32 j = 0; j < GROUP; j++) w[j] = 0;
    }
    float zero = 0;
#pragma unroll
    for (u32 j = 0; j < GROUP; j += 4) {
        f32x4 four = {w[j], w[j + 1], w[j + 2], w[j + 3]};
        to[j / 4] = four;
#pragma unroll
        for (u32 n = 0; n < 4; n++) zero += w[j + n] * 0.0f;
    }
    return zero != 0;
}

#define ROW_TILE 8
#define CHUNKS 1
#include "flash_attn.h"
#define ROW_TILE 8
#define CHUNKS 5
#include "flash_attn.h"
#define ROW_TILE 32
#define CHUNKS 1
#include "flash_attn.h"
#define ROW_TILE 16
#define CHUNKS 2
#include "flash_attn.h"
