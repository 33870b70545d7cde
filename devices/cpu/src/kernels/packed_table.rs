//! Rows of packed tables, selected by number, so that an embedding that is also the output matrix
//! is stored only once.

use crate::activations::SLAB;
use crate::operand::Operand;
use crate::packed::PANEL;
use crate::packed::layout::PackedLayout;
use samite_core::DType;

/// Bytes of a slab of one row, of the largest type that can be packed.
const SLAB_BYTES: usize = SLAB * 4;

/// A packed tensor from which rows are decoded.
#[derive(Clone, Copy)]
pub(crate) struct PackedTable {
    table: Operand,
    layout: PackedLayout,
}

impl PackedTable {
    /// Returns `None` if such a tensor cannot be packed.
    pub fn new(table: Operand) -> Option<Self> {
        let layout = PackedLayout::new(table.layout())?;
        Some(PackedTable { table, layout })
    }

    /// Decodes a row.
    ///
    /// # Safety
    /// See [`Operand`]. The row must exist, and `out` must have its length.
    pub unsafe fn load(&self, [i1, i2, i3]: [usize; 3], out: &mut [f32]) {
        let PackedTable { table, layout } = self;
        let dtype: DType = table.dtype();
        let matrix = i2 + table.shape()[2] * i3;
        let at = table.base().wrapping_add(layout.panel_of(matrix, i1));
        // SAFETY: the row's panel is inside the tensor.
        let panel = unsafe { std::slice::from_raw_parts(at, layout.panel_bytes) };
        let mut buffer = [0; SLAB_BYTES];
        for (slab, out) in out.chunks_mut(SLAB).enumerate() {
            let len = layout.slab_row_bytes() * out.len() / SLAB;
            let bytes = &mut buffer[..len];
            layout.unpack_slab(panel, i1 % PANEL, slab, bytes);
            let decoded = samite_quant::decode_row(dtype, bytes, out);
            debug_assert!(decoded.is_ok(), "{decoded:?}");
        }
    }
}
