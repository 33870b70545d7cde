//! The grids of the IQ1, IQ2 and IQ3 types, which kernels read from one device buffer.
//!
//! The grids are memory rather than constants of the kernels: each module would have its own copy,
//! and the driver would decide where to place tables that are indexed at run time.

use samite_quant::grids::all_grids;

/// Returns the content of the buffer that every kernel gets as `tables`: the coordinates of all
/// points, one byte each. `kernels/blocks.h` has the same offsets.
///
/// | byte | grid | points |
/// |---|---|---|
/// | 0 | `IQ2_XXS` | 256 of 8 |
/// | 2,048 | `IQ2_XS` | 512 of 8 |
/// | 6,144 | `IQ2_S` | 1,024 of 8 |
/// | 14,336 | `IQ3_XXS` | 256 of 4 |
/// | 15,360 | `IQ3_S` | 512 of 4 |
/// | 17,408 | `IQ1_S`, `IQ1_M` | 2,048 of 8 |
pub fn tables() -> Vec<u8> {
    all_grids().map(|(_, points)| points).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_tables_agree_on_offsets() {
        let header = include_str!("../kernels/blocks.h");
        let names = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1"];
        let mut offset = 0;
        for (name, (_, points)) in names.into_iter().zip(all_grids()) {
            let line = format!("#define GRID_{name} {offset}\n");
            assert!(header.contains(&line), "{line}");
            offset += points.len();
        }
        assert_eq!(tables().len(), offset);
    }
}
