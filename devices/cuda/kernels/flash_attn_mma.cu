// Attention on tensor cores with keys and values of one type, without softcap.
#include "attention.h"
#include "mma.h"

#define ROW_TILE 64
#define KEYS 64
// Halves between the elements of values in shared memory, where keys are neighbours.
#define VALUE_ROW (KEYS + 8)
#if IS_PLAIN
#define ELEMENT_STRIDE ELEMENT_BYTES
#else
#define ELEMENT_STRIDE 0
#endif

// Decodes group `g` of a row, with 0 past its end and from row `end` on.
INLINE void load_group(const GLOBAL u8 *rows, u64 row_stride, u32 row, u32 end, u32 g, u32 length,
                       float *w, const GLOBAL u8 *tables) {
    if (row < end && g * GROUP < length) {
        decode32(rows + row * row_stride, ELEMENT_STRIDE, g, length, w, tables);
    } else {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) w[i] = 0;
    }
}

// Loads a tile of keys of `groups` groups.
INLINE void load_keys(const GLOBAL u8 *rows, u64 row_stride, u32 first, u32 end, u32 length,
                      u32 groups, u32 key_row, LOCAL u16 *tile, const GLOBAL u8 *tables) {
#pragma unroll 1
    for (u32 n = thread_id(); n < KEYS * groups; n += 128) {
        u32 key = n / groups, g = n % groups;
        float w[GROUP];
        load_group(rows, row_stride, first + key, end, g, length, w, tables);
        LOCAL u32x4 *to = (LOCAL u32x4 *)(tile + key * key_row + g * GROUP);
#pragma unroll
        for (u32 i = 0; i < GROUP; i += 8) {
            u32x4 four = {halves_of(w[i], w[i + 1]), halves_of(w[i + 2], w[i + 3]),
                          halves_of(w[i + 4], w[i + 5]), halves_of(w[i + 6], w[i + 7])};
            to[i / 8] = four;
        }
    }
}

// Loads a tile of values, transposed. Returns 1 if an element is not finite.
INLINE u32 load_values(const GLOBAL u8 *rows, u64 row_stride, u32 first, u32 end, u32 length,
                       u32 groups, LOCAL u16 *tile, const GLOBAL u8 *tables) {
    float zero = 0;
#pragma unroll 1
    for (u32 n = thread_id(); n < KEYS / 2 * groups; n += 128) {
        u32 pair = n % (KEYS / 2), g = n / (KEYS / 2);
        float w[GROUP], x[GROUP];
        load_group(rows, row_stride, first + 2 * pair, end, g, length, w, tables);
        load_group(rows, row_stride, first + 2 * pair + 1, end, g, length, x, tables);
        LOCAL u16 *to = tile + g * GROUP * VALUE_ROW + 2 * pair;
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            u32 both = halves_of(w[i], x[i]);
            *(LOCAL u32 *)(to + i * VALUE_ROW) = both;
            zero += half_float((u16)both) * 0.0f + half_float((u16)(both >> 16)) * 0.0f;
        }
    }
    return zero != 0;
}

// Loads the masks of the keys of a lane's logits: minus infinity for keys that do not exist.
// Returns 1 if a row sees a key.
INLINE u32 load_masks(const GLOBAL u8 *const *masks, u32 first, u32 end, float (*logits)[4]) {
    u32 sees = 0;
#pragma unroll
    for (u32 j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 key = first + j * 8 + (thread_id() & 3) * 2 + (i & 1);
            float masked = LOWEST;
            if (key < end) masked = masks[i / 2] ? load_half(masks[i / 2] + 2 * (u64)key) : 0.0f;
            sees |= masked != LOWEST;
            logits[j][i] = masked;
        }
    return sees;
}

// Replaces the logits of a lane's two rows by weights, and updates the rows' largest logits and the
// lane's totals. `rescales` gets the factors of earlier sums.
INLINE void next_weights(float (*logits)[4], float *largest, float *total, float *rescales) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        float next = largest[r];
#pragma unroll
        for (u32 j = 0; j < KEYS / 8; j++)
            next = max_float(next, max_float(logits[j][2 * r], logits[j][2 * r + 1]));
        // Four lanes share a row.
        next = max_float(next, shuffle_xor(next, 1));
        next = max_float(next, shuffle_xor(next, 2));
        rescales[r] = largest[r] == LOWEST ? 0.0f : exp_fast(largest[r] - next);
        largest[r] = next;
        total[r] *= rescales[r];
#pragma unroll
        for (u32 j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (u32 i = 2 * r; i < 2 * r + 2; i++) {
                float x = logits[j][i];
                logits[j][i] = x == LOWEST ? 0.0f : exp_fast(x - next);
                total[r] += logits[j][i];
            }
    }
}

#define HEAD 64
#include "flash_attn_mma.h"
#define HEAD 128
#include "flash_attn_mma.h"
