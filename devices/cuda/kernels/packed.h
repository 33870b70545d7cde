// Decoding of packed rows: the codes of all blocks come first, then the next part of all blocks.
// `base/quant/src/packing.rs` describes the order. A source is compiled once for each type.
#pragma once
#include "blocks.h"

// Bytes of a row of `length` elements before part 1, 2 and 3 of its blocks.
#if WEIGHT == Q4_0
#define PART_1(length) ((length) / 2)
#elif WEIGHT == Q8_0
#define PART_1(length) (length)
#elif WEIGHT == Q4_K
#define PART_1(length) ((length) / 2)
#elif WEIGHT == Q5_K
#define PART_1(length) ((length) / 2)
#define PART_2(length) ((length) / 8 * 5)
#elif WEIGHT == Q6_K
#define PART_1(length) ((length) / 2)
#define PART_2(length) ((length) / 4 * 3)
#define PART_3(length) ((length) / 16 * 13)
#endif

INLINE u32x4 load_u32x4(const GLOBAL u8 *at) { return *(const GLOBAL u32x4 *)at; }

// Scale and minimum of group `j` of 32 elements, from the head of a block.
INLINE void scales_of_head(const GLOBAL u8 *head, u32 j, float *scale, float *minimum) {
    u32 both = scale_and_minimum(head + 4, j);
    *scale = load_half(head) * (float)(both & 255);
    *minimum = load_half(head + 2) * (float)(both >> 8);
}

// Scale of group `g` of 16 elements.
#if WEIGHT == Q6_K
INLINE float scale16(const GLOBAL u8 *row, u32 g, u32 length) {
    float scale = (float)(i32)(i8)row[PART_2(length) + g];
    return scale * load_half(row + PART_3(length) + g / 16 * 2);
}
#endif

// Decodes elements 32 g to 32 g + 31 of a packed row. `stride` and `tables` have no use here.
INLINE void decode32_packed(const GLOBAL u8 *row, u64 stride, u32 g, u32 length, float *w,
                            const GLOBAL u8 *tables) {
#if WEIGHT == Q4_0
    u32x4 codes = load_u32x4(row + 16 * g);
    float d = load_half(row + PART_1(length) + 2 * g);
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        u32 code = codes[i / 4 & 3] >> (8 * (i & 3) + i / 16 * 4) & 15;
        w[i] = d * (float)((i32)code - 8);
    }
#elif WEIGHT == Q8_0
    u32x4 codes[2] = {load_u32x4(row + 32 * g), load_u32x4(row + 32 * g + 16)};
    float d = load_half(row + PART_1(length) + 2 * g);
#pragma unroll
    for (u32 i = 0; i < 32; i++) w[i] = d * (float)signed_byte(codes[i / 16][i / 4 & 3], i & 3);
#elif WEIGHT == Q4_K || WEIGHT == Q5_K
    u32 block = g / 8, j = g & 7;
    const GLOBAL u8 *at = row + 128 * block + j / 2 * 32;
    u32x4 codes[2] = {load_u32x4(at), load_u32x4(at + 16)};
    float scale, minimum;
#if WEIGHT == Q5_K
    const GLOBAL u8 *fifth = row + PART_1(length) + 32 * block;
    u32x4 bits[2] = {load_u32x4(fifth), load_u32x4(fifth + 16)};
    scales_of_head(row + PART_2(length) + 16 * block, j, &scale, &minimum);
#else
    scales_of_head(row + PART_1(length) + 16 * block, j, &scale, &minimum);
#endif
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        u32 code = codes[i / 16][i / 4 & 3] >> (8 * (i & 3) + (j & 1) * 4) & 15;
#if WEIGHT == Q5_K
        code |= (bits[i / 16][i / 4 & 3] >> (8 * (i & 3) + j) & 1) << 4;
#endif
        w[i] = scale * (float)code - minimum;
    }
#elif WEIGHT == Q6_K
    u32 block = g / 8, half = g / 4 & 1, j = g & 3;
    const GLOBAL u8 *at = row + 128 * block + 64 * half + (j & 1) * 32;
    const GLOBAL u8 *high = row + PART_1(length) + 64 * block + 32 * half;
    u32x4 codes[2] = {load_u32x4(at), load_u32x4(at + 16)};
    u32x4 bits[2] = {load_u32x4(high), load_u32x4(high + 16)};
    float scales[2] = {scale16(row, 2 * g, length), scale16(row, 2 * g + 1, length)};
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        u32 code = codes[i / 16][i / 4 & 3] >> (8 * (i & 3) + j / 2 * 4) & 15;
        code |= (bits[i / 16][i / 4 & 3] >> (8 * (i & 3) + j * 2) & 3) << 4;
        w[i] = scales[i / 16] * (float)((i32)code - 32);
    }
#endif
}

// Weights that lie together in a packed row: two groups of 16 codes, as signed bytes. A weight is
// its code times the scale of its group, less the group's offset.
typedef struct {
    u32x4 codes[2];
    float scales[2], offsets[2];
} Unit;

// Number of the first group of 16 elements in unit `u`, and the distance to the other group.
#if WEIGHT == Q4_0
#define FIRST_GROUP(u) (2 * (u))
#define GROUP_DISTANCE(units) 1
#elif WEIGHT == Q8_0
// One group of each half of the row, so that neighbouring lanes load neighbouring bytes.
#define FIRST_GROUP(u) (u)
#define GROUP_DISTANCE(units) (units)
#elif WEIGHT == Q4_K || WEIGHT == Q5_K
#define FIRST_GROUP(u) ((u) / 8 * 16 + ((u) & 7) / 2 * 4 + ((u) & 1))
#define GROUP_DISTANCE(units) 2
#elif WEIGHT == Q6_K
#define FIRST_GROUP(u) ((u) / 4 * 8 + ((u) & 3))
#define GROUP_DISTANCE(units) 4
#endif

INLINE u32x4 low_nibbles(u32x4 v) { return v & 0x0f0f0f0fu; }

// Scales and minimums of groups `j` and `j` + 1 of 32 elements, for even `j`.
INLINE void scales_of_pair(const GLOBAL u8 *at, u32 j, float *scales, float *minimums) {
    u32x4 head = load_u32x4(at);
    u32 shift = j & 2 ? 16 : 0, a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
    u32 low = a & 0x3f3fu, least = b & 0x3f3fu;
    if (j >= 4) {
        low = (c & 0x0f0fu) | (a >> 2 & 0x3030u);
        least = (c >> 4 & 0x0f0fu) | (b >> 2 & 0x3030u);
    }
    float scale = half_float((u16)head.x), minimum = half_float((u16)(head.x >> 16));
    scales[0] = scale * (float)(low & 255);
    scales[1] = scale * (float)(low >> 8 & 255);
    minimums[0] = minimum * (float)(least & 255);
    minimums[1] = minimum * (float)(least >> 8 & 255);
}

// Loads unit `u` of `units`.
INLINE Unit load_unit(const GLOBAL u8 *row, u32 u, u32 units) {
    u32 length = 32 * units;
    Unit unit;
#if WEIGHT == Q4_0
    u32x4 codes = load_u32x4(row + 16 * u);
    unit.codes[0] = low_nibbles(codes);
    unit.codes[1] = low_nibbles(codes >> 4);
    unit.scales[0] = unit.scales[1] = load_half(row + PART_1(length) + 2 * u);
    unit.offsets[0] = unit.offsets[1] = 8 * unit.scales[0];
#elif WEIGHT == Q8_0
    unit.codes[0] = load_u32x4(row + 16 * u);
    unit.codes[1] = load_u32x4(row + 16 * (u + units));
    unit.scales[0] = load_half(row + PART_1(length) + u / 2 * 2);
    unit.scales[1] = load_half(row + PART_1(length) + (u + units) / 2 * 2);
    unit.offsets[0] = unit.offsets[1] = 0;
#elif WEIGHT == Q4_K || WEIGHT == Q5_K
    u32 block = u / 8, j = (u & 7) / 2 * 2;
    u32x4 codes = load_u32x4(row + 16 * u);
    unit.codes[0] = low_nibbles(codes);
    unit.codes[1] = low_nibbles(codes >> 4);
#if WEIGHT == Q5_K
    u32x4 bits = load_u32x4(row + PART_1(length) + 32 * block + (u & 1) * 16) >> j;
    unit.codes[0] |= (bits << 4) & 0x10101010u;
    unit.codes[1] |= (bits << 3) & 0x10101010u;
    const GLOBAL u8 *head = row + PART_2(length) + 16 * block;
#else
    const GLOBAL u8 *head = row + PART_1(length) + 16 * block;
#endif
    scales_of_pair(head, j, unit.scales, unit.offsets);
#elif WEIGHT == Q6_K
    u32x4 codes = load_u32x4(row + 16 * u);
    u32x4 bits = load_u32x4(row + PART_1(length) + 16 * (u / 4 * 2 + (u & 1))) >> (u & 2);
    unit.codes[0] = low_nibbles(codes) | ((bits << 4) & 0x30303030u);
    unit.codes[1] = low_nibbles(codes >> 4) | (bits & 0x30303030u);
    u32 first = FIRST_GROUP(u);
    unit.scales[0] = scale16(row, first, length);
    unit.scales[1] = scale16(row, first + 4, length);
    unit.offsets[0] = 32 * unit.scales[0];
    unit.offsets[1] = 32 * unit.scales[1];
#endif
    return unit;
}
