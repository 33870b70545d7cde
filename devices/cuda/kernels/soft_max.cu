// Softmax of rows: one group per row.
#include "math.h"

// A logit with its mask. What is masked may be NaN.
INLINE float masked_logit(const GLOBAL u8 *x, u32 type, const GLOBAL u8 *mask, u32 mask_type,
                          float scale, float slope) {
    if (mask) {
        float m = get_float(mask, mask_type);
        if (m == -INFINITE) return m;
        return get_float(x, type) * scale + slope * m;
    }
    return get_float(x, type) * scale;
}

// floats: 0 scale, 1 maximum bias of ALiBi. ints[0]: largest power of two of at most all heads.
KERNEL THREADS(1024) soft_max(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *mask,
                              const GLOBAL u8 *sinks, COMMON) {
    SHARED float scratch[32];
    u32 count = p.t[0].shape[0];
    float scale = p.floats[0];
#pragma unroll 1
    for (u32 row = group_id(); row < ROWS(p.t[0]); row += group_count()) {
        ROW_INDICES(row, p.t[0].shape, i1, i2, i3);
        const GLOBAL u8 *from = a + AT(p.t[1], 0, i1, i2, i3);
        GLOBAL u8 *to = y + AT(p.t[0], 0, i1, i2, i3);
        const GLOBAL u8 *masks =
            mask ? mask + AT(p.t[2], 0, i1, i2 % p.t[2].shape[2], i3 % p.t[2].shape[3]) : 0;
        float slope = alibi_slope(i2, p.ints[0], p.floats[1]);
        float largest = -INFINITE, nan = 0;
#define LOGIT(i)                                                                                   \
    masked_logit(from + (i) * p.t[1].strides[0], p.t[1].type,                                      \
                 masks ? masks + (i) * p.t[2].strides[0] : 0, p.t[2].type, scale, slope)
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count()) {
            float x = LOGIT(i);
            if (is_nan(x)) nan = x;
            largest = max_float(largest, x);
        }
        largest = group_max(largest, scratch);
        float sink = -INFINITE;
        if (sinks) sink = get_float(sinks + AT(p.t[3], i2, 0, 0, 0), p.t[3].type);
        largest = max_float(largest, sink);
        // Of a row that is masked as a whole, differences would be NaN.
        if (largest == -INFINITE) largest = 0;
        float sum = nan;
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count())
            sum += exp_float(LOGIT(i) - largest);
        sum = group_sum(sum, scratch);
        if (sinks) sum += exp_float(sink - largest);
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count())
            set_float(to + i * p.t[0].strides[0], p.t[0].type, exp_float(LOGIT(i) - largest) / sum);
        barrier_local();
    }
}
