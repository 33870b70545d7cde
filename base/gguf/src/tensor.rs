//! Descriptions of the tensors in a file.

use crate::error::{Error, ErrorKind, Result, quoted};
use crate::index::sorted_index;
use samite_core::DType;

/// Maximum number of dimensions of a tensor.
pub const MAX_DIMS: usize = 4;

/// Type, shape and data location of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The unique name, such as `blk.0.attn_q.weight`.
    pub name: Box<str>,
    /// The type of the elements.
    pub dtype: DType,
    /// The extents, innermost first. 1 from `n_dims` on, and never 0.
    pub shape: [usize; MAX_DIMS],
    /// Number of extents in the file: 1 to 4.
    pub n_dims: usize,
    /// Start of the data, in bytes from the start of the file (not from the start of its data
    /// section).
    pub offset: u64,
    /// The size of the data in bytes.
    pub size: usize,
    /// Index of the file that holds the data in [`crate::GgufFile::parts`]. 0 if the model is not
    /// split.
    pub file: usize,
}

impl TensorInfo {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the end of the data in its file.
    pub(crate) fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.size as u64)
    }
}

/// Returns the size in bytes of a contiguous tensor. `Err` contains the invalid dimension, if it is
/// one, and the reason.
pub(crate) fn tensor_bytes(dtype: DType, dims: &[u64]) -> Result<usize, (Option<usize>, String)> {
    for (dimension, &extent) in dims.iter().enumerate() {
        if extent == 0 {
            return Err((
                Some(dimension),
                "is 0: tensors without elements are not allowed".into(),
            ));
        }
        if i64::try_from(extent).is_err() {
            return Err((
                Some(dimension),
                format!("is {extent}, more than a signed 64-bit number holds"),
            ));
        }
    }
    let overflows = || {
        (
            None,
            format!("the size of shape {dims:?} in {dtype} overflows"),
        )
    };
    // Every product must fit a signed number, in which ggml counts elements and bytes.
    let product = |factors: &[u64]| {
        let product = factors
            .iter()
            .try_fold(1u64, |product, &factor| product.checked_mul(factor))?;
        usize::try_from(product)
            .ok()
            .filter(|&product| isize::try_from(product).is_ok())
    };
    product(dims).ok_or_else(overflows)?;
    let [row, rest @ ..] = dims else {
        return Err((None, "has no dimensions".into()));
    };
    let (row, rows) = (
        usize::try_from(*row).map_err(|_| overflows())?,
        product(rest).ok_or_else(overflows)?,
    );
    if !row.is_multiple_of(dtype.block_len()) {
        let block = dtype.block_len();
        return Err((
            Some(0),
            format!("is {row}, not a whole number of {dtype} blocks of {block} elements"),
        ));
    }
    let row_bytes = dtype.row_bytes(row).map_err(|_| overflows())?;
    product(&[row_bytes as u64, rows as u64]).ok_or_else(overflows)
}

/// The tensors of a file or of all parts of a split model, in file order, with lookup by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    list: Vec<TensorInfo>,
    /// Indices of `list`, sorted by name.
    by_name: Vec<u32>,
}

impl Tensors {
    /// # Errors
    /// The index and the name of the first tensor with a repeated name.
    pub(crate) fn new(mut list: Vec<TensorInfo>) -> Result<Self, (usize, Box<str>)> {
        let by_name = sorted_index(&list, |info| &info.name)
            .map_err(|repeated| (repeated, std::mem::take(&mut list[repeated].name)))?;
        Ok(Tensors { list, by_name })
    }

    pub(crate) fn into_list(self) -> Vec<TensorInfo> {
        self.list
    }

    /// Returns the tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        let rank = self
            .by_name
            .binary_search_by(|&index| (*self.list[index as usize].name).cmp(name));
        rank.ok()
            .map(|rank| &self.list[self.by_name[rank] as usize])
    }

    /// Returns the tensor called `name`.
    ///
    /// # Errors
    /// [`ErrorKind::MissingTensor`] if it does not exist.
    pub fn require(&self, name: &str) -> Result<&TensorInfo> {
        self.get(name).ok_or_else(|| {
            let field = format!("tensor {}", quoted(name));
            Error::new(
                ErrorKind::MissingTensor,
                field,
                "is missing, but the model needs it",
            )
        })
    }

    /// Returns the data of all tensors in bytes, without padding.
    pub fn total_bytes(&self) -> u64 {
        self.list.iter().map(|info| info.size as u64).sum()
    }

    /// Returns the number of elements of all tensors: the number of parameters.
    pub fn total_elements(&self) -> u64 {
        self.list.iter().map(|info| info.elements() as u64).sum()
    }
}

impl std::ops::Deref for Tensors {
    type Target = [TensorInfo];

    fn deref(&self) -> &[TensorInfo] {
        &self.list
    }
}

impl<'a> IntoIterator for &'a Tensors {
    type Item = &'a TensorInfo;
    type IntoIter = std::slice::Iter<'a, TensorInfo>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact_or_refused() {
        assert_eq!(tensor_bytes(DType::F32, &[3, 2]), Ok(24));
        assert_eq!(tensor_bytes(DType::Q4_K, &[512, 3, 2]), Ok(144 * 2 * 6));
        assert_eq!(tensor_bytes(DType::Q4_0, &[33, 2]).unwrap_err().0, Some(0));
        assert_eq!(tensor_bytes(DType::F32, &[4, 0]).unwrap_err().0, Some(1));
        assert_eq!(
            tensor_bytes(DType::F32, &[4, u64::MAX]).unwrap_err().0,
            Some(1)
        );
        assert!(tensor_bytes(DType::F32, &[]).is_err());
        // Products that wrap to zero or to something small, and byte counts that wrap while element
        // counts fit.
        for dims in [
            &[1 << 32, 1 << 32][..],
            &[1 << 33, (1 << 31) + 1],
            &[1 << 62, 1, 4],
            &[1 << 61],
            &[1 << 62],
        ] {
            assert!(
                tensor_bytes(DType::F32, dims)
                    .unwrap_err()
                    .1
                    .contains("overflows"),
                "{dims:?}"
            );
        }
    }
}
