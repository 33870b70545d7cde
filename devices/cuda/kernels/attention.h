// Functions of attention.
#pragma once
#include "prelude.h"

#define LOWEST bits_float(0xff800000u)

// Errors of weights are far below those of halves: the fast functions suffice.
INLINE float exp_fast(float x) { return exp2_fast(x * 1.44269504f); }
INLINE float log_fast(float x) { return log2_fast(x) * 0.693147181f; }
INLINE float tanh_fast(float x) { return 1 - 2 / (exp_fast(2 * x) + 1); }

INLINE float capped(float logit, float softcap) {
    return softcap == 0 ? logit : softcap * tanh_fast(logit / softcap);
}

// The place of a part of a row's attention: its largest logit, the sum of exponentials, and the
// weighted sum of values. `shape` is that of the result.
INLINE GLOBAL float *partial(GLOBAL u8 *partials, const u32 *shape, u32 head, u32 token, u32 batch,
                             u32 shares, u32 share) {
    u64 row = head + shape[1] * (token + (u64)shape[2] * batch);
    return (GLOBAL float *)partials + (row * shares + share) * (shape[0] + 2);
}

INLINE float sink_of(const GLOBAL u8 *sinks, u32 head) {
    return sinks ? ((const GLOBAL float *)sinks)[head] : LOWEST;
}

// The factor of the sum of a row's weighted values. A row without keys gets zeros.
INLINE float final_factor(float largest, float total, float sink) {
    if (total == 0) return 0;
    float last = max_float(largest, sink);
    float rescale = exp_fast(largest - last);
    return rescale / (total * rescale + (sink == LOWEST ? 0.0f : exp_fast(sink - last)));
}

// Replaces the logit of each lane's key by its weight, and updates the largest logit and the lane's
// total. Returns the factor of earlier sums.
INLINE float next_weight(float *logit, float *largest, float *total) {
    float next = max_float(*largest, warp_max(*logit));
    float weight = *logit == LOWEST ? 0.0f : exp_fast(*logit - next);
    float rescale = *largest == LOWEST ? 0.0f : exp_fast(*largest - next);
    *total = *total * rescale + weight;
    *largest = next;
    *logit = weight;
    return rescale;
}
