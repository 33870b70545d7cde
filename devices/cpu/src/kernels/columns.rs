//! Columns of products, and their computation.
//!
//! Most products need columns in a special form. If they are computed row by row and have no other
//! reader, they are computed during packing and never stored in their original form.

use super::{elementwise, glu, reduce};
use crate::activations::ActivationForm;
use crate::detect::Isa;
use crate::kernel::{InputSource, Phase, Prologue, Scratch};
use crate::operand::Operand;
use crate::simd::prefetch;
use samite_core::{DType, Layout};

impl Prologue {
    /// Returns the operand that is processed row by row.
    fn x(&self) -> &Operand {
        match self {
            Prologue::Norm { x, .. } | Prologue::Gated { x, .. } => x,
        }
    }

    /// Returns the estimated nanoseconds for an element.
    fn cost(&self) -> f64 {
        match self {
            Prologue::Norm { .. } => 0.4,
            Prologue::Gated { kind, .. } => glu::cost(*kind),
        }
    }

    /// Passes row number `row` to `take`, in pieces of 256 elements with their starts.
    ///
    /// # Safety
    /// See [`Operand`]; there must be such a row.
    unsafe fn each(&self, isa: Isa, row: usize, mut take: impl FnMut(usize, &[f32])) {
        let row = self.x().layout().row_index(row);
        let mut buffer = [0.0; 256];
        // SAFETY: the row exists in `x`, and in all operands of its shape. The scale is one row.
        // All are F32 with dense rows. If `x` is a sum that is computed here, only the caller
        // writes this row.
        unsafe {
            match *self {
                Prologue::Norm { sum, x, eps, scale } => {
                    if let Some([a, b]) = sum {
                        elementwise::add_row(isa, &x, &a, &b, row);
                    }
                    let (x, scale) = (x.row::<f32>(row), scale.row::<f32>([0; 3]));
                    let factor = reduce::rms_factor(isa, x, eps);
                    for (i, (x, scale)) in x.chunks(256).zip(scale.chunks(256)).enumerate() {
                        let out = &mut buffer[..x.len()];
                        reduce::norm_slice(isa, out, x, factor, scale);
                        take(256 * i, out);
                    }
                }
                Prologue::Gated { x, gate, kind } => {
                    let (x, gate) = (x.row::<f32>(row), gate.row::<f32>(row));
                    for (i, (x, gate)) in x.chunks(256).zip(gate.chunks(256)).enumerate() {
                        let out = &mut buffer[..x.len()];
                        [x, gate].into_iter().for_each(ask_ahead);
                        glu::gate_slice(isa, kind, out, x, gate);
                        take(256 * i, out);
                    }
                }
            }
        }
    }
}

/// Columns of source 1, in the form that the product needs.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    source: Operand,
    input: InputSource,
    form: ActivationForm,
    /// Place and distance of packed columns, or `None` if the source is used in place.
    packed: Option<(Scratch, usize)>,
}

impl Columns {
    /// Returns the bytes of scratch memory for all columns.
    pub fn bytes(form: ActivationForm, layout: &Layout) -> Option<usize> {
        if matches!(form, ActivationForm::F32) && is_usable(layout) {
            return Some(0);
        }
        form.bytes(layout.shape()[0], layout.rows())
    }

    /// Plans packing to the start of `scratch`.
    pub fn new(
        source: Operand,
        input: InputSource,
        form: ActivationForm,
        scratch: Scratch,
    ) -> Self {
        let usable = matches!(form, ActivationForm::F32) && is_usable(source.layout());
        let stride = form.stride(source.shape()[0]).unwrap_or(0);
        Columns {
            source,
            input,
            form,
            packed: (!usable).then_some((scratch, stride)),
        }
    }

    /// Returns the address of column `i1` of matrix `i2, i3`.
    #[inline]
    pub fn at(&self, [i1, i2, i3]: [usize; 3]) -> *const u8 {
        match self.packed {
            None => self.source.at([i1, i2, i3]),
            Some((scratch, stride)) => {
                let [_, n1, n2, _] = self.source.shape();
                scratch.at((i1 + n1 * (i2 + n2 * i3)) * stride)
            }
        }
    }

    /// Returns the phase that packs the columns, if needed.
    pub fn pack(self, isa: Isa) -> Option<Phase> {
        let (scratch, stride) = self.packed?;
        let cost = match self.input {
            InputSource::Memory => 0.2,
            InputSource::Shared => return None,
            InputSource::Fused(prologue) => 0.2 + prologue.cost(),
        };
        Some(Phase::new(
            self.source.rows(),
            self.source.elements() as f64 * cost,
            move |tasks, _| {
                for task in tasks {
                    // SAFETY: each task has its own part of the scratch memory, and its row exists.
                    unsafe { self.pack_row(task, scratch.at(task * stride), isa) };
                }
                Ok(())
            },
        ))
    }

    /// # Safety
    /// See [`Operand`]. The row must exist, and `out` must have room for a column of the form.
    unsafe fn pack_row(&self, row: usize, out: *mut u8, isa: Isa) {
        let (source, form) = (&self.source, self.form);
        // SAFETY: the row exists, and pieces of 256 elements end at its `k`. `out` has room for a
        // column of `form` and is scratch memory, which does not contain the source. `isa` was
        // detected.
        unsafe {
            if let InputSource::Fused(prologue) = &self.input {
                return prologue.each(isa, row, |start, x| form.write(x, start, out, isa));
            }
            let row = source.layout().row_index(row);
            if is_usable(source.layout()) {
                for (i, x) in source.row::<f32>(row).chunks(256).enumerate() {
                    ask_ahead(x);
                    form.write(x, 256 * i, out, isa);
                }
                return;
            }
            // Through a buffer of whole slabs.
            let (k, mut buffer) = (source.shape()[0], [0.0; 256]);
            for start in (0..k).step_by(256) {
                let buffer = &mut buffer[..(k - start).min(256)];
                source.load(row, start, buffer);
                form.write(buffer, start, out, isa);
            }
        }
    }
}

/// Prefetches the memory after a piece of 256 elements, since many columns come from memory.
fn ask_ahead(piece: &[f32]) {
    for line in (0..256).step_by(16) {
        prefetch(piece.as_ptr().wrapping_add(512 + line));
    }
}

/// Returns whether columns of such a tensor can be used in place.
pub(crate) fn is_usable(layout: &Layout) -> bool {
    layout.dtype() == DType::F32 && layout.has_contiguous_rows()
}
