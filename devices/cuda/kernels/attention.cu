// Parts of attention that do not depend on the type of keys, and its gradients, in f32.
#include "attention.h"
#include "int8.h"

#define GROUP_THREADS 128
// Pieces of 128 elements of the largest head.
#define PIECES 8

// Maximum number of groups that share the keys of a row.
#define MAX_SHARES 64
// Maximum elements of a value.
#define MAX_VALUE 640

// y = attention of rows whose keys were shared between several groups. One group per row. Unless
// `codes` is null, y is also stored as 8-bit numbers, a column per token, with ints[2] bytes before
// the scales.
KERNEL THREADS(GROUP_THREADS) combine(GLOBAL u8 *y, const GLOBAL u8 *partials,
                                      const GLOBAL u8 *sinks, GLOBAL u8 *codes, COMMON) {
    wait_for_earlier();
    SHARED float weights[MAX_SHARES], sums[2];
    SHARED float result[MAX_VALUE] __attribute__((aligned(16)));
    u32 shares = p.ints[1], size = p.t[0].shape[0], lane = thread_id();
    u32 rows = ROWS(p.t[0]);
#pragma unroll 1
    for (u32 row = group_id(); row < rows; row += group_count()) {
        ROW_INDICES(row, p.t[0].shape, head, token, batch);
        const GLOBAL float *parts = (const GLOBAL float *)partials + (u64)row * shares * (size + 2);
        barrier_local();
        if (lane < 32) {
            float largest = LOWEST, total = 0;
#pragma unroll
            for (u32 s = lane; s < MAX_SHARES; s += 32)
                if (s < shares) largest = max_float(largest, parts[s * (size + 2)]);
            largest = warp_max(largest);
#pragma unroll
            for (u32 s = lane; s < MAX_SHARES; s += 32) {
                if (s >= shares) continue;
                const GLOBAL float *part = parts + s * (size + 2);
                float weight = part[0] == LOWEST ? 1.0f : exp_fast(part[0] - largest);
                weights[s] = weight;
                total += part[1] * weight;
            }
            total = warp_sum(total);
            if (lane == 0) {
                sums[0] = largest;
                sums[1] = total;
            }
        }
        barrier_local();
        float factor = final_factor(sums[0], sums[1], sink_of(sinks, head));
#pragma unroll 1
        for (u32 d = lane; d < size; d += GROUP_THREADS) {
            float sum = 0;
#pragma unroll 8
            for (u32 s = 0; s < shares; s++) sum += parts[s * (size + 2) + 2 + d] * weights[s];
            result[d] = sum * factor;
            *(GLOBAL float *)(y + AT(p.t[0], d, head, token, batch)) = result[d];
        }
        if (!codes) continue;
        barrier_local();
        u32 first = head * size, length = p.t[0].shape[1] * size;
#pragma unroll 1
        for (u32 d = 4 * lane; (d & ~127u) < size; d += 4 * GROUP_THREADS) {
            f32x4 v = {0, 0, 0, 0};
            if (d < size) v = *(const LOCAL f32x4 *)(result + d);
            store_int8(codes, p.ints[2], length, token, first + d, first + size, v);
        }
    }
}

// Product of a row whose elements are `stride` bytes apart with one without gaps.
INLINE float dot(const GLOBAL u8 *a, u64 stride, const GLOBAL u8 *b, u32 count) {
    float sum = 0;
#pragma unroll 1
    for (u32 i = 0; i < count; i++)
        sum += *(const GLOBAL float *)(a + i * stride) * ((const GLOBAL float *)b)[i];
    return sum;
}

// The mask of a key, for a query.
#define MASK(key, token, head, batch)                                                              \
    (mask ? half_float(*(const GLOBAL u16 *)(mask + AT(p.t[5], key, token,                         \
                                                       (head) % p.t[5].shape[2],                   \
                                                       (batch) % p.t[5].shape[3])))                \
          : 0.0f)
// Rows of the gradient of the result, of queries, keys and values.
#define ROW(base, n, i1, i2, i3) ((base) + AT(p.t[n], 0, i1, i2, i3))

// The gradient of attention with respect to queries. `rows` gets the logarithm of the sum of each
// row's exponentials, and the mean of the gradients of its shares. One group per query of a head.
KERNEL THREADS(GROUP_THREADS) back_queries(GLOBAL u8 *y, const GLOBAL u8 *g, const GLOBAL u8 *q,
                                           const GLOBAL u8 *k, const GLOBAL u8 *v,
                                           const GLOBAL u8 *mask, GLOBAL u8 *rows, COMMON) {
    wait_for_earlier();
    SHARED float scratch[32], factors[GROUP_THREADS];
    u32 size = p.t[2].shape[0], tokens = p.t[2].shape[1], heads = p.t[2].shape[2];
    u32 keys = p.t[3].shape[1], count = ROWS(p.t[2]);
    float scale = p.floats[0];
    u64 g_stride = p.t[1].strides[0];
#pragma unroll 1
    for (u32 number = group_id(); number < count; number += group_count()) {
        u32 head = number % heads, token = number / heads % tokens;
        u32 batch = number / (heads * tokens);
        u32 kv_head = head / (heads / p.t[3].shape[2]);
        const GLOBAL u8 *query = ROW(q, 2, token, head, batch);
        const GLOBAL u8 *gradient = ROW(g, 1, head, token, batch);
        float largest = LOWEST;
#pragma unroll 1
        for (u32 key = thread_id(); key < keys; key += GROUP_THREADS) {
            float masked = MASK(key, token, head, batch);
            if (masked == LOWEST) continue;
            float logit = dot(query, 4, ROW(k, 3, key, kv_head, batch), size) * scale + masked;
            largest = max_float(largest, logit);
        }
        largest = group_max(largest, scratch);
        float total = 0, mean = 0;
#pragma unroll 1
        for (u32 key = thread_id(); key < keys; key += GROUP_THREADS) {
            float masked = MASK(key, token, head, batch);
            if (masked == LOWEST) continue;
            float logit = dot(query, 4, ROW(k, 3, key, kv_head, batch), size) * scale + masked;
            float share = logit == LOWEST ? 0.0f : exp_fast(logit - largest);
            total += share;
            const GLOBAL u8 *value = ROW(v, 4, key, kv_head, batch);
            mean += share * dot(gradient, g_stride, value, p.t[4].shape[0]);
        }
        total = group_sum(total, scratch);
        mean = group_sum(mean, scratch);
        // Rows without keys have no shares.
        u32 is_empty = total == 0;
        if (!is_empty) mean /= total;
        float logarithm = is_empty ? -LOWEST : largest + log_fast(total);
        if (thread_id() == 0) {
            ((GLOBAL float *)rows)[2 * (u64)number] = logarithm;
            ((GLOBAL float *)rows)[2 * (u64)number + 1] = mean;
        }
        float sums[PIECES];
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) sums[i] = 0;
#pragma unroll 1
        for (u32 first = 0; first < keys; first += GROUP_THREADS) {
            u32 key = first + thread_id();
            float factor = 0;
            if (key < keys && !is_empty) {
                float masked = MASK(key, token, head, batch);
                if (masked != LOWEST) {
                    const GLOBAL u8 *own_key = ROW(k, 3, key, kv_head, batch);
                    const GLOBAL u8 *own_value = ROW(v, 4, key, kv_head, batch);
                    float logit = dot(query, 4, own_key, size) * scale + masked;
                    float of_share = dot(gradient, g_stride, own_value, p.t[4].shape[0]);
                    factor = exp_fast(logit - logarithm) * (of_share - mean) * scale;
                }
            }
            barrier_local();
            factors[thread_id()] = factor;
            barrier_local();
            u32 here = min_u32(GROUP_THREADS, keys - first);
#pragma unroll
            for (u32 i = 0; i < PIECES; i++) {
                u32 d = i * GROUP_THREADS + thread_id();
                if (d >= size) break;
#pragma unroll 1
                for (u32 j = 0; j < here; j++) {
                    const GLOBAL u8 *row = ROW(k, 3, first + j, kv_head, batch);
                    if (factors[j] != 0) sums[i] += factors[j] * ((const GLOBAL float *)row)[d];
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            u32 d = i * GROUP_THREADS + thread_id();
            if (d < size) ((GLOBAL float *)y)[(u64)number * size + d] = sums[i];
        }
    }
}

// The gradients of attention with respect to keys and values, after `back_queries`. One group per
// key of a head of keys.
KERNEL THREADS(GROUP_THREADS) back_keys(GLOBAL u8 *y, const GLOBAL u8 *g, const GLOBAL u8 *q,
                                        const GLOBAL u8 *k, const GLOBAL u8 *v,
                                        const GLOBAL u8 *mask, const GLOBAL u8 *rows, COMMON) {
    wait_for_earlier();
    SHARED float of_logits[GROUP_THREADS], shares[GROUP_THREADS];
    u32 size = p.t[2].shape[0], tokens = p.t[2].shape[1], heads = p.t[2].shape[2];
    u32 keys = p.t[3].shape[1], kv_heads = p.t[3].shape[2], value_size = p.t[4].shape[0];
    u32 sharing = heads / kv_heads, queries = sharing * tokens, count = ROWS(p.t[3]);
    float scale = p.floats[0];
    u64 g_stride = p.t[1].strides[0];
    GLOBAL float *of_keys = (GLOBAL float *)y + ELEMENTS(p.t[2]);
    GLOBAL float *of_values = of_keys + ELEMENTS(p.t[3]);
#pragma unroll 1
    for (u32 number = group_id(); number < count; number += group_count()) {
        u32 kv_head = number % kv_heads, key = number / kv_heads % keys;
        u32 batch = number / (kv_heads * keys);
        const GLOBAL u8 *own_key = ROW(k, 3, key, kv_head, batch);
        const GLOBAL u8 *own_value = ROW(v, 4, key, kv_head, batch);
        float key_sums[PIECES], value_sums[PIECES];
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) key_sums[i] = value_sums[i] = 0;
#pragma unroll 1
        for (u32 first = 0; first < queries; first += GROUP_THREADS) {
            u32 n = first + thread_id();
            float share = 0, of_logit = 0;
            if (n < queries) {
                u32 head = kv_head * sharing + n % sharing, token = n / sharing;
                float masked = MASK(key, token, head, batch);
                if (masked != LOWEST) {
                    u64 row = 2 * (head + heads * (token + (u64)tokens * batch));
                    float logarithm = ((const GLOBAL float *)rows)[row];
                    float mean = ((const GLOBAL float *)rows)[row + 1];
                    const GLOBAL u8 *query = ROW(q, 2, token, head, batch);
                    const GLOBAL u8 *gradient = ROW(g, 1, head, token, batch);
                    float logit = dot(query, 4, own_key, size) * scale + masked;
                    float of_share = dot(gradient, g_stride, own_value, value_size);
                    share = exp_fast(logit - logarithm);
                    of_logit = share * (of_share - mean) * scale;
                }
            }
            barrier_local();
            shares[thread_id()] = share;
            of_logits[thread_id()] = of_logit;
            barrier_local();
            u32 here = min_u32(GROUP_THREADS, queries - first);
#pragma unroll
            for (u32 i = 0; i < PIECES; i++) {
                u32 d = i * GROUP_THREADS + thread_id();
                if (d >= size && d >= value_size) break;
#pragma unroll 1
                for (u32 j = 0; j < here; j++) {
                    u32 head = kv_head * sharing + (first + j) % sharing;
                    u32 token = (first + j) / sharing;
                    if (d < size)
                        key_sums[i] += of_logits[j] *
                                       ((const GLOBAL float *)ROW(q, 2, token, head, batch))[d];
                    if (d < value_size)
                        value_sums[i] +=
                            shares[j] *
                            *(const GLOBAL float *)(g + AT(p.t[1], d, head, token, batch));
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            u32 d = i * GROUP_THREADS + thread_id();
            if (d < size) of_keys[(u64)number * size + d] = key_sums[i];
            if (d < value_size) of_values[(u64)number * value_size + d] = value_sums[i];
        }
    }
}
