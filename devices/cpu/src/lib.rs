//! The CPU device: fast kernels on host memory, run by a pool of worker threads.
//!
//! [`CpuBackend`] has one [`CpuDevice`] for all processors that the process may use. It works on
//! any host memory, its streams are synchronous, and it runs every operation of
//! [`Op`](samite_core::Op) on the types that `samite-quant` decodes.
//!
//! # How a graph runs
//! *Preparing* looks every node up in one table of kernels (which also answers
//! [`supports`](samite_core::Device::supports)), resolves addresses, strides and parameters, and
//! yields a flat list of phases. Each phase is a closure over a number of independent tasks.
//! *Running* locks all memory involved and walks the list. Small phases run in the calling thread.
//! The others are distributed over the workers, which wait at a barrier after each phase. Running
//! does not allocate.
//!
//! Some nodes are fused. Products of the same columns quantize these once, and results of norms and
//! gated units between products are never written to memory. An observer gets the time of the last
//! fused node, and no time for the others.
//!
//! # Packed weights
//! The device offers a memory type for weights, `cpu-packed`, as an [extra buffer
//! type](samite_core::Device::extra_buffer_types). A tensor takes as many bytes there as in a file,
//! but is rearranged so that products are several times as fast, and even faster with AMX. Writing
//! packs, reading unpacks.
//!
//! # Where a product is computed
//! A product of weights and columns (a column is the activations of one token) has three parts: the
//! registers of an instruction set, the decoding of a type, and the micro-kernel that multiplies.
//! The registers are in `simd/`: `sse2.rs`, `avx2.rs`, `avx512.rs`, `neon.rs`, `generic*.rs`.
//! Decoding of packed weights and most micro-kernels are written once over these. By default,
//! models pack the weights of products. To find the code for a type, use this table:
//!
//! | types | decoding, packed | decoding, as in the file, x86-64 | as in the file, aarch64 |
//! |---|---|---|---|
//! | Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 | `packed/formats/legacy.rs` | `unpacked/x86/legacy.rs` | `unpacked/neon.rs` |
//! | Q2_K, Q3_K, Q4_K, Q5_K, Q6_K | `packed/formats/k_quants.rs` | `unpacked/x86/k_quants.rs` | `unpacked/neon.rs` |
//! | IQ4_NL, IQ4_XS, MXFP4 | `packed/formats/codebook.rs` | `unpacked/x86/codebook.rs` | `unpacked/neon.rs` |
//! | NVFP4 | not packed | `unpacked/x86/codebook.rs` | `unpacked/neon.rs` |
//! | IQ1, IQ2, IQ3 | not packed | `unpacked/x86/grids.rs` | `unpacked/neon.rs` |
//! | TQ1_0, TQ2_0 | `packed/formats/ternary.rs` | `unpacked/x86/ternary.rs` | `unpacked/neon.rs` |
//! | Q1_0, Q2_0 | not packed | `unpacked/x86/bits.rs` | `unpacked/neon.rs` |
//! | F32, F16, BF16 | `simd/float.rs` | `simd/float.rs` | `simd/float.rs` |
//! | F8_E4M3 | not packed | `base/quant/src/float.rs` | `base/quant/src/float.rs` |
//!
//! To find the code for an instruction set and a number of columns (tokens), use this one:
//!
//! | weights | columns | SSE2, NEON, others | AVX2, AVX-VNNI | AVX-512 | AVX-512 VNNI | AMX |
//! |---|---|---|---|---|---|---|
//! | packed, quantized | 1; up to 4 with AVX2, up to 8 with AVX-512 | `packed/int8/gemv.rs` | `packed/int8/gemv.rs` | `packed/int8/gemv.rs` | `packed/int8/gemv.rs` | `packed/int8/gemv.rs` |
//! | packed, quantized | more | `packed/int8/gemm.rs` | `packed/int8/gemm.rs` | `packed/int8/gemm.rs` | `packed/int8/gemm.rs` | `packed/int8/amx.rs` from 12, `packed/bf16_amx.rs` from 64 on |
//! | packed floats | few | `packed/float.rs` | `packed/float.rs` | `packed/float.rs` | `packed/float.rs` | `packed/float.rs` |
//! | packed F16, BF16 | many | `packed/float.rs` | `packed/int16.rs` from 8 on | `packed/float.rs` | `packed/int16.rs` from 16 on | `packed/bf16_amx.rs` |
//! | quantized, as in the file | up to 5 | `unpacked/neon.rs`; others decode rows | `unpacked/x86/mod.rs` | `unpacked/x86/mod.rs` | `unpacked/x86/gemv_avx512.rs` | as VNNI |
//! | quantized, as in the file | more | the same | `unpacked/x86/mod.rs` | `unpacked/x86/mod.rs` | `unpacked/x86/gemm_avx512.rs` | as VNNI |
//! | floats, as in the file | any | `unpacked/float.rs` | `unpacked/float.rs` | `unpacked/float.rs` | `unpacked/float.rs` | `unpacked/float.rs` |
//!
//! Decoding "as in the file" on x86-64 has its traits and common steps in `unpacked/x86/decode.rs`,
//! and needs AVX2.
//!
//! For example, `impl Format for Q4K` in `packed/formats/k_quants.rs` decodes packed Q4_K on AVX2,
//! with the registers `Ymm` of `simd/avx2.rs`, and `packed/int8/gemv.rs` or `packed/int8/gemm.rs`
//! multiplies it. Columns are quantized in `activations/`, whose module documentation lists the
//! form for each product.
//!
//! # Modules, from the lowest to the highest
//! A module uses those above it in this list only.
//!
//! | module | what it has |
//! |---|---|
//! | `detect`, `machine` | instruction sets, memory and processors; threads are in `base/threads` |
//! | `simd` | vector registers |
//! | `product` | what a product is called with |
//! | `activations` | activation quantization |
//! | `unpacked`, `packed` | products of weights as they lie in the file, and of packed ones |
//! | `operand`, `kernel` | tensors in memory; what a kernel is, and its phases |
//! | `tune` | choices that are measured on the machine |
//! | `kernels` | the operations |
//! | `table` | which kernel computes which operation: a new operation needs an entry here and a function in `kernels` |
//! | `fuse`, `program` | fused regions; compiled graphs and how they run |
//! | `packed_buffer_type`, `high_bandwidth`, `calibrate`, `device` | memory for packed weights, high-bandwidth memory, limits of the machine, the device |
//!
//! # What kernels promise
//! - Results do not depend on the number of threads: one task computes each element, in a fixed
//!   order.
//! - Values in memory (row numbers) are checked before they become addresses. An invalid one is an
//!   error that names it.
//! - Instruction sets are selected at run time by tokens that only detection creates. Portable code
//!   is always available.
#![warn(clippy::undocumented_unsafe_blocks)]

mod activations;
mod calibrate;
mod detect;
mod device;
mod fuse;
#[cfg(test)]
mod harness;
mod high_bandwidth;
mod kernel;
mod kernels;
mod machine;
mod operand;
mod packed;
mod packed_buffer_type;
mod product;
mod program;
mod simd;
mod table;
#[cfg(test)]
mod tests;
mod tune;
mod unpacked;

pub use calibrate::{Peaks, Probe, allowed_threads, allowed_threads_on, measure_peaks};
pub use detect::{ISA_VARIABLE, IsaLevel};
pub use device::{CpuBackend, CpuDevice, CpuOptions};
pub use high_bandwidth::HighBandwidth;
pub use samite_threads::{CpuSet, Pool, PoolError, PoolOptions, Priority};
pub use tune::TUNING_VARIABLE;
