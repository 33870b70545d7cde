//! Element types: names, sizes, and conversion from and to `f32`.

use super::text::fail;
use super::{Symbol, exports};
use samite_core::DType;
use std::ffi::{CString, c_char, c_void};
use std::sync::LazyLock;

/// Converts `len` elements to `f32`.
type ToFloat = unsafe extern "C" fn(*const c_void, *mut f32, i64);
/// Converts `len` elements from `f32`.
type FromFloat = unsafe extern "C" fn(*const f32, *mut c_void, i64);

pub fn symbols() -> Vec<Symbol> {
    exports![
        bf16_to_f32 as ggml_bf16_to_fp32,
        block_len_of as ggml_blck_size,
        f16_to_f32 as ggml_fp16_to_fp32,
        f32_to_bf16 as ggml_fp32_to_bf16,
        f32_to_f16 as ggml_fp32_to_fp16,
        is_quantized as ggml_is_quantized,
        quantize_iq4_xs as quantize_iq4_xs,
        row_size as ggml_row_size,
        traits_of as ggml_get_type_traits,
        type_name as ggml_type_name,
        type_size_of as ggml_type_size,
        to_float::<{ DType::F16 as u32 }> as ggml_fp16_to_fp32_row,
        to_float::<{ DType::BF16 as u32 }> as ggml_bf16_to_fp32_row,
        from_float::<{ DType::F16 as u32 }> as ggml_fp32_to_fp16_row,
        from_float::<{ DType::BF16 as u32 }> as ggml_fp32_to_bf16_row,
        from_float::<{ DType::Q4_0 as u32 }> as quantize_row_q4_0_ref,
        from_float::<{ DType::Q4_1 as u32 }> as quantize_row_q4_1_ref,
        from_float::<{ DType::Q5_0 as u32 }> as quantize_row_q5_0_ref,
        from_float::<{ DType::Q5_1 as u32 }> as quantize_row_q5_1_ref,
        from_float::<{ DType::Q8_0 as u32 }> as quantize_row_q8_0_ref,
        from_float::<{ DType::Q8_1 as u32 }> as quantize_row_q8_1_ref,
        from_float::<{ DType::Q2_K as u32 }> as quantize_row_q2_K_ref,
        from_float::<{ DType::Q3_K as u32 }> as quantize_row_q3_K_ref,
        from_float::<{ DType::Q4_K as u32 }> as quantize_row_q4_K_ref,
        from_float::<{ DType::Q5_K as u32 }> as quantize_row_q5_K_ref,
        from_float::<{ DType::Q6_K as u32 }> as quantize_row_q6_K_ref,
        from_float::<{ DType::Q8_K as u32 }> as quantize_row_q8_K_ref,
        from_float::<{ DType::IQ4_NL as u32 }> as quantize_row_iq4_nl_ref,
        from_float::<{ DType::IQ4_XS as u32 }> as quantize_row_iq4_xs_ref,
        from_float::<{ DType::MXFP4 as u32 }> as quantize_row_mxfp4_ref,
        from_float::<{ DType::TQ1_0 as u32 }> as quantize_row_tq1_0_ref,
        from_float::<{ DType::TQ2_0 as u32 }> as quantize_row_tq2_0_ref,
        from_float::<{ DType::NVFP4 as u32 }> as quantize_row_nvfp4_ref,
        from_float::<{ DType::Q1_0 as u32 }> as quantize_row_q1_0_ref,
        from_float::<{ DType::Q2_0 as u32 }> as quantize_row_q2_0_ref,
        from_float::<{ DType::F8_E4M3 as u32 }> as quantize_row_f8_e4m3_ref,
    ]
}

/// Returns the conversions of a type, if ggml's table has them and samite supports them.
fn codec(dtype: DType) -> (Option<ToFloat>, Option<FromFloat>) {
    macro_rules! codecs {
        ($($name:ident)*; only decoded $($decoded:ident)*) => {
            match dtype {
                $(DType::$name => (
                    Some(to_float::<{ DType::$name as u32 }> as ToFloat),
                    Some(from_float::<{ DType::$name as u32 }> as FromFloat),
                ),)*
                $(DType::$decoded => (
                    Some(to_float::<{ DType::$decoded as u32 }> as ToFloat),
                    None,
                ),)*
                // Exists only as an intermediate format.
                DType::Q8_1 => (None, Some(from_float::<{ DType::Q8_1 as u32 }> as FromFloat)),
                _ => (None, None),
            }
        };
    }
    codecs!(
        F16 BF16 F8_E4M3 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4
        TQ1_0 TQ2_0 NVFP4 Q1_0 Q2_0;
        only decoded IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S
    )
}

/// `ggml_type_traits`
#[repr(C)]
#[derive(Clone, Copy)]
struct Traits {
    name: *const c_char,
    block_len: i64,
    block_len_interleaved: i64,
    block_bytes: usize,
    is_quantized: bool,
    to_float: Option<ToFloat>,
    from_float: Option<FromFloat>,
}

/// Number of type IDs in use.
const COUNT: usize = 44;

/// Traits by type ID.
struct Table {
    traits: [Traits; COUNT],
    /// Names that the traits point to.
    _names: Vec<CString>,
}

// SAFETY: the table never changes, and the names live as long as the pointers to them.
unsafe impl Send for Table {}
// SAFETY: the table never changes, so threads only read it, and the names live as long as the
// pointers to them.
unsafe impl Sync for Table {}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let unused = Traits {
        name: c"unused".as_ptr(),
        block_len: 0,
        block_len_interleaved: 0,
        block_bytes: 0,
        is_quantized: false,
        to_float: None,
        from_float: None,
    };
    let mut traits = [unused; COUNT];
    let mut names = Vec::new();
    for dtype in DType::all() {
        let name = CString::new(dtype.name()).unwrap_or_default();
        let (to_float, from_float) = codec(dtype);
        traits[dtype as usize] = Traits {
            name: name.as_ptr(),
            block_len: dtype.block_len() as i64,
            block_bytes: dtype.block_bytes(),
            is_quantized: dtype.is_quantized(),
            to_float,
            from_float,
            ..unused
        };
        names.push(name); // the heap allocation does not move
    }
    Table {
        traits,
        _names: names,
    }
});

fn traits(number: u32) -> &'static Traits {
    TABLE
        .traits
        .get(number as usize)
        .unwrap_or_else(|| fail(&format!("there is no type with the number {number}")))
}

/// Returns the elements of a block, at least 1.
pub fn block_len(number: u32) -> usize {
    traits(number).block_len.max(1) as usize
}

/// Returns the bytes of a block.
pub fn type_size(number: u32) -> usize {
    traits(number).block_bytes
}

unsafe extern "C" fn traits_of(number: u32) -> *const Traits {
    traits(number)
}

unsafe extern "C" fn type_name(number: u32) -> *const c_char {
    match TABLE.traits.get(number as usize) {
        Some(traits) => traits.name,
        None => c"unused".as_ptr(),
    }
}

unsafe extern "C" fn type_size_of(number: u32) -> usize {
    type_size(number)
}

unsafe extern "C" fn block_len_of(number: u32) -> i64 {
    traits(number).block_len
}

unsafe extern "C" fn is_quantized(number: u32) -> bool {
    traits(number).is_quantized
}

unsafe extern "C" fn row_size(number: u32, len: i64) -> usize {
    type_size(number) * usize::try_from(len).unwrap_or(0) / block_len(number)
}

unsafe extern "C" fn f16_to_f32(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

unsafe extern "C" fn f32_to_f16(value: f32) -> u16 {
    samite_quant::f32_to_f16(value).to_bits()
}

unsafe extern "C" fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

unsafe extern "C" fn f32_to_bf16(value: f32) -> u16 {
    samite_quant::f32_to_bf16(value)
}

/// Returns the number of elements and the bytes of `len` elements.
fn extents(dtype: DType, len: i64) -> (usize, usize) {
    let elements = usize::try_from(len).unwrap_or(0);
    match dtype.row_bytes(elements) {
        Ok(bytes) => (elements, bytes),
        Err(error) => fail(&error.to_string()),
    }
}

fn dtype_of<const ID: u32>() -> DType {
    DType::from_id(ID).unwrap_or_else(|| fail(&format!("there is no type with the number {ID}")))
}

/// Decodes `len` elements of type `ID`.
unsafe extern "C" fn to_float<const ID: u32>(from: *const c_void, to: *mut f32, len: i64) {
    let dtype = dtype_of::<ID>();
    let (elements, bytes) = extents(dtype, len);
    if elements == 0 {
        return;
    }
    // SAFETY: the plugin passes this many elements, and separate space for their values.
    let (from, to) = unsafe {
        (
            std::slice::from_raw_parts(from.cast::<u8>(), bytes),
            std::slice::from_raw_parts_mut(to, elements),
        )
    };
    if let Err(error) = samite_quant::decode_row(dtype, from, to) {
        fail(&error.to_string());
    }
}

/// Encodes `len` elements as type `ID`.
unsafe extern "C" fn from_float<const ID: u32>(from: *const f32, to: *mut c_void, len: i64) {
    let dtype = dtype_of::<ID>();
    let (elements, bytes) = extents(dtype, len);
    if elements == 0 {
        return;
    }
    // SAFETY: the plugin passes this many elements, and separate space for their blocks.
    let (from, to) = unsafe {
        (
            std::slice::from_raw_parts(from, elements),
            std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes),
        )
    };
    if let Err(error) = samite_quant::encode_row(dtype, from, to) {
        fail(&error.to_string());
    }
}

/// `quantize_iq4_xs`: quantizes rows without column weights. Returns the number of bytes.
unsafe extern "C" fn quantize_iq4_xs(
    from: *const f32,
    to: *mut c_void,
    rows: i64,
    columns: i64,
    importance: *const f32,
) -> usize {
    if !importance.is_null() {
        fail("quantize_iq4_xs: samite's libggml-base takes no importance matrix");
    }
    const ID: u32 = DType::IQ4_XS as u32;
    // SAFETY: the plugin passes this many consecutive rows.
    unsafe {
        from_float::<ID>(from, to, rows * columns);
        row_size(ID, rows * columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;
    use std::mem::{offset_of, size_of};

    #[test]
    fn struct_layout_matches_upstream() {
        assert_eq!(size_of::<Traits>(), 56);
        assert_eq!(offset_of!(Traits, block_bytes), 24);
        assert_eq!(offset_of!(Traits, is_quantized), 32);
        assert_eq!(offset_of!(Traits, from_float), 48);
    }

    #[test]
    fn every_type_is_in_the_table() {
        for dtype in DType::all() {
            // SAFETY: a known type ID.
            let traits = unsafe { &*traits_of(dtype.id()) };
            // SAFETY: names are static strings.
            let name = unsafe { CStr::from_ptr(traits.name) };
            assert_eq!(name.to_str(), Ok(dtype.name()));
            assert_eq!(traits.block_bytes, dtype.block_bytes());
            assert_eq!(traits.to_float.is_some(), codec(dtype).0.is_some());
        }
        // SAFETY: any number may be passed.
        let (unused, beyond) =
            unsafe { (CStr::from_ptr(type_name(4)), CStr::from_ptr(type_name(99))) };
        assert_eq!((unused, beyond), (c"unused", c"unused"));
        assert_eq!((type_size(4), block_len(4)), (0, 1));
    }

    #[test]
    fn rows_round_trip_within_the_error_limit() {
        let values: Vec<f32> = (0..512).map(|i| (i as f32 * 0.37).sin()).collect();
        for dtype in DType::all() {
            let (Some(decode), Some(encode)) = codec(dtype) else {
                continue;
            };
            let mut bytes = vec![0u8; dtype.row_bytes(512).unwrap()];
            let mut back = vec![0f32; 512];
            // SAFETY: lengths are those of 512 elements.
            unsafe {
                encode(values.as_ptr(), bytes.as_mut_ptr().cast(), 512);
                decode(bytes.as_ptr().cast(), back.as_mut_ptr(), 512);
                encode(values.as_ptr(), std::ptr::null_mut(), 0);
            }
            let error: f32 = values.iter().zip(&back).map(|(a, b)| (a - b).powi(2)).sum();
            let limit = match dtype {
                DType::TQ1_0 | DType::TQ2_0 | DType::Q1_0 | DType::Q2_0 => 60.0,
                _ => 16.0, // of 256
            };
            assert!(error < limit, "{dtype}: {error}");
        }
    }

    #[test]
    fn iq4_xs_rows_quantize_identically_through_both_functions() {
        let values: Vec<f32> = (0..512).map(|i| (i as f32 * 0.11).cos()).collect();
        let mut bytes = [vec![0u8; 272], vec![0u8; 272]];
        let (from, to) = (
            values.as_ptr(),
            bytes.each_mut().map(|b| b.as_mut_ptr().cast()),
        );
        // SAFETY: 512 elements take 272 bytes.
        unsafe {
            assert_eq!(quantize_iq4_xs(from, to[0], 2, 256, std::ptr::null()), 272);
            from_float::<{ DType::IQ4_XS as u32 }>(from, to[1], 512);
        }
        assert_eq!(bytes[0], bytes[1]);
        assert_ne!(bytes[0], [0; 272]);
    }
}
