//! What this machine can do at most, measured: the yardstick for everything else.
//!
//! Speeds of kernels are worth little without the machine's limits beside them. Each limit is measured by a loop that does
//! nothing but the limiting operation, by all threads at once for some milliseconds; the best of several tries counts.

use samite_core::HostMemory;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Limits of some threads together.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// Threads that took part.
    pub threads: usize,
    /// Bytes read from memory per second, in several streams.
    pub read_bytes: f64,
    /// F32 operations per second; a fused multiply-add counts as two.
    pub f32_operations: f64,
    /// 8-bit integer operations per second by the instruction that multiplies bytes and adds the products (VNNI); a
    /// multiply-add counts as two. `None` where there is no such instruction.
    pub i8_operations: Option<f64>,
}

/// How many threads this process may use: allowed by affinity and quota, one for each physical core.
pub fn allowed_threads() -> usize {
    crate::machine::processors()
}

const TRIES: usize = 6;
/// Bytes that are read, by all threads together: more than the part of a shared cache that a few cores get to use.
const BUFFER_BYTES: usize = 768 << 20;
/// Bytes that each thread reads at least.
const THREAD_BYTES: usize = 64 << 20;
const REGISTERS: usize = 12;

/// Measures the limits of `threads` threads. Takes about a second and 768 MiB, or more for many threads; a limit that
/// could not be measured for want of memory is 0.
pub fn measure_peaks(threads: usize) -> Peaks {
    let threads = threads.max(1);
    let best = |work: &(dyn Fn(&[u8], usize) -> f64 + Sync), bytes: usize| {
        let barrier = Barrier::new(threads);
        std::thread::scope(|scope| {
            let run = || {
                // As weights lie, in large pages where there are such.
                let memory = HostMemory::allocate(bytes, "cpu", "measuring");
                let buffer = memory.as_ref().map_or(&[][..], |memory| {
                    // Pages that were never written are all the same one.
                    let _ = memory.fill(0, bytes, 1);
                    // SAFETY: the memory has so many bytes, lives longer than the slice, and nobody writes to it.
                    unsafe { std::slice::from_raw_parts(memory.base().as_ptr(), bytes) }
                });
                let mut rates = [0.0; TRIES];
                for (number, rate) in rates.iter_mut().enumerate() {
                    barrier.wait();
                    let start = Instant::now();
                    let amount = work(buffer, number);
                    *rate = amount / start.elapsed().max(Duration::from_nanos(1)).as_secs_f64();
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
    Peaks {
        threads,
        read_bytes: best(&read, (BUFFER_BYTES / threads).max(THREAD_BYTES)),
        f32_operations: best(&|_, _| multiply_add(), 1),
        i8_operations: can_multiply_bytes().then(|| best(&|_, _| multiply_bytes(), 1)),
    }
}

/// Reads the buffer once, in one stream or in several; returns its size.
fn read(buffer: &[u8], number: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was detected.
        std::hint::black_box(unsafe {
            match number % 2 {
                0 => x86::read_avx2::<1>(buffer),
                _ => x86::read_avx2::<4>(buffer),
            }
        });
        return buffer.len() as f64;
    }
    let _ = number;
    // Four streams keep more lines in flight than one.
    let (words, _) = buffer.as_chunks::<8>();
    let quarter = words.len() / 4;
    let mut sum = 0u64;
    for i in 0..quarter {
        for stream in 0..4 {
            sum = sum.wrapping_add(u64::from_le_bytes(words[stream * quarter + i]));
        }
    }
    std::hint::black_box(sum);
    (quarter * 32) as f64
}

/// Does multiply-adds in registers; returns how many operations.
fn multiply_add() -> f64 {
    const ROUNDS: usize = 2_000_000;
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: AVX-512F was detected.
            std::hint::black_box(unsafe { x86::multiply_add_avx512(ROUNDS) });
            return (ROUNDS * REGISTERS * 16 * 2) as f64;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: AVX2 and FMA were detected.
            std::hint::black_box(unsafe { x86::multiply_add_avx2(ROUNDS) });
            return (ROUNDS * REGISTERS * 8 * 2) as f64;
        }
    }
    let mut sums = [[1.0f32; 4]; REGISTERS];
    let factor = std::hint::black_box(0.999_999f32);
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            sum.iter_mut().for_each(|s| *s = *s * factor + factor);
        }
    }
    std::hint::black_box(sums);
    (ROUNDS * REGISTERS * 4 * 2) as f64
}

fn can_multiply_bytes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Does byte products in registers; returns how many operations.
fn multiply_bytes() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if can_multiply_bytes() {
        const ROUNDS: usize = 2_000_000;
        // SAFETY: AVX-512 VNNI was detected.
        std::hint::black_box(unsafe { x86::multiply_bytes_avx512(ROUNDS) });
        return (ROUNDS * REGISTERS * 64 * 2) as f64;
    }
    0.0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::REGISTERS;
    use std::arch::x86_64::*;

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
    pub fn multiply_add_avx512(rounds: usize) -> f32 {
        let factor = _mm512_set1_ps(std::hint::black_box(0.999_999));
        let mut sums = [_mm512_set1_ps(1.0); REGISTERS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, factor);
            }
        }
        _mm512_reduce_add_ps(
            sums.into_iter()
                .fold(_mm512_setzero_ps(), |a, b| _mm512_add_ps(a, b)),
        )
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn multiply_add_avx2(rounds: usize) -> f32 {
        let factor = _mm256_set1_ps(std::hint::black_box(0.999_999));
        let mut sums = [_mm256_set1_ps(1.0); REGISTERS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, factor);
            }
        }
        _mm256_cvtss_f32(
            sums.into_iter()
                .fold(_mm256_setzero_ps(), |a, b| _mm256_add_ps(a, b)),
        )
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn multiply_bytes_avx512(rounds: usize) -> i32 {
        let factor = _mm512_set1_epi8(std::hint::black_box(3));
        let mut sums = [_mm512_set1_epi32(1); REGISTERS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, factor, factor);
            }
        }
        _mm512_reduce_add_epi32(
            sums.into_iter()
                .fold(_mm512_setzero_si512(), |a, b| _mm512_add_epi32(a, b)),
        )
    }
}
