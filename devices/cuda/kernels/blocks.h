// Decoding of weights, in groups of 32 elements. A source that includes this file is compiled once
// for each type, with -DWEIGHT=Q4_0 and so on. `base/quant/src/blocks.rs` describes the formats.
#pragma once
#include "prelude.h"

// Elements that `decode32` decodes at once.
#define GROUP 32

// Byte offsets of the grids of IQ types in `tables`. `src/tables.rs` builds them.
#define GRID_IQ2_XXS 0
#define GRID_IQ2_XS 2048
#define GRID_IQ2_S 6144
#define GRID_IQ3_XXS 14336
#define GRID_IQ3_S 15360
#define GRID_IQ1 17408


INLINE u32 load_u16(const GLOBAL u8 *at) { return *(const GLOBAL u16 *)at; }
INLINE u32 load_u32(const GLOBAL u8 *at) { return *(const GLOBAL u32 *)at; }
// Loads 4 bytes that may be aligned to 2 only.
INLINE u32 load_halves(const GLOBAL u8 *at) { return load_u16(at) | load_u16(at + 2) << 16; }
INLINE float load_half(const GLOBAL u8 *at) { return half_float(*(const GLOBAL u16 *)at); }
INLINE i32 signed_byte(u32 word, u32 i) { return (i32)(i8)(word >> (8 * i)); }
INLINE u32 is_aligned(const GLOBAL u8 *at, u32 bytes) { return ((u64)at & (bytes - 1)) == 0; }

INLINE float f8_float(u32 x) {
    u32 exponent = x >> 3 & 15, mantissa = x & 7;
    float v = exponent ? bits_float((exponent + 120) << 23 | mantissa << 20)
                       : (float)mantissa * (1.0f / 512.0f);
    if ((x & 127) == 127) v = bits_float(0x7fc00000u);
    return x & 128 ? -v : v;
}

// Byte `code` of a table of 16.
INLINE i32 lookup16(u64 low, u64 high, u32 code) {
    return (i32)(i8)((code & 8 ? high : low) >> (8 * (code & 7)));
}
INLINE i32 iq4_value(u32 code) {
    return lookup16(0xf6eaddcfbfad9881ull, 0x7159453526190d01ull, code);
}
// Values of E2M1, doubled.
INLINE i32 e2m1_value(u32 code) {
    return lookup16(0x0c08060403020100ull, 0xf4f8fafcfdfeff00ull, code);
}
// Half of an E8M0 scale.
INLINE float e8m0_half(u32 e) { return bits_float(e < 2 ? 0x00200000u << e : (e - 1) << 23); }
// Half of a UE4M3 scale.
INLINE float ue4m3_half(u32 x) {
    u32 exponent = x >> 3 & 15, mantissa = x & 7;
    if (x == 127) return 0;
    return exponent ? bits_float((exponent + 119) << 23 | mantissa << 20)
                    : (float)mantissa * (1.0f / 1024.0f);
}
// Seven signs, and an eighth that makes the number of negative ones even.
INLINE u32 even_signs(u32 seven) {
    u32 parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return seven | (parity & 1) << 7;
}
// Writes eight coordinates of a point, times `scale`. Bits of `signs` negate.
INLINE void signed_point(u32x2 point, u32 signs, float scale, float *w) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        float v = (float)signed_byte(i < 4 ? point.x : point.y, i & 3);
        w[i] = scale * (signs >> i & 1 ? -v : v);
    }
}
INLINE u32x2 point8(const GLOBAL u8 *grid, u32 n) { return *(const GLOBAL u32x2 *)(grid + 8 * n); }
INLINE u32x2 points4(const GLOBAL u8 *grid, u32 m, u32 n) {
    u32x2 both = {load_u32(grid + 4 * m), load_u32(grid + 4 * n)};
    return both;
}
// Scale (low byte) and minimum (second byte) of group `j` of Q4_K and Q5_K.
INLINE u32 scale_and_minimum(const GLOBAL u8 *scales, u32 j) {
    u32 a = load_u32(scales), b = load_u32(scales + 4), c = load_u32(scales + 8);
    u32 shift = 8 * (j & 3);
    a >>= shift, b >>= shift, c >>= shift;
    if (j < 4) return (a & 63) | (b & 63) << 8;
    return (c & 15) | (a >> 2 & 48) | ((c >> 4 & 15) | (b >> 2 & 48)) << 8;
}

#if WEIGHT == F32 || WEIGHT == F16 || WEIGHT == BF16 || WEIGHT == F8_E4M3
#define IS_PLAIN 1
#if WEIGHT == F32
#define ELEMENT(at) (*(const GLOBAL float *)(at))
#define ELEMENT_BYTES 4
#elif WEIGHT == F16
#define ELEMENT(at) load_half(at)
#define ELEMENT_BYTES 2
#elif WEIGHT == BF16
#define ELEMENT(at) bf16_float(*(const GLOBAL u16 *)(at))
#define ELEMENT_BYTES 2
#else
#define ELEMENT(at) f8_float(*(at))
#define ELEMENT_BYTES 1
#endif
#else
#define IS_PLAIN 0
#endif

// Decodes elements 32 g to 32 g + 31 of a row of `length` elements to `w`. Elements of plain types
// are `stride` bytes apart, and those past the end are 0. Blocks have no gaps.
INLINE void decode32(const GLOBAL u8 *row, u64 stride, u32 g, u32 length, float *w,
                     const GLOBAL u8 *tables) {
#if IS_PLAIN
    const GLOBAL u8 *at = row + (u64)(GROUP * g) * stride;
    u32 count = length - GROUP * g;
    if (stride == ELEMENT_BYTES && count >= GROUP && is_aligned(at, 16)) {
#pragma unroll
        for (u32 i = 0; i < 2 * ELEMENT_BYTES; i++) {
            u32x4 v = ((const GLOBAL u32x4 *)at)[i];
#if WEIGHT == F32
#pragma unroll
            for (u32 j = 0; j < 4; j++) w[4 * i + j] = bits_float(v[j]);
#elif WEIGHT == F8_E4M3
#pragma unroll
            for (u32 j = 0; j < 16; j++) w[16 * i + j] = f8_float(v[j / 4] >> (8 * (j & 3)) & 255);
#else
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                u16 h = (u16)(v[j / 2] >> (16 * (j & 1)));
                w[8 * i + j] = WEIGHT == F16 ? half_float(h) : bf16_float(h);
            }
#endif
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) w[i] = i < count ? ELEMENT(at + i * stride) : 0.0f;

#elif WEIGHT == Q4_0 || WEIGHT == Q4_1 || WEIGHT == Q5_0 || WEIGHT == Q5_1 || WEIGHT == IQ4_NL
#define BLOCK_BYTES                                                                                \
    (18 + (WEIGHT == Q4_1 || WEIGHT == Q5_1 ? 2 : 0) +                                             \
     (WEIGHT == Q5_0 || WEIGHT == Q5_1 ? 4 : 0))
    const GLOBAL u8 *b = row + (u64)g * BLOCK_BYTES;
    const GLOBAL u8 *codes = b + BLOCK_BYTES - 16;
    float d = load_half(b);
#if WEIGHT == Q4_1 || WEIGHT == Q5_1
    float m = load_half(b + 2);
#endif
#if WEIGHT == Q5_0 || WEIGHT == Q5_1
    u32 high = load_halves(codes - 4);
#endif
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#if WEIGHT == Q4_1 || WEIGHT == Q5_1
        u32 q = load_u32(codes + 4 * i);
#else
        u32 q = load_halves(codes + 4 * i);
#endif
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            u32 n = 4 * i + (j & 3) + (j >= 4 ? 16 : 0);
            u32 code = q >> (8 * (j & 3) + (j >= 4 ? 4 : 0)) & 15;
#if WEIGHT == Q4_0
            w[n] = (float)((i32)code - 8) * d;
#elif WEIGHT == Q4_1
            w[n] = (float)code * d + m;
#elif WEIGHT == Q5_0
            w[n] = (float)((i32)(code | (high >> n & 1) << 4) - 16) * d;
#elif WEIGHT == Q5_1
            w[n] = (float)(code | (high >> n & 1) << 4) * d + m;
#else
            w[n] = d * (float)iq4_value(code);
#endif
        }
    }

#elif WEIGHT == Q8_0
    const GLOBAL u8 *b = row + (u64)g * 34;
    float d = load_half(b);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 q = load_halves(b + 2 + 4 * i);
#pragma unroll
        for (u32 j = 0; j < 4; j++) w[4 * i + j] = (float)signed_byte(q, j) * d;
    }

#elif WEIGHT == Q1_0
    const GLOBAL u8 *b = row + (u64)(g / 4) * 18;
    float d = load_half(b);
    u32 q = load_halves(b + 2 + 4 * (g & 3));
#pragma unroll
    for (u32 i = 0; i < 32; i++) w[i] = q >> i & 1 ? d : -d;

#elif WEIGHT == Q2_0
    const GLOBAL u8 *b = row + (u64)(g / 2) * 18;
    float d = load_half(b);
    u32 q0 = load_halves(b + 2 + 8 * (g & 1)), q1 = load_halves(b + 6 + 8 * (g & 1));
#pragma unroll
    for (u32 i = 0; i < 32; i++)
        w[i] = (float)((i32)((i < 16 ? q0 : q1) >> (2 * (i & 15)) & 3) - 1) * d;

#elif WEIGHT == Q2_K || WEIGHT == TQ2_0 || WEIGHT == Q3_K
    // Four groups share 32 bytes of codes of two bits.
    u32 j = g & 7, shift = 2 * (j & 3);
#if WEIGHT == Q2_K
    const GLOBAL u8 *b = row + (u64)(g / 8) * 84;
    const GLOBAL u8 *codes = b + 16 + 32 * (j / 4);
    float d = load_half(b + 80), dmin = load_half(b + 82);
    u32 packed = load_u16(b + 2 * j);
    float s0 = d * (float)(packed & 15), s1 = d * (float)(packed >> 8 & 15);
    float m0 = dmin * (float)(packed >> 4 & 15), m1 = dmin * (float)(packed >> 12);
#elif WEIGHT == TQ2_0
    const GLOBAL u8 *b = row + (u64)(g / 8) * 66;
    const GLOBAL u8 *codes = b + 32 * (j / 4);
    float d = load_half(b + 64);
#else
    const GLOBAL u8 *b = row + (u64)(g / 8) * 110;
    const GLOBAL u8 *codes = b + 32 + 32 * (j / 4);
    float d = load_half(b + 108);
    // Scales 2 j and 2 j + 1: low bits in bytes 0 to 7, high bits in bytes 8 to 11.
    u32 low = load_u16(b + 96 + 2 * (j & 3)) >> (4 * (j / 4));
    u32 top = load_u16(b + 104 + 2 * (j & 1)) >> (2 * (j / 2));
    float s0 = d * (float)((i32)((low & 15) | (top & 3) << 4) - 32);
    float s1 = d * (float)((i32)((low >> 8 & 15) | (top >> 8 & 3) << 4) - 32);
#endif
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
#if WEIGHT == Q2_K
        u32 q = load_u32(codes + 4 * i) >> shift;
#else
        u32 q = load_halves(codes + 4 * i) >> shift;
#endif
#if WEIGHT == Q3_K
        u32 h = load_halves(b + 4 * i) >> j;
#endif
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            u32 code = q >> (8 * k) & 3;
#if WEIGHT == Q2_K
            w[4 * i + k] = (i < 4 ? s0 : s1) * (float)code - (i < 4 ? m0 : m1);
#elif WEIGHT == TQ2_0
            w[4 * i + k] = (float)((i32)code - 1) * d;
#else
            code |= (h >> (8 * k) & 1) << 2;
            w[4 * i + k] = (i < 4 ? s0 : s1) * (float)((i32)code - 4);
#endif
        }
    }

#elif WEIGHT == Q4_K || WEIGHT == Q5_K
#define BLOCK_BYTES (WEIGHT == Q4_K ? 144 : 176)
    const GLOBAL u8 *b = row + (u64)(g / 8) * BLOCK_BYTES;
    u32 j = g & 7, shift = 4 * (j & 1);
    u32 both = scale_and_minimum(b + 4, j);
    float scale = load_half(b) * (float)(both & 255);
    float minimum = load_half(b + 2) * (float)(both >> 8);
    const GLOBAL u32x4 *codes = (const GLOBAL u32x4 *)(b + BLOCK_BYTES - 128 + 32 * (j / 2));
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32x4 q = codes[i];
#if WEIGHT == Q5_K
        u32x4 high = ((const GLOBAL u32x4 *)(b + 16))[i];
#endif
#pragma unroll
        for (u32 k = 0; k < 16; k++) {
            u32 code = q[k / 4] >> (8 * (k & 3) + shift) & 15;
#if WEIGHT == Q5_K
            code |= (high[k / 4] >> (8 * (k & 3) + j) & 1) << 4;
#endif
            w[16 * i + k] = scale * (float)code - minimum;
        }
    }

#elif WEIGHT == Q6_K
    const GLOBAL u8 *b = row + (u64)(g / 8) * 210;
    u32 j = g & 7;
    const GLOBAL u8 *low = b + 64 * (j / 4) + 32 * (j & 1);
    const GLOBAL u8 *high = b + 128 + 32 * (j / 4);
    u32 low_shift = 2 * (j & 2), high_shift = 2 * (j & 3);
    float d = load_half(b + 208);
    u32 scales = load_u16(b + 192 + 2 * j);
    float s0 = d * (float)signed_byte(scales, 0), s1 = d * (float)signed_byte(scales, 1);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 l = load_halves(low + 4 * i) >> low_shift & 0x0f0f0f0fu;
        u32 h = load_halves(high + 4 * i) >> high_shift & 0x03030303u;
        u32 q = l | h << 4;
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            w[4 * i + k] = (i < 4 ? s0 : s1) * (float)((i32)(q >> (8 * k) & 63) - 32);
    }

#elif WEIGHT == IQ4_XS
    const GLOBAL u8 *b = row + (u64)(g / 8) * 136;
    u32 j = g & 7;
    u32 low = (u32)b[4 + j / 2] >> (4 * (j & 1)) & 15;
    u32 top = load_u16(b + 2) >> (2 * j) & 3;
    float d = load_half(b) * (float)((i32)(low | top << 4) - 32);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 q = load_u32(b + 8 + 16 * j + 4 * i);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            w[4 * i + k] = d * (float)iq4_value(q >> (8 * k) & 15);
            w[16 + 4 * i + k] = d * (float)iq4_value(q >> (8 * k + 4) & 15);
        }
    }

#elif WEIGHT == MXFP4
    const GLOBAL u8 *b = row + (u64)g * 17;
    float d = e8m0_half(b[0]);
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        u32 q = b[1 + i];
        w[i] = d * (float)e2m1_value(q & 15);
        w[16 + i] = d * (float)e2m1_value(q >> 4);
    }

#elif WEIGHT == NVFP4
    const GLOBAL u8 *b = row + (u64)(g / 2) * 36;
    u32 j = g & 1;
#pragma unroll
    for (u32 s = 0; s < 2; s++) {
        float d = ue4m3_half(b[2 * j + s]);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 q = load_u32(b + 4 + 16 * j + 8 * s + 4 * i);
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                w[16 * s + 4 * i + k] = d * (float)e2m1_value(q >> (8 * k) & 15);
                w[16 * s + 8 + 4 * i + k] = d * (float)e2m1_value(q >> (8 * k + 4) & 15);
            }
        }
    }

#elif WEIGHT == TQ1_0
    const GLOBAL u8 *b = row + (u64)(g / 8) * 54;
    u32 j = g & 7;
    float d = load_half(b + 52);
    // The last three groups consist of two halves from other bytes than the first five.
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        u32 byte = i, trit = j;
        if (j >= 5) {
            u32 n = 2 * (j - 5) + i / 16; // of six halves
            byte = 32 + (i & 15), trit = n;
            if (n == 5) byte = 48 + (i & 3), trit = (i & 15) / 4;
        }
        u32 power = trit == 0 ? 1 : trit == 1 ? 3 : trit == 2 ? 9 : trit == 3 ? 27 : 81;
        u32 rest = b[byte] * power & 255;
        w[i] = (float)((i32)(rest * 3 >> 8) - 1) * d;
    }

#elif WEIGHT == IQ2_XXS
    const GLOBAL u8 *b = row + (u64)(g / 8) * 66;
    u32 points = load_halves(b + 2 + 8 * (g & 7)), others = load_halves(b + 6 + 8 * (g & 7));
    float scale = 0.25f * load_half(b) * (0.5f + (float)(others >> 28));
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32x2 point = point8(tables + GRID_IQ2_XXS, points >> (8 * i) & 255);
        signed_point(point, even_signs(others >> (7 * i) & 127), scale, w + 8 * i);
    }

#elif WEIGHT == IQ2_XS || WEIGHT == IQ2_S
    u32 j = g & 7;
#if WEIGHT == IQ2_XS
    const GLOBAL u8 *b = row + (u64)(g / 8) * 74;
    u32 scales = b[66 + j];
#else
    const GLOBAL u8 *b = row + (u64)(g / 8) * 82;
    u32 scales = b[74 + j], high = b[66 + j];
#endif
    float d = 0.25f * load_half(b);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        float scale = d * (0.5f + (float)(scales >> (i < 2 ? 0 : 4) & 15));
#if WEIGHT == IQ2_XS
        u32 q = load_u16(b + 2 + 8 * j + 2 * i);
        u32x2 point = point8(tables + GRID_IQ2_XS, q & 511);
        signed_point(point, even_signs(q >> 9), scale, w + 8 * i);
#else
        u32 n = b[2 + 4 * j + i] | (high >> (2 * i) & 3) << 8;
        signed_point(point8(tables + GRID_IQ2_S, n), b[34 + 4 * j + i], scale, w + 8 * i);
#endif
    }

#elif WEIGHT == IQ3_XXS
    u32 j = g & 7;
    const GLOBAL u8 *b = row + (u64)(g / 8) * 98;
    u32 others = load_halves(b + 66 + 4 * j);
    float scale = 0.5f * load_half(b) * (0.5f + (float)(others >> 28));
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 q = load_u16(b + 2 + 8 * j + 2 * i);
        u32x2 points = points4(tables + GRID_IQ3_XXS, q & 255, q >> 8);
        signed_point(points, even_signs(others >> (7 * i) & 127), scale, w + 8 * i);
    }

#elif WEIGHT == IQ3_S
    u32 j = g & 7;
    const GLOBAL u8 *b = row + (u64)(g / 8) * 110;
    u32 high = b[66 + j];
    float scale = load_half(b) * (float)(2 * ((u32)b[106 + j / 2] >> (4 * (j & 1)) & 15) + 1);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 q = load_u16(b + 2 + 8 * j + 2 * i), bits = high >> (2 * i);
        u32 m = (q & 255) | (bits & 1) << 8, n = q >> 8 | (bits & 2) << 7;
        signed_point(points4(tables + GRID_IQ3_S, m, n), b[74 + 4 * j + i], scale, w + 8 * i);
    }

#elif WEIGHT == IQ1_S || WEIGHT == IQ1_M
    u32 j = g & 7;
#if WEIGHT == IQ1_S
    const GLOBAL u8 *b = row + (u64)(g / 8) * 50;
    const GLOBAL u8 *low = b + 2;
    u32 bits = load_u16(b + 34 + 2 * j);
    float scale = 0.125f * load_half(b) * (float)(2 * (bits >> 12 & 7) + 1);
#else
    const GLOBAL u8 *b = row + (u64)(g / 8) * 56;
    const GLOBAL u8 *low = b;
    u32 bits = load_u16(b + 32 + 2 * j), word = load_u16(b + 48 + 2 * (j / 2));
    u32 half = load_u16(b + 48) >> 12 | load_u16(b + 50) >> 12 << 4 |
               load_u16(b + 52) >> 12 << 8 | load_u16(b + 54) >> 12 << 12;
    float d = 0.125f * half_float((u16)half);
    word >>= 6 * (j & 1);
#endif
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#if WEIGHT == IQ1_S
        u32 top = bits >> (3 * i) & 7, mark = bits >> 15;
#else
        u32 top = bits >> (4 * i) & 7, mark = bits >> (4 * i + 3) & 1;
        float scale = d * (float)(2 * (word >> (i < 2 ? 0 : 3) & 7) + 1);
#endif
        u32x2 point = point8(tables + GRID_IQ1, low[4 * j + i] | top << 8);
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            i32 v = signed_byte(k < 4 ? point.x : point.y, k & 3);
            w[8 * i + k] = scale * (float)(v - (i32)(2 * mark));
        }
    }
#else
#error "unknown type of weights"
#endif
}
