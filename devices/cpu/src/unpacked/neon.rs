//! Products of quantized rows with columns of 8-bit codes, with the byte multiplications that every
//! aarch64 processor has.

use crate::activations::int8_blocks::Int8Blocks;
use crate::detect::Isa;
use crate::product::{Column, Panel, PanelFn};
use samite_core::DType;
use samite_quant::blocks::*;
use samite_quant::{Codebook, IQ4_NL_VALUES, MXFP4_VALUES, e8m0_half, ue4m3_half};
use std::arch::aarch64::*;

/// Number of columns that share one unpacking of a row.
const COLUMNS: usize = 4;

/// 32 codes, with scale and offset of each half. An element is `scale * code + offset`.
struct CodeGroup {
    codes: [i8; 32],
    scales: [f32; 2],
    offsets: [f32; 2],
}

/// Formats that unpack to groups of 32 signed codes.
trait CodeGroupFormat: Block {
    /// True if elements have an offset besides their code.
    const OFFSETS: bool;
    /// Returns group number `group` of the block.
    fn group(&self, group: usize) -> CodeGroup;
}

/// Returns the low halves of 16 bytes, then the high halves.
#[inline(always)]
fn halves(bytes: &[u8; 16]) -> [u8; 32] {
    std::array::from_fn(|i| {
        if i < 16 {
            bytes[i] & 15
        } else {
            bytes[i - 16] >> 4
        }
    })
}

/// Returns the group of a format with one scale and one offset.
#[inline(always)]
fn plain(codes: [i8; 32], scale: f32, offset: f32) -> CodeGroup {
    CodeGroup {
        codes,
        scales: [scale; 2],
        offsets: [offset; 2],
    }
}

/// Returns bit `i` of a block of 32, moved to the place of a fifth bit.
#[inline(always)]
fn fifth_bit(bits: [u8; 4], i: usize) -> u8 {
    (u32::from_le_bytes(bits) >> i & 1) as u8 * 16
}

/// Returns the group of a format with a grid of points.
#[inline(always)]
fn of_grid<B: Codebook>(block: &B, group: usize) -> CodeGroup {
    let d = block.d().to_f32();
    CodeGroup {
        codes: block.codes(group),
        scales: [0, 1].map(|half| block.scale(d, 2 * group + half)),
        offsets: [0.0; 2],
    }
}

macro_rules! groups {
    ($($block:ty, $offsets:literal: |$b:ident, $group:ident| $body:expr;)*) => {$(
        impl CodeGroupFormat for $block {
            const OFFSETS: bool = $offsets;
            #[inline(always)]
            fn group(&self, $group: usize) -> CodeGroup {
                let $b = self;
                $body
            }
        }
    )*};
}

groups! {
    BlockQ4_0, false: |b, _group| plain(halves(&b.qs).map(|q| q as i8 - 8), b.d.to_f32(), 0.0);
    BlockQ4_1, true: |b, _group| plain(halves(&b.qs).map(|q| q as i8), b.d.to_f32(), b.m.to_f32());
    BlockQ5_0, false: |b, _group| {
        let low = halves(&b.qs);
        let codes = std::array::from_fn(|i| (low[i] | fifth_bit(b.qh, i)) as i8 - 16);
        plain(codes, b.d.to_f32(), 0.0)
    };
    BlockQ5_1, true: |b, _group| {
        let low = halves(&b.qs);
        let codes = std::array::from_fn(|i| (low[i] | fifth_bit(b.qh, i)) as i8);
        plain(codes, b.d.to_f32(), b.m.to_f32())
    };
    BlockQ8_0, false: |b, _group| plain(b.qs, b.d.to_f32(), 0.0);
    BlockIq4Nl, false: |b, _group| plain(halves(&b.qs).map(|q| IQ4_NL_VALUES[usize::from(q)]),
        b.d.to_f32(), 0.0);
    BlockMxfp4, false: |b, _group| plain(halves(&b.qs).map(|q| MXFP4_VALUES[usize::from(q)]),
        e8m0_half(b.e), 0.0);
    BlockNvfp4, false: |b, group| {
        let run = &b.qs[group * 16..][..16];
        let codes = std::array::from_fn(|i| {
            let code = run[i / 16 * 8 + i % 8] >> (i / 8 % 2 * 4) & 15;
            MXFP4_VALUES[usize::from(code)]
        });
        let scale = |i: usize| ue4m3_half(b.d[group * 2 + i]);
        CodeGroup { codes, scales: [scale(0), scale(1)], offsets: [0.0; 2] }
    };
    BlockQ1_0, false: |b, group| {
        let run = &b.qs[group * 4..][..4];
        plain(std::array::from_fn(|i| (run[i / 8] >> (i % 8) & 1) as i8 * 2 - 1), b.d.to_f32(), 0.0)
    };
    BlockQ2_0, false: |b, group| {
        let run = &b.qs[group * 8..][..8];
        plain(std::array::from_fn(|i| (run[i / 4] >> (i % 4 * 2) & 3) as i8 - 1), b.d.to_f32(), 0.0)
    };
    BlockIq1S, false: |b, group| of_grid(b, group);
    BlockIq1M, false: |b, group| of_grid(b, group);
    BlockIq2Xxs, false: |b, group| of_grid(b, group);
    BlockIq2Xs, false: |b, group| of_grid(b, group);
    BlockIq2S, false: |b, group| of_grid(b, group);
    BlockIq3Xxs, false: |b, group| of_grid(b, group);
    BlockIq3S, false: |b, group| of_grid(b, group);
    BlockQ4K, true: |b, group| {
        let (scales, minima) = b.scales_and_minima();
        let shift = group % 2 * 4;
        let run = &b.qs[group / 2 * 32..][..32];
        let codes = std::array::from_fn(|i| (run[i] >> shift & 15) as i8);
        plain(codes, b.d.to_f32() * f32::from(scales[group]),
            -b.dmin.to_f32() * f32::from(minima[group]))
    };
    BlockQ5K, true: |b, group| {
        let (scales, minima) = b.scales_and_minima();
        let shift = group % 2 * 4;
        let run = &b.qs[group / 2 * 32..][..32];
        let code = |i: usize| ((run[i] >> shift & 15) | (b.qh[i] >> group & 1) << 4) as i8;
        let codes = std::array::from_fn(code);
        plain(codes, b.d.to_f32() * f32::from(scales[group]),
            -b.dmin.to_f32() * f32::from(minima[group]))
    };
    BlockQ6K, false: |b, group| {
        // Each half of the block holds four groups: low halves of 64 bytes, then high halves, and
        // separately two high bits of each code.
        let (half, quarter) = (group / 4, group % 4);
        let low = &b.ql[half * 64 + quarter % 2 * 32..][..32];
        let high = &b.qh[half * 32..][..32];
        let codes = std::array::from_fn(|i| {
            let low = low[i] >> (quarter / 2 * 4) & 15;
            (low | (high[i] >> (quarter * 2) & 3) << 4) as i8 - 32
        });
        let d = b.d.to_f32();
        let scale = |i: usize| d * f32::from(b.scales[group * 2 + i]);
        CodeGroup { codes, scales: [scale(0), scale(1)], offsets: [0.0; 2] }
    };
}

/// Returns the sums of 16 products of codes, four in each lane.
#[inline(always)]
unsafe fn dot(a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: NEON is part of the architecture. Two products of codes, at most 128 * 127 each, fit
    // into 16 bits.
    unsafe {
        let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
        vpaddlq_s16(vmlal_s8(low, vget_high_s8(a), vget_high_s8(b)))
    }
}

/// Implements [`PanelFn`] for one format.
unsafe fn panel<T: CodeGroupFormat>(panel: &Panel, columns: &[Column]) {
    let Some(int8) = Int8Blocks::new(panel.k) else {
        return;
    };
    let blocks = panel.k / T::LEN;
    for row in 0..panel.rows {
        let weights = panel.weights.wrapping_add(row * panel.stride).cast::<T>();
        for columns in columns.chunks(COLUMNS) {
            // SAFETY: rows and columns have the panel's length, by the contract of `PanelFn`.
            // Blocks and columns are aligned as their formats require.
            unsafe {
                let mut sums = [vdupq_n_f32(0.0); COLUMNS];
                let mut offsets = [0.0f32; COLUMNS];
                for block in 0..blocks {
                    let weights = &*weights.add(block);
                    for group in 0..T::LEN / 32 {
                        let w = weights.group(group);
                        let [low, high] = [0, 16].map(|at| vld1q_s8(w.codes.as_ptr().add(at)));
                        let number = block * (T::LEN / 32) + group;
                        for (c, column) in columns.iter().enumerate() {
                            let codes = column.x.add(number * 32).cast::<i8>();
                            let scale = *column.x.add(int8.scales).cast::<f32>().add(number);
                            let first = vcvtq_f32_s32(dot(low, vld1q_s8(codes)));
                            let second = vcvtq_f32_s32(dot(high, vld1q_s8(codes.add(16))));
                            sums[c] = vfmaq_n_f32(sums[c], first, w.scales[0] * scale);
                            sums[c] = vfmaq_n_f32(sums[c], second, w.scales[1] * scale);
                            if T::OFFSETS {
                                let halves =
                                    column.x.add(int8.half_sums).cast::<[f32; 2]>().add(number);
                                let [a, b] = *halves;
                                offsets[c] += w.offsets[0] * a + w.offsets[1] * b;
                            }
                        }
                    }
                }
                for (c, column) in columns.iter().enumerate() {
                    *column.out.add(panel.first + row) = vaddvq_f32(sums[c]) + offsets[c];
                }
            }
        }
    }
}

/// Returns the product for weights of `dtype` with columns quantized to 8 bits, if there is one.
pub(crate) fn product(_isa: Isa, dtype: DType) -> Option<PanelFn> {
    Some(match dtype {
        DType::Q4_0 => panel::<BlockQ4_0>,
        DType::Q4_1 => panel::<BlockQ4_1>,
        DType::Q5_0 => panel::<BlockQ5_0>,
        DType::Q5_1 => panel::<BlockQ5_1>,
        DType::Q8_0 => panel::<BlockQ8_0>,
        DType::IQ4_NL => panel::<BlockIq4Nl>,
        DType::MXFP4 => panel::<BlockMxfp4>,
        DType::Q4_K => panel::<BlockQ4K>,
        DType::Q5_K => panel::<BlockQ5K>,
        DType::Q6_K => panel::<BlockQ6K>,
        DType::NVFP4 => panel::<BlockNvfp4>,
        DType::Q1_0 => panel::<BlockQ1_0>,
        DType::Q2_0 => panel::<BlockQ2_0>,
        DType::IQ1_S => panel::<BlockIq1S>,
        DType::IQ1_M => panel::<BlockIq1M>,
        DType::IQ2_XXS => panel::<BlockIq2Xxs>,
        DType::IQ2_XS => panel::<BlockIq2Xs>,
        DType::IQ2_S => panel::<BlockIq2S>,
        DType::IQ3_XXS => panel::<BlockIq3Xxs>,
        DType::IQ3_S => panel::<BlockIq3S>,
        _ => return None,
    })
}
