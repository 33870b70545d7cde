//! Limit for tensors whose strides repeat memory.

use crate::error::{Error, Result};
use crate::layout::Layout;

/// Maximum bytes of a tensor that repeats a smaller buffer.
pub const MAX_REPEATED_BYTES: usize = 1 << 30;

/// Checks that a tensor described by a peer has no more elements than fit side by side in `buffer`
/// bytes or [`MAX_REPEATED_BYTES`].
///
/// With strides of 0, a few bytes represent up to 2⁶² elements, and a kernel visits each of them.
/// An extent of 0 makes a tensor empty, but kernels loop over its other extents, so it counts as 1
/// here.
///
/// # Errors
/// [`Error::InvalidArgument`] that names the tensor.
pub fn check_repeated(name: &str, layout: &Layout, buffer: usize) -> Result<()> {
    let [_, rows @ ..] = layout.shape();
    let row = layout.row_bytes().max(layout.dtype().block_bytes());
    let times = |bytes: usize, extent: usize| bytes.saturating_mul(extent.max(1));
    let dense = rows.into_iter().fold(row, times);
    // Packed buffers may be smaller than their tensors.
    if dense <= buffer.max(layout.bytes()).max(MAX_REPEATED_BYTES) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "'{name}' ({layout}) repeats its memory: its elements would take {dense} bytes, but its \
         buffer has {buffer}; views repeat at most {MAX_REPEATED_BYTES} bytes"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn is_allowed(shape: [usize; 4], strides: [usize; 4], buffer: usize) -> bool {
        let layout = Layout::strided(DType::F32, shape, strides).unwrap();
        check_repeated("t", &layout, buffer).is_ok()
    }

    #[test]
    fn repetition_is_limited_by_the_buffer_size() {
        let row = |rows| ([1024, rows, 1, 1], [4, 0, 0, 0]);
        let is_row_allowed = |rows, buffer| {
            let (shape, strides) = row(rows);
            is_allowed(shape, strides, buffer)
        };
        assert!(is_row_allowed(1 << 18, 4096));
        assert!(!is_row_allowed((1 << 18) + 1, 4096));
        assert!(is_row_allowed((1 << 18) + 1, (1 << 30) + 4096));
        assert!(!is_allowed([1, 1 << 25, 1 << 25, 1], [4, 0, 0, 0], 64));
        assert!(!is_allowed([1 << 50, 1, 1, 1], [0; 4], 64));
        // Without repetition, the buffer may be smaller, because it may be packed.
        let dense = Layout::contiguous(DType::F32, [1 << 20, 1 << 12, 1, 1]).unwrap();
        assert!(check_repeated("t", &dense, 64).is_ok());
    }

    #[test]
    fn empty_tensors_have_a_row_limit() {
        assert!(is_allowed([0, 1 << 20, 1, 1], [4, 0, 0, 0], 0));
        assert!(!is_allowed([0, 1 << 50, 1, 1], [4, 0, 0, 0], 0));
        assert!(!is_allowed([1 << 50, 0, 1, 1], [0; 4], 0));
    }
}
