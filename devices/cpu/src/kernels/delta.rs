//! Gated delta net.

use super::state::{MAX_DECAYS, ROWS, check_decays};
use crate::detect::Isa;
use crate::kernel::{Kernel, KernelContext, Phase, UnsupportedKernel};
use crate::simd::float::Vector;
#[cfg(not(target_arch = "aarch64"))]
use crate::simd::generic::PortableVector;
use samite_core::{Node, Result};

/// Returns the kernel of the gated delta rule.
pub(crate) fn delta_net_kernel(
    node: Node<'_>,
    snapshots: usize,
) -> Result<Kernel, UnsupportedKernel> {
    check_decays(node, 3, |decays| format!("{decays} decays of a head"))?;
    Ok(Kernel::one_phase(move |c| delta_net(c, snapshots)))
}

/// Input of one token to a matrix.
struct DeltaStep<'a> {
    query: &'a [f32],
    key: &'a [f32],
    /// One factor for the whole matrix, or one for each column.
    decay: &'a [f32],
    beta: f32,
    scale: f32,
}

/// Rows of a transposed matrix that one token updates, each with its value. `out` gets each row's
/// output.
struct StateRows<'a> {
    rows: &'a mut [f32],
    values: &'a [f32],
    out: &'a mut [f32],
}

type StepFn = unsafe fn(StateRows<'_>, &DeltaStep<'_>);

/// Number of rows that are updated together, so that their sums are independent.
const TOGETHER: usize = 4;

/// Loads the next `count` numbers, then zeros.
///
/// # Safety
/// As [`Vector::load`].
#[inline(always)]
unsafe fn load<V: Vector>(from: *const f32, count: usize) -> V {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if count < V::LANES {
            V::load_part(from, count)
        } else {
            V::load(from)
        }
    }
}

/// Stores `count` numbers.
///
/// # Safety
/// As [`Vector::store`].
#[inline(always)]
unsafe fn store<V: Vector>(x: V, to: *mut f32, count: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if count < V::LANES {
            x.store_part(to, count)
        } else {
            x.store(to)
        }
    }
}

/// Returns the sum of products of two rows.
///
/// # Safety
/// The instructions of `V` must be available.
#[inline(always)]
unsafe fn dot<V: Vector>(x: &[f32], y: &[f32]) -> f32 {
    let size = x.len().min(y.len());
    // SAFETY: all reads are inside both rows. The caller guarantees the instructions.
    unsafe {
        let mut sum = V::splat(0.0);
        for at in (0..size).step_by(V::LANES) {
            let (x, y) = (x.as_ptr().add(at), y.as_ptr().add(at));
            sum = load::<V>(x, size - at).mul_add(load(y, size - at), sum);
        }
        sum.sum()
    }
}

/// Updates `R` rows, at most [`TOGETHER`]. The output of a row after the update is `decay (row ·
/// q) + delta (k · q)`, so a row is read only twice: for its sums, and for the update.
///
/// # Safety
/// The instructions of `V` must be available. Key and query must have the same number of elements,
/// and the decays one, or, with `EACH`, that number. `R` such rows must be readable and writable at
/// `rows`, and `R` numbers at `values` and `out`.
#[inline(always)]
unsafe fn change<V: Vector, const R: usize, const EACH: bool>(
    rows: *mut f32,
    values: *const f32,
    out: *mut f32,
    step: &DeltaStep<'_>,
    key_query: f32,
) {
    let size = step.key.len();
    let (key, query) = (step.key.as_ptr(), step.query.as_ptr());
    let decays = step.decay.as_ptr();
    let decay = if EACH { 1.0 } else { step.decay[0] };
    // SAFETY: `at` and the elements loaded from there are inside the rows, which are as long as key
    // and query. The caller guarantees the rest.
    unsafe {
        let zero = V::splat(0.0);
        let mut sums = [zero; 2 * TOGETHER];
        for at in (0..size).step_by(V::LANES) {
            let count = size - at;
            let (k, q) = (
                load::<V>(key.add(at), count),
                load::<V>(query.add(at), count),
            );
            for r in 0..R {
                let row = rows.add(r * size + at);
                let mut x = load::<V>(row, count);
                if EACH {
                    x = x.mul_add(load(decays.add(at), count), zero);
                    store(x, row, count);
                }
                sums[r] = x.mul_add(k, sums[r]);
                sums[TOGETHER + r] = x.mul_add(q, sums[TOGETHER + r]);
            }
        }
        let sums = V::sums(&sums);
        let mut deltas = [zero; R];
        for (r, to) in deltas.iter_mut().enumerate() {
            let delta = (*values.add(r) - decay * sums[r]) * step.beta;
            *to = V::splat(delta);
            out.add(r)
                .write((decay * sums[TOGETHER + r] + delta * key_query) * step.scale);
        }
        let decay = V::splat(decay);
        for at in (0..size).step_by(V::LANES) {
            let count = size - at;
            let k = load::<V>(key.add(at), count);
            for (r, delta) in deltas.iter().enumerate() {
                let row = rows.add(r * size + at);
                let mut x = load::<V>(row, count);
                if !EACH {
                    x = x.mul_add(decay, zero);
                }
                store(k.mul_add(*delta, x), row, count);
            }
        }
    }
}

/// Updates rows by one token.
///
/// # Safety
/// The instructions of `V` must be available.
#[inline(always)]
unsafe fn step<V: Vector>(work: StateRows<'_>, step: &DeltaStep<'_>) {
    let StateRows { rows, values, out } = work;
    let size = step.key.len();
    assert!(
        step.query.len() == size && rows.len() == values.len() * size && out.len() == values.len()
    );
    assert!(step.decay.len() == size || step.decay.len() == 1);
    // SAFETY: checked above, block by block. The caller guarantees the instructions.
    unsafe {
        let key_query = dot::<V>(step.key, step.query);
        let mut at = 0;
        while at < values.len() {
            let place = (
                rows.as_mut_ptr().add(at * size),
                values.as_ptr().add(at),
                out.as_mut_ptr().add(at),
            );
            let is_whole = at + TOGETHER <= values.len();
            match (is_whole, step.decay.len() == 1) {
                (true, true) => {
                    change::<V, TOGETHER, false>(place.0, place.1, place.2, step, key_query)
                }
                (true, false) => {
                    change::<V, TOGETHER, true>(place.0, place.1, place.2, step, key_query)
                }
                (false, true) => change::<V, 1, false>(place.0, place.1, place.2, step, key_query),
                (false, false) => change::<V, 1, true>(place.0, place.1, place.2, step, key_query),
            }
            at += if is_whole { TOGETHER } else { 1 };
        }
    }
}

/// Compiles the generic function for one instruction set.
macro_rules! compile {
    ($name:ident, $vector:ty $(, $features:literal)?) => {
        mod $name {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub unsafe fn step(work: StateRows<'_>, step: &DeltaStep<'_>) {
                // SAFETY: the features above are those of the vector type, and only a detected
                // instruction set leads here.
                unsafe { super::step::<$vector>(work, step) }
            }
        }
    };
}

#[cfg(not(target_arch = "aarch64"))]
compile!(portable, PortableVector);
#[cfg(target_arch = "x86_64")]
compile!(avx2, std::arch::x86_64::__m256, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(
    avx512,
    std::arch::x86_64::__m512,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
#[cfg(target_arch = "aarch64")]
compile!(neon, std::arch::aarch64::float32x4_t);

/// Returns the function for an instruction set.
fn step_of(isa: Isa) -> StepFn {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) => avx512::step,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => avx2::step,
        #[cfg(target_arch = "aarch64")]
        _ => neon::step,
        #[cfg(not(target_arch = "aarch64"))]
        _ => portable::step,
    }
}

fn delta_net(context: &KernelContext<'_>, snapshots: usize) -> Result<Phase> {
    let source = |index| context.source(index);
    let (q, k, v) = (source(0)?, source(1)?, source(2)?);
    let (decays, betas, start) = (source(3)?, source(4)?, source(5)?);
    let (result, change) = (context.result(), step_of(context.isa));
    let [size, heads, tokens, sequences] = v.shape();
    let scale = 1.0 / (size as f32).sqrt();
    let blocks = size.div_ceil(ROWS);
    let outputs = size * heads * tokens * sequences;
    let matrices = size * size * heads * sequences;
    let cost = (size * size * heads * sequences) as f64 * (tokens as f64 * 0.2 + 0.1);
    let run = move |tasks: std::ops::Range<usize>, _| {
        let mut decay = [0.0; MAX_DECAYS];
        for task in tasks {
            let (block, matrix) = (task % blocks, task / blocks);
            let (head, sequence) = (matrix % heads, matrix / heads);
            let first = block * ROWS;
            let count = ROWS.min(size - first);
            let base = result.base().cast::<f32>();
            let place = |slot: usize| outputs + slot * matrices + (matrix * size + first) * size;
            // SAFETY: the result is dense F32 and has `outputs + snapshots * matrices` elements. No
            // other task has these rows of this matrix in any snapshot.
            let snapshot = |slot: usize| unsafe {
                std::slice::from_raw_parts_mut(base.add(place(slot)), count * size)
            };
            for (i, row) in snapshot(0).chunks_exact_mut(size).enumerate() {
                // SAFETY: the row is inside the shape, and rows are dense F32.
                row.copy_from_slice(unsafe { start.row::<f32>([first + i, head, sequence]) });
            }
            let copy = |slot: usize| {
                if (1..snapshots).contains(&slot) {
                    snapshot(slot).copy_from_slice(snapshot(0));
                }
            };
            (tokens..snapshots).for_each(copy);
            for token in 0..tokens {
                let shared =
                    |shape: [usize; 4]| [head % shape[1], token, sequence / (sequences / shape[3])];
                let at = [head, token, sequence];
                // SAFETY: all rows are inside their shapes, by the rules of the operation, and rows
                // are dense F32.
                let (query, key, value, beta, logs) = unsafe {
                    (
                        q.row::<f32>(shared(q.shape())),
                        k.row::<f32>(shared(k.shape())),
                        &v.row::<f32>(at)[first..first + count],
                        betas.row::<f32>(at)[0],
                        decays.row::<f32>(at),
                    )
                };
                for (decay, log) in decay.iter_mut().zip(logs) {
                    *decay = log.exp();
                }
                let step = DeltaStep {
                    query,
                    key,
                    decay: &decay[..logs.len()],
                    beta,
                    scale,
                };
                let to = ((sequence * tokens + token) * heads + head) * size + first;
                // SAFETY: the elements are among the first `outputs` of the result, and no other
                // task has them.
                let out = unsafe { std::slice::from_raw_parts_mut(base.add(to), count) };
                let work = StateRows {
                    rows: snapshot(0),
                    values: value,
                    out,
                };
                // SAFETY: the function belongs to the detected instruction set.
                unsafe { change(work, &step) };
                copy(tokens - 1 - token);
            }
        }
        Ok(())
    };
    Ok(Phase::new(blocks * heads * sequences, cost, run))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::numbers;

    #[test]
    fn delta_net_kernels_match_plain_loops() {
        for (size, count) in [
            (1, 1),
            (5, 3),
            (16, 4),
            (40, 9),
            (64, 32),
            (128, 5),
            (256, 6),
        ] {
            for each in [false, true] {
                let of = |seed, count| numbers(seed, count);
                let short = |seed| -> Vec<f32> {
                    let length = (size as f32).sqrt();
                    of(seed, size).iter().map(|x| x / length).collect()
                };
                let (key, query, values) = (short(1), short(2), of(3, count));
                let decay = of(4, if each { size } else { 1 });
                let decay: Vec<f32> = decay.iter().map(|x| 0.5 + 0.4 * x).collect();
                let before = of(5, size * count);
                let step = DeltaStep {
                    query: &query,
                    key: &key,
                    decay: &decay,
                    beta: 0.7,
                    scale: 0.25,
                };
                for isa in Isa::all() {
                    let (mut rows, mut out) = (before.clone(), vec![f32::NAN; count]);
                    let work = StateRows {
                        rows: &mut rows,
                        values: &values,
                        out: &mut out,
                    };
                    // SAFETY: the instruction set was detected.
                    unsafe { step_of(isa)(work, &step) };
                    for r in 0..count {
                        let row = before[r * size..][..size].iter().enumerate();
                        let decayed: Vec<f64> = row
                            .map(|(i, x)| {
                                f64::from(*x) * f64::from(decay[if each { i } else { 0 }])
                            })
                            .collect();
                        let dot = |row: &[f64], other: &[f32]| -> f64 {
                            row.iter().zip(other).map(|(x, y)| x * f64::from(*y)).sum()
                        };
                        let delta =
                            (f64::from(values[r]) - dot(&decayed, &key)) * f64::from(0.7f32);
                        let pairs = decayed.iter().zip(&key);
                        let changed: Vec<f64> =
                            pairs.map(|(x, k)| x + f64::from(*k) * delta).collect();
                        let found = &rows[r * size..][..size];
                        for (x, y) in changed.iter().zip(found) {
                            assert!((x - f64::from(*y)).abs() < 1e-5, "{isa:?} {size}: {x} {y}");
                        }
                        let given = dot(&changed, &query) * 0.25;
                        assert!((given - f64::from(out[r])).abs() < 1e-5, "{isa:?} {size}");
                    }
                }
            }
        }
    }
}
