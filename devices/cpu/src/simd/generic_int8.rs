//! Registers with 32 bits of each of 8 rows for processors without their own vector code here:
//! arrays, which compilers keep in the available registers.

use super::int8::{Simd, functions};
use half::f16;
use std::array::from_fn;

/// Number of rows of an array.
const LANES: usize = 8;

/// Portable registers: arrays of 8 rows.
pub(crate) struct Portable;

type PortableWords = [u32; LANES];
type Floats = [f32; LANES];

impl Simd for Portable {
    const LANES: usize = LANES;
    const SIGNED: bool = true;
    type Words = PortableWords;
    type Floats = Floats;
    type Sum = [i32; LANES];

    functions! {
        fn load(at: *const u8) -> PortableWords { at.cast::<[[u8; 4];
            LANES]>().read().map(u32::from_le_bytes) }
        fn load_u8(at: *const u8) -> PortableWords {
            at.cast::<[u8; LANES]>().read().map(u32::from)
        }
        fn load_i8(at: *const u8) -> PortableWords {
            at.cast::<[i8; LANES]>().read().map(|x| x as u32)
        }
        fn load_u16(at: *const u8) -> PortableWords {
            at.cast::<[[u8; 2]; LANES]>().read().map(|x| u32::from(u16::from_le_bytes(x)))
        }
        fn store(words: PortableWords, to: *mut u8) { to.cast::<[[u8; 4];
            LANES]>().write(words.map(u32::to_le_bytes)) }
        fn splat(word: i32) -> PortableWords { [word as u32; LANES] }
        fn and(a: PortableWords, b: PortableWords) -> PortableWords { from_fn(|i| a[i] & b[i]) }
        fn or(a: PortableWords, b: PortableWords) -> PortableWords { from_fn(|i| a[i] | b[i]) }
        fn xor(a: PortableWords, b: PortableWords) -> PortableWords { from_fn(|i| a[i] ^ b[i]) }
        fn add(a: PortableWords, b: PortableWords) -> PortableWords {
            from_fn(|i| a[i].wrapping_add(b[i]))
        }
        fn add_bytes(a: PortableWords, b: PortableWords) -> PortableWords {
            let [a, b] = [a, b].map(|words| words.map(u32::to_le_bytes));
            from_fn(|i| u32::from_le_bytes(from_fn(|j| a[i][j].wrapping_add(b[i][j]))))
        }
        fn above(bytes: PortableWords, limit: i8) -> PortableWords {
            let mask = |byte: u8| if byte as i8 > limit { 0xff } else { 0 };
            bytes.map(|word| u32::from_le_bytes(word.to_le_bytes().map(mask)))
        }
        fn shl(words: PortableWords, bits: usize) -> PortableWords {
            words.map(|word| word << bits)
        }
        fn shr(words: PortableWords, bits: usize) -> PortableWords {
            words.map(|word| word >> bits)
        }
        fn look_up(table: &[i8; 16], bytes: PortableWords) -> PortableWords {
            let value = |byte: u8| table[usize::from(byte & 15)] as u8;
            bytes.map(|word| u32::from_le_bytes(word.to_le_bytes().map(value)))
        }
        fn load_f16(at: *const u8) -> Floats {
            at.cast::<[[u8; 2]; LANES]>().read().map(|x| f16::from_le_bytes(x).to_f32())
        }
        fn load_floats(at: *const f32) -> Floats { at.cast::<Floats>().read_unaligned() }
        fn store_floats(floats: Floats,
            to: *mut f32) { to.cast::<Floats>().write_unaligned(floats) }
        fn splat_float(x: f32) -> Floats { [x; LANES] }
        fn floats(words: PortableWords) -> Floats { words.map(|word| word as i32 as f32) }
        fn from_bits(words: PortableWords) -> Floats { words.map(f32::from_bits) }
        fn mul(a: Floats, b: Floats) -> Floats { from_fn(|i| a[i] * b[i]) }
        fn mul_add(a: Floats, b: Floats,
            c: Floats) -> Floats { from_fn(|i| a[i].mul_add(b[i], c[i])) }
        fn start(start: PortableWords) -> [i32; LANES] { start.map(|start| start as i32) }
        fn dot(sum: &mut [i32; LANES], codes: PortableWords, x: PortableWords, _full: bool) {
            for (sum, (codes, x)) in sum.iter_mut().zip(codes.into_iter().zip(x)) {
                for shift in [24, 16, 8, 0] {
                    // The highest byte after the shift, sign-extended.
                    *sum += ((codes << shift) as i32 >> 24) * ((x << shift) as i32 >> 24);
                }
            }
        }
        fn total(sum: [i32; LANES]) -> PortableWords { sum.map(|sum| sum as u32) }
    }
}
