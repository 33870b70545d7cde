//! The grids of the IQ1, IQ2 and IQ3 types in device memory. All grids share one buffer, which is
//! bound after the operands of kernels that read one of these types.
//!
//! The grids are a buffer rather than constants of the kernels. With constants, each driver's
//! compiler would decide where to place tables of up to 4,096 words that are indexed at run time.

use crate::gpu::Opened;
use samite_core::{DType, Result};
use samite_quant::grids::all_grids;

/// Returns the index of the first word of a type's grid in the buffer, or `None` for types without
/// a grid.
pub fn first_word(dtype: DType) -> Option<usize> {
    let all = all_grids();
    let at = all.iter().position(|(types, _)| types.contains(&dtype))?;
    let before: usize = all[..at].iter().map(|(_, bytes)| bytes.len()).sum();
    Some(before / 4)
}

/// Creates and fills the buffer.
///
/// # Errors
/// Returns an error if the driver fails.
pub fn upload(opened: &Opened) -> Result<wgpu::Buffer> {
    let bytes: Vec<u8> = all_grids()
        .iter()
        .flat_map(|(_, bytes)| *bytes)
        .copied()
        .collect();
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
    let buffer = opened.create("the grids of IQ types", bytes.len() as u64, usage)?;
    opened.write(&buffer, 0, &bytes)?;
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codebook_grids_fit_into_the_smallest_binding() {
        // `binding=64KiB` is the smallest value that users can set.
        let bytes: usize = all_grids().iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(bytes <= 64 << 10, "{bytes}");
        assert_eq!(first_word(DType::IQ2_XXS), Some(0));
        assert_eq!(first_word(DType::IQ2_XS), Some(2 * 256));
        assert_eq!(first_word(DType::IQ1_S), first_word(DType::IQ1_M));
        assert_eq!(first_word(DType::IQ4_XS), None);
    }
}
