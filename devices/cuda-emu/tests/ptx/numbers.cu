// One instruction per kernel: operands in, results out.
#include "base.h"

#define ONE32(name, text)                                                                          \
    KERNEL name(u32 *y, const u32 *a) {                                                            \
        u32 r;                                                                                     \
        asm volatile(text : "=r"(r) : "r"(a[tid()]));                                              \
        y[tid()] = r;                                                                              \
    }
#define THREE32(name, text)                                                                        \
    KERNEL name(u32 *y, const u32 *a) {                                                            \
        u32 r;                                                                                     \
        u32 i = tid() * 3;                                                                         \
        asm volatile(text : "=r"(r) : "r"(a[i]), "r"(a[i + 1]), "r"(a[i + 2]));                    \
        y[tid()] = r;                                                                              \
    }

THREE32(fma_f32, "fma.rn.f32 %0, %1, %2, %3;")
THREE32(fma_ftz, "fma.rn.ftz.f32 %0, %1, %2, %3;")
THREE32(fma_f16x2, "fma.rn.f16x2 %0, %1, %2, %3;")
THREE32(add_f16x2, "add.f16x2 %0, %1, %2;")
THREE32(mul_f16x2, "mul.f16x2 %0, %1, %2;")
THREE32(add_f32, "add.f32 %0, %1, %2;")
THREE32(div_f32, "div.rn.f32 %0, %1, %2;")
THREE32(min_f32, "min.f32 %0, %1, %2;")
THREE32(max_s32, "max.s32 %0, %1, %2;")
THREE32(prmt_b32, "prmt.b32 %0, %1, %2, %3;")
THREE32(lop3_b32, "lop3.b32 %0, %1, %2, %3, 0x6a;")
THREE32(shf_l, "shf.l.wrap.b32 %0, %1, %2, %3;")
THREE32(shf_r, "shf.r.clamp.b32 %0, %1, %2, %3;")
THREE32(bfe_u32, "{ .reg .u32 s, n; and.b32 s, %2, 63; and.b32 n, %3, 63; bfe.u32 %0, %1, s, n; }")
THREE32(bfe_s32, "{ .reg .u32 s, n; and.b32 s, %2, 63; and.b32 n, %3, 63; bfe.s32 %0, %1, s, n; }")
THREE32(bfi_b32, "{ .reg .u32 s; and.b32 s, %3, 31; bfi.b32 %0, %1, %2, s, 7; }")
THREE32(sad_s32, "sad.s32 %0, %1, %2, %3;")
THREE32(mul_hi_s32, "mul.hi.s32 %0, %1, %2;")
THREE32(mad_hi_u32, "mad.hi.u32 %0, %1, %2, %3;")
THREE32(slct_f32, "slct.u32.f32 %0, %1, %2, %3;")
THREE32(compare_ltu, "{ .reg .pred p; setp.ltu.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }")
THREE32(compare_gt, "{ .reg .pred p, q; setp.gt.f32 p|q, %1, %2; selp.u32 %0, 1, 0, p; @q add.u32 %0, %0, 2; }")
THREE32(compare_and, "{ .reg .pred p, q; setp.lt.s32 q, %1, %2; setp.gt.and.u32 p, %2, %3, !q; selp.u32 %0, 1, 0, p; }")
THREE32(set_f32, "set.lt.f32.s32 %0, %1, %2;")
THREE32(set_u32, "set.gtu.u32.f32 %0, %1, %2;")
THREE32(dp2a_lo, "dp2a.lo.s32.u32 %0, %1, %2, %3;")
THREE32(halves, "{ .reg .b16 a, b, c, d; mov.b32 {a, b}, %1; mov.b32 {c, _}, %2; mov.b32 %0, {b, c}; }")
ONE32(popc_b32, "popc.b32 %0, %1;")
ONE32(clz_b32, "clz.b32 %0, %1;")
ONE32(brev_b32, "brev.b32 %0, %1;")
ONE32(bfind_s32, "bfind.s32 %0, %1;")
ONE32(abs_s32, "abs.s32 %0, %1;")
ONE32(sqrt_f32, "sqrt.rn.f32 %0, %1;")
ONE32(rsqrt_f32, "rsqrt.approx.f32 %0, %1;")
ONE32(ex2_f32, "ex2.approx.ftz.f32 %0, %1;")
ONE32(to_s32_rni, "cvt.rni.s32.f32 %0, %1;")
ONE32(to_s32_rzi, "cvt.rzi.s32.f32 %0, %1;")
ONE32(to_u32_rpi, "cvt.rpi.u32.f32 %0, %1;")
ONE32(to_s8_sat, "cvt.sat.s8.s32 %0, %1;")
ONE32(floor_f32, "cvt.rmi.f32.f32 %0, %1;")
ONE32(to_f16, "{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h; }")
ONE32(to_f16_rz, "{ .reg .b16 h; cvt.rz.f16.f32 h, %1; cvt.u32.u16 %0, h; }")
ONE32(from_s16, "{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f32.s16 %0, h; }")
ONE32(shifts_16, "{ .reg .b16 h, k; cvt.u16.u32 h, %1; shr.s16 k, h, 3; shl.b16 h, h, 5; add.s16 h, h, k; cvt.s32.s16 %0, h; }")
ONE32(match_any, "{ .reg .b32 v; and.b32 v, %1, 3; match.any.sync.b32 %0, v, -1; }")
ONE32(ballot, "{ .reg .pred p; setp.lt.s32 p, %1, 0; vote.sync.ballot.b32 %0, p, -1; }")

KERNEL doubles(double *y, const double *a) {
    double r;
    u32 i = tid() * 3;
    asm volatile("fma.rn.f64 %0, %1, %2, %3;" : "=d"(r) : "d"(a[i]), "d"(a[i + 1]), "d"(a[i + 2]));
    y[tid()] = r;
}

KERNEL wide(u64 *y, const u32 *a) {
    u64 r;
    u32 i = tid() * 3;
    asm volatile("{ .reg .s64 t; mul.wide.s32 t, %1, %2; mad.wide.s32 %0, %2, %3, t; }"
                 : "=l"(r) : "r"(a[i]), "r"(a[i + 1]), "r"(a[i + 2]));
    y[tid()] = r;
}
