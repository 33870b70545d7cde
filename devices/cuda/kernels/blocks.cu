// Rows and copies of one type of blocks. Results are equal to those of `base/quant` bit by bit, so
// this is compiled with -ffp-contract=off.
#include "blocks.h"

#define THREADS_HERE 128
// Floats between the elements of neighbouring threads in shared memory.
#define OWN 33

// Moves an element's numbers to those of the next element.
#define NEXT(shape, i0, i1, i2, i3)                                                                \
    if (++i0 == (shape)[0]) {                                                                      \
        i0 = 0;                                                                                    \
        if (++i1 == (shape)[1]) {                                                                  \
            i1 = 0;                                                                                \
            if (++i2 == (shape)[2]) i2 = 0, i3++;                                                  \
        }                                                                                          \
    }

// y = the rows of `a` that `numbers` selects, as f32. A thread decodes 32 elements.
KERNEL THREADS(THREADS_HERE) get_rows(GLOBAL u8 *y, const GLOBAL u8 *a,
                                      const GLOBAL u8 *numbers, COMMON) {
    u32 length = p.t[0].shape[0], groups = (length + GROUP - 1) / GROUP;
    u64 items = (u64)groups * ROWS(p.t[0]);
#pragma unroll 1
    for (u64 item = global_id(); item < items; item += global_count()) {
        u32 g = (u32)(item % groups);
        ROW_INDICES((u32)(item / groups), p.t[0].shape, i1, i2, i3);
        i64 number = row_number(numbers + AT(p.t[2], i1, i2, i3, 0), p.t[2].type);
        if ((u64)number >= p.t[1].shape[1]) {
            fail();
            continue;
        }
        float w[GROUP];
        decode32(a + AT(p.t[1], 0, number, i2, i3), p.t[1].strides[0], g, length, w, tables);
        GLOBAL u8 *to = y + AT(p.t[0], (u64)g * GROUP, i1, i2, i3);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            if (g * GROUP + i < length) *(GLOBAL float *)(to + i * p.t[0].strides[0]) = w[i];
    }
}

#ifndef ONLY_GET_ROWS
// y = the elements of `a` in logical order as f32, f16 or bf16. A thread decodes 32 elements.
KERNEL THREADS(THREADS_HERE) decode(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    SHARED float elements[THREADS_HERE * OWN];
    LOCAL float *own = elements + thread_id() * OWN;
    u32 length = p.t[1].shape[0], groups = (length + GROUP - 1) / GROUP;
    u64 items = (u64)groups * ROWS(p.t[1]);
#pragma unroll 1
    for (u64 item = global_id(); item < items; item += global_count()) {
        u32 g = (u32)(item % groups), row = (u32)(item / groups);
        ROW_INDICES(row, p.t[1].shape, a1, a2, a3);
        float w[GROUP];
        decode32(a + AT(p.t[1], 0, a1, a2, a3), p.t[1].strides[0], g, length, w, tables);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) own[i] = w[i];
        INDICES((u64)row * length + g * GROUP, p.t[0].shape, i0, i1, i2, i3);
        u32 count = min_u32(GROUP, length - g * GROUP);
#pragma unroll 1
        for (u32 i = 0; i < count; i++) {
            set_float(y + AT(p.t[0], i0, i1, i2, i3), p.t[0].type, own[i]);
            NEXT(p.t[0].shape, i0, i1, i2, i3);
        }
    }
}

#if WEIGHT == Q4_0 || WEIGHT == Q4_1 || WEIGHT == Q5_0 || WEIGHT == Q5_1 || WEIGHT == Q8_0 ||      \
    WEIGHT == IQ4_NL

INLINE void store_half(GLOBAL u8 *at, u32 bits) { *(GLOBAL u16 *)at = (u16)bits; }
INLINE void store_float(GLOBAL u8 *at, float v) { store_half(at, float_half(v)); }
INLINE float reciprocal(float d) { return d != 0 ? 1.0f / d : 0; }

// The first element of largest magnitude. NaN has none.
INLINE float first_largest(const LOCAL float *x) {
    float largest = 0;
#pragma unroll 4
    for (u32 i = 0; i < GROUP; i++)
        if (abs_float(x[i]) > abs_float(largest)) largest = x[i];
    return largest;
}

// The code of a float, rounded down. Floats that are no byte have code 0.
INLINE u32 truncated(float x, u32 top) {
    if (!(x >= 0 && x < 256)) return 0;
    return min_u32((u32)x, top);
}

#if WEIGHT == IQ4_NL
// The code of the nearest value. Of two equally near ones, the higher.
INLINE u32 iq4_code(float x) {
    u32 above = 0;
    above += x < -115.5f, above += x < -93.5f, above += x < -74.0f, above += x < -57.0f;
    above += x < -42.0f, above += x < -28.5f, above += x < -16.0f, above += x < -4.5f;
    above += x < 7.0f, above += x < 19.0f, above += x < 31.5f, above += x < 45.5f;
    above += x < 61.0f, above += x < 79.0f, above += x < 101.0f;
    return 15 - above;
}
#endif

// Writes the block of 32 elements.
INLINE void encode32(GLOBAL u8 *at, const LOCAL float *x) {
#if WEIGHT == Q8_0
    float largest = 0;
#pragma unroll 4
    for (u32 i = 0; i < GROUP; i++)
        if (abs_float(x[i]) > largest) largest = abs_float(x[i]);
    float d = largest / 127.0f, inverse = reciprocal(d);
    store_float(at, d);
#pragma unroll 1
    for (u32 i = 0; i < GROUP; i += 2) {
        u32 pair = 0;
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            float v = x[i + j] * inverse;
            if (!(abs_float(v) < 127.5f)) v = 0;
            // Ties go away from zero.
            float even = round_even(v), rest = v - even;
            i32 code = (i32)even + (rest == 0.5f && v > 0) - (rest == -0.5f && v < 0);
            pair |= ((u32)code & 255) << (8 * j);
        }
        store_half(at + 2 + i, pair);
    }
#else
#if WEIGHT == IQ4_NL
    float largest = first_largest(x), inverse = 1.0f / (largest / -127.0f), d = 0;
    if (!(abs_float(largest) < 1e-15f)) {
        float products = 0, squares = 0;
#pragma unroll 1
        for (u32 i = 0; i < GROUP; i++) {
            float t = (float)iq4_value(iq4_code(inverse * x[i]));
            float weighted = x[i] * x[i] * t;
            products += weighted * x[i];
            squares += weighted * t;
        }
        if (squares > 0) d = products / squares;
    }
    if (d == 0) inverse = 0;
#define CODE(x) iq4_code(inverse * (x))
#elif WEIGHT == Q4_0 || WEIGHT == Q5_0
    const u32 zero = WEIGHT == Q4_0 ? 8 : 16;
    float d = first_largest(x) / -(float)zero, inverse = reciprocal(d);
#define CODE(x) truncated((x) * inverse + ((float)zero + 0.5f), 2 * zero - 1)
#else
    const u32 top = WEIGHT == Q4_1 ? 15 : 31;
    float least = 3.40282347e38f, most = -3.40282347e38f, zero = 0;
#pragma unroll 1
    for (u32 i = GROUP; i-- > 0;) {
        if (x[i] < least) least = x[i];
        if (x[i] > most) most = x[i];
        // The sign of the first zero is kept.
        if (x[i] == 0) zero = x[i];
    }
    if (least == 0) least = zero;
    if (most == 0) most = zero;
    float d = (most - least) / (float)top, inverse = reciprocal(d);
    store_float(at + 2, least);
#define CODE(x) truncated(((x) - least) * inverse + 0.5f, top)
#endif
    store_float(at, d);
    GLOBAL u8 *codes = at + BLOCK_BYTES - 16;
    u32 high = 0;
#pragma unroll 1
    for (u32 i = 0; i < 16; i += 2) {
        u32 pair = 0;
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            u32 low_code = CODE(x[i + j]), high_code = CODE(x[i + j + 16]);
            pair |= ((low_code & 15) | (high_code & 15) << 4) << (8 * j);
            high |= (low_code >> 4) << (i + j) | (high_code >> 4) << (i + j + 16);
        }
        store_half(codes + i, pair);
    }
    if (WEIGHT == Q5_0 || WEIGHT == Q5_1) {
        store_half(codes - 4, high & 0xffff);
        store_half(codes - 2, high >> 16);
    }
#endif
}

// y = the floats of `a` in logical order, as blocks. A thread encodes a block.
KERNEL THREADS(THREADS_HERE) encode(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    SHARED float elements[THREADS_HERE * OWN];
    LOCAL float *x = elements + thread_id() * OWN;
    u32 blocks = p.t[0].shape[0] / GROUP;
    u64 items = (u64)blocks * ROWS(p.t[0]);
#pragma unroll 1
    for (u64 item = global_id(); item < items; item += global_count()) {
        INDICES(item * GROUP, p.t[1].shape, i0, i1, i2, i3);
#pragma unroll 1
        for (u32 i = 0; i < GROUP; i++) {
            x[i] = get_float(a + AT(p.t[1], i0, i1, i2, i3), p.t[1].type);
            NEXT(p.t[1].shape, i0, i1, i2, i3);
        }
        ROW_INDICES((u32)(item / blocks), p.t[0].shape, y1, y2, y3);
        encode32(y + AT(p.t[0], item % blocks, y1, y2, y3), x);
    }
}

// Writes the rows of `a` to the rows of `y` that `numbers` selects. A thread encodes a block.
KERNEL THREADS(THREADS_HERE) set_rows(GLOBAL u8 *y, const GLOBAL u8 *a,
                                      const GLOBAL u8 *numbers, COMMON) {
    SHARED float elements[THREADS_HERE * OWN];
    LOCAL float *x = elements + thread_id() * OWN;
    u32 blocks = p.t[1].shape[0] / GROUP;
    u64 items = (u64)blocks * ROWS(p.t[1]);
#pragma unroll 1
    for (u64 item = global_id(); item < items; item += global_count()) {
        u32 block = (u32)(item % blocks);
        ROW_INDICES((u32)(item / blocks), p.t[1].shape, i1, i2, i3);
        u64 place = AT(p.t[2], i1, i2 % p.t[2].shape[1], i3 % p.t[2].shape[2], 0);
        i64 number = row_number(numbers + place, p.t[2].type);
        if ((u64)number >= p.t[0].shape[1]) {
            fail();
            continue;
        }
        const GLOBAL u8 *from = a + AT(p.t[1], (u64)block * GROUP, i1, i2, i3);
#pragma unroll 4
        for (u32 i = 0; i < GROUP; i++)
            x[i] = get_float(from + i * p.t[1].strides[0], p.t[1].type);
        encode32(y + AT(p.t[0], block, number, i2, i3), x);
    }
}
#endif
#endif
