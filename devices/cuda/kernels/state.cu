// Recurrent operations: each thread holds a row of a matrix state and goes through the tokens.
// Compiled once for each STATE, the maximum length of a row.
#include "math.h"

#define GET(x, k, i0, i1, i2, i3) get_float((x) + AT(p.t[k], i0, i1, i2, i3), p.t[k].type)

// The result is one piece of f32.
#define PUT(n, v) ((GLOBAL float *)y)[n] = (v)

#if STATE == 0
// A convolution over time, channel by channel.
KERNEL THREADS(256) ssm_conv(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *b, COMMON) {
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        float sum = 0;
#pragma unroll 1
        for (u32 k = 0; k < p.t[2].shape[0]; k++)
            sum += GET(a, 1, i1 + k, i0, i2, 0) * GET(b, 2, k, i0, 0, 0);
        set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, sum);
    }
}
#else

// Writes a state to its place in each snapshot from `slot` on, or in one.
#define PUT_STATE(slot)                                                                            \
    _Pragma("unroll 1") for (u32 j = 0; j < size; j++)                                             \
        PUT(kept + (u64)(slot) * matrices + j, state[j])

// A selective state space: sources as in the operation. ints[0]: snapshots.
KERNEL THREADS(128) ssm_scan(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x,
                             const GLOBAL u8 *dt, const GLOBAL u8 *rates, const GLOBAL u8 *b,
                             const GLOBAL u8 *c, const GLOBAL u8 *rows, COMMON) {
    u32 size = p.t[1].shape[0], d = p.t[2].shape[0], heads = p.t[2].shape[1];
    u32 tokens = p.t[2].shape[2], sequences = p.t[2].shape[3], snapshots = p.ints[0];
    u64 outputs = (u64)d * heads * tokens * sequences;
    u64 matrices = (u64)size * d * heads * sequences;
#pragma unroll 1
    for (u64 n = global_id(); n < (u64)d * heads * sequences; n += global_count()) {
        u32 i = (u32)(n % d), head = (u32)(n / d % heads), sequence = (u32)(n / ((u64)d * heads));
        i32 row = *(const GLOBAL i32 *)(rows + AT(p.t[7], sequence, 0, 0, 0));
        if ((u32)row >= p.t[1].shape[3]) {
            fail();
            continue;
        }
        float state[STATE];
#pragma unroll 1
        for (u32 j = 0; j < size; j++) state[j] = GET(a, 1, j, i, head, (u32)row);
        u64 kept = outputs + n * size;
#pragma unroll 1
        for (u32 slot = tokens; slot < snapshots; slot++) PUT_STATE(slot);
        u32 bank = head / (heads / p.t[5].shape[1]);
#pragma unroll 1
        for (u32 token = 0; token < tokens; token++) {
            float step = softplus(GET(dt, 3, head, token, sequence, 0));
            float input = step * GET(x, 2, i, head, token, sequence), sum = 0;
#pragma unroll 1
            for (u32 j = 0; j < size; j++) {
                float rate = GET(rates, 4, j % p.t[4].shape[0], head, 0, 0);
                state[j] = state[j] * exp_float(step * rate);
                state[j] += input * GET(b, 5, j, bank, token, sequence);
                sum += state[j] * GET(c, 6, j, bank, token, sequence);
            }
            PUT((((u64)sequence * tokens + token) * heads + head) * d + i, sum);
            u32 slot = tokens - 1 - token;
            if (slot < snapshots) PUT_STATE(slot);
        }
    }
}

// The gated delta rule: a thread has a column of a matrix. ints[0]: snapshots.
KERNEL THREADS(128) gated_delta_net(GLOBAL u8 *y, const GLOBAL u8 *q, const GLOBAL u8 *k,
                                    const GLOBAL u8 *v, const GLOBAL u8 *g, const GLOBAL u8 *betas,
                                    const GLOBAL u8 *first, COMMON) {
    u32 size = p.t[3].shape[0], heads = p.t[3].shape[1];
    u32 tokens = p.t[3].shape[2], sequences = p.t[3].shape[3], snapshots = p.ints[0];
    u64 outputs = (u64)size * heads * tokens * sequences;
    u64 matrices = (u64)size * size * heads * sequences;
    float factor = 1.0f / sqrt_float((float)size);
#pragma unroll 1
    for (u64 n = global_id(); n < (u64)size * heads * sequences; n += global_count()) {
        u32 column = (u32)(n % size), head = (u32)(n / size % heads);
        u32 sequence = (u32)(n / ((u64)size * heads));
        float state[STATE];
#pragma unroll 1
        for (u32 j = 0; j < size; j++) state[j] = GET(first, 6, j, column, head, sequence);
        u64 kept = outputs + n * size;
#pragma unroll 1
        for (u32 slot = tokens; slot < snapshots; slot++) PUT_STATE(slot);
        u32 q1 = head % p.t[1].shape[1], q3 = sequence / (sequences / p.t[1].shape[3]);
        u32 k1 = head % p.t[2].shape[1], k3 = sequence / (sequences / p.t[2].shape[3]);
#pragma unroll 1
        for (u32 token = 0; token < tokens; token++) {
            float beta = GET(betas, 5, 0, head, token, sequence), found = 0, sum = 0;
#pragma unroll 1
            for (u32 j = 0; j < size; j++) {
                state[j] *= exp_float(GET(g, 4, j % p.t[4].shape[0], head, token, sequence));
                found += state[j] * GET(k, 2, j, k1, token, k3);
            }
            float delta = (GET(v, 3, column, head, token, sequence) - found) * beta;
#pragma unroll 1
            for (u32 j = 0; j < size; j++) {
                state[j] += GET(k, 2, j, k1, token, k3) * delta;
                sum += state[j] * GET(q, 1, j, q1, token, q3);
            }
            PUT((((u64)sequence * tokens + token) * heads + head) * size + column, sum * factor);
            u32 slot = tokens - 1 - token;
            if (slot < snapshots) PUT_STATE(slot);
        }
    }
}
#endif
