// Angles of rotary position embedding.
#pragma once
#include "math.h"

// ints: 0 first rotated element, 1 pairs, 2 distance of partners, 3 distance of pairs, 4 mode (0
// one position, 1 sections, 2 interleaved sections, 3 sections with frequencies of their own),
// 5..8 sections. floats: 0, 1 binary logarithm of the ratio of successive frequencies, as a sum;
// 2 scale, 3 mix of extrapolation, 4 and 5 first and last pair of the ramp, 6 magnitude,
// 7 direction.
INLINE void turn_of(const u32 *ints, u32 pair, u32 *axis, u32 *step) {
    *axis = 0;
    *step = pair;
    if (ints[4] == 0) return;
    u32 starts[4] = {0, ints[5], ints[5] + ints[6], ints[5] + ints[6] + ints[7]};
    u32 sector = pair % max_u32(starts[3] + ints[8], 1);
    if (ints[4] == 2) {
        u32 of = sector % 3;
        u32 section = of == 0 ? ints[5] : of == 1 ? ints[6] : ints[7];
        *axis = sector < 3 * section ? of : 3;
        return;
    }
    u32 first = 0, begins_anew = 1;
#pragma unroll
    for (u32 i = 1; i < 4; i++) {
        if (sector < starts[i]) continue;
        // An axis that begins at the same pair as an earlier one does not restart frequencies.
        *axis += 1;
    }
#pragma unroll
    for (u32 i = 1; i < 4; i++)
        if (i == *axis) first = starts[i];
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (i < *axis && starts[i] == first) begins_anew = 0;
    if (ints[4] == 3 && begins_anew) *step = sector - first;
}

// Sine and cosine of the angle by which pair `pair` of a token turns, times the magnitude.
// Operand 2 has positions, operand 3 divisors of frequencies.
INLINE void angle_of(const Params *p, const GLOBAL u8 *positions, const GLOBAL u8 *divisors,
                     u32 pair, u32 token, u32 tokens, float *sine, float *cosine) {
    u32 axis, step;
    turn_of(p->ints, pair, &axis, &step);
    i32 position = *(const GLOBAL i32 *)(positions + AT(p->t[2], axis * tokens + token, 0, 0, 0));
    double ratio = (double)p->floats[0] + (double)p->floats[1];
    double frequency = exp2_double((double)step * ratio) * 0.15915494309189535;
    if (divisors)
        frequency /= (double)get_float(divisors + AT(p->t[3], pair, 0, 0, 0), p->t[3].type);
    double turns = frequency * (double)position, scale = p->floats[2];
    if (p->floats[3] != 0) {
        float ramp = ((float)pair - p->floats[4]) / max_float(p->floats[5] - p->floats[4], 0.001f);
        double mix = (1.0f - min_float(max_float(ramp, 0), 1)) * p->floats[3];
        turns *= scale * (1 - mix) + mix;
    } else {
        turns *= scale;
    }
    sin_cos_turns((float)(turns - round_double(turns)), sine, cosine);
    *sine *= p->floats[6] * p->floats[7];
    *cosine *= p->floats[6];
}
