// Functions of real numbers, in f32 to about an ulp. There is no library of them to link.
#pragma once
#include "prelude.h"

#define INFINITE bits_float(0x7f800000u)
#define NOT_A_NUMBER bits_float(0x7fc00000u)

INLINE u32 is_nan(float x) { return (float_bits(x) & 0x7fffffffu) > 0x7f800000u; }

// A number's rank: greater for greater numbers. NaN ranks as minus infinity, -0 as 0.
INLINE u32 rank(float x) {
    u32 bits = float_bits(is_nan(x) ? -INFINITE : x);
    if (x == 0) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// x times 2^n, for n from -250 to 250.
INLINE float scale_by_power(float x, i32 n) {
    i32 half = n / 2;
    return x * bits_float((u32)(half + 127) << 23) * bits_float((u32)(n - half + 127) << 23);
}

// e^r for |r| <= ln(2) / 2, less 1: a Taylor polynomial.
INLINE float expm1_reduced(float r) {
    float s = 1.0f / 5040.0f;
    s = fma_float(s, r, 1.0f / 720.0f);
    s = fma_float(s, r, 1.0f / 120.0f);
    s = fma_float(s, r, 1.0f / 24.0f);
    s = fma_float(s, r, 1.0f / 6.0f);
    s = fma_float(s, r, 0.5f);
    return fma_float(s * r, r, r);
}

INLINE float exp_float(float x) {
    if (is_nan(x)) return x;
    if (x > 88.8f) return INFINITE;
    if (x < -104.0f) return 0;
    float n = round_even(x * 1.44269504f);
    float r = fma_float(n, -0.693145752f, x);
    r = fma_float(n, -1.42860677e-6f, r);
    return scale_by_power(1.0f + expm1_reduced(r), (i32)n);
}

INLINE float expm1_float(float x) {
    if (abs_float(x) < 0.34f) return expm1_reduced(x);
    return exp_float(x) - 1.0f;
}

INLINE float log_float(float x) {
    u32 bits = float_bits(x);
    if (is_nan(x) || bits == 0x7f800000u) return x;
    if ((bits & 0x7fffffffu) == 0) return -INFINITE;
    if (bits >> 31) return NOT_A_NUMBER;
    i32 shift = 0;
    if (bits < 0x00800000u) {
        bits = float_bits(x * 8388608.0f);
        shift = 23;
    }
    // The mantissa lies from sqrt(1/2) to sqrt(2).
    i32 exponent = (i32)((bits - 0x3f3504f3u) >> 23) - (bits < 0x3f3504f3u ? 512 : 0);
    float m = bits_float(bits - ((u32)exponent << 23));
    float f = m - 1.0f, s = f / (2.0f + f), z = s * s;
    float sum = 1.0f / 11.0f;
    sum = fma_float(sum, z, 1.0f / 9.0f);
    sum = fma_float(sum, z, 1.0f / 7.0f);
    sum = fma_float(sum, z, 1.0f / 5.0f);
    sum = fma_float(sum, z, 1.0f / 3.0f) * z;
    float half = 0.5f * f * f, n = (float)(exponent - shift);
    // log(1 + f) = f - (f^2 / 2 - s (f^2 / 2 + 2 sum)), with less rounding than 2 s (1 + sum).
    float rest = s * (half + 2.0f * sum);
    return n * 0.693145752f + (f - (half - (rest + n * 1.42860677e-6f)));
}

INLINE float log1p_float(float x) {
    float u = 1.0f + x;
    if (u == 1.0f) return x;
    return log_float(u) * (x / (u - 1.0f));
}

INLINE float tanh_float(float x) {
    float a = abs_float(x);
    if (a > 10.0f) return x < 0 ? -1.0f : 1.0f;
    float t = expm1_float(2.0f * a);
    t = t / (t + 2.0f);
    return x < 0 ? -t : t;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_float(-x)); }
INLINE float silu(float x) { return x * sigmoid(x); }
INLINE float softplus(float x) { return x > 20.0f ? x : log1p_float(exp_float(x)); }

INLINE float erf_float(float x) {
    float a = abs_float(x), z = a * a;
    if (a < 1.0f) {
        // Taylor: 2 / sqrt(pi) times the sum of (-1)^n x^(2n + 1) / (n! (2n + 1)).
        float s = -1.0f / 918086400.0f;
        s = fma_float(s, z, 1.0f / 76204800.0f);
        s = fma_float(s, z, -1.0f / 6894720.0f);
        s = fma_float(s, z, 1.0f / 685440.0f);
        s = fma_float(s, z, -1.0f / 75600.0f);
        s = fma_float(s, z, 1.0f / 9360.0f);
        s = fma_float(s, z, -1.0f / 1320.0f);
        s = fma_float(s, z, 1.0f / 216.0f);
        s = fma_float(s, z, -1.0f / 42.0f);
        s = fma_float(s, z, 0.1f);
        s = fma_float(s, z, -1.0f / 3.0f);
        return 1.12837917f * fma_float(s * z, x, x);
    }
    if (a > 6.0f) return x < 0 ? -1.0f : 1.0f;
    // A Chebyshev fit of the complement (Numerical Recipes, erfcc): a relative error of 1.2e-7.
    float t = 1.0f / (1.0f + 0.5f * a), s = 0.17087277f;
    s = fma_float(s, t, -0.82215223f);
    s = fma_float(s, t, 1.48851587f);
    s = fma_float(s, t, -1.13520398f);
    s = fma_float(s, t, 0.27886807f);
    s = fma_float(s, t, -0.18628806f);
    s = fma_float(s, t, 0.09678418f);
    s = fma_float(s, t, 0.37409196f);
    s = fma_float(s, t, 1.00002368f);
    s = fma_float(s, t, -1.26551223f);
    float y = 1.0f - t * exp_float(s - z);
    return x < 0 ? -y : y;
}

INLINE float gelu(float x) {
    return 0.5f * x * (1.0f + tanh_float(0.797884560802865f * x * (1.0f + 0.044715f * x * x)));
}
INLINE float gelu_erf(float x) { return 0.5f * x * (1.0f + erf_float(0.707106781f * x)); }
INLINE float gelu_quick(float x) { return x * sigmoid(1.702f * x); }

// Sine and cosine of 2 pi `turns`, for |turns| <= 1/2.
INLINE void sin_cos_turns(float turns, float *sine, float *cosine) {
    float quarter = round_even(4.0f * turns);
    float r = fma_float(quarter, -0.25f, turns) * 6.28318531f, z = r * r;
    float s = 1.0f / 362880.0f;
    s = fma_float(s, z, -1.0f / 5040.0f);
    s = fma_float(s, z, 1.0f / 120.0f);
    s = fma_float(s, z, -1.0f / 6.0f);
    s = fma_float(s * z, r, r);
    float c = 1.0f / 40320.0f;
    c = fma_float(c, z, -1.0f / 720.0f);
    c = fma_float(c, z, 1.0f / 24.0f);
    c = fma_float(c, z, -0.5f);
    c = fma_float(c, z, 1.0f);
    i32 q = (i32)quarter & 3;
    float a = q & 1 ? c : s, b = q & 1 ? s : c;
    *sine = q & 2 ? -a : a;
    *cosine = q == 1 || q == 2 ? -b : b;
}

INLINE double round_double(double x) {
    double r;
    asm("cvt.rni.f64.f64 %0, %1;" : "=d"(r) : "d"(x));
    return r;
}

INLINE void sin_cos(float x, float *sine, float *cosine) {
    double turns = (double)x * 0.15915494309189535;
    sin_cos_turns((float)(turns - round_double(turns)), sine, cosine);
}

// 2^x for -1000 <= x <= 1000, to 1e-15.
INLINE double exp2_double(double x) {
    double n = round_double(x), r = (x - n) * 0.6931471805599453, s = 1.0 / 6227020800.0;
    s = s * r + 1.0 / 479001600.0;
    s = s * r + 1.0 / 39916800.0;
    s = s * r + 1.0 / 3628800.0;
    s = s * r + 1.0 / 362880.0;
    s = s * r + 1.0 / 40320.0;
    s = s * r + 1.0 / 5040.0;
    s = s * r + 1.0 / 720.0;
    s = s * r + 1.0 / 120.0;
    s = s * r + 1.0 / 24.0;
    s = s * r + 1.0 / 6.0;
    s = s * r + 0.5;
    s = s * r + 1.0;
    s = s * r + 1.0;
    u64 bits = (u64)((i64)n + 1023) << 52;
    double power;
    asm("mov.b64 %0, %1;" : "=d"(power) : "l"(bits));
    return s * power;
}
