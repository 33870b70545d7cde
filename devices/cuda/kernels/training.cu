// Gradients, losses and steps of optimizers.
#include "math.h"

#define ROW_OF(x, t) ((x) + AT(t, 0, i1, i2, i3))
#define GET(x, t, i) get_float((x) + (i) * (t).strides[0], (t).type)
#define SET(x, t, i, v) set_float((x) + (i) * (t).strides[0], (t).type, v)

// y = sums of what a repetition spread out over `a`.
KERNEL THREADS(256) repeat_back(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    const u32 *shape = p.t[0].shape, *all = p.t[1].shape;
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        float sum = 0;
#pragma unroll 1
        for (u32 j3 = i3; j3 < all[3]; j3 += shape[3])
#pragma unroll 1
            for (u32 j2 = i2; j2 < all[2]; j2 += shape[2])
#pragma unroll 1
                for (u32 j1 = i1; j1 < all[1]; j1 += shape[1])
#pragma unroll 1
                    for (u32 j0 = i0; j0 < all[0]; j0 += shape[0])
                        sum += get_float(a + AT(p.t[1], j0, j1, j2, j3), p.t[1].type);
        set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, sum);
    }
}

// Gradients of rows that were normalized together. `g` is the gradient of the result. `x` is the
// input of RMSNorm (ints[0] is 0, floats[0] eps) or the result of softmax (ints[0] is 1, floats[0]
// scale).
KERNEL THREADS(1024) row_gradient(GLOBAL u8 *y, const GLOBAL u8 *g, const GLOBAL u8 *x, COMMON) {
    SHARED float scratch[32];
    u32 count = p.t[0].shape[0];
#pragma unroll 1
    for (u32 row = group_id(); row < ROWS(p.t[0]); row += group_count()) {
        ROW_INDICES(row, p.t[0].shape, i1, i2, i3);
        const GLOBAL u8 *gradient = ROW_OF(g, p.t[1]), *input = ROW_OF(x, p.t[2]);
        GLOBAL u8 *to = ROW_OF(y, p.t[0]);
        float products = 0, squares = 0;
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count()) {
            float v = GET(input, p.t[2], i);
            products += GET(gradient, p.t[1], i) * v;
            squares += v * v;
        }
        products = group_sum(products, scratch);
        squares = group_sum(squares, scratch);
        float factor = p.floats[0], mean = products;
        if (p.ints[0] == 0) {
            factor = 1.0f / sqrt_float(squares / (float)count + p.floats[0]);
            mean = factor * factor * products / (float)count;
        }
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count()) {
            float v = GET(input, p.t[2], i), d = GET(gradient, p.t[1], i);
            SET(to, p.t[0], i, p.ints[0] ? factor * v * (d - mean) : factor * (d - v * mean));
        }
    }
}

// y = sums of the rows of `a` whose numbers are that of the row.
KERNEL THREADS(256) get_rows_back(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *numbers,
                                  COMMON) {
    u32 rows = p.t[1].shape[1];
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        float sum = 0;
#pragma unroll 1
        for (u32 row = 0; row < rows; row++) {
            u32 number = *(const GLOBAL u32 *)(numbers + AT(p.t[2], row, 0, 0, 0));
            if (number >= p.t[0].shape[1]) fail();
            else if (number == i1) sum += get_float(a + AT(p.t[1], i0, row, 0, 0), p.t[1].type);
        }
        set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, sum);
    }
}

// Largest logit of a row and the sum of exp(logit - largest), in all threads.
INLINE float exp_sum(const GLOBAL u8 *logits, const Tensor *t, u32 count, float *largest,
                     LOCAL float *scratch) {
    float most = -INFINITE, sum = 0;
#pragma unroll 1
    for (u32 i = thread_id(); i < count; i += thread_count())
        most = max_float(most, GET(logits, *t, i));
    most = group_max(most, scratch);
#pragma unroll 1
    for (u32 i = thread_id(); i < count; i += thread_count())
        sum += exp_float(GET(logits, *t, i) - most);
    *largest = most;
    return group_sum(sum, scratch);
}

// y = loss of the logits of each row against the probabilities `labels`.
KERNEL THREADS(1024) cross_entropy(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *labels,
                                   COMMON) {
    SHARED float scratch[32];
    u32 count = p.t[1].shape[0];
    Tensor logits_t = p.t[1];
#pragma unroll 1
    for (u32 row = group_id(); row < ROWS(p.t[1]); row += group_count()) {
        ROW_INDICES(row, p.t[1].shape, i1, i2, i3);
        const GLOBAL u8 *logits = ROW_OF(a, p.t[1]), *wanted = ROW_OF(labels, p.t[2]);
        float largest, sum = exp_sum(logits, &logits_t, count, &largest, scratch);
        float all = largest + log_float(sum), loss = 0;
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count())
            loss += GET(wanted, p.t[2], i) * (GET(logits, p.t[1], i) - all);
        loss = group_sum(loss, scratch);
        if (thread_id() == 0) ((GLOBAL float *)y)[row] = -loss;
    }
}

// y = gradient of the loss for logits `a` and probabilities `labels`, times `gradient` / floats[0].
KERNEL THREADS(1024) cross_entropy_back(GLOBAL u8 *y, const GLOBAL u8 *gradient,
                                        const GLOBAL u8 *a, const GLOBAL u8 *labels, COMMON) {
    SHARED float scratch[32];
    u32 count = p.t[0].shape[0];
    Tensor logits_t = p.t[2];
    float factor = get_float(gradient, p.t[1].type) / p.floats[0];
#pragma unroll 1
    for (u32 row = group_id(); row < ROWS(p.t[0]); row += group_count()) {
        ROW_INDICES(row, p.t[0].shape, i1, i2, i3);
        const GLOBAL u8 *logits = ROW_OF(a, p.t[2]), *wanted = ROW_OF(labels, p.t[3]);
        GLOBAL u8 *to = ROW_OF(y, p.t[0]);
        float largest, sum = exp_sum(logits, &logits_t, count, &largest, scratch);
#pragma unroll 1
        for (u32 i = thread_id(); i < count; i += thread_count()) {
            float share = exp_float(GET(logits, p.t[2], i) - largest) / sum;
            SET(to, p.t[0], i, factor * (share - GET(wanted, p.t[3], i)));
        }
    }
}

#define PART(x, k) get_float((x) + AT(p.t[k], i0, i1, i2, i3), p.t[k].type)
#define RULE(x, k, i) get_float((x) + (i) * p.t[k].strides[0], p.t[k].type)

// A step of AdamW: weights, gradient, both moments, rules.
KERNEL THREADS(256) adamw(GLOBAL u8 *w, const GLOBAL u8 *g, GLOBAL u8 *m, GLOBAL u8 *v,
                          const GLOBAL u8 *rules, COMMON) {
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        float gradient = PART(g, 1), first = RULE(rules, 4, 1), second = RULE(rules, 4, 2);
        float mean = PART(m, 2) * first + gradient * (1.0f - first);
        float square = PART(v, 3) * second + gradient * gradient * (1.0f - second);
        float rate = RULE(rules, 4, 0), root = sqrt_float(square * RULE(rules, 4, 6));
        float step = mean * RULE(rules, 4, 5) / (root + RULE(rules, 4, 3));
        float weight = PART(w, 0) * (1.0f - rate * RULE(rules, 4, 4)) - rate * step;
        set_float(w + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, weight);
        set_float(m + AT(p.t[2], i0, i1, i2, i3), p.t[2].type, mean);
        set_float(v + AT(p.t[3], i0, i1, i2, i3), p.t[3].type, square);
    }
}

// A step of gradient descent: weights, gradient, rules.
KERNEL THREADS(256) sgd(GLOBAL u8 *w, const GLOBAL u8 *g, const GLOBAL u8 *rules, COMMON) {
    float rate = RULE(rules, 2, 0), decay = RULE(rules, 2, 1);
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        float weight = PART(w, 0) * (1.0f - rate * decay) - rate * PART(g, 1);
        set_float(w + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, weight);
    }
}
