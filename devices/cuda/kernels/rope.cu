// Rotary position embedding.
#include "rope.h"

// A thread for each pair, and for each element that is in none.
KERNEL THREADS(256) rope(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *positions,
                         const GLOBAL u8 *divisors, COMMON) {
    wait_for_earlier();
    u32 pairs = p.ints[1], per_row = p.t[0].shape[0] - pairs;
    u64 items = (u64)per_row * ROWS(p.t[0]);
#pragma unroll 1
    for (u64 n = global_id(); n < items; n += global_count()) {
        u32 item = (u32)(n % per_row);
        ROW_INDICES((u32)(n / per_row), p.t[0].shape, i1, i2, i3);
        const GLOBAL u8 *from = a + AT(p.t[1], 0, i1, i2, i3);
        GLOBAL u8 *to = y + AT(p.t[0], 0, i1, i2, i3);
        if (item >= pairs) {
            u32 i = item - pairs;
            if (i >= p.ints[0]) i += 2 * pairs;
            float x = get_float(from + i * p.t[1].strides[0], p.t[1].type);
            set_float(to + i * p.t[0].strides[0], p.t[0].type, x);
            continue;
        }
        float sine, cosine;
        angle_of(&p, positions, divisors, item, i2, p.t[0].shape[2], &sine, &cosine);
        u32 i = p.ints[0] + item * p.ints[3], j = i + p.ints[2];
        float x = get_float(from + i * p.t[1].strides[0], p.t[1].type);
        float z = get_float(from + j * p.t[1].strides[0], p.t[1].type);
        set_float(to + i * p.t[0].strides[0], p.t[0].type, x * cosine - z * sine);
        set_float(to + j * p.t[0].strides[0], p.t[0].type, x * sine + z * cosine);
    }
}

// Maximum elements of a head below, and warps of a group.
#define MAX_HEAD 512
#define WARPS 4

// Loads a head of `size` elements. Unless `factors` is null, the head is normed and multiplied by
// them. All lanes of a warp take part.
INLINE void load_head(const GLOBAL u8 *from, u64 stride, u32 type, u32 size,
                      const GLOBAL float *factors, float eps, LOCAL float *head) {
    u32 lane = thread_id() & 31;
    float squares = 0;
#pragma unroll 1
    for (u32 i = lane; i < size; i += 32) {
        float x = get_float(from + i * stride, type);
        head[i] = x;
        squares += x * x;
    }
    if (factors) {
        float factor = 1.0f / sqrt_float(warp_sum(squares) / (float)size + eps);
#pragma unroll 1
        for (u32 i = lane; i < size; i += 32) head[i] *= factor * factors[i];
    }
    barrier_warp();
}

// Turns the pairs of a head. All lanes of a warp take part.
INLINE void turn_head(const Params *p, const GLOBAL u8 *positions, const GLOBAL u8 *divisors,
                      u32 token, u32 tokens, LOCAL float *head) {
#pragma unroll 1
    for (u32 pair = thread_id() & 31; pair < p->ints[1]; pair += 32) {
        float sine, cosine;
        angle_of(p, positions, divisors, pair, token, tokens, &sine, &cosine);
        u32 i = p->ints[0] + pair * p->ints[3], j = i + p->ints[2];
        float x = head[i], z = head[j];
        head[i] = x * cosine - z * sine;
        head[j] = x * sine + z * cosine;
    }
    barrier_warp();
}

// Rotates heads of queries `q` and of keys `k`, after their norms if they have factors. Writes the
// keys and the values `v` to the rows of the caches that `numbers` selects. Keys, values and caches
// may be missing. A warp has a head, or 128 elements of a value. floats[8], [9]: epsilons of norms.
KERNEL THREADS(128) rope_store(GLOBAL u8 *y, const GLOBAL u8 *q, const GLOBAL u8 *positions,
                               const GLOBAL u8 *divisors, const GLOBAL u8 *k,
                               const GLOBAL u8 *numbers, GLOBAL u8 *keys, const GLOBAL u8 *v,
                               GLOBAL u8 *values, const GLOBAL u8 *q_factors,
                               const GLOBAL u8 *k_factors, COMMON) {
    wait_for_earlier();
    SHARED float heads[WARPS * MAX_HEAD];
    u32 lane = thread_id() & 31, warp = thread_id() >> 5, size = p.t[0].shape[0];
    u32 tokens = p.t[0].shape[2], queries = ROWS(p.t[0]);
    u32 with_keys = queries + p.t[4].shape[1] * p.t[4].shape[2];
    u32 pieces = (p.t[7].shape[0] + 127) / 128, items = with_keys + pieces * p.t[7].shape[1];
    LOCAL float *head = heads + warp * MAX_HEAD;
#pragma unroll 1
    for (u32 item = group_id() * WARPS + warp; item < items; item += group_count() * WARPS) {
        if (item < queries) {
            ROW_INDICES(item, p.t[0].shape, i1, i2, i3);
            load_head(q + AT(p.t[1], 0, i1, i2, i3), p.t[1].strides[0], p.t[1].type, size,
                      (const GLOBAL float *)q_factors, p.floats[8], head);
            turn_head(&p, positions, divisors, i2, tokens, head);
            GLOBAL u8 *to = y + AT(p.t[0], 0, i1, i2, i3);
#pragma unroll 1
            for (u32 i = lane; i < size; i += 32)
                set_float(to + i * p.t[0].strides[0], p.t[0].type, head[i]);
            barrier_warp();
            continue;
        }
        u32 is_key = item < with_keys, n = item - (is_key ? queries : with_keys);
        u32 per_token = is_key ? p.t[4].shape[1] : pieces, token = n / per_token;
        u32 part = n % per_token;
        i64 number = row_number(numbers + AT(p.t[5], token, 0, 0, 0), p.t[5].type);
        if ((u64)number >= (is_key ? p.t[6].shape[1] : p.t[8].shape[1])) {
            fail();
            continue;
        }
        if (is_key) {
            load_head(k + AT(p.t[4], 0, part, token, 0), p.t[4].strides[0], p.t[4].type, size,
                      (const GLOBAL float *)k_factors, p.floats[9], head);
            turn_head(&p, positions, divisors, token, tokens, head);
            GLOBAL u8 *to = keys + AT(p.t[6], part * size, number, 0, 0);
#pragma unroll 1
            for (u32 i = lane; i < size; i += 32)
                set_float(to + i * p.t[6].strides[0], p.t[6].type, head[i]);
            barrier_warp();
        } else {
            u32 end = min_u32(128 * part + 128, p.t[7].shape[0]);
#pragma unroll 1
            for (u32 i = 128 * part + lane; i < end; i += 32) {
                float x = get_float(v + AT(p.t[7], i, token, 0, 0), p.t[7].type);
                set_float(values + AT(p.t[8], i, number, 0, 0), p.t[8].type, x);
            }
        }
    }
}
