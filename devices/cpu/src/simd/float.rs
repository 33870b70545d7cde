//! Registers of f32 numbers, and element types that are loaded into them.

use half::f16;

/// A register of f32 numbers.
///
/// # Safety
/// All functions require the instruction set of the type. Pointers must be valid for the elements
/// that are read or written: [`LANES`](Vector::LANES), or `count`, which is less.
pub(crate) trait Vector: Copy {
    /// Number of lanes.
    const LANES: usize;
    /// True if loading two-byte numbers is almost as fast as loading four-byte ones.
    const WIDENS: bool = true;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn splat_f16(x: f16) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// Loads the first `count` numbers, then zeros.
    unsafe fn load_part(from: *const f32, count: usize) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn load_i8(from: *const i8) -> Self;
    /// Loads codes of 4 bits of each byte, starting with bit `shift`, and a fifth bit: bit `i` of
    /// `fifth` for lane `i`.
    unsafe fn load_codes(from: *const u8, shift: usize, fifth: u32) -> Self;
    /// Loads the values of codes of 4 bits of each byte, starting with bit `shift`.
    unsafe fn load_values(from: *const u8, shift: usize, values: &[f32; 16]) -> Self;
    /// Loads the first `count` numbers, then zeros.
    #[inline(always)]
    unsafe fn load_f16_part(from: *const u16, count: usize) -> Self {
        // SAFETY: the first `count` elements are readable, fewer than `LANES`, which is at most
        // `MAX_LANES`: as many as the copy that is loaded has.
        unsafe { Self::load_f16(padded(from, count).as_ptr()) }
    }
    /// Loads the first `count` numbers, then zeros.
    #[inline(always)]
    unsafe fn load_bf16_part(from: *const u16, count: usize) -> Self {
        // SAFETY: the first `count` elements are readable, fewer than `LANES`, which is at most
        // `MAX_LANES`: as many as the copy that is loaded has.
        unsafe { Self::load_bf16(padded(from, count).as_ptr()) }
    }
    unsafe fn store(self, to: *mut f32);
    unsafe fn store_part(self, to: *mut f32, count: usize);
    /// Returns `self * b + c`.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// Returns the sum of all lanes.
    unsafe fn sum(self) -> f32;
    /// Returns the sums of all lanes of some registers, each in the same order.
    #[inline(always)]
    unsafe fn sums(of: &[Self; 8]) -> [f32; 8] {
        // SAFETY: the instruction set is available, as the trait requires, and `sum` touches
        // registers only.
        of.map(|x| unsafe { x.sum() })
    }
}

/// A type of weights that is loaded as f32.
pub(crate) trait Element {
    /// Bytes of an element.
    const BYTES: usize;
    /// True if the lower 16 bits of every element are zero as f32.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const UPPER_ONLY: bool = false;

    /// Loads elements from element `i`.
    ///
    /// # Safety
    /// As many elements as `V` has lanes must be readable from element `i` of `from`, and the
    /// instructions of `V` must be available.
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V;

    /// Loads `count` elements, fewer than the number of lanes, from element `i`.
    ///
    /// # Safety
    /// `count` elements must be readable from element `i` of `from`, and the instructions of `V`
    /// must be available.
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V;
}

pub(crate) struct F32;
pub(crate) struct F16;
pub(crate) struct Bf16;

/// Maximum number of lanes of any [`Vector`].
const MAX_LANES: usize = 16;

/// Returns `count` 16-bit elements, followed by zeros.
///
/// # Safety
/// `count` elements must be readable, at most [`MAX_LANES`].
#[inline(always)]
unsafe fn padded(from: *const u16, count: usize) -> [u16; MAX_LANES] {
    let mut padded = [0; MAX_LANES];
    // SAFETY: `count` elements are readable, and at most as many as `padded`, a new array, has.
    unsafe { std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), count) };
    padded
}

impl Element for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V {
        // SAFETY: as many elements as `V` has lanes are readable from element `i` on, and the
        // instructions of `V` are available.
        unsafe { V::load(from.cast::<f32>().add(i)) }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V {
        // SAFETY: `count` elements are readable from element `i` on, fewer than `V` has lanes, and
        // the instructions of `V` are available.
        unsafe { V::load_part(from.cast::<f32>().add(i), count) }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V {
        // SAFETY: as many elements as `V` has lanes are readable from element `i` on, and the
        // instructions of `V` are available.
        unsafe { V::load_f16(from.cast::<u16>().add(i)) }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V {
        // SAFETY: `count` elements are readable from element `i` on, fewer than `V` has lanes, and
        // the instructions of `V` are available.
        unsafe { V::load_f16_part(from.cast::<u16>().add(i), count) }
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;
    const UPPER_ONLY: bool = true;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V {
        // SAFETY: as many elements as `V` has lanes are readable from element `i` on, and the
        // instructions of `V` are available.
        unsafe { V::load_bf16(from.cast::<u16>().add(i)) }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V {
        // SAFETY: `count` elements are readable from element `i` on, fewer than `V` has lanes, and
        // the instructions of `V` are available.
        unsafe { V::load_bf16_part(from.cast::<u16>().add(i), count) }
    }
}
