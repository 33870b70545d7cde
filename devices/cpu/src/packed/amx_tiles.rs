//! AMX tiles: their sizes, which are per-thread state, and columns that can be loaded as a tile.

use crate::product::Column;
use std::arch::asm;
use std::mem::MaybeUninit;

/// Number of columns of a tile.
pub(crate) const TILE: usize = 16;

/// Returns whether columns make a whole tile, at equal distances in memory.
#[inline(always)]
pub(crate) fn are_regular(tile: &[Column], stride: usize) -> bool {
    tile.len() == TILE
        && tile
            .windows(2)
            .all(|pair| pair[1].x == pair[0].x.wrapping_add(stride))
}

/// Tile sizes, in the processor's format. All zero if tiles are not in use.
#[repr(C, align(64))]
pub(crate) struct Configuration {
    pub palette: u8,
    pub start_row: u8,
    pub reserved: [u8; 14],
    pub row_bytes: [u16; 16],
    pub rows: [u8; 16],
}

impl Configuration {
    /// Configures tiles 0 to 3 for products, 4 and 5 for columns, 6 and 7 for weights, of groups of
    /// `group` elements.
    pub fn new(group: usize) -> Self {
        let (columns, weights) = (group as u16, group as u8 / 4);
        Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [
                64, 64, 64, 64, columns, columns, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0,
            ],
            rows: [
                16, 16, 16, 16, 16, 16, weights, weights, 0, 0, 0, 0, 0, 0, 0, 0,
            ],
        }
    }

    /// Configures whole tiles: 16 rows of 64 bytes.
    pub fn whole() -> Self {
        Self::new(64)
    }

    /// Returns this thread's configuration.
    ///
    /// # Safety
    /// AMX must be available and permitted.
    #[inline(always)]
    pub unsafe fn current() -> Self {
        let mut configuration = MaybeUninit::<Self>::uninit();
        // SAFETY: the caller has AMX. The instruction writes all 64 bytes of the configuration,
        // which has that size, and any bytes are valid in it.
        unsafe {
            asm!("sttilecfg [{}]", in(reg) configuration.as_mut_ptr(),
                options(nostack, preserves_flags));
            configuration.assume_init()
        }
    }

    /// Sets this thread's configuration.
    ///
    /// # Safety
    /// AMX must be available and permitted, and the processor must accept the configuration.
    #[inline(always)]
    pub unsafe fn set(&self) {
        // SAFETY: the caller has AMX, and the processor accepts the configuration. The instruction
        // reads the 64 bytes of `self`.
        unsafe {
            if self.palette == 0 {
                // The system need not save unused tiles.
                asm!("tilerelease", options(nostack, preserves_flags, nomem));
            } else {
                asm!("ldtilecfg [{}]", in(reg) &raw const *self,
                    options(nostack, preserves_flags, readonly));
            }
        }
    }
}
