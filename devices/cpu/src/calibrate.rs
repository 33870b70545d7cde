//! What this machine can do at most, measured: the yardstick for everything else.
//!
//! Speeds of kernels are worth little without the machine's limits beside them. Each limit is measured by a loop that does
//! nothing but the limiting operation, by all threads at once for some milliseconds; the best of several tries counts.
//! Loops use the instructions that kernels use: those of the level that was detected, or of a lower one that the
//! [environment](crate::ISA_VARIABLE) asks for.

use crate::detect::Isa;
use crate::tune;
use samite_core::HostMemory;
use samite_core::environment::Instant;
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Limits of some threads together.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// Threads that took part.
    pub threads: usize,
    /// Cycles per second of each thread, on average while all of them run.
    pub clock_hz: f64,
    /// Bytes read from memory per second, in several streams.
    pub read_bytes: f64,
    /// F32 operations per second; a fused multiply-add counts as two.
    pub f32_operations: f64,
    /// 8-bit integer operations per second: by the instruction that multiplies bytes and adds the products to sums of 32
    /// bits (VNNI, `sdot`, `smmla`), or by the three that AVX2 and AVX-512 without VNNI need for that. A multiply-add counts as
    /// two. `None` at other levels. Not quite a limit: AMX does more, and so do the three where codes are so small that
    /// several products fit into 16 bits.
    pub i8_operations: Option<f64>,
}

impl Peaks {
    /// The larger ones of two measurements.
    pub fn max(self, other: Peaks) -> Peaks {
        let i8_operations = [self.i8_operations, other.i8_operations];
        Peaks {
            threads: self.threads,
            clock_hz: self.clock_hz.max(other.clock_hz),
            read_bytes: self.read_bytes.max(other.read_bytes),
            f32_operations: self.f32_operations.max(other.f32_operations),
            i8_operations: i8_operations.into_iter().flatten().reduce(f64::max),
        }
    }
}

/// How many threads this process may use: allowed by affinity and quota, one for each physical core.
pub fn allowed_threads() -> usize {
    crate::machine::processors(None)
}

/// As [`allowed_threads`], counting only processors in `cpus`; at least 1.
pub fn allowed_threads_on(cpus: &samite_threads::CpuSet) -> usize {
    crate::machine::processors(Some(cpus))
}

const TRIES: usize = 6;
/// Bytes that are read, by all threads together: more than the part of a shared cache that a few cores get to use.
const BUFFER_BYTES: usize = 768 << 20;
/// Bytes that each thread reads at least.
const THREAD_BYTES: usize = 64 << 20;
/// Sums that do not wait for each other: enough for the latency of multipliers, and for the registers.
const REGISTERS: usize = if cfg!(target_arch = "aarch64") {
    24
} else {
    12
};
const ROUNDS: usize = 2_000_000;

/// Measures the limits of `threads` threads. Takes about a second and 768 MiB, or more for many threads; a limit that
/// could not be measured for want of memory is 0.
pub fn measure_peaks(threads: usize) -> Peaks {
    peaks(tune::detect(None), threads.max(1))
}

fn peaks(isa: Isa, threads: usize) -> Peaks {
    let best = |work: &(dyn Fn(&[u8], usize) -> f64 + Sync), bytes: usize| {
        let barrier = Barrier::new(threads);
        std::thread::scope(|scope| {
            let run = || {
                let buffer = Buffer::new(bytes);
                let mut rates = [0.0; TRIES];
                for (number, rate) in rates.iter_mut().enumerate() {
                    barrier.wait();
                    *rate = per_second(|| work(buffer.bytes(), number));
                }
                rates
            };
            let handles: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
            let mut sums = [0.0; TRIES];
            for handle in handles {
                let rates = handle.join().unwrap_or([0.0; TRIES]);
                sums.iter_mut()
                    .zip(rates)
                    .for_each(|(sum, rate)| *sum += rate);
            }
            sums.into_iter().fold(0.0, f64::max)
        })
    };
    let bytes = (BUFFER_BYTES / threads).max(THREAD_BYTES);
    let i8_operations = best(&|_, _| multiply_bytes(isa), 0);
    Peaks {
        threads,
        clock_hz: best(&|_, _| count_cycles(), 0) / threads as f64,
        read_bytes: best(&|buffer, number| read(isa, buffer, number), bytes),
        f32_operations: best(&|_, _| multiply_add(isa), 0),
        i8_operations: Some(i8_operations).filter(|&rate| rate > 0.0),
    }
}

/// Measures one thread's clock and reading again and again, to tell whether the machine stays the same.
pub struct Probe {
    isa: Isa,
    buffer: Buffer,
}

impl Probe {
    /// More than third-level caches hold.
    const BYTES: usize = 512 << 20;
    const TRIES: usize = 4;

    /// Allocates what is read: 512 MiB, or an eighth of the free memory if that is less.
    pub fn new() -> Self {
        let free = crate::machine::memory().free.unwrap_or(usize::MAX);
        Probe {
            isa: tune::detect(None),
            buffer: Buffer::new(Self::BYTES.min(free / 8)),
        }
    }

    fn best(work: impl Fn(usize) -> f64) -> f64 {
        let rates = (0..Self::TRIES).map(|number| per_second(|| work(number)));
        rates.fold(0.0, f64::max)
    }

    /// Cycles per second. Takes some milliseconds.
    pub fn clock_hz(&self) -> f64 {
        Self::best(|_| count_cycles())
    }

    /// Bytes read from memory per second; 0 if there was no memory. Takes about a tenth of a second.
    pub fn read_bytes(&self) -> f64 {
        Self::best(|number| read(self.isa, self.buffer.bytes(), number))
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self::new()
    }
}

/// The amount of work that is done, per second.
fn per_second(work: impl FnOnce() -> f64) -> f64 {
    let start = Instant::now();
    let amount = work();
    amount / start.elapsed().max(Duration::from_nanos(1)).as_secs_f64()
}

/// Memory to be read, as weights lie: in large pages where there are such. Empty if there is too little memory.
struct Buffer(Option<Arc<HostMemory>>, usize);

impl Buffer {
    fn new(bytes: usize) -> Self {
        let memory = HostMemory::allocate(bytes, "cpu", "measuring").ok();
        if let Some(memory) = &memory {
            // Pages that were never written are all the same one.
            let _ = memory.fill(0, bytes, 1);
        }
        Buffer(memory, bytes)
    }

    fn bytes(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |memory| {
            // SAFETY: the memory has so many bytes, lives as long as `self`, and nobody writes to it any more.
            unsafe { std::slice::from_raw_parts(memory.base().as_ptr(), self.1) }
        })
    }
}

/// Does additions and exclusive ors, each of which waits for the one before and takes one cycle on every processor;
/// returns how many.
fn count_cycles() -> f64 {
    const CHAIN: usize = 6_000_000;
    // A constant would not do: some processors add small ones at no cost while they rename registers.
    let (mut x, y) = black_box((1u64, 0x9e37_79b9_7f4a_7c15u64));
    for _ in 0..CHAIN / 16 {
        for _ in 0..8 {
            x = x.wrapping_add(y) ^ y;
        }
    }
    black_box(x);
    CHAIN as f64
}

/// Reads the buffer once, in one stream or in several; returns its size.
fn read(isa: Isa, buffer: &[u8], number: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if let Isa::Avx2(_) | Isa::Avx512(_) = isa {
        // SAFETY: AVX2 was detected.
        black_box(unsafe {
            match number % 2 {
                0 => x86::read_avx2::<1>(buffer),
                _ => x86::read_avx2::<4>(buffer),
            }
        });
        return buffer.len() as f64;
    }
    let _ = (isa, number);
    // Four streams keep more lines in flight than one.
    let (words, _) = buffer.as_chunks::<8>();
    let quarter = words.len() / 4;
    let mut sum = 0u64;
    for i in 0..quarter {
        for stream in 0..4 {
            sum = sum.wrapping_add(u64::from_le_bytes(words[stream * quarter + i]));
        }
    }
    black_box(sum);
    (quarter * 32) as f64
}

/// Does `$step` [`ROUNDS`] times for each of [`REGISTERS`] sums that begin as `$start`.
macro_rules! rounds {
    ($start:expr, |$sum:ident| $step:expr) => {{
        let mut sums = [$start; REGISTERS];
        for _ in 0..ROUNDS {
            for $sum in &mut sums {
                $step
            }
        }
        black_box(sums);
    }};
}

/// Does multiply-adds in registers; returns how many operations.
fn multiply_add(isa: Isa) -> f64 {
    let lanes = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) => {
            // SAFETY: AVX-512F was detected.
            unsafe { x86::multiply_add_avx512() };
            16
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => {
            // SAFETY: AVX2 and FMA were detected.
            unsafe { x86::multiply_add_avx2() };
            8
        }
        #[cfg(target_arch = "aarch64")]
        _ => {
            // SAFETY: every processor has NEON.
            unsafe { neon::multiply_add() };
            4
        }
        #[cfg(not(target_arch = "aarch64"))]
        _ => {
            let factor = black_box(0.999_999f32);
            rounds!([1.0f32; 4], |sum| sum
                .iter_mut()
                .for_each(|s| *s = *s * factor + factor));
            4
        }
    };
    (ROUNDS * REGISTERS * lanes * 2) as f64
}

/// Does byte products in registers; returns how many operations, none where they have no instruction.
fn multiply_bytes(isa: Isa) -> f64 {
    let products = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(token) => {
            // SAFETY: AVX-512 F and BW were detected, and VNNI if the token says so.
            unsafe {
                if token.vnni() {
                    x86::multiply_bytes_avx512_vnni();
                } else {
                    x86::multiply_bytes_avx512();
                }
            }
            64
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(token) => {
            // SAFETY: AVX2 was detected, and AVX-VNNI if the token says so.
            unsafe {
                if token.vnni() {
                    x86::multiply_bytes_avx_vnni();
                } else {
                    x86::multiply_bytes_avx2();
                }
            }
            32
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Dotprod(token) if token.i8mm() => {
            // SAFETY: products of matrices of bytes were detected.
            unsafe { neon::multiply_bytes_i8mm() };
            32
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Dotprod(_) => {
            // SAFETY: products of bytes were detected.
            unsafe { neon::multiply_bytes_dotprod() };
            16
        }
        _ => 0,
    };
    (ROUNDS * REGISTERS * products * 2) as f64
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{REGISTERS, ROUNDS};
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    #[target_feature(enable = "avx2")]
    pub fn read_avx2<const STREAMS: usize>(buffer: &[u8]) -> i64 {
        const AHEAD: usize = 1024;
        let part = buffer.len() / STREAMS / 128 * 128;
        let mut sums = [_mm256_setzero_si256(); STREAMS];
        for at in (0..part).step_by(128) {
            for (stream, sum) in sums.iter_mut().enumerate() {
                let line = buffer[stream * part + at..][..128].as_ptr();
                // Prefetching touches no memory that the program can see, wherever it points.
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD).cast());
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD + 64).cast());
                for half in 0..4 {
                    // SAFETY: the slice above has 128 bytes from `line` on.
                    let value = unsafe { _mm256_loadu_si256(line.add(half * 32).cast()) };
                    *sum = _mm256_add_epi64(*sum, value);
                }
            }
        }
        let sum = sums
            .into_iter()
            .fold(_mm256_setzero_si256(), |a, b| _mm256_add_epi64(a, b));
        _mm256_extract_epi64::<0>(sum)
    }

    #[target_feature(enable = "avx512f")]
    pub fn multiply_add_avx512() {
        let factor = _mm512_set1_ps(black_box(0.999_999));
        rounds!(_mm512_set1_ps(1.0), |sum| *sum =
            _mm512_fmadd_ps(*sum, factor, factor));
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn multiply_add_avx2() {
        let factor = _mm256_set1_ps(black_box(0.999_999));
        rounds!(_mm256_set1_ps(1.0), |sum| *sum =
            _mm256_fmadd_ps(*sum, factor, factor));
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn multiply_bytes_avx512_vnni() {
        let factor = _mm512_set1_epi8(black_box(3));
        rounds!(_mm512_set1_epi32(1), |sum| *sum =
            _mm512_dpbusd_epi32(*sum, factor, factor));
    }

    #[target_feature(enable = "avx2,avxvnni")]
    pub fn multiply_bytes_avx_vnni() {
        let factor = _mm256_set1_epi8(black_box(3));
        rounds!(_mm256_set1_epi32(1), |sum| *sum =
            _mm256_dpbusd_avx_epi32(*sum, factor, factor));
    }

    /// What `vpdpbusd` does, in three instructions. They are written out because the compiler would multiply once and then
    /// only add.
    macro_rules! add_products {
        ($class:ident, $sum:expr, $factor:expr, $ones:expr) => {
            asm!(
                "vpmaddubsw {products}, {factor}, {factor}",
                "vpmaddwd {products}, {products}, {ones}",
                "vpaddd {sum}, {sum}, {products}",
                products = out($class) _,
                sum = inout($class) *$sum,
                factor = in($class) $factor,
                ones = in($class) $ones,
                options(pure, nomem, nostack, preserves_flags),
            )
        };
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    pub fn multiply_bytes_avx512() {
        let factor = _mm512_set1_epi8(black_box(3));
        let ones = _mm512_set1_epi16(1);
        // SAFETY: the instructions change registers only, and are there by this function's contract.
        rounds!(_mm512_set1_epi32(1), |sum| unsafe {
            add_products!(zmm_reg, sum, factor, ones);
        });
    }

    #[target_feature(enable = "avx2")]
    pub fn multiply_bytes_avx2() {
        let factor = _mm256_set1_epi8(black_box(3));
        let ones = _mm256_set1_epi16(1);
        // SAFETY: the instructions change registers only, and are there by this function's contract.
        rounds!(_mm256_set1_epi32(1), |sum| unsafe {
            add_products!(ymm_reg, sum, factor, ones);
        });
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{REGISTERS, ROUNDS};
    use std::arch::aarch64::*;
    use std::arch::asm;
    use std::hint::black_box;

    #[target_feature(enable = "neon")]
    pub fn multiply_add() {
        let factor = vdupq_n_f32(black_box(0.999_999));
        rounds!(vdupq_n_f32(1.0), |sum| *sum =
            vfmaq_f32(factor, *sum, factor));
    }

    /// Adds products of bytes to each sum, by an instruction that the compiler does not have as a function yet.
    macro_rules! multiply_bytes {
        ($name:ident, $feature:literal, $instruction:literal) => {
            #[target_feature(enable = $feature)]
            pub fn $name() {
                let factor = vdupq_n_s8(black_box(3));
                // SAFETY: the instruction changes a register only, and is there by this function's contract.
                rounds!(vdupq_n_s32(1), |sum| unsafe {
                    asm!(
                        concat!($instruction, " {sum:v}.4s, {a:v}.16b, {a:v}.16b"),
                        sum = inout(vreg) *sum,
                        a = in(vreg) factor,
                        options(pure, nomem, nostack, preserves_flags),
                    );
                });
            }
        };
    }

    multiply_bytes!(multiply_bytes_dotprod, "neon,dotprod", "sdot");
    multiply_bytes!(multiply_bytes_i8mm, "neon,dotprod,i8mm", "smmla");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_has_limits() {
        for isa in Isa::all() {
            let peaks = peaks(isa, 2);
            let multiplies_bytes = isa != Isa::Generic;
            assert_eq!(peaks.i8_operations.is_some(), multiplies_bytes, "{isa:?}");
            let i8_operations = peaks.i8_operations.unwrap_or(f64::INFINITY);
            for rate in [
                peaks.clock_hz,
                peaks.read_bytes,
                peaks.f32_operations,
                i8_operations,
            ] {
                assert!(rate > 1e7, "{isa:?}: {peaks:?}");
            }
            assert!((1e8..2e10).contains(&peaks.clock_hz), "{isa:?}: {peaks:?}");
        }
    }

    #[test]
    fn probes_and_larger_limits() {
        let probe = Probe::new();
        assert!(probe.clock_hz() > 1e8 && probe.read_bytes() > 1e7);
        let one = Peaks {
            threads: 2,
            clock_hz: 1.0,
            read_bytes: 5.0,
            f32_operations: 3.0,
            i8_operations: None,
        };
        let other = Peaks {
            clock_hz: 2.0,
            read_bytes: 4.0,
            i8_operations: Some(7.0),
            ..one
        };
        let larger = one.max(other);
        assert_eq!(
            (larger.clock_hz, larger.read_bytes, larger.i8_operations),
            (2.0, 5.0, Some(7.0))
        );
    }
}
