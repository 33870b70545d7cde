//! Quantized weights in a layout for fast products: the extra buffer type `cpu-packed`.
//!
//! Rows are grouped in panels of [`PANEL`] rows. In a panel, what [`LANES`] rows have in one place of their blocks lies
//! together: four bytes of codes of each row make one vector register, the sixteen scales another. So one instruction
//! multiplies sixteen rows, no sum has to be taken across a register, and an activation is used by all lanes.
//!
//! - [`layout`]: which byte goes where. It only moves bytes, so packing loses nothing and can be undone.
//! - [`buffer`]: the memory: packs what is written, unpacks what is read.
//! - [`activations`]: the other side of products, rounded to 8 bits.
//! - [`formats`], [`kernels`]: how panels of each type become bytes, and products of those.
//! - [`simd`]: the instruction sets for which these are compiled.
//! - `tiles`: products with many columns, for AMX.
//! - [`rows`]: rows by number, so that an embedding that is the output matrix too is there once.

pub(crate) mod activations;
pub(crate) mod buffer;
mod formats;
mod kernels;
pub(crate) mod layout;
pub(crate) mod rows;
mod simd;
#[cfg(target_arch = "x86_64")]
mod tiles;

use crate::detect::Isa;
use crate::simd::float::PanelFn;
use activations::Activations;
use buffer::PackedBuffer;
use samite_core::{DType, HostMemory, Node, TensorRef};
use std::sync::Arc;

/// Rows whose units lie together: those of the widest registers.
pub(crate) const LANES: usize = 16;

/// Rows of a panel: what products take at a time.
pub(crate) const PANEL: usize = 2 * LANES;

/// How rows of a packed type are multiplied with columns.
#[derive(Clone, Copy)]
pub(crate) struct PackedProduct {
    /// Multiplies whole panels: [`Panel::weights`](crate::simd::float::Panel) is that of the first row,
    /// [`stride`](crate::simd::float::Panel) the distance of panels.
    pub function: PanelFn,
    /// What columns must be.
    pub columns: Activations,
}

/// The product for packed rows of `k` elements of `dtype` with `columns` columns.
pub(crate) fn product(isa: Isa, dtype: DType, k: usize, columns: usize) -> Option<PackedProduct> {
    let (function, spec) = kernels::product(isa, dtype)?;
    Some(PackedProduct {
        function,
        columns: Activations::new(isa, spec, k, columns)?,
    })
}

/// Host memory of a tensor, packed or not.
pub(crate) fn memory_of(place: &TensorRef) -> Option<&Arc<HostMemory>> {
    let packed = || place.buffer.as_any().downcast_ref::<PackedBuffer>();
    place
        .buffer
        .host()
        .or_else(|| packed().map(PackedBuffer::memory))
}

/// Whether a source of a node lies in packed memory, or is a view of something there.
pub(crate) fn is_packed(node: Node<'_>, source: usize) -> bool {
    let stored = node.source(source).and_then(Node::stored);
    stored.is_some_and(|stored| stored.tensor().buffer.as_any().is::<PackedBuffer>())
}

#[cfg(test)]
mod tests {
    use super::layout::PackedLayout;
    use super::*;
    use crate::harness::numbers;
    use crate::simd::float::{Column, Panel};
    use samite_core::Layout;

    #[test]
    fn every_type_that_can_be_packed_has_a_product() {
        for isa in Isa::all() {
            for dtype in DType::all() {
                let Ok(layout) = Layout::contiguous(dtype, [dtype.block_len(), 1, 1, 1]) else {
                    continue;
                };
                let packed = PackedLayout::new(&layout).is_some();
                assert_eq!(packed, product(isa, dtype, 256, 1).is_some(), "{dtype}");
            }
            assert!(product(isa, DType::F32, 256, 1).is_none());
        }
    }

    /// All products for packed rows of `k` elements of `dtype`.
    fn products(dtype: DType, k: usize, columns: usize) -> Vec<(&'static str, PackedProduct)> {
        let of_isa = |isa: Isa| Some((isa.name(), product(isa, dtype, k, columns)?));
        let mut all: Vec<_> = Isa::all().into_iter().filter_map(of_isa).collect();
        if let Some(function) = kernels::portable_product(dtype) {
            let columns = all[0].1.columns;
            all.push(("portable", PackedProduct { function, columns }));
        }
        all
    }

    /// Products of packed rows with `columns`, `batch` of them at a time.
    fn multiply(
        product: PackedProduct,
        layout: &Layout,
        weights: &[u8],
        x: &[f32],
        batch: usize,
    ) -> Option<Vec<f32>> {
        let [k, rows, ..] = layout.shape();
        let packed = PackedLayout::new(layout)?;
        let mut memory = vec![[0u64; 8]; packed.bytes() / 64];
        let panels = bytemuck::cast_slice_mut(&mut memory).chunks_mut(packed.panel_bytes);
        for (rows, panel) in weights.chunks(PANEL * packed.row_bytes).zip(panels) {
            packed.pack(rows, panel);
        }
        let mut columns = vec![[0u64; 8]; product.columns.bytes / 64];
        let base = columns.as_mut_ptr().cast::<u8>();
        let mut out = vec![f32::NAN; x.len() / k * rows];
        let places: Vec<_> = x
            .chunks(k)
            .zip(out.chunks_mut(rows))
            .enumerate()
            .map(|(c, (x, out))| {
                let to = base.wrapping_add(c * product.columns.stride());
                // SAFETY: there is memory for each column.
                unsafe { product.columns.quantize(x, 0, to) };
                Column {
                    x: to,
                    out: out.as_mut_ptr(),
                }
            })
            .collect();
        let panel = Panel {
            weights: memory.as_ptr().cast(),
            stride: packed.panel_bytes,
            rows,
            k,
            first: 0,
            slabs: product.columns.slabs,
        };
        for columns in places.chunks(batch) {
            // SAFETY: everything is as large as said, and the instructions were detected.
            unsafe { (product.function)(&panel, columns) };
        }
        Some(out)
    }

    #[test]
    fn products_are_close_to_exact_ones_and_the_same_in_any_batch_and_at_any_level() {
        for dtype in DType::all().filter(|&dtype| !products(dtype, 256, 1).is_empty()) {
            let lengths = if dtype.block_len() == 256 {
                [256, 768]
            } else {
                [32, 608]
            };
            for (k, rows) in lengths
                .into_iter()
                .flat_map(|k| [1, 16, 31, 50].map(|m| (k, m)))
            {
                let layout = Layout::contiguous(dtype, [k, rows, 1, 1]).unwrap();
                let mut weights = vec![0; layout.bytes()];
                samite_quant::encode_row(dtype, &numbers(7, k * rows), &mut weights).unwrap();
                let mut decoded = vec![0.0; k * rows];
                samite_quant::decode_row(dtype, &weights, &mut decoded).unwrap();
                let x = numbers(11, k * 67);
                let products = products(dtype, k, 67);
                let got = multiply(products[0].1, &layout, &weights, &x, 67).unwrap();
                for ((name, product), batch) in products
                    .iter()
                    .flat_map(|product| [1, 2, 5, 9, 16, 64, 67].map(|batch| (product, batch)))
                {
                    let other = multiply(*product, &layout, &weights, &x, batch).unwrap();
                    assert!(got == other, "{name} {dtype} {k} {rows} {batch}");
                }
                let (mut error, mut power) = (0.0, 0.0);
                for (c, x) in x.chunks(k).enumerate() {
                    for (r, w) in decoded.chunks(k).enumerate() {
                        let pairs = x.iter().zip(w);
                        let exact: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        error += (exact - f64::from(got[c * rows + r])).powi(2);
                        power += exact * exact;
                    }
                }
                assert!(
                    error / power < 1e-4,
                    "{dtype} {k} {rows}: {}",
                    error / power
                );
            }
        }
    }
}
