//! ggml's number and block formats: decoding to `f32`, encoding from `f32`, and access to their
//! parts.
//!
//! Everything here is a pure function or plain data. Nothing opens files. Only [`gather_row`] and
//! [`RowReader`] allocate memory, and [`quantize_row`] for the IQ1, IQ2 and IQ3 types: on its first
//! call it builds and caches lists of neighbouring grid points.
//!
//! # Rows
//! [`decode_row`] and [`encode_row`] work on whole rows of any [`DType`](samite_core::DType) for
//! which [`can_decode`] or [`can_encode`] holds. They check every length, never panic whatever the
//! bytes or numbers, and accept any alignment of the bytes. Decoding gives the same bits as ggml's
//! reference functions. (A NaN stays a NaN, but its bit pattern may differ between processors.)
//! Encoding gives the same bytes as ggml's reference functions for all finite input, unless those
//! read uninitialised memory, depend on undefined conversions or are wrong. The block's `encode`
//! then documents what happens here. [`quantize_row`] spends more time on a row, which is
//! worthwhile for files, and accepts the importance of columns. Its bytes are also ggml's.
//!
//! # Blocks
//! Kernels read blocks in place: [`blocks_of`] casts the bytes of a row to a slice of one of the
//! `#[repr(C)]` types in [`blocks`], and [`Block`], [`Decode`] and [`Encode`] work on a single
//! block with statically sized arrays.
//!
//! | dtype | elements | bytes | stored, in this order | an element is |
//! |---|---|---|---|---|
//! | `q4_0` | 32 | 18 | f16 `d`, 32 × 4 bits | `d (q - 8)` |
//! | `q4_1` | 32 | 20 | f16 `d`, f16 `m`, 32 × 4 bits | `d q + m` |
//! | `q5_0` | 32 | 22 | f16 `d`, 32 × high bit, 32 × 4 low bits | `d (q - 16)` |
//! | `q5_1` | 32 | 24 | f16 `d`, f16 `m`, 32 × high bit, 32 × 4 low bits | `d q + m` |
//! | `q8_0` | 32 | 34 | f16 `d`, 32 × i8 | `d q` |
//! | `q8_1` | 32 | 36 | f16 `d`, f16 `d Σq`, 32 × i8 (activations only) | `d q` |
//! | `q2_K` | 256 | 84 | 16 × (4-bit scale, 4-bit minimum), 256 × 2 bits, f16 `d`, f16 `dmin` | `d s q - dmin m` |
//! | `q3_K` | 256 | 110 | 256 × high bit, 256 × 2 low bits, 16 × 6-bit scale, f16 `d` | `d (s - 32) (q - 4)` |
//! | `q4_K` | 256 | 144 | f16 `d`, f16 `dmin`, 8 × (6-bit scale, 6-bit minimum), 256 × 4 bits | `d s q - dmin m` |
//! | `q5_K` | 256 | 176 | f16 `d`, f16 `dmin`, 8 × (6-bit scale, 6-bit minimum), 256 × high bit, 256 × 4 low bits | `d s q - dmin m` |
//! | `q6_K` | 256 | 210 | 256 × 4 low bits, 256 × 2 high bits, 16 × i8 scale, f16 `d` | `d s (q - 32)` |
//! | `q8_K` | 256 | 292 | f32 `d`, 256 × i8, 16 × i16 sum of 16 (activations only) | `d q` |
//! | `iq4_nl` | 32 | 18 | f16 `d`, 32 × 4 bits | `d T[q]`, `T` = [`IQ4_NL_VALUES`] |
//! | `iq4_xs` | 256 | 136 | f16 `d`, 8 × 6-bit scale, 256 × 4 bits | `d (s - 32) T[q]` |
//! | `mxfp4` | 32 | 17 | E8M0 `e`, 32 × E2M1 | `2^(e - 127) E2M1(q)` |
//! | `nvfp4` | 64 | 36 | 4 × UE4M3 `e`, 64 × E2M1 | `UE4M3(e) E2M1(q)` |
//! | `iq1_s` | 256 | 50 | f16 `d`, 32 × 8 low bits of points, 8 × (4 × 3 high bits, 3-bit `s`, sign of the eighth) | `d (2 s + 1) (g ± 1/8)` |
//! | `iq1_m` | 256 | 56 | 32 × 8 low bits of points, 32 × (3 high bits, sign of the eighth), 16 × 3-bit `s` with the f16 `d` between | `d (2 s + 1) (g ± 1/8)` |
//! | `iq2_xxs` | 256 | 66 | f16 `d`, 8 × (4 × 8-bit point, 4 × 7 signs, 4-bit `s`) | `d (s + 1/2) / 4 · ±g` |
//! | `iq2_xs` | 256 | 74 | f16 `d`, 32 × (9-bit point, 7 signs), 16 × 4-bit `s` | `d (s + 1/2) / 4 · ±g` |
//! | `iq2_s` | 256 | 82 | f16 `d`, 32 × 8 low bits of points, 256 signs, 32 × 2 high bits, 16 × 4-bit `s` | `d (s + 1/2) / 4 · ±g` |
//! | `iq3_xxs` | 256 | 98 | f16 `d`, 64 × 8-bit point, 8 × (4 × 7 signs, 4-bit `s`) | `d (s + 1/2) / 2 · ±g` |
//! | `iq3_s` | 256 | 110 | f16 `d`, 64 × 8 low bits of points, 64 × high bit, 256 signs, 8 × 4-bit `s` | `d (2 s + 1) · ±g` |
//! | `tq1_0` | 256 | 54 | 240 trits, five a byte, 16 trits, four a byte, f16 `d` | `d (q - 1)` |
//! | `tq2_0` | 256 | 66 | 256 × 2 bits, f16 `d` | `d (q - 1)` |
//! | `q1_0` | 128 | 18 | f16 `d`, 128 × 1 bit | `d (2 q - 1)` |
//! | `q2_0` | 64 | 18 | f16 `d`, 64 × 2 bits | `d (q - 1)` |
//!
//! Every field is little-endian. Each type documents how codes are spread over a block's bytes. `g`
//! are the coordinates of a grid point: the sets of points are in [`grids`], and [`Codebook`] is
//! the common interface of their types.
//!
//! In addition, [`decode_row`] reads F32, F16, BF16, F8 and F64, and [`encode_row`] writes F32,
//! F16, BF16 and F8. Only [`quantize_row`] encodes the IQ1, IQ2 and IQ3 types: choosing points is
//! slow, and weighted by what a model computes on sample texts.
//!
//! The formats are defined by `ggml-common.h` (layouts) and `ggml-quants.c` (meaning) of the ggml
//! project; MXFP4 follows the OCP Microscaling Formats specification, with the element order of
//! ggml.
#![forbid(unsafe_code)]

pub mod blocks;
pub mod grids;

mod affine;
mod bits;
mod codebook;
mod float;
mod legacy;
mod neighbours;
mod non_linear;
mod packed_buffer;
mod packing;
mod quantize;
mod random;
mod row;
mod search;
mod shifted_points;
mod signed_points;
mod symmetric;
mod tables;
mod ternary;
mod values;

pub use blocks::{Block, Decode, Encode, blocks_of, blocks_of_mut};
pub use codebook::Codebook;
pub use float::{f8_e4m3_to_f32, f32_to_bf16, f32_to_f8_e4m3, f32_to_f16};
pub use packed_buffer::{
    PackableMemory, PackedBuffer, PackedBufferType, is_packable, reads_packed,
};
pub use packing::{PackedMemory, RowPacking, has_packed_rows, packed_row_bytes};
pub use quantize::{Quantize, can_quantize, needs_importance, quantize_row};
pub use random::random_row;
pub use row::{can_decode, can_encode, decode_row, encode_row};
pub use tables::{IQ4_NL_VALUES, MXFP4_VALUES, e8m0_half, ue4m3_half};
pub use values::{RowReader, gather_row};
