//! Measured limits of this machine, against which kernels are judged.
//!
//! Kernel speeds mean little without the machine's limits. Each limit is measured by a loop that
//! does only the limiting operation, in all threads at once for some milliseconds. The best of
//! several tries counts. Loops use the instructions that kernels use: those of the detected level,
//! or of a lower one set in the [environment](crate::ISA_VARIABLE).

use crate::detect::Isa;
use crate::tune;
use samite_core::HostMemory;
use samite_core::environment::Instant;
use std::hint::black_box;
use std::io;
use std::sync::{Arc, Barrier, mpsc};
use std::thread::Builder;
use std::time::Duration;

/// Combined limits of several threads.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// Number of threads.
    pub threads: usize,
    /// Average cycles per second of each thread while all of them run.
    pub clock_hz: f64,
    /// Bytes read from memory per second, in several streams.
    pub read_bytes: f64,
    /// F32 operations per second; a fused multiply-add counts as two.
    pub f32_operations: f64,
    /// 8-bit integer operations per second. A multiply-add counts as two. Measures the instruction
    /// that multiplies bytes and adds the products to 32-bit sums (VNNI, `sdot`, `smmla`), or the
    /// three instructions that AVX2 and AVX-512 without VNNI need for it. `None` at other levels.
    /// Kernels can exceed it with AMX, or if codes are so small that several products fit into 16
    /// bits.
    pub i8_operations: Option<f64>,
}

impl Peaks {
    /// Returns the larger value of each limit.
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

/// Returns the number of threads that this process may use, by affinity and quota, one per physical
/// core.
pub fn allowed_threads() -> usize {
    crate::machine::processors(None)
}

/// Does what [`allowed_threads`] does, counting only processors in `cpus`. At least 1.
pub fn allowed_threads_on(cpus: &samite_threads::CpuSet) -> usize {
    crate::machine::processors(Some(cpus))
}

const TRIES: usize = 6;
/// Bytes that all threads read together: more than the share of a cache that a few cores can use.
const BUFFER_BYTES: usize = 768 << 20;
/// Minimum bytes that each thread reads.
const THREAD_BYTES: usize = 64 << 20;
/// Number of independent sums: enough for the latency of multipliers, and few enough for the
/// registers.
const REGISTERS: usize = if cfg!(target_arch = "aarch64") {
    24
} else {
    12
};
const ROUNDS: usize = 2_000_000;

/// Measures the limits of `threads` threads. Takes about a second and 768 MiB, or more for many
/// threads. A limit that could not be measured because of too little memory, or because a thread
/// could not be started, is 0.
pub fn measure_peaks(threads: usize) -> Peaks {
    let thread = &samite_threads::thread_builder;
    peaks(tune::detect(None), threads.max(1), thread)
}

fn peaks(isa: Isa, threads: usize, thread: &dyn Fn() -> io::Result<Builder>) -> Peaks {
    let best = |work: &(dyn Fn(&[u8], usize) -> f64 + Sync), bytes: usize| {
        std::thread::scope(|scope| {
            let run = |start: mpsc::Receiver<Arc<Barrier>>| {
                // The sender is dropped if another thread could not be started.
                let Ok(barrier) = start.recv() else {
                    return [0.0; TRIES];
                };
                let buffer = BandwidthBuffer::new(bytes);
                let mut rates = [0.0; TRIES];
                for (number, rate) in rates.iter_mut().enumerate() {
                    barrier.wait();
                    *rate = per_second(|| work(buffer.bytes(), number));
                }
                rates
            };
            let (mut starts, mut handles) = (Vec::new(), Vec::new());
            for _ in 0..threads {
                let (start, started) = mpsc::channel();
                let run = move || run(started);
                let Ok(handle) = thread().and_then(|one| one.spawn_scoped(scope, run)) else {
                    return 0.0;
                };
                starts.push(start);
                handles.push(handle);
            }
            let barrier = Arc::new(Barrier::new(threads));
            for start in starts {
                let _ = start.send(Arc::clone(&barrier));
            }
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

/// Repeatedly measures one thread's clock and read bandwidth, to detect changes of the machine's
/// speed.
pub struct Probe {
    isa: Isa,
    buffer: BandwidthBuffer,
}

impl Probe {
    /// More than L3 caches hold.
    const BYTES: usize = 512 << 20;
    const TRIES: usize = 4;

    /// Allocates the memory that is read: 512 MiB, or an eighth of the free memory if that is less.
    pub fn new() -> Self {
        let free = crate::machine::memory().free.unwrap_or(usize::MAX);
        Probe {
            isa: tune::detect(None),
            buffer: BandwidthBuffer::new(Self::BYTES.min(free / 8)),
        }
    }

    fn best(work: impl Fn(usize) -> f64) -> f64 {
        let rates = (0..Self::TRIES).map(|number| per_second(|| work(number)));
        rates.fold(0.0, f64::max)
    }

    /// Returns the cycles per second. Takes some milliseconds.
    pub fn clock_hz(&self) -> f64 {
        Self::best(|_| count_cycles())
    }

    /// Returns the bytes read from memory per second, or 0 without memory. Takes about a tenth of a
    /// second.
    pub fn read_bytes(&self) -> f64 {
        Self::best(|number| read(self.isa, self.buffer.bytes(), number))
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the amount of work per second. `work` returns the amount done.
fn per_second(work: impl FnOnce() -> f64) -> f64 {
    let start = Instant::now();
    let amount = work();
    amount / start.elapsed().max(Duration::from_nanos(1)).as_secs_f64()
}

/// Memory to read, allocated like weights, in large pages if available. Empty if there is too
/// little memory.
struct BandwidthBuffer(Option<Arc<HostMemory>>, usize);

impl BandwidthBuffer {
    fn new(bytes: usize) -> Self {
        let memory = HostMemory::allocate(bytes, "cpu", "measuring").ok();
        if let Some(memory) = &memory {
            // Pages that were never written all map to the same page.
            let _ = memory.fill(0, bytes, 1);
        }
        BandwidthBuffer(memory, bytes)
    }

    fn bytes(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |memory| {
            // SAFETY: the memory has this many bytes, lives as long as `self`, and is not written
            // to any more.
            unsafe { std::slice::from_raw_parts(memory.base().as_ptr(), self.1) }
        })
    }
}

/// Does additions and exclusive ors in a dependency chain, with a latency of one cycle each on
/// every processor. Returns their number.
fn count_cycles() -> f64 {
    const CHAIN: usize = 6_000_000;
    // A constant would not work: some processors add small constants for free during register
    // renaming.
    let (mut x, y) = black_box((1u64, 0x9e37_79b9_7f4a_7c15u64));
    for _ in 0..CHAIN / 16 {
        for _ in 0..8 {
            x = x.wrapping_add(y) ^ y;
        }
    }
    black_box(x);
    CHAIN as f64
}

/// Reads the buffer once, in one stream or in several. Returns its size.
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

/// Does `$step` [`ROUNDS`] times for each of [`REGISTERS`] sums that start as `$start`.
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

/// Does multiply-adds in registers. Returns the number of operations.
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

/// Does byte products in registers. Returns the number of operations, or 0 without such
/// instructions.
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
                // Prefetching does not access memory visibly to the program, whatever the address.
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD).cast());
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD + 64).cast());
                for half in 0..4 {
                    // SAFETY: the slice above has 128 bytes from `line`.
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

    /// Does the work of `vpdpbusd` in three instructions. They are inline assembly because the
    /// compiler would multiply once and then only add.
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
        // SAFETY: the instructions change only registers, and are available by this function's
        // contract.
        rounds!(_mm512_set1_epi32(1), |sum| unsafe {
            add_products!(zmm_reg, sum, factor, ones);
        });
    }

    #[target_feature(enable = "avx2")]
    pub fn multiply_bytes_avx2() {
        let factor = _mm256_set1_epi8(black_box(3));
        let ones = _mm256_set1_epi16(1);
        // SAFETY: the instructions change only registers, and are available by this function's
        // contract.
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

    /// Adds products of bytes to each sum, with an instruction for which the compiler does not have
    /// an intrinsic yet.
    macro_rules! multiply_bytes {
        ($name:ident, $feature:literal, $instruction:literal) => {
            #[target_feature(enable = $feature)]
            pub fn $name() {
                let factor = vdupq_n_s8(black_box(3));
                // SAFETY: the instruction changes only a register, and is available by this
                // function's contract.
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
            let peaks = peaks(isa, 2, &samite_threads::thread_builder);
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
    fn a_thread_that_fails_to_start_blocks_no_other() {
        let asked = std::cell::Cell::new(0);
        let every_third_fails = || {
            asked.set(asked.get() + 1);
            if asked.get() % 3 == 0 {
                Err(io::ErrorKind::OutOfMemory.into())
            } else {
                samite_threads::thread_builder()
            }
        };
        let peaks = peaks(Isa::Generic, 3, &every_third_fails);
        assert_eq!((peaks.clock_hz, peaks.read_bytes), (0.0, 0.0));
        assert_eq!(asked.get(), 12);
    }

    #[test]
    fn merged_peaks_take_the_larger_limits() {
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
