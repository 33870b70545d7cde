//! Element and block types, with ggml's numbering and sizes.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Type of a tensor's elements: a plain number, or a block of quantized numbers.
///
/// The discriminants are ggml's `ggml_type` values, as in GGUF files, ggml's plugin interface and
/// its RPC protocol.
///
/// ```
/// use samite_core::DType;
///
/// let dtype = DType::from_name("Q4_0").unwrap();
/// assert_eq!((dtype.block_len(), dtype.block_bytes()), (32, 18));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(non_camel_case_types, missing_docs)] // ggml's own spelling of the names is what users know.
#[repr(u32)]
pub enum DType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q8_1 = 9,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    Q8_K = 15,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    Q1_0 = 41,
    Q2_0 = 42,
    F8_E4M3 = 43,
}

/// Name, elements per block and bytes per block of one type.
struct Row(DType, &'static str, usize, usize);

/// Every type, in the order of ggml's numbering.
const TABLE: [Row; 36] = {
    use DType::*;
    [
        Row(F32, "f32", 1, 4),
        Row(F16, "f16", 1, 2),
        Row(Q4_0, "q4_0", 32, 18),
        Row(Q4_1, "q4_1", 32, 20),
        Row(Q5_0, "q5_0", 32, 22),
        Row(Q5_1, "q5_1", 32, 24),
        Row(Q8_0, "q8_0", 32, 34),
        Row(Q8_1, "q8_1", 32, 36),
        Row(Q2_K, "q2_K", 256, 84),
        Row(Q3_K, "q3_K", 256, 110),
        Row(Q4_K, "q4_K", 256, 144),
        Row(Q5_K, "q5_K", 256, 176),
        Row(Q6_K, "q6_K", 256, 210),
        Row(Q8_K, "q8_K", 256, 292),
        Row(IQ2_XXS, "iq2_xxs", 256, 66),
        Row(IQ2_XS, "iq2_xs", 256, 74),
        Row(IQ3_XXS, "iq3_xxs", 256, 98),
        Row(IQ1_S, "iq1_s", 256, 50),
        Row(IQ4_NL, "iq4_nl", 32, 18),
        Row(IQ3_S, "iq3_s", 256, 110),
        Row(IQ2_S, "iq2_s", 256, 82),
        Row(IQ4_XS, "iq4_xs", 256, 136),
        Row(I8, "i8", 1, 1),
        Row(I16, "i16", 1, 2),
        Row(I32, "i32", 1, 4),
        Row(I64, "i64", 1, 8),
        Row(F64, "f64", 1, 8),
        Row(IQ1_M, "iq1_m", 256, 56),
        Row(BF16, "bf16", 1, 2),
        Row(TQ1_0, "tq1_0", 256, 54),
        Row(TQ2_0, "tq2_0", 256, 66),
        Row(MXFP4, "mxfp4", 32, 17),
        Row(NVFP4, "nvfp4", 64, 36),
        Row(Q1_0, "q1_0", 128, 18),
        Row(Q2_0, "q2_0", 64, 18),
        Row(F8_E4M3, "f8_e4m3", 1, 1),
    ]
};

impl DType {
    /// Iterates over all types, in the order of ggml's numbering.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static Row {
        const INDEX: [u8; 44] = {
            let mut index = [u8::MAX; 44];
            let mut i = 0;
            while i < TABLE.len() {
                index[TABLE[i].0 as usize] = i as u8;
                i += 1;
            }
            index
        };
        &TABLE[INDEX[self as usize] as usize]
    }

    /// Returns ggml's number of this type.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Returns the type with ggml's number `id`, or `None` for numbers that ggml does not use (any
    /// more).
    pub fn from_id(id: u32) -> Option<DType> {
        TABLE.iter().map(|row| row.0).find(|dtype| dtype.id() == id)
    }

    /// Returns ggml's name of this type, such as `f32` or `q4_K`.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Returns the type called `name`, ignoring case.
    pub fn from_name(name: &str) -> Option<DType> {
        TABLE
            .iter()
            .find(|row| row.1.eq_ignore_ascii_case(name))
            .map(|row| row.0)
    }

    /// Returns the number of elements per block. 1 for plain numbers.
    pub fn block_len(self) -> usize {
        self.row().2
    }

    /// Returns the number of bytes per block.
    pub fn block_bytes(self) -> usize {
        self.row().3
    }

    /// Returns whether elements are packed in blocks, so that a single one has no address.
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Returns whether this is F32, F16, BF16, F8 or F64.
    pub fn is_float(self) -> bool {
        matches!(
            self,
            DType::F32 | DType::F16 | DType::BF16 | DType::F8_E4M3 | DType::F64
        )
    }

    /// Returns whether this is one of the integer types.
    pub fn is_integer(self) -> bool {
        matches!(self, DType::I8 | DType::I16 | DType::I32 | DType::I64)
    }

    /// Returns the bytes of a contiguous row of `len` elements.
    ///
    /// # Errors
    /// [`Error::Shape`] if `len` is not a whole number of blocks, or if the size overflows.
    pub fn row_bytes(self, len: usize) -> Result<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return Err(Error::shape(format!(
                "a row of {len} elements is not a whole number of {self} blocks of {}",
                self.block_len()
            )));
        }
        (len / self.block_len())
            .checked_mul(self.block_bytes())
            .ok_or_else(|| {
                Error::shape(format!(
                    "the size of a row of {len} {self} elements overflows"
                ))
            })
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_unique_and_invertible() {
        for dtype in DType::all() {
            assert_eq!(DType::from_id(dtype.id()), Some(dtype));
            assert_eq!(DType::from_name(&dtype.name().to_uppercase()), Some(dtype));
        }
        assert_eq!(DType::all().count(), 36);
        for hole in [4, 5, 31, 32, 33, 36, 37, 38, 44, u32::MAX] {
            assert_eq!(DType::from_id(hole), None);
        }
    }

    #[test]
    fn row_bytes_checks_blocks_and_overflow() {
        assert_eq!(DType::Q4_0.row_bytes(64).unwrap(), 36);
        assert_eq!(DType::F32.row_bytes(0).unwrap(), 0);
        assert!(DType::Q4_0.row_bytes(33).is_err());
        assert!(DType::F32.row_bytes(usize::MAX / 2).is_err());
    }
}
