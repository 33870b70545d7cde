//! Weights in a layout for fast products, and the products.
//!
//! Rows are grouped in panels of [`PANEL`] rows. In a panel, the same parts of the blocks of
//! [`LANES`] rows are stored together: four bytes of codes of each row make one vector register,
//! the sixteen scales another. One instruction then multiplies sixteen rows, no sum crosses a
//! register, and all lanes use the same activation.
//!
//! - [`layout`]: the place of each byte. It only moves bytes, so packing is lossless and
//!   reversible.
//! - [`buffer`]: the memory. Writing packs, reading unpacks.
//! - [`formats`]: the fields of each type's blocks, and their decoding. [`decode`]: common parts of
//!   decoding.
//! - [`int8`]: products of quantized rows with columns of 8 bits.
//! - [`float`]: products of rows of floats with F32 columns. `int16`: those with many columns, for
//!   VNNI and AVX2.
//! - `bf16_amx`: products of all types with many columns, for AMX.
//! - [`tile`], [`store`](mod@store): division of columns, and storing of results. `amx_tiles`: AMX
//!   tiles.

#[cfg(target_arch = "x86_64")]
mod amx_tiles;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bf16_amx;
pub(crate) mod buffer;
mod decode;
pub(crate) mod float;
mod formats;
#[cfg(target_arch = "x86_64")]
mod int16;
pub(crate) mod int8;
pub(crate) mod layout;
pub(crate) mod store;
mod tile;

use crate::activations::int8::Int8Slabs;
use crate::activations::{self, ActivationForm};
use crate::detect::Isa;
use crate::product::PanelFn;
use buffer::PackedBuffer;
use samite_core::{DType, HostMemory, Node, TensorRef};
use std::sync::Arc;

pub(crate) use store::{Sum, all_stored, past_caches, store, store_all};

/// Number of rows whose units are stored together: those of the widest registers.
pub(crate) const LANES: usize = 16;

/// Number of rows of a panel, which products process at a time.
pub(crate) const PANEL: usize = 2 * LANES;

/// Product of rows of a packed type with columns.
#[derive(Clone, Copy)]
pub(crate) struct PackedProduct {
    /// Multiplies whole panels. [`Panel::weights`](crate::product::Panel) is the panel of the first
    /// row, [`stride`](crate::product::Panel) the distance of panels.
    pub function: PanelFn,
    /// Required form of columns.
    pub form: ActivationForm,
}

/// Returns the product for packed rows of `k` elements of `dtype` with `columns` columns, if about
/// `each` of them are multiplied with one matrix.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn product(
    isa: Isa,
    dtype: DType,
    k: usize,
    columns: usize,
    each: usize,
) -> Option<PackedProduct> {
    #[cfg(target_arch = "x86_64")]
    if let Isa::Avx512(token) = isa
        && let Some((function, planes)) = bf16_amx::product(token, dtype, k, columns, each)
    {
        return Some(PackedProduct {
            function,
            form: ActivationForm::Bf16Slabs(planes),
        });
    }
    #[cfg(target_arch = "x86_64")]
    if let Some((function, sixteen)) = int16::product(isa, dtype, k, columns, each) {
        return Some(PackedProduct {
            function,
            form: ActivationForm::Int16Slabs(sixteen),
        });
    }
    if let Some((function, spec)) = int8::product(isa, dtype) {
        return Some(PackedProduct {
            function,
            form: ActivationForm::Int8Slabs(Int8Slabs::new(isa, spec, k, columns)?),
        });
    }
    Some(PackedProduct {
        function: float::product(isa, dtype)?,
        form: activations::f32::slabs(k, columns, each)
            .map_or(ActivationForm::F32, ActivationForm::F32Slabs),
    })
}

/// Returns the bytes of scratch memory that products need for each worker.
pub(crate) fn worker_bytes(form: ActivationForm) -> usize {
    match form {
        #[cfg(target_arch = "x86_64")]
        ActivationForm::Bf16Slabs(_) => bf16_amx::WORKER_BYTES,
        _ => 0,
    }
}

/// Returns the product for F32 panels that were packed for a single use.
pub(crate) fn float_product(isa: Isa) -> Option<PanelFn> {
    float::product(isa, DType::F32)
}

/// Returns the host memory of a tensor, packed or not.
pub(crate) fn memory_of(place: &TensorRef) -> Option<&Arc<HostMemory>> {
    let packed = || place.buffer.as_any().downcast_ref::<PackedBuffer>();
    place
        .buffer
        .host()
        .or_else(|| packed().map(PackedBuffer::memory))
}

/// Returns whether a source of a node lies, or will lie, in packed memory, or is a view of such a
/// tensor.
pub(crate) fn is_packed(node: Node<'_>, source: usize) -> bool {
    let stored = node.source(source).and_then(Node::stored);
    stored.is_some_and(|stored| buffer::is_packed(&*stored.tensor().buffer))
}

#[cfg(test)]
mod tests {
    use super::layout::PackedLayout;
    use super::*;
    use crate::harness::numbers;
    use crate::product::AccessPattern;
    use crate::product::{Column, Panel};
    use samite_core::Layout;

    #[test]
    fn every_packable_type_has_a_product() {
        for isa in Isa::all() {
            for dtype in DType::all() {
                let Ok(layout) = Layout::contiguous(dtype, [dtype.block_len(), 1, 1, 1]) else {
                    continue;
                };
                let packed = PackedLayout::new(&layout).is_some();
                assert_eq!(packed, product(isa, dtype, 256, 1, 1).is_some(), "{dtype}");
            }
        }
    }

    /// Returns all products for packed rows of `k` elements of `dtype` with `columns` columns, with
    /// their names.
    fn products(dtype: DType, k: usize, columns: usize) -> Vec<(String, Isa, PackedProduct)> {
        let mut all = Vec::new();
        for (isa, each) in Isa::all()
            .into_iter()
            .flat_map(|isa| [1, columns].map(|each| (isa, each)))
        {
            if let Some(product) = product(isa, dtype, k, columns, each) {
                all.push((format!("{isa:?} for {each}"), isa, product));
            }
        }
        if let Some(function) = int8::portable_product(dtype) {
            let (_, isa, PackedProduct { form, .. }) = all[0];
            all.push(("portable".into(), isa, PackedProduct { function, form }));
        }
        all
    }

    /// Memory with the alignment that products need.
    #[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C, align(64))]
    struct Line([u64; 8]);

    /// Order and manner of computing a product, on which the result must not depend.
    #[derive(Clone, Copy)]
    struct Strategy {
        /// Number of columns at a time.
        batch: usize,
        /// True to start with the last columns.
        backwards: bool,
        past_caches: bool,
        reading: AccessPattern,
    }

    impl Strategy {
        fn batches(batch: usize) -> Self {
            Strategy {
                batch,
                backwards: false,
                past_caches: true,
                reading: AccessPattern::DEFAULT,
            }
        }
    }

    /// Multiplies packed rows with columns.
    fn multiply(
        (isa, product): (Isa, PackedProduct),
        layout: &Layout,
        weights: &[u8],
        x: &[f32],
        way: Strategy,
    ) -> Option<Vec<f32>> {
        let [k, rows, ..] = layout.shape();
        let packed = PackedLayout::new(layout)?;
        let mut memory = vec![Line::default(); packed.bytes() / 64];
        let panels = bytemuck::cast_slice_mut(&mut memory).chunks_mut(packed.panel_bytes);
        for (rows, panel) in weights.chunks(PANEL * packed.row_bytes).zip(panels) {
            packed.pack(rows, panel);
        }
        let form = product.form;
        let (stride, bytes) = (form.stride(k)?, form.bytes(k, x.len() / k)?);
        let mut columns = vec![Line::default(); bytes / 64];
        let base = columns.as_mut_ptr().cast::<u8>();
        let mut lines = vec![Line::default(); (x.len() / k * rows).div_ceil(LANES)];
        let out = &mut bytemuck::cast_slice_mut(&mut lines)[..x.len() / k * rows];
        out.fill(f32::NAN);
        let mut places: Vec<_> = x
            .chunks(k)
            .zip(out.chunks_mut(rows))
            .enumerate()
            .map(|(c, (x, out))| {
                let to = base.wrapping_add(c * stride);
                // SAFETY: there is memory for each column.
                unsafe { form.write(x, 0, to, isa) };
                Column {
                    x: to,
                    out: out.as_mut_ptr(),
                }
            })
            .collect();
        if way.backwards {
            places.reverse();
        }
        let mut scratch = vec![Line::default(); worker_bytes(form) / 64];
        let panel = Panel {
            weights: memory.as_ptr().cast(),
            stride: packed.panel_bytes,
            rows,
            k,
            first: 0,
            slabs: form.slabs().map_or(0, |slabs| slabs.distance),
            past_caches: way.past_caches,
            reading: way.reading,
            scratch: scratch.as_mut_ptr().cast(),
        };
        for columns in places.chunks(way.batch) {
            // SAFETY: everything has the stated size, and the instructions were detected.
            unsafe { (product.function)(&panel, columns) };
        }
        Some(out.to_vec())
    }

    #[test]
    fn products_are_accurate_and_independent_of_batch_and_level() {
        for dtype in DType::all().filter(|&dtype| !products(dtype, 256, 1).is_empty()) {
            let (lengths, bound) = match dtype.block_len() {
                256 => ([256, 768], 1e-4),
                32 => ([32, 608], 1e-4),
                // Floats are rounded in a different order at each level.
                _ => ([33, 600], 1e-10),
            };
            for (k, rows) in lengths
                .into_iter()
                .flat_map(|k| [1, 16, 31, 50, 96].map(|m| (k, m)))
            {
                let layout = Layout::contiguous(dtype, [k, rows, 1, 1]).unwrap();
                let mut weights = vec![0; layout.bytes()];
                samite_quant::encode_row(dtype, &numbers(7, k * rows), &mut weights).unwrap();
                let mut decoded = vec![0.0; k * rows];
                samite_quant::decode_row(dtype, &weights, &mut decoded).unwrap();
                let x = numbers(11, k * 67);
                let mut first: Option<Vec<f32>> = None;
                for (name, isa, product) in products(dtype, k, 67) {
                    let multiply =
                        |way| multiply((isa, product), &layout, &weights, &x, way).unwrap();
                    let got = multiply(Strategy::batches(67));
                    for batch in [1, 2, 3, 4, 5, 8, 9, 16, 64] {
                        let other = multiply(Strategy::batches(batch));
                        assert!(got == other, "{name} {dtype} {k} {rows} {batch}");
                    }
                    let cached = Strategy {
                        past_caches: false,
                        ..Strategy::batches(1)
                    };
                    let cached = multiply(cached);
                    assert!(got == cached, "{name} {dtype} {k} {rows}, cached");
                    let backwards = Strategy {
                        backwards: true,
                        ..Strategy::batches(67)
                    };
                    let backwards = multiply(backwards);
                    assert!(got == backwards, "{name} {dtype} {k} {rows}, backwards");
                    for (batch, ahead, streams) in
                        [(1, 0, 2), (1, 128, 3), (4, 9216, 2), (8, 64, 9)]
                    {
                        let other = multiply(Strategy {
                            reading: AccessPattern { ahead, streams },
                            ..Strategy::batches(batch)
                        });
                        assert!(
                            got == other,
                            "{name} {dtype} {k} {rows} {ahead} x {streams}"
                        );
                    }
                    let (mut error, mut power) = (0.0, 0.0);
                    for (c, x) in x.chunks(k).enumerate() {
                        for (r, w) in decoded.chunks(k).enumerate() {
                            let pairs = x.iter().zip(w);
                            let exact: f64 =
                                pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                            error += (exact - f64::from(got[c * rows + r])).powi(2);
                            power += exact * exact;
                        }
                    }
                    let nmse = error / power;
                    #[cfg(target_arch = "x86_64")]
                    let bound = match product.form {
                        ActivationForm::Int16Slabs(_) => 1e-8,
                        _ => bound,
                    };
                    assert!(nmse < bound, "{name} {dtype} {k} {rows}: {nmse}");
                    // Integers are the same at all levels.
                    if let ActivationForm::Int8Slabs(_) = product.form {
                        let first = first.get_or_insert_with(|| got.clone());
                        assert!(got == *first, "{name} {dtype} {k} {rows}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_largest_codes_do_not_overflow() {
        let (k, rows, columns) = (768, 40, 70);
        let sign = |x: f32| if x < 0.0 { -1.0 } else { 1.0 };
        for dtype in DType::all().filter(|&dtype| !products(dtype, k, 1).is_empty()) {
            let layout = Layout::contiguous(dtype, [k, rows, 1, 1]).unwrap();
            let mut weights = vec![0; layout.bytes()];
            // The smallest and the largest codes of four and five bits, then mostly the largest
            // ones.
            let numbers_of_two = numbers(7, k * rows).into_iter().enumerate();
            let numbers_of_two: Vec<_> = numbers_of_two
                .map(|(i, x)| match i / k {
                    0..20 if x < 0.0 => -8.0,
                    0..20 => 7.0,
                    _ if i.is_multiple_of(16) => -8.0,
                    _ => 7.75,
                })
                .collect();
            samite_quant::encode_row(dtype, &numbers_of_two, &mut weights).unwrap();
            let mut decoded = vec![0.0; k * rows];
            samite_quant::decode_row(dtype, &weights, &mut decoded).unwrap();
            let mut x: Vec<_> = numbers(11, k * columns).into_iter().map(sign).collect();
            // Sums of one sign are the largest.
            x[..2 * k].fill(1.0);
            x[35 * k..].fill(-1.0);
            for (name, isa, product) in products(dtype, k, columns) {
                let results = [1, 2, 4, 8, columns].map(|batch| {
                    let way = Strategy::batches(batch);
                    multiply((isa, product), &layout, &weights, &x, way).unwrap()
                });
                for (i, got) in results
                    .iter()
                    .flat_map(|results| results.iter().enumerate())
                {
                    let (x, w) = (&x[i / rows * k..][..k], &decoded[i % rows * k..][..k]);
                    let terms = x.iter().zip(w).map(|(a, b)| f64::from(a * b));
                    let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), term| {
                        (sum + term, size + term.abs())
                    });
                    // Codes of columns are exact, so only an overflow causes large errors. Weights
                    // in BF16 keep 8 significant bits, those in 16 bits are off by one in 16382 of
                    // the largest of a group. Other errors come from a few hundred roundings of
                    // sums.
                    let rounding = match product.form {
                        #[cfg(target_arch = "x86_64")]
                        ActivationForm::Bf16Slabs(_) => 1.0 / 256.0,
                        #[cfg(target_arch = "x86_64")]
                        ActivationForm::Int16Slabs(_) => 2.0 / 16382.0,
                        _ => 0.0,
                    };
                    let bound = (rounding + k as f64 * f64::from(f32::EPSILON)) * size;
                    let error = (f64::from(*got) - exact).abs();
                    assert!(error <= bound, "{name} {dtype} {i}: {got} {exact}");
                }
            }
        }
    }

    #[test]
    fn an_outlier_does_not_coarsen_other_blocks() {
        let (k, rows, columns) = (512, 33, 67);
        for dtype in DType::all().filter(|dtype| dtype.block_len() == 32) {
            let layout = Layout::contiguous(dtype, [k, rows, 1, 1]).unwrap();
            let mut numbers_of_rows = numbers(7, k * rows);
            for row in numbers_of_rows.chunks_mut(k) {
                row[64..96].fill(0.0);
            }
            let mut weights = vec![0; layout.bytes()];
            samite_quant::encode_row(dtype, &numbers_of_rows, &mut weights).unwrap();
            let x = numbers(11, k * columns);
            let mut with_outliers = x.clone();
            for column in with_outliers.chunks_mut(k) {
                column[70] = 1000.0;
            }
            for (name, isa, product) in products(dtype, k, columns) {
                for batch in [1, 2, 4, 8, columns] {
                    let [without, with] = [&x, &with_outliers].map(|x| {
                        let way = Strategy::batches(batch);
                        multiply((isa, product), &layout, &weights, x, way).unwrap()
                    });
                    // The weights of the outlier's block are zeros.
                    assert!(without == with, "{name} {dtype}, {batch} columns");
                }
            }
        }
    }

    #[test]
    fn non_finite_values_stay_within_their_column() {
        let (k, rows, columns) = (256, 33, 67);
        for dtype in DType::all().filter(|&dtype| !products(dtype, k, 1).is_empty()) {
            let layout = Layout::contiguous(dtype, [k, rows, 1, 1]).unwrap();
            let mut weights = vec![0; layout.bytes()];
            samite_quant::encode_row(dtype, &numbers(7, k * rows), &mut weights).unwrap();
            let mut x = numbers(11, k * columns);
            x[3 * k + 100] = f32::NAN;
            x[5 * k + 40] = f32::INFINITY;
            x[66 * k] = f32::NEG_INFINITY;
            for (name, isa, product) in products(dtype, k, columns) {
                let way = Strategy::batches(columns);
                let got = multiply((isa, product), &layout, &weights, &x, way).unwrap();
                for (c, results) in got.chunks(rows).enumerate() {
                    let finite = !matches!(c, 3 | 5 | 66);
                    let all = results.iter().all(|x| x.is_finite() == finite);
                    assert!(all, "{name} {dtype} column {c}");
                }
            }
        }
    }
}
