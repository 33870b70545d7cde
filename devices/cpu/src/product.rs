//! What a matrix product is called with: rows of weights and columns of activations.

/// Rows of weights.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    /// First byte of the first row.
    pub weights: *const u8,
    /// Distance of rows in bytes.
    pub stride: usize,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub k: usize,
    /// Where the first row's product goes in each column's results.
    pub first: usize,
    /// Distance in bytes of the slabs of a column, if columns are in slabs.
    pub slabs: usize,
    /// Whether results should go past the caches, where the product can do that.
    pub past_caches: bool,
    /// How weights are read, where the product multiplies them as they come out of memory.
    pub reading: Reading,
    /// Memory for this thread alone, if the product needs such.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub scratch: *mut u8,
}

/// A column that all rows of a panel are multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct Column {
    /// The column, in the form that the product needs.
    pub x: *const u8,
    /// Where the products go: that of the panel's first row to `out + first`.
    pub out: *mut f32,
}

/// Multiplies rows with columns.
///
/// # Safety
/// All addresses must be valid for what they are said to hold, and the instruction set must be there.
pub(crate) type PanelFn = unsafe fn(&Panel, &[Column]);

/// How a product with few columns reads weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reading {
    /// How many bytes before they are needed they are asked for. A processor whose own prefetching is good is only disturbed by requests far
    /// ahead; others read half as much without.
    pub ahead: usize,
    /// How many streams they are read in, one among the other.
    pub streams: usize,
}

impl Reading {
    pub const DEFAULT: Self = Self::new(6144, 1);

    pub const fn new(ahead: usize, streams: usize) -> Self {
        Reading { ahead, streams }
    }
}
