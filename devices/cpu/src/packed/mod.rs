//! Quantized weights in a layout for fast products: the extra buffer type `cpu-packed`.
//!
//! Rows are grouped in panels of [`PANEL`] rows. In a panel, what sixteen rows have in one place of their blocks lies
//! together: four bytes of codes of each row make one vector register, the sixteen scales another. So one instruction
//! multiplies sixteen rows, no sum has to be taken across a register, and an activation is used by all lanes.
//!
//! - [`layout`]: which byte goes where. It only moves bytes, so packing loses nothing and can be undone.
//! - [`buffer`]: the memory: packs what is written, unpacks what is read.
//! - [`activations`]: the other side of products, rounded to 8 bits.
//! - [`kernels`]: products, for AVX-512 with VNNI.

pub(crate) mod activations;
pub(crate) mod buffer;
#[cfg(target_arch = "x86_64")]
mod formats;
#[cfg(target_arch = "x86_64")]
mod kernels;
pub(crate) mod layout;
pub(crate) mod rows;

use crate::detect::Isa;
use crate::simd::float::PanelFn;
use activations::Activations;
use buffer::PackedBuffer;
use samite_core::{DType, HostMemory, Node, TensorRef};
use std::sync::Arc;

/// Rows of a panel: the lanes of a register.
pub(crate) const PANEL: usize = 16;

/// How rows of a packed type are multiplied with columns.
#[derive(Clone, Copy)]
pub(crate) struct PackedProduct {
    /// Multiplies whole panels: [`Panel::weights`](crate::simd::float::Panel) is that of the first row,
    /// [`stride`](crate::simd::float::Panel) the distance of panels.
    pub function: PanelFn,
    /// What columns must be.
    pub columns: Activations,
}

/// The product for packed rows of `k` elements of `dtype`.
#[cfg(target_arch = "x86_64")]
pub(crate) fn product(isa: Isa, dtype: DType, k: usize) -> Option<PackedProduct> {
    let Isa::Avx512(token) = isa else {
        return None;
    };
    let (function, spec) = kernels::product(token, dtype)?;
    Some(PackedProduct {
        function,
        columns: Activations::new(token, spec, k)?,
    })
}

/// The product for packed rows of `k` elements of `dtype`.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn product(_isa: Isa, _dtype: DType, _k: usize) -> Option<PackedProduct> {
    None
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
