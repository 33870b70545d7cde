//! Arguments of a matrix product: rows of weights and columns of activations.

/// Rows of weights.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    /// First byte of the first row.
    pub weights: *const u8,
    /// Distance of rows in bytes.
    pub stride: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of elements of a row.
    pub k: usize,
    /// Index of the first row's product in each column's results.
    pub first: usize,
    /// Distance in bytes of the slabs of a column, if columns are in slabs.
    pub slabs: usize,
    /// True if results should bypass the caches, if the product supports that.
    pub past_caches: bool,
    /// Access pattern for products that multiply weights directly after loading.
    pub reading: AccessPattern,
    /// Memory that only this thread uses, if the product needs it.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub scratch: *mut u8,
}

/// A column that all rows of a panel are multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct Column {
    /// The column, in the form that the product needs.
    pub x: *const u8,
    /// Results. The product of the panel's first row goes to `out + first`.
    pub out: *mut f32,
}

/// Multiplies rows with columns.
///
/// # Safety
/// All addresses must be valid for the stated data, and the instruction set must be available.
pub(crate) type PanelFn = unsafe fn(&Panel, &[Column]);

/// Access pattern of a product with few columns for weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AccessPattern {
    /// Prefetch distance in bytes. On processors with good hardware prefetchers, requests far ahead
    /// only interfere. Others read half as fast without them.
    pub ahead: usize,
    /// Number of interleaved streams.
    pub streams: usize,
}

impl AccessPattern {
    pub const DEFAULT: Self = Self::new(6144, 1);

    pub const fn new(ahead: usize, streams: usize) -> Self {
        AccessPattern { ahead, streams }
    }
}
