//! Activation quantization: the column formats of products, and the conversion to them.
//!
//! | file | form | for weights |
//! |---|---|---|
//! | [`f32`](mod@f32) | F32 in slabs | packed F32, F16, BF16 |
//! | [`int16`] | 16 bits, a scale for each 32 | packed F16, BF16 with many columns |
//! | [`bf16`](self) | BF16, one plane or two | all packed ones with many columns, with AMX |
//! | [`int8`] | 8 bits, a scale for each 32 or 256 | packed quantized ones |
//! | [`int8_blocks`] | 8 bits, a scale for each 32 | quantized ones as they lie in the file |
//!
//! All but the last are stored in [`slabs`].

#[cfg(target_arch = "x86_64")]
pub(crate) mod bf16;
pub(crate) mod f32;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) mod int16;
pub(crate) mod int8;
pub(crate) mod int8_blocks;
pub(crate) mod slabs;

use crate::detect::Isa;
#[cfg(target_arch = "x86_64")]
use bf16::Bf16Slabs;
use int8::Int8Slabs;
use int8_blocks::Int8Blocks;
#[cfg(target_arch = "x86_64")]
use int16::Int16Slabs;
use slabs::Slabs;

/// Elements of a slab, which is multiplied at a time.
pub(crate) const SLAB: usize = 256;

/// Column format that a product needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ActivationForm {
    F32,
    F32Slabs(Slabs),
    Int8Blocks(Int8Blocks),
    Int8Slabs(Int8Slabs),
    #[cfg(target_arch = "x86_64")]
    Bf16Slabs(Bf16Slabs),
    #[cfg(target_arch = "x86_64")]
    Int16Slabs(Int16Slabs),
}

impl ActivationForm {
    /// Returns the distance in bytes of columns of `k` elements.
    pub fn stride(self, k: usize) -> Option<usize> {
        match self {
            ActivationForm::F32 => k.checked_mul(4)?.checked_next_multiple_of(64),
            ActivationForm::Int8Blocks(int8) => Some(int8.bytes),
            _ => Some(self.slabs()?.slab_bytes),
        }
    }

    /// Returns the bytes of all `columns` columns of `k` elements.
    pub fn bytes(self, k: usize, columns: usize) -> Option<usize> {
        match self.slabs() {
            Some(slabs) => Some(slabs.total()),
            None => self.stride(k)?.checked_mul(columns),
        }
    }

    /// Returns the layout of columns in slabs, if they are in slabs.
    pub fn slabs(self) -> Option<Slabs> {
        match self {
            ActivationForm::F32Slabs(slabs) => Some(slabs),
            ActivationForm::Int8Slabs(activations) => Some(activations.slabs),
            #[cfg(target_arch = "x86_64")]
            ActivationForm::Bf16Slabs(planes) => Some(planes.slabs),
            #[cfg(target_arch = "x86_64")]
            ActivationForm::Int16Slabs(sixteen) => Some(sixteen.slabs),
            ActivationForm::F32 | ActivationForm::Int8Blocks(_) => None,
        }
    }

    /// Writes elements of a column, from element `start`, a multiple of 256, to the column at
    /// `out`.
    ///
    /// # Safety
    /// `out` must be a column of this form, which has these elements, and `isa` must have been
    /// detected.
    pub unsafe fn write(self, x: &[f32], start: usize, out: *mut u8, isa: Isa) {
        // SAFETY: `out` is a column of this form with these elements, so it has the room that each
        // form's function requires. `x` is borrowed, so it is elsewhere.
        unsafe {
            match self {
                ActivationForm::F32 => {
                    let out = out.cast::<f32>().add(start);
                    out.copy_from_nonoverlapping(x.as_ptr(), x.len());
                }
                ActivationForm::F32Slabs(slabs) => f32::copy(slabs, x, start, out),
                ActivationForm::Int8Blocks(int8) => {
                    int8_blocks::quantize(isa, &int8, x, start, out)
                }
                ActivationForm::Int8Slabs(activations) => activations.quantize(x, start, out),
                #[cfg(target_arch = "x86_64")]
                ActivationForm::Bf16Slabs(planes) => planes.split(x, start, out),
                #[cfg(target_arch = "x86_64")]
                ActivationForm::Int16Slabs(sixteen) => sixteen.round(x, start, out),
            }
        }
    }
}
