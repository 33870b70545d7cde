//! Layout of a tensor in memory: element type, four extents, four byte strides.

use crate::dtype::DType;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Number of dimensions of every tensor. Missing ones have extent 1.
pub const DIMS: usize = 4;

/// Four extents, innermost first, as in ggml: a matrix of `rows` rows of `columns` is `[columns,
/// rows, 1, 1]`.
pub type Shape = [usize; DIMS];

/// Element type, extents and byte strides of a tensor: everything except its place in memory.
///
/// Every constructor and deserialisation keep these invariants: `shape[0]` is a whole number of
/// blocks. The last byte of the last element lies at most `isize::MAX` bytes after the first.
/// Elements (blocks, for a quantized type) are whole elements apart. So [`bytes`](Layout::bytes),
/// counts and all offsets within a tensor cannot overflow, and every element is aligned if the
/// first one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Layout {
    dtype: DType,
    shape: Shape,
    strides: [usize; DIMS],
}

/// A layout from an untrusted source.
#[derive(Deserialize)]
struct Unchecked {
    dtype: DType,
    shape: Shape,
    strides: [usize; DIMS],
}

impl TryFrom<Unchecked> for Layout {
    type Error = Error;

    fn try_from(layout: Unchecked) -> Result<Self> {
        Layout::strided(layout.dtype, layout.shape, layout.strides)
    }
}

/// Extends up to four extents with ones.
///
/// # Errors
/// [`Error::Shape`] if there are more than four.
pub fn shape(extents: &[usize]) -> Result<Shape> {
    if extents.len() > DIMS {
        return Err(Error::shape(format!(
            "{} dimensions given, at most {DIMS} are possible",
            extents.len()
        )));
    }
    let mut shape = [1; DIMS];
    shape[..extents.len()].copy_from_slice(extents);
    Ok(shape)
}

impl Layout {
    /// Returns the layout without gaps. Each dimension's stride is the size of everything within
    /// it.
    ///
    /// # Errors
    /// [`Error::Shape`] if `shape[0]` is not a whole number of blocks or if the size overflows.
    pub fn contiguous(dtype: DType, shape: Shape) -> Result<Self> {
        let row = dtype.row_bytes(shape[0])?;
        let mut strides = [dtype.block_bytes(), row, 0, 0];
        for dim in 2..DIMS {
            strides[dim] = strides[dim - 1]
                .checked_mul(shape[dim - 1])
                .ok_or_else(|| {
                    Error::shape(format!(
                        "the size of a {dtype} tensor of shape {shape:?} overflows"
                    ))
                })?;
        }
        Self::strided(dtype, shape, strides)
    }

    /// Returns a layout with the given byte strides. `strides[0]` is the distance of elements (of
    /// blocks, for a quantized type).
    ///
    /// # Errors
    /// [`Error::Shape`] if `shape[0]` is not a whole number of blocks, if the spanned memory or the
    /// number of elements overflows, or if a stride is not a whole number of elements (blocks).
    /// Strides of dimensions with extent 1 may be anything.
    pub fn strided(dtype: DType, shape: Shape, strides: [usize; DIMS]) -> Result<Self> {
        dtype.row_bytes(shape[0])?;
        let layout = Layout {
            dtype,
            shape,
            strides,
        };
        if (0..DIMS).any(|dim| {
            let extent = if dim == 0 {
                shape[0] / dtype.block_len()
            } else {
                shape[dim]
            };
            extent > 1 && !strides[dim].is_multiple_of(dtype.block_bytes())
        }) {
            return Err(Error::shape(format!(
                "strides {strides:?} of a {dtype} tensor of shape {shape:?} are not multiples of {} bytes",
                dtype.block_bytes()
            )));
        }
        // Empty dimensions count as one, so that products of some of the extents cannot overflow
        // either.
        let elements = shape
            .iter()
            .try_fold(1usize, |n, &extent| n.checked_mul(extent.max(1)));
        match (elements, layout.checked_bytes()) {
            (Some(_), Some(bytes)) if bytes <= isize::MAX as usize => Ok(layout),
            _ => Err(Error::shape(format!(
                "the size of a {dtype} tensor of shape {shape:?} overflows"
            ))),
        }
    }

    fn checked_bytes(&self) -> Option<usize> {
        if self.is_empty() {
            return Some(0);
        }
        let blocks = self.shape[0] / self.dtype.block_len();
        let mut last = (blocks - 1).checked_mul(self.strides[0])?;
        for dim in 1..DIMS {
            last = last.checked_add((self.shape[dim] - 1).checked_mul(self.strides[dim])?)?;
        }
        last.checked_add(self.dtype.block_bytes())
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the extents, innermost first.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the byte strides, innermost first.
    pub fn strides(&self) -> [usize; DIMS] {
        self.strides
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of rows: the product of all extents but the first.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Returns whether some extent is zero.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Returns the bytes from the first element to the end of the last, including gaps. (ggml:
    /// `ggml_nbytes`.)
    pub fn bytes(&self) -> usize {
        self.checked_bytes().unwrap_or(0) // never None: checked at construction
    }

    /// Returns the bytes of one contiguous row.
    pub fn row_bytes(&self) -> usize {
        self.shape[0] / self.dtype.block_len() * self.dtype.block_bytes()
    }

    /// Returns the byte offset of row `(i1, i2, i3)`.
    #[inline]
    pub fn row_offset(&self, i1: usize, i2: usize, i3: usize) -> usize {
        i1 * self.strides[1] + i2 * self.strides[2] + i3 * self.strides[3]
    }

    /// Returns the indices `(i1, i2, i3)` of row number `row` of all [`rows`](Layout::rows).
    #[inline]
    pub fn row_index(&self, row: usize) -> [usize; 3] {
        let [_, n1, n2, _] = self.shape;
        [row % n1, row / n1 % n2, row / (n1 * n2)]
    }

    /// Returns whether memory has no gaps and elements are in order. Strides of dimensions with
    /// extent 1 do not matter.
    pub fn is_contiguous(&self) -> bool {
        self.contiguous_from(0)
    }

    /// Returns whether the elements of each row have no gaps. Rows may be anywhere.
    pub fn has_contiguous_rows(&self) -> bool {
        self.shape[0] == self.dtype.block_len() || self.strides[0] == self.dtype.block_bytes()
    }

    /// Returns whether only dimensions 0 to `dim` may have gaps between their slices, and the
    /// dimensions above have none. `contiguous_from(0)` is
    /// [`is_contiguous`](Layout::is_contiguous). With 1, rows may have padding between them. (ggml:
    /// `ggml_is_contiguous_n`.)
    pub fn contiguous_from(&self, dim: usize) -> bool {
        if self.is_empty() {
            return true;
        }
        let block = self.dtype.block_len();
        if self.shape[0] != block && self.strides[0] != self.dtype.block_bytes() {
            return false;
        }
        let mut expected = self.row_bytes();
        for d in 1..DIMS {
            if d > dim {
                if self.shape[d] != 1 && self.strides[d] != expected {
                    return false;
                }
                expected = expected.saturating_mul(self.shape[d]);
            } else {
                expected = self.strides[d].saturating_mul(self.shape[d]);
            }
        }
        true
    }

    /// Returns whether the first stride is larger than the second. (ggml: `ggml_is_transposed`.)
    pub fn is_transposed(&self) -> bool {
        self.strides[0] > self.strides[1]
    }

    /// Returns whether no two elements share memory, so that the tensor can be written to. May
    /// return false for layouts whose dimensions interleave without overlapping.
    pub fn has_distinct_elements(&self) -> bool {
        let mut dims = [0, 1, 2, 3].map(|dim| (self.strides[dim], self.shape[dim]));
        dims[0].1 /= self.dtype.block_len();
        dims.sort_unstable();
        // Extent in bytes of the dimensions so far.
        let mut reach = self.dtype.block_bytes();
        self.is_empty()
            || dims
                .into_iter()
                .filter(|(_, extent)| *extent > 1)
                .all(|(stride, extent)| {
                    let apart = stride >= reach;
                    reach += stride * (extent - 1); // within `bytes`
                    apart
                })
    }

    /// Returns whether an element of this layout at byte `at` of some memory may share bytes with
    /// an element of `other` at byte `other_at`. Exact if both have the same nested strides, such
    /// as windows into one tensor. Otherwise compares whole byte ranges.
    pub fn may_meet(&self, at: usize, other: &Layout, other_at: usize) -> bool {
        let end = |layout: &Layout, at: usize| at.saturating_add(layout.bytes());
        if self.is_empty() || other.is_empty() {
            return false;
        }
        if at >= end(other, other_at) || other_at >= end(self, at) {
            return false;
        }
        let block = self.dtype.block_bytes();
        let mut dims = [0, 1, 2, 3];
        dims.sort_unstable_by_key(|&dim| std::cmp::Reverse(self.strides[dim]));
        let same_grid = block == other.dtype.block_bytes()
            && (0..DIMS).all(|dim| {
                let both_one = self.blocks_along(dim) == 1 && other.blocks_along(dim) == 1;
                both_one || self.strides[dim] == other.strides[dim]
            });
        if !same_grid {
            return true;
        }
        // Elements overlap if their indices differ by some `k` in each dimension so that `sum(k *
        // stride)` is the distance of the starts, plus or minus a part of an element.
        let steps: Vec<Steps> = dims
            .into_iter()
            .map(|dim| Steps {
                stride: self.strides[dim] as i128,
                least: 1 - other.blocks_along(dim) as i128,
                most: self.blocks_along(dim) as i128 - 1,
            })
            .filter(|steps| steps.stride > 0 && steps.least < steps.most)
            .collect();
        let mut attempts = 256;
        Steps::reach(
            &steps,
            other_at as i128 - at as i128,
            block as i128,
            &mut attempts,
        )
    }

    /// Returns extent `dim` in elements, or in blocks along dimension 0 of a quantized type.
    fn blocks_along(&self, dim: usize) -> usize {
        match dim {
            0 => self.shape[0] / self.dtype.block_len(),
            _ => self.shape[dim],
        }
    }

    /// Returns whether a tensor of this shape, repeated a whole number of times along each
    /// dimension, fills `shape`.
    pub fn repeats_to(&self, shape: Shape) -> bool {
        if self.is_empty() {
            return shape.contains(&0);
        }
        shape
            .iter()
            .zip(self.shape)
            .all(|(whole, part)| whole % part == 0)
    }

    /// Returns the layout with the same element type and shape without gaps.
    ///
    /// # Errors
    /// [`Error::Shape`] if the size overflows, which is possible for a layout that overlaps itself.
    pub fn compact(&self) -> Result<Self> {
        Self::contiguous(self.dtype, self.shape)
    }

    /// Returns the layout in which source dimension `i` becomes dimension `axes[i]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `axes` is not a permutation of 0 to 3, or if a quantized type would no
    /// longer have whole blocks in its first dimension.
    pub fn permuted(&self, axes: [usize; DIMS]) -> Result<Self> {
        let mut seen = [false; DIMS];
        for axis in axes {
            if axis >= DIMS || std::mem::replace(&mut seen[axis], true) {
                return Err(Error::shape(format!(
                    "permute: {axes:?} is not a permutation of [0, 1, 2, 3]"
                )));
            }
        }
        if self.dtype.is_quantized() && axes[0] != 0 {
            return Err(Error::shape(format!(
                "permute: dimension 0 of a {} tensor holds blocks and cannot move",
                self.dtype
            )));
        }
        let (mut shape, mut strides) = ([0; DIMS], [0; DIMS]);
        for (from, to) in axes.into_iter().enumerate() {
            shape[to] = self.shape[from];
            strides[to] = self.strides[from];
        }
        Self::strided(self.dtype, shape, strides)
    }
}

/// Maximum difference between the indices of two elements along one dimension.
struct Steps {
    stride: i128,
    least: i128,
    most: i128,
}

impl Steps {
    /// Returns whether steps along all dimensions, the longest first, end less than `block` away
    /// from `distance`. Returns true if this takes too many attempts.
    fn reach(dims: &[Steps], distance: i128, block: i128, attempts: &mut usize) -> bool {
        let Some((dim, inner)) = dims.split_first() else {
            return distance.abs() < block;
        };
        let (mut backward, mut forward) = (block - 1, block - 1);
        for Steps {
            stride,
            least,
            most,
        } in inner
        {
            backward -= least * stride;
            forward += most * stride;
        }
        // Distance that the inner dimensions can compensate.
        let first = (distance - forward).div_euclid(dim.stride)
            + i128::from((distance - forward).rem_euclid(dim.stride) != 0);
        let last = (distance + backward).div_euclid(dim.stride);
        (first.max(dim.least)..=last.min(dim.most)).any(|k| {
            *attempts = attempts.saturating_sub(1);
            *attempts == 0 || Self::reach(inner, distance - k * dim.stride, block, attempts)
        })
    }
}

impl fmt::Display for Layout {
    /// Writes for example `f32 [64, 7]`, with strides unless they are contiguous.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims = self
            .shape
            .iter()
            .rposition(|&extent| extent != 1)
            .map_or(1, |last| last + 1);
        write!(f, "{} {:?}", self.dtype, &self.shape[..dims])?;
        if !self.is_contiguous() {
            write!(f, " strides {:?}", self.strides)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::strategy::Strategy;

    fn f32s(extents: &[usize]) -> Layout {
        Layout::contiguous(DType::F32, shape(extents).unwrap()).unwrap()
    }

    #[test]
    fn contiguous_strides_and_bytes() {
        let l = Layout::contiguous(DType::Q8_0, [64, 3, 2, 1]).unwrap();
        assert_eq!(l.strides(), [34, 68, 204, 408]);
        assert_eq!(l.bytes(), 408);
        assert!(l.is_contiguous());
        assert_eq!(f32s(&[0, 5]).bytes(), 0);
    }

    #[test]
    fn overflow_is_an_error_even_if_it_wraps_to_small_sizes() {
        let half = 1usize << 32;
        assert!(Layout::contiguous(DType::F32, [half, half, 1, 1]).is_err());
        assert!(Layout::contiguous(DType::F32, [half, half, 0, 1]).is_err());
        assert!(
            Layout::contiguous(DType::F32, [0, half, half, 1]).is_err(),
            "the number of rows overflows"
        );
        assert!(Layout::contiguous(DType::I8, [half, half / 2, 1, 1]).is_err());
        assert!(Layout::strided(DType::F32, [2, 2, 1, 1], [4, usize::MAX - 3, 0, 0]).is_err());
        assert!(Layout::contiguous(DType::Q4_0, [31, 1, 1, 1]).is_err());
    }

    #[test]
    fn permute_moves_dimensions_like_ggml() {
        let l = f32s(&[2, 3, 5, 7]).permuted([1, 2, 0, 3]).unwrap();
        assert_eq!(l.shape(), [5, 2, 3, 7]);
        assert_eq!(l.strides(), [24, 4, 8, 120]);
        assert!(!l.is_contiguous());
        assert!(f32s(&[2, 3]).permuted([0, 0, 2, 3]).is_err());
        assert!(
            Layout::contiguous(DType::Q4_0, [32, 32, 1, 1])
                .unwrap()
                .permuted([1, 0, 2, 3])
                .is_err()
        );
    }

    #[test]
    fn contiguity_by_dimension() {
        let padded = Layout::strided(DType::F32, [4, 3, 2, 1], [4, 32, 96, 192]).unwrap();
        assert!(!padded.is_contiguous());
        assert!(padded.contiguous_from(1));
        assert!(padded.has_contiguous_rows());
        let planes = Layout::strided(DType::F32, [4, 3, 2, 1], [4, 16, 96, 192]).unwrap();
        assert!(!planes.contiguous_from(1));
        assert!(planes.contiguous_from(2));
        // Strides of dimensions with extent 1 do not matter.
        assert!(
            Layout::strided(DType::F32, [4, 1, 1, 1], [4, 999, 3, 5])
                .unwrap()
                .is_contiguous()
        );
    }

    #[test]
    fn repeat_needs_whole_multiples() {
        assert!(f32s(&[2, 1]).repeats_to([4, 3, 1, 1]));
        assert!(!f32s(&[3]).repeats_to([4, 1, 1, 1]));
        assert!(!f32s(&[0]).repeats_to([4, 1, 1, 1]));
        assert!(f32s(&[0]).repeats_to([0, 1, 1, 1]));
    }

    #[test]
    fn display_is_short() {
        assert_eq!(f32s(&[64, 7]).to_string(), "f32 [64, 7]");
        assert_eq!(f32s(&[1]).to_string(), "f32 [1]");
        let t = f32s(&[2, 3]).permuted([1, 0, 2, 3]).unwrap();
        assert_eq!(t.to_string(), "f32 [3, 2] strides [8, 4, 24, 24]");
    }

    #[test]
    fn strides_must_be_multiples_of_the_element_size() {
        let strided = |dtype, shape, strides| Layout::strided(dtype, shape, strides);
        assert!(strided(DType::F32, [4, 2, 1, 1], [4, 18, 0, 0]).is_err());
        assert!(strided(DType::F16, [4, 2, 1, 1], [4, 18, 0, 0]).is_ok());
        assert!(strided(DType::Q8_0, [32, 2, 1, 1], [34, 36, 0, 0]).is_err());
        assert!(strided(DType::Q8_0, [32, 2, 1, 1], [34, 68, 0, 0]).is_ok());
    }

    #[test]
    fn deserialized_layouts_are_checked() {
        let json =
            |strides: &str| format!(r#"{{"dtype":"F32","shape":[4,2,1,1],"strides":{strides}}}"#);
        let good: Layout = serde_json::from_str(&json("[4,16,32,32]")).unwrap();
        assert_eq!(good, f32s(&[4, 2]));
        for bad in ["[4,18,32,32]", "[4,18446744073709551612,0,0]"] {
            assert!(serde_json::from_str::<Layout>(&json(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn overlapping_elements_are_detected() {
        assert!(
            f32s(&[2, 3, 5])
                .permuted([2, 0, 1, 3])
                .unwrap()
                .has_distinct_elements()
        );
        assert!(f32s(&[0, 3]).has_distinct_elements());
        let padded = Layout::strided(DType::Q8_0, [32, 3, 1, 1], [34, 68, 999, 3]).unwrap();
        assert!(padded.has_distinct_elements());
        for strides in [[4, 0, 0, 0], [4, 8, 0, 0], [8, 12, 0, 0]] {
            let l = Layout::strided(DType::F32, [4, 2, 1, 1], strides).unwrap();
            assert!(!l.has_distinct_elements(), "{strides:?}");
        }
    }

    #[test]
    fn contiguity_considers_row_gaps_but_not_unused_strides() {
        let gaps = Layout::strided(DType::F32, [4, 3, 1, 1], [8, 32, 96, 96]).unwrap();
        assert!(!gaps.contiguous_from(1) && !gaps.has_contiguous_rows());
        let column = Layout::strided(DType::F32, [1, 3, 1, 1], [8, 4, 12, 12]).unwrap();
        assert!(column.is_contiguous() && column.contiguous_from(1));
        assert!(!f32s(&[1, 5]).is_transposed(), "equal strides");
        assert!(
            f32s(&[2, 3])
                .permuted([1, 0, 2, 3])
                .unwrap()
                .is_transposed()
        );
    }

    #[test]
    fn layouts_on_different_grids_may_overlap_if_their_ranges_do() {
        let strided = |dtype, shape, strides| Layout::strided(dtype, shape, strides).unwrap();
        let meet = |a: &Layout, at: usize, b: &Layout, b_at: usize| {
            assert_eq!(a.may_meet(at, b, b_at), b.may_meet(b_at, a, at));
            a.may_meet(at, b, b_at)
        };
        let row = f32s(&[4]);
        assert!(!meet(&f32s(&[0, 5]), 4, &row, 0), "one is empty");
        let halves = Layout::contiguous(DType::F16, [4, 1, 1, 1]).unwrap();
        assert!(!meet(&row, 0, &halves, 16) && meet(&row, 0, &halves, 14));
        // Smaller elements at the same distances lie within the larger ones.
        let halves = strided(DType::F16, [4, 1, 1, 1], [4, 16, 16, 16]);
        assert!(meet(&row, 0, &halves, 2));
        // A stride that only one of the two uses.
        let single = strided(DType::F32, [4, 1, 1, 1], [4, 100, 100, 100]);
        assert!(meet(&single, 32, &f32s(&[4, 3]), 0));
        // A stride that neither uses.
        let left = strided(DType::F32, [2, 2, 1, 1], [4, 32, 64, 64]);
        let right = strided(DType::F32, [2, 2, 1, 1], [4, 32, 4000, 64]);
        assert!(!meet(&left, 0, &right, 8) && meet(&left, 0, &right, 4));
    }

    #[test]
    fn overlap_of_repeated_elements_and_blocks_is_exact() {
        let repeated = Layout::strided(DType::F32, [4, 2, 1, 1], [4, 0, 0, 0]).unwrap();
        assert!(repeated.may_meet(0, &repeated, 12) && !repeated.may_meet(0, &repeated, 16));
        // Two of four blocks of each row.
        let blocks = Layout::strided(DType::Q8_0, [64, 2, 1, 1], [34, 136, 272, 272]).unwrap();
        assert!(!blocks.may_meet(0, &blocks, 68) && blocks.may_meet(0, &blocks, 34));
    }

    proptest::proptest! {
        #[test]
        fn inverse_permutations_restore_layouts(
            n in [0usize..4, 0..4, 0..4, 0..4],
            axes in proptest::sample::subsequence(vec![0usize, 1, 2, 3], 4).prop_shuffle(),
        ) {
            let (l, axes) = (f32s(&n), [axes[0], axes[1], axes[2], axes[3]]);
            let mut inverse = [0; DIMS];
            for (from, to) in axes.into_iter().enumerate() {
                inverse[to] = from;
            }
            let turned = l.permuted(axes).unwrap();
            proptest::prop_assert_eq!(turned.permuted(inverse).unwrap(), l);
            proptest::prop_assert_eq!(
                (turned.bytes(), turned.elements()),
                (l.bytes(), l.elements())
            );
            proptest::prop_assert!(turned.has_distinct_elements());
            proptest::prop_assert_eq!(turned.compact().unwrap().bytes(), l.bytes());
        }

        #[test]
        fn arbitrary_strides_are_refused_or_safe(
            n in [0usize..1 << 40, 0..1 << 33, 0usize..9, 0..1 << 62],
            strides in proptest::array::uniform4(proptest::num::usize::ANY),
            dtype in proptest::sample::select(DType::all().collect::<Vec<_>>()),
        ) {
            for strides in [strides, strides.map(|s| s % 64 * dtype.block_bytes())] {
                if let Ok(l) = Layout::strided(dtype, n, strides) {
                    proptest::prop_assert!(l.bytes() <= isize::MAX as usize);
                    let _ = (
                        l.elements(),
                        l.rows(),
                        l.row_bytes(),
                        l.is_contiguous(),
                        l.contiguous_from(2),
                    );
                    let _ = (
                        l.has_distinct_elements(),
                        l.compact(),
                        l.permuted([0, 3, 1, 2]),
                    );
                    if !l.is_empty() {
                        let [a, b, c] = l.row_index(l.rows() - 1);
                        proptest::prop_assert!(l.row_offset(a, b, c) < l.bytes());
                    }
                }
            }
        }

        #[test]
        fn windows_overlap_exactly_if_they_share_a_byte(
            starts in [[0usize..5, 0..4, 0..3, 0..2], [0usize..5, 0..4, 0..3, 0..2]],
            extents in [[1usize..5, 1..4, 1..3, 1..2], [1usize..5, 1..4, 1..3, 1..2]],
            axes in proptest::sample::subsequence(vec![0usize, 1, 2, 3], 4).prop_shuffle(),
            dtype in proptest::sample::select(vec![DType::F32, DType::I8]),
        ) {
            let whole = Layout::contiguous(dtype, [8, 7, 5, 3]).unwrap();
            let axes = [axes[0], axes[1], axes[2], axes[3]];
            let windows = [0, 1].map(|i| {
                let window = Layout::strided(dtype, extents[i], whole.strides()).unwrap();
                let at: usize = (0..DIMS).map(|d| starts[i][d] * whole.strides()[d]).sum();
                (at, window.permuted(axes).unwrap())
            });
            let bytes = windows.map(|(at, l)| {
                let rows = (0..l.rows()).map(|row| l.row_index(row));
                let elements = rows.flat_map(|[a, b, c]| (0..l.shape()[0])
                    .map(move |i| at + l.row_offset(a, b, c) + i * l.strides()[0]));
                elements.collect::<std::collections::HashSet<_>>()
            });
            let [(a, la), (b, lb)] = windows;
            let common = !bytes[0].is_disjoint(&bytes[1]);
            proptest::prop_assert_eq!(la.may_meet(a, &lb, b), common);
            proptest::prop_assert_eq!(lb.may_meet(b, &la, a), common);
        }

        #[test]
        fn rows_enumerate_every_offset_once(n in [1usize..5, 1..5, 1..5, 1..5]) {
            let l = f32s(&n);
            let mut offsets: Vec<_> = (0..l.rows())
                .map(|row| { let [a, b, c] = l.row_index(row); l.row_offset(a, b, c) })
                .collect();
            proptest::prop_assert!(offsets.is_sorted());
            offsets.dedup();
            proptest::prop_assert_eq!(offsets.len(), l.rows());
            proptest::prop_assert_eq!(offsets.last().unwrap() + l.row_bytes(), l.bytes());
        }
    }
}
