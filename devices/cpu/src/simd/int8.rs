//! Instruction set functions for products of packed rows. Formats and products are generic over
//! [`Simd`].

/// Defines functions of an implementation of [`Simd`], or of a trait that needs it.
macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? { $($body:tt)* })*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe)]
        unsafe fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: the instruction set of the type is available. Pointers are valid for the one
            // register, or part of it, that the function loads or stores without alignment, as the
            // trait requires. The rest uses only registers and local arrays.
            unsafe { $($body)* }
        }
    )*};
}
#[allow(unused_imports)] // some architectures have no implementation beside the portable one
pub(crate) use functions;

/// Defines an inline assembly instruction that updates a register with two others. Its register
/// class needs the feature. Instructions that are `in order` stay in call order.
#[cfg(target_arch = "x86_64")]
macro_rules! in_place {
    ($(#[$meta:meta])* fn $name:ident($type:ty), $feature:literal, $class:ident,
        $instruction:literal) => {
        in_place! { $(#[$meta])* fn $name($type), $feature, $class, $instruction; pure, }
    };
    ($(#[$meta:meta])* fn $name:ident($type:ty), $feature:literal, $class:ident,
        $instruction:literal, in order) => {
        in_place! { $(#[$meta])* fn $name($type), $feature, $class, $instruction; }
    };
    ($(#[$meta:meta])* fn $name:ident($type:ty), $feature:literal, $class:ident,
        $instruction:literal; $($pure:ident,)?) => {
        $(#[$meta])*
        #[inline]
        #[target_feature(enable = $feature)]
        fn $name(changed: &mut $type, a: $type, b: $type) {
            // SAFETY: the instruction is available, and changes only the register.
            unsafe {
                std::arch::asm!(
                    concat!($instruction, " {}, {}, {}"),
                    inout($class) * changed,
                    in($class) a,
                    in($class) b,
                    options($($pure,)? nomem, nostack, preserves_flags)
                )
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use in_place;

/// Registers with 32 bits for each of some rows.
///
/// Results are the same for every instruction set: products of codes are exact, and `mul_add`
/// rounds once.
///
/// # Safety
/// All functions require the instruction set. Pointers must be valid for the data that one register
/// holds of `LANES` rows. They need no alignment.
pub(crate) trait Simd {
    /// Number of rows of a register: a divisor of [`LANES`](crate::packed::LANES).
    const LANES: usize;
    /// True if codes that need all eight bits are signed in products.
    const SIGNED: bool;
    /// Maximum number of columns whose codes are multiplied directly after loading, without
    /// unpacking them first.
    const GEMV_COLUMNS: usize = 1;
    /// True if pairs of columns are multiplied with eight codes at a time:
    /// [`dot_pairs`](Simd::dot_pairs).
    const COLUMN_PAIRS: bool = false;
    /// True if products of 16-bit numbers are [crossed](super::int16): more of the processor's
    /// units add than multiply.
    const CROSSED: bool = false;

    /// Four codes of each row, or an integer of each row.
    type Words: Copy;
    /// A float of each row.
    type Floats: Copy;
    /// A sum of products of codes.
    type Sum: Copy;

    /// Prefetches memory, at any address. Does nothing on processors whose hardware prefetcher
    /// suffices.
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        super::prefetch(at);
    }

    /// Does what `prefetch` does, exactly where it is called.
    #[inline(always)]
    unsafe fn prefetch_here(at: *const u8) {
        // SAFETY: prefetching is allowed at any address, and the instruction set is available, as
        // the trait requires.
        unsafe { Self::prefetch(at) }
    }

    /// Adds `a * b` to a sum in place, rounded once. Compilers might otherwise copy the sum.
    #[inline(always)]
    unsafe fn accumulate(sum: &mut Self::Floats, a: Self::Floats, b: Self::Floats) {
        // SAFETY: only registers are touched, and the instruction set is available, as the trait
        // requires.
        unsafe { *sum = Self::mul_add(a, b, *sum) }
    }

    /// Loads 32 bits of each row.
    unsafe fn load(at: *const u8) -> Self::Words;
    /// Loads a byte of each row as an integer.
    unsafe fn load_u8(at: *const u8) -> Self::Words;
    /// Loads a signed byte of each row as an integer.
    unsafe fn load_i8(at: *const u8) -> Self::Words;
    /// Loads 16 bits of each row as an integer.
    unsafe fn load_u16(at: *const u8) -> Self::Words;
    unsafe fn store(words: Self::Words, to: *mut u8);
    /// Returns the same 32 bits for each row.
    unsafe fn splat(word: i32) -> Self::Words;
    unsafe fn and(a: Self::Words, b: Self::Words) -> Self::Words;
    unsafe fn or(a: Self::Words, b: Self::Words) -> Self::Words;
    unsafe fn xor(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Adds integers.
    unsafe fn add(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Adds bytes, truncated to eight bits.
    unsafe fn add_bytes(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Sets all bits of each byte that is above a limit, and none of the others. Bytes and limit
    /// are signed.
    unsafe fn above(bytes: Self::Words, limit: i8) -> Self::Words;
    /// Shifts integers left.
    unsafe fn shl(words: Self::Words, bits: usize) -> Self::Words;
    /// Shifts integers right, inserting zeros.
    unsafe fn shr(words: Self::Words, bits: usize) -> Self::Words;
    /// Returns byte `i` of each word as an integer.
    #[inline(always)]
    unsafe fn byte(words: Self::Words, i: usize) -> Self::Words {
        // SAFETY: only registers are touched, and the instruction set is available, as the trait
        // requires.
        unsafe { Self::and(Self::shr(words, 8 * i), Self::splat(0xff)) }
    }
    /// Returns table entries, indexed by bytes below 16.
    unsafe fn look_up(table: &[i8; 16], bytes: Self::Words) -> Self::Words;
    /// Returns bits `4 * i..4 * i + 4` as four bytes: 16 for a set bit, otherwise 0.
    #[inline(always)]
    unsafe fn fifth_bits(words: Self::Words, i: usize) -> Self::Words {
        // SAFETY: only registers are touched, and the instruction set is available, as the trait
        // requires.
        unsafe {
            // Bit 0 stays in byte 0, bit 1 moves by 7 bits to byte 1, and so on.
            let nibble = Self::and(Self::shr(words, 4 * i), Self::splat(15));
            let pair = Self::or(nibble, Self::shl(nibble, 7));
            let all = Self::or(pair, Self::shl(pair, 14));
            Self::and(Self::shl(all, 4), Self::splat(0x1010_1010))
        }
    }

    /// Loads a half-precision number of each row.
    unsafe fn load_f16(at: *const u8) -> Self::Floats;
    unsafe fn load_floats(at: *const f32) -> Self::Floats;
    unsafe fn store_floats(floats: Self::Floats, to: *mut f32);
    /// Returns the same number for each row.
    unsafe fn splat_float(x: f32) -> Self::Floats;
    /// Converts integers to floats.
    unsafe fn floats(words: Self::Words) -> Self::Floats;
    /// Returns the floats with these bits.
    unsafe fn from_bits(words: Self::Words) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Returns `a * b + c`, rounded once.
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Returns a sum that starts with these integers.
    unsafe fn start(start: Self::Words) -> Self::Sum;
    /// Adds the products of four codes of each row with `x`, four signed codes of a column for each
    /// row. `full` means that codes need all eight bits: signed ones if [`SIGNED`](Simd::SIGNED).
    /// Otherwise they are below 128.
    unsafe fn dot(sum: &mut Self::Sum, codes: Self::Words, x: Self::Words, full: bool);
    /// Does what [`dot`](Simd::dot) does, exactly where it is called. Compilers reorder integer
    /// additions: they may finish one sum before they start the next, and spill all codes.
    #[inline(always)]
    unsafe fn dot_here(sum: &mut Self::Sum, codes: Self::Words, x: Self::Words, full: bool) {
        // SAFETY: guaranteed by the caller of this function.
        unsafe { Self::dot(sum, codes, x, full) }
    }
    /// Adds the products of eight codes of each row with those of two columns to the
    /// [mixed](Simd::mix) sums of the columns. `x` are the first bytes of the columns' codes.
    #[inline(always)]
    unsafe fn dot_pairs(
        mut sums: [Self::Sum; 2],
        codes: [Self::Words; 2],
        x: [*const u8; 2],
        full: bool,
    ) -> [Self::Sum; 2] {
        for (sum, x) in sums.iter_mut().zip(x) {
            for (i, codes) in codes.into_iter().enumerate() {
                // SAFETY: the eight codes of each column are readable at `x`. This reads four of
                // them from byte `4 * i`, with `i` below 2. The instruction set is available.
                unsafe {
                    let x = x.add(4 * i).cast::<i32>().read_unaligned();
                    Self::dot(sum, codes, Self::splat(x), full);
                }
            }
        }
        sums
    }
    /// Returns the sums of two columns in the order to which [`dot_pairs`](Simd::dot_pairs) adds.
    #[inline(always)]
    unsafe fn mix(sums: [Self::Sum; 2]) -> [Self::Sum; 2] {
        sums
    }
    /// Returns the inverse of [`mix`](Simd::mix).
    #[inline(always)]
    unsafe fn separate(sums: [Self::Sum; 2]) -> [Self::Sum; 2] {
        sums
    }
    /// Makes room for more products, if sums are in 16 bits at first. Must be called after [`room`]
    /// products of codes that are not full, after each product of full ones, and before
    /// [`total`](Simd::total).
    #[inline(always)]
    unsafe fn carry(_sum: &mut Self::Sum) {}
    unsafe fn total(sum: Self::Sum) -> Self::Words;
}

/// Returns the number of products of codes up to `largest` after which sums must be
/// [carried](Simd::carry).
const fn room(largest: usize) -> usize {
    // 16 bits hold the sum of two products, with codes of columns up to 128.
    let room = i16::MAX as usize / (2 * 128 * largest);
    if room > 0 { room } else { 1 }
}

/// Returns the number of words after which sums must be [carried](Simd::carry), in a group of
/// `steps` words. It divides `steps`, a power of two.
pub(crate) const fn steps_between_carries(largest: usize, steps: usize) -> usize {
    assert!(steps.is_power_of_two());
    let room = 1 << room(largest).ilog2();
    if room < steps { room } else { steps }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::generic_int8::Portable;
    use proptest::prelude::*;

    /// Number of rows of [`Portable`], with which other types are compared.
    const ROWS: usize = Portable::LANES;

    /// Returns the results of all nontrivial functions, for rows of `a`, `b` and `c`.
    fn results<V: Simd>(a: [u32; ROWS], b: [u32; ROWS], c: [u32; ROWS]) -> Vec<[u32; ROWS]> {
        let mut out = vec![];
        let mut keep = |words: &dyn Fn(usize) -> V::Words| {
            let mut all = [0; ROWS];
            for row in (0..ROWS).step_by(V::LANES) {
                // SAFETY: these rows exist, and the instruction set is the architecture's own.
                unsafe { V::store(words(row), (&raw mut all[row]).cast()) };
            }
            out.push(all);
        };
        let at = |x: &[u32; ROWS], row: usize| (&raw const x[row]).cast::<u8>();
        // SAFETY: `at` stays inside arrays of `ROWS` words, a multiple of `V::LANES`: `row +
        // V::LANES <= ROWS`, and narrower loads start at most `2 * row` bytes in. The instruction
        // set is the architecture's own.
        unsafe {
            keep(&|row| V::load_u8(at(&a, 0).add(row)));
            keep(&|row| V::load_i8(at(&a, 0).add(row)));
            keep(&|row| V::load_u16(at(&a, 0).add(2 * row)));
            keep(&|row| V::add_bytes(V::load(at(&a, row)), V::load(at(&b, row))));
            for limit in [-43, 0, 42] {
                keep(&|row| V::above(V::load(at(&a, row)), limit));
            }
            for i in 0..4 {
                keep(&|row| V::byte(V::load(at(&a, row)), i));
            }
            for i in 0..8 {
                keep(&|row| V::fifth_bits(V::load(at(&a, row)), i));
                keep(&|row| V::shl(V::load(at(&a, row)), i));
                keep(&|row| V::shr(V::load(at(&a, row)), i));
            }
            keep(&|row| {
                let bytes = V::and(V::load(at(&a, row)), V::splat(0x0f0f_0f0f));
                V::look_up(&samite_quant::IQ4_NL_VALUES, bytes)
            });
            let mut floats = |floats: &dyn Fn(usize) -> V::Floats| {
                let mut all = [0.0; ROWS];
                for row in (0..ROWS).step_by(V::LANES) {
                    V::store_floats(floats(row), &raw mut all[row]);
                }
                // All NaNs count as equal.
                let bits = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
                out.push(all.map(bits));
            };
            floats(&|row| V::load_f16(at(&a, 0).add(2 * row)));
            floats(&|row| V::floats(V::load(at(&a, row))));
            floats(&|row| {
                let [a, b, c] = [&a, &b, &c].map(|x| V::load_floats(at(x, row).cast()));
                V::mul_add(a, b, c)
            });
        }
        out
    }

    proptest! {
        #[test]
        fn simd_results_match_portable_code(
            a: [u32; ROWS],
            b: [u32; ROWS],
            c: [u32; ROWS],
            near: bool,
        ) {
            // Makes sums fall between two representable numbers often.
            let like = |x: u32| (x & 0x83ff_ffff) | 0x3c00_0000;
            let [a, b, c] = if near { [a, b, c].map(|x| x.map(like)) } else { [a, b, c] };
            #[cfg(target_arch = "x86_64")]
            let own = results::<crate::simd::sse2::Xmm>(a, b, c);
            #[cfg(target_arch = "aarch64")]
            let own = results::<crate::simd::neon::Neon<false, false>>(a, b, c);
            prop_assert_eq!(own, results::<Portable>(a, b, c));
        }
    }
}
