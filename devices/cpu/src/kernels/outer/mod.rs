//! Sums of outer products: a matrix product in which neither operand is summed across a register.
//!
//! - [`float`]: of F32, F16 and BF16 rows with F32 factors.
//! - [`int16`]: of numbers rounded to 16 bits, for attention.

pub(crate) mod float;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) mod int16;
