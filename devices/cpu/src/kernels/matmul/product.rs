//! Selection of a node's product: the function, the form of its columns, and the access to rows of
//! weights.

use crate::activations::ActivationForm;
use crate::activations::int8_blocks::Int8Blocks;
use crate::detect::Isa;
use crate::operand::Operand;
#[cfg(target_arch = "x86_64")]
use crate::packed::bf16_amx;
use crate::packed::layout::PackedLayout;
use crate::packed::{self, PANEL, PackedProduct};
use crate::product::{AccessPattern, Column, Panel, PanelFn};
use crate::tune::{self, AccessPatterns};
use crate::unpacked::{self, float};
use samite_core::{DType, Layout, Node, Op};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Maximum number of columns that a task multiplies with a block of rows.
pub(crate) const COLUMNS: usize = 512;

/// Number of rows that are decoded at a time for types without a product of their own.
const DECODED_ROWS: usize = 4;

/// Minimum number of rows for which columns are quantized. For fewer, decoding the rows costs less
/// and is exact.
const WORTH_QUANTIZING: usize = 8;

/// Maximum length of rows of floats that are packed for a single use.
const SHORT: usize = 512;

/// Minimum number of columns for which rows are packed for a single use.
const WORTH_PACKING: usize = 32;

/// Minimum number of columns for which scattered columns are gathered.
const WORTH_GATHERING: usize = 16;

/// Bytes of columns that are gathered at a time, unless these are too few columns.
const GATHERED_BYTES: usize = 2 << 20;

/// Number of rows of a task for which columns are gathered, so that gathering takes little of its
/// time.
const GATHERED_ROWS: usize = 16 * PANEL;

/// Bytes of weights that a task multiplies. They stay in the L2 cache while columns stream past.
const TASK_BYTES: usize = 128 << 10;

/// Maximum number of columns that are multiplied with weights while these are read from memory.
const GEMV_COLUMNS: usize = 8;

/// Maximum number of rows of a task whose panels are multiplied one by one: enough to read them in
/// several streams.
const PACKED_ROWS: usize = 16 * PANEL;

/// Access to rows for the function that multiplies them.
#[derive(Clone, Copy)]
enum Rows {
    /// In place.
    Unpacked,
    /// In place, in panels.
    Packed {
        layout: PackedLayout,
        /// True if results exceed the caches.
        past_caches: bool,
        /// Access pattern for weights in memory.
        readings: AccessPatterns,
        /// Maximum number of columns that are gathered at a time if they are scattered, as those of
        /// an expert are. Otherwise 0.
        most_gathered: usize,
    },
    /// Decoded to F32, a few at a time.
    Decoded,
    /// Decoded and packed, a panel at a time. Short rows would otherwise need too many sums across
    /// registers.
    PackedOnce(PackedLayout),
}

/// Product of rows of one type with columns.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    function: PanelFn,
    pub form: ActivationForm,
    rows: Rows,
}

impl Product {
    /// Returns the rows and columns of a task for matrices of `rows` rows of `row_bytes` bytes.
    /// Data that a task reuses stays in the L2 cache. Rows are a multiple of those of every tile,
    /// columns at most [`COLUMNS`].
    pub fn task(&self, rows: usize, row_bytes: usize, threads: usize) -> [usize; 2] {
        let in_cache = TASK_BYTES / row_bytes.max(1);
        let (most, columns) = match self.form {
            #[cfg(target_arch = "x86_64")]
            ActivationForm::Bf16Slabs(_) => (bf16_amx::ROWS, COLUMNS),
            ActivationForm::F32 | ActivationForm::Int8Blocks(_) => {
                return [in_cache.clamp(32, 256) & !31, 128];
            }
            // Panel by panel, with all columns.
            ActivationForm::Int8Slabs(_) => (PACKED_ROWS, COLUMNS),
            #[cfg(target_arch = "x86_64")]
            ActivationForm::Int16Slabs(_) => (PACKED_ROWS, COLUMNS),
            // Products process the best number of columns at a time.
            _ => (in_cache.clamp(PANEL, 256), COLUMNS),
        };
        // Several tasks for each thread, so that all threads end at about the same time.
        let parts = if threads == 1 { 1 } else { 4 * threads };
        let share = rows.div_ceil(parts).next_multiple_of(PANEL);
        [share.clamp(PANEL, most / PANEL * PANEL), columns]
    }

    /// Returns the best product for source 0 of a node.
    pub fn for_node(node: Node<'_>, isa: Isa) -> Option<Self> {
        let weights = node.source_layout(0)?;
        let [k, rows, ..] = weights.shape();
        let x = node.source_layout(1)?;
        let (columns, each, choices) = match node.op() {
            // The third source has the selected experts.
            Op::MulMatId { .. } => {
                let choices = node.source_layout(2)?.elements();
                let each = choices / weights.shape()[2].max(1);
                (x.rows(), each, choices)
            }
            _ => (x.rows(), x.shape()[1], 0),
        };
        if packed::is_packed(node, 0) {
            let PackedProduct { function, form } =
                packed::product(isa, weights.dtype(), k, columns, each)?;
            let bytes = weights.row_bytes().saturating_mul(rows);
            let past_caches = packed::past_caches(bytes, rows, each);
            // Measuring is not worthwhile for data that stays in caches or that many columns share.
            let readings = match form {
                ActivationForm::Int8Slabs(_) if past_caches && each <= GEMV_COLUMNS => {
                    tune::choose(isa)
                }
                _ => AccessPatterns::DEFAULT,
            };
            let most_gathered = form.slabs().map_or(0, |slabs| {
                let most = GATHERED_BYTES / slabs.column_bytes().max(1);
                choices.min(most.clamp(4 * WORTH_GATHERING, COLUMNS))
            });
            return Some(Product {
                function,
                form,
                rows: Rows::Packed {
                    layout: PackedLayout::new(weights)?,
                    past_caches,
                    readings,
                    most_gathered,
                },
            });
        }
        Self::new(isa, weights.dtype(), [k, rows, each])
    }

    /// Returns the best product for `rows` rows of `k` elements of `dtype` with about `each`
    /// columns.
    fn new(isa: Isa, dtype: DType, [k, rows, each]: [usize; 3]) -> Option<Self> {
        let floats = float::product(isa, dtype);
        if floats.is_some() && k <= SHORT && rows >= PANEL / 2 && each >= WORTH_PACKING {
            let panel = Layout::contiguous(DType::F32, [k, PANEL, 1, 1]).ok()?;
            return Some(Product {
                function: packed::float_product(isa)?,
                form: ActivationForm::F32,
                rows: Rows::PackedOnce(PackedLayout::new(&panel)?),
            });
        }
        if let Some(function) = floats {
            return Some(Product {
                function,
                form: ActivationForm::F32,
                rows: Rows::Unpacked,
            });
        }
        if rows >= WORTH_QUANTIZING
            && let Some(function) = unpacked::product(isa, dtype)
        {
            return Some(Product {
                function,
                form: ActivationForm::Int8Blocks(Int8Blocks::new(k)?),
                rows: Rows::Unpacked,
            });
        }
        Some(Product {
            function: float::product(isa, DType::F32)?,
            form: ActivationForm::F32,
            rows: Rows::Decoded,
        })
    }

    /// Returns whether results bypass the caches and rows are multiplied panel by panel.
    pub fn goes_by_panels(&self) -> bool {
        let by_panels = match self.form {
            ActivationForm::Int8Slabs(_) => true,
            #[cfg(target_arch = "x86_64")]
            ActivationForm::Int16Slabs(_) => true,
            _ => false,
        };
        by_panels && matches!(self.rows, Rows::Packed { past_caches, .. } if past_caches)
    }

    /// Returns the same product with results that stay in the caches.
    pub fn within_caches(mut self) -> Self {
        if let Rows::Packed { past_caches, .. } = &mut self.rows {
            *past_caches = false;
        }
        self
    }

    /// Returns whether this many columns of an expert are gathered first.
    fn gathers(&self, columns: usize) -> bool {
        matches!(self.rows, Rows::Packed { most_gathered,
            .. } if columns.min(most_gathered) >= WORTH_GATHERING)
    }

    /// Returns the rows and columns of a task, like [`task`](Product::task), for experts with about
    /// `each` columns.
    pub fn expert_task(&self, weights: &Layout, each: usize, threads: usize) -> [usize; 2] {
        let rows = weights.shape()[1];
        let [task, columns] = self.task(rows, weights.row_bytes(), threads);
        if self.gathers(each) {
            [task.max(GATHERED_ROWS), columns]
        } else {
            [task, columns]
        }
    }

    /// Returns the bytes of scratch memory for each worker.
    pub fn worker_bytes(&self, k: usize) -> Option<usize> {
        match self.rows {
            Rows::Unpacked => Some(packed::worker_bytes(self.form)),
            Rows::Packed { most_gathered, .. } => {
                let gathered = match self.form.slabs() {
                    Some(slabs) if self.gathers(most_gathered) => {
                        slabs.column_bytes().checked_mul(most_gathered)?
                    }
                    _ => 0,
                };
                packed::worker_bytes(self.form).checked_add(gathered)
            }
            Rows::Decoded => k
                .checked_mul(4 * DECODED_ROWS)?
                .checked_next_multiple_of(64),
            // A panel, and its rows before packing.
            Rows::PackedOnce(layout) => layout.panel_bytes.checked_mul(2),
        }
    }

    /// Multiplies rows of a matrix of `weights` with columns. Packed rows start at a panel.
    ///
    /// # Safety
    /// See [`Operand`] and [`PanelFn`]. `scratch` must have [`worker_bytes`](Product::worker_bytes)
    /// that only the caller uses.
    pub unsafe fn run(
        &self,
        weights: &Operand,
        matrix: [usize; 2],
        rows: Range<usize>,
        columns: &[Column],
        scratch: *mut u8,
    ) {
        let k = weights.shape()[0];
        let [i2, i3] = matrix;
        let (first, stride, past_caches, reading) = match &self.rows {
            Rows::Packed {
                layout,
                past_caches,
                readings,
                ..
            } => {
                let at = layout.panel_of(i2 + weights.shape()[2] * i3, rows.start);
                let first = weights.base().wrapping_add(at);
                (
                    first,
                    layout.panel_bytes,
                    *past_caches,
                    readings.for_columns(columns.len()),
                )
            }
            _ => {
                let first = weights.at([rows.start, i2, i3]);
                (first, weights.strides()[1], false, AccessPattern::DEFAULT)
            }
        };
        let slabs = self.form.slabs();
        let mut panel = Panel {
            weights: first,
            stride,
            rows: rows.len(),
            k,
            first: rows.start,
            slabs: slabs.map_or(0, |slabs| slabs.distance),
            past_caches,
            reading,
            scratch,
        };
        // SAFETY: the rows exist in this matrix, and columns are in the product's form. Only the
        // caller uses `scratch`, and `worker_bytes` counts its parts: gathered columns after the
        // product's own memory, `DECODED_ROWS` decoded rows, or a panel for decoded rows, followed
        // by a panel. The function was chosen for a detected `isa`.
        unsafe {
            let (at_a_time, layout) = match self.rows {
                Rows::Unpacked => return (self.function)(&panel, columns),
                Rows::Packed { most_gathered, .. } => {
                    let worth = self.gathers(columns.len()) && rows.len() > PANEL;
                    match slabs.filter(|_| worth) {
                        Some(slabs) => {
                            let to = scratch.add(packed::worker_bytes(self.form));
                            let mut list = ColumnList::new();
                            for columns in columns.chunks(most_gathered) {
                                panel.slabs = slabs.gather(columns, to);
                                let columns = list.fill(columns.len(), |c| Column {
                                    x: to.wrapping_add(c * slabs.slab_bytes),
                                    ..columns[c]
                                });
                                (self.function)(&panel, columns);
                            }
                        }
                        None => (self.function)(&panel, columns),
                    }
                    if past_caches {
                        packed::all_stored();
                    }
                    return;
                }
                Rows::Decoded => (DECODED_ROWS, None),
                Rows::PackedOnce(layout) => (PANEL, Some(layout)),
            };
            let decoded = std::slice::from_raw_parts_mut(scratch.cast::<f32>(), at_a_time * k);
            for first in rows.clone().step_by(at_a_time) {
                let count = at_a_time.min(rows.end - first);
                for (i, row) in decoded.chunks_exact_mut(k.max(1)).take(count).enumerate() {
                    weights.load([first + i, i2, i3], 0, row);
                }
                let mut panel = Panel {
                    weights: scratch,
                    stride: k * 4,
                    rows: count,
                    first,
                    ..panel
                };
                if let Some(layout) = layout {
                    let to = scratch.add(layout.panel_bytes);
                    let to = std::slice::from_raw_parts_mut(to, layout.panel_bytes);
                    layout.pack(bytemuck::cast_slice(&decoded[..count * k]), to);
                    panel.weights = to.as_ptr();
                }
                (self.function)(&panel, columns);
            }
        }
    }
}

/// Room for the columns of a task. There are many tasks, so only the used part is written.
pub(crate) struct ColumnList([MaybeUninit<Column>; COLUMNS]);

impl ColumnList {
    pub fn new() -> Self {
        ColumnList([const { MaybeUninit::uninit() }; COLUMNS])
    }

    /// Writes `count` columns, at most [`COLUMNS`], and returns them.
    #[inline]
    pub fn fill(&mut self, count: usize, column: impl Fn(usize) -> Column) -> &[Column] {
        let places = &mut self.0[..count];
        for (c, place) in places.iter_mut().enumerate() {
            place.write(column(c));
        }
        // SAFETY: all of them were written.
        unsafe { places.assume_init_ref() }
    }
}
