//! Matrix products.
//!
//! Columns of source 1 are brought into the form that the product needs once (packed F32, or rounded to fewer bits), in a
//! first phase; a second phase multiplies blocks of weight rows with blocks of columns.

use super::columns::Columns;
use super::glu;
use crate::activations::ActivationForm;
use crate::activations::int8_blocks::Int8Blocks;
use crate::detect::Isa;
use crate::kernel::InputSource;
use crate::kernel::{KernelContext, Phase, Scratch};
use crate::operand::Operand;
use crate::packed::PANEL;
#[cfg(target_arch = "x86_64")]
use crate::packed::bf16_amx;
use crate::packed::layout::PackedLayout;
use crate::packed::{self, PackedProduct};
use crate::product::{Column, Panel, PanelFn};
use crate::unpacked::{self, float};

use crate::kernel::{Kernel, Reason, decodable, dense_rows};
use crate::product::Reading;
use crate::tune::{self, Readings};
use samite_core::{DType, Error, Layout, Node, Op, Result};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Most columns that a task multiplies with a block of rows.
pub(crate) const COLUMNS: usize = 512;

/// Rows that are decoded at a time where a type has no product of its own.
const DECODED_ROWS: usize = 4;

/// Rows from which on it pays to quantize columns: for fewer, decoding the rows costs less and is exact.
const WORTH_QUANTIZING: usize = 8;

/// Longest rows of floats that are packed to be used once.
const SHORT: usize = 512;

/// Columns from which on it pays to pack rows to be used once.
const WORTH_PACKING: usize = 32;

/// Columns from which on it pays to gather those that lie here and there.
const WORTH_GATHERING: usize = 16;

/// Bytes of columns that are gathered at a time, if these are not too few.
const GATHERED_BYTES: usize = 2 << 20;

/// Rows of a task for which columns are gathered, so that gathering takes little of its time.
const GATHERED_ROWS: usize = 16 * PANEL;

/// Bytes of weights that a task multiplies: they stay in the second-level cache while columns pass by.
const TASK_BYTES: usize = 128 << 10;

/// Most columns that are multiplied with weights as they come out of memory.
const GEMV_COLUMNS: usize = 8;

/// Most rows of a task whose panels are multiplied one by one: enough to read them in several streams.
const PACKED_ROWS: usize = 16 * PANEL;

/// How rows come to the function that multiplies them.
#[derive(Clone, Copy)]
enum Rows {
    /// As they lie.
    Unpacked,
    /// As they lie, in panels.
    Packed {
        layout: PackedLayout,
        /// Whether results go past the caches.
        past_caches: bool,
        /// How weights are read from memory.
        readings: Readings,
        /// Most columns that are gathered at a time, if they lie here and there, as those of an expert do; 0 otherwise.
        most_gathered: usize,
    },
    /// Decoded to F32, a few at a time.
    Decoded,
    /// Decoded and packed, a panel at a time: short rows would have to be summed across registers all the time.
    PackedOnce(PackedLayout),
}

/// How rows of one type are multiplied with columns.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    function: PanelFn,
    pub form: ActivationForm,
    rows: Rows,
}

impl Product {
    /// Rows and columns of a task for matrices of `rows` rows of so many bytes. What a task uses again stays in the
    /// second-level cache. Rows are a multiple of those of every tile, columns at most [`COLUMNS`].
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
            // Products take as many columns at a time as pays.
            _ => (in_cache.clamp(PANEL, 256), COLUMNS),
        };
        // Several tasks for each thread, so that all end at about the same time.
        let parts = if threads == 1 { 1 } else { 4 * threads };
        let share = rows.div_ceil(parts).next_multiple_of(PANEL);
        [share.clamp(PANEL, most / PANEL * PANEL), columns]
    }

    /// The best product for source 0 of a node.
    pub fn of(node: Node<'_>, isa: Isa) -> Option<Self> {
        let weights = node.source_layout(0)?;
        let [k, rows, ..] = weights.shape();
        let x = node.source_layout(1)?;
        let (columns, each, choices) = match node.op() {
            // The third source has the chosen experts.
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
            // What stays in caches is not worth measuring, nor is what many columns share.
            let readings = match form {
                ActivationForm::Int8Slabs(_) if past_caches && each <= GEMV_COLUMNS => {
                    tune::choose(isa)
                }
                _ => Readings::DEFAULT,
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

    /// The best product for `rows` rows of `k` elements of `dtype` with about `each` columns.
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

    /// Whether results go past the caches and rows are multiplied panel by panel.
    pub fn goes_by_panels(&self) -> bool {
        let by_panels = match self.form {
            ActivationForm::Int8Slabs(_) => true,
            #[cfg(target_arch = "x86_64")]
            ActivationForm::Int16Slabs(_) => true,
            _ => false,
        };
        by_panels && matches!(self.rows, Rows::Packed { past_caches, .. } if past_caches)
    }

    /// The same for results that do not go past the caches.
    fn within_caches(mut self) -> Self {
        if let Rows::Packed { past_caches, .. } = &mut self.rows {
            *past_caches = false;
        }
        self
    }

    /// Whether so many columns of an expert are gathered first.
    fn gathers(&self, columns: usize) -> bool {
        matches!(self.rows, Rows::Packed { most_gathered, .. } if columns.min(most_gathered) >= WORTH_GATHERING)
    }

    /// Rows and columns of a task, as [`task`](Product::task), for experts with about `each` columns.
    pub fn expert_task(&self, weights: &Layout, each: usize, threads: usize) -> [usize; 2] {
        let rows = weights.shape()[1];
        let [task, columns] = self.task(rows, weights.row_bytes(), threads);
        if self.gathers(each) {
            [task.max(GATHERED_ROWS), columns]
        } else {
            [task, columns]
        }
    }

    /// Bytes of scratch memory for each worker.
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
            // A panel, and its rows before they are packed.
            Rows::PackedOnce(layout) => layout.panel_bytes.checked_mul(2),
        }
    }

    /// Multiplies rows of a matrix of `weights` with columns. Packed rows begin at a panel.
    ///
    /// # Safety
    /// See [`Operand`] and [`PanelFn`]; `scratch` has [`worker_bytes`](Product::worker_bytes) for the caller alone.
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
                    readings.of(columns.len()),
                )
            }
            _ => {
                let first = weights.at([rows.start, i2, i3]);
                (first, weights.strides()[1], false, Reading::DEFAULT)
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
        // SAFETY: the caller's contract.
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

/// Room for the columns of a task. Tasks are many, so only what is used is written.
pub(crate) struct ColumnList([MaybeUninit<Column>; COLUMNS]);

impl ColumnList {
    pub fn new() -> Self {
        ColumnList([const { MaybeUninit::uninit() }; COLUMNS])
    }

    /// `count` columns, at most [`COLUMNS`].
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

/// What a product needs of the scratch memory.
struct Plan {
    product: Product,
    columns: usize,
    worker: usize,
    total: usize,
}

fn plan(node: Node<'_>, isa: Isa, threads: usize) -> Option<Plan> {
    let x = node.source_layout(1)?;
    let k = x.shape()[0];
    let product = Product::of(node, isa)?;
    let columns = Columns::bytes(product.form, x)?;
    let worker = product.worker_bytes(k)?;
    Some(Plan {
        product,
        columns,
        worker,
        total: columns.checked_add(worker.checked_mul(threads)?)?,
    })
}

pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, Reason> {
    let weights = node.source_layout(0).ok_or("there are no weights")?;
    decodable(weights.dtype())?;
    dense_rows(node, 0)?;
    Ok(Kernel::with_scratch(
        |node, isa, threads| Some(plan(node, isa, threads)?.total),
        build,
    ))
}

/// Estimated nanoseconds of a product.
pub(crate) fn cost(rows: usize, columns: usize, k: usize) -> f64 {
    (rows * columns) as f64 * (k as f64 * 0.03 + 2.0)
}

/// What the product `node` needs of the scratch memory, that memory, and the columns `x`, which come from `input`, in there.
fn place(
    context: &KernelContext<'_>,
    node: Node<'_>,
    x: Operand,
    input: InputSource,
) -> Result<(Plan, Scratch, Columns)> {
    let plan = plan(node, context.isa, context.threads)
        .ok_or_else(|| Error::shape("mul_mat: the size of its workspace overflows"))?;
    let scratch = context.scratch(plan.total)?;
    let columns = Columns::new(x, input, plan.product.form, scratch);
    Ok((plan, scratch, columns))
}

/// Packs columns only.
pub(crate) fn pack(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (_, _, columns) = place(context, context.node, context.source(1)?, context.input)?;
    Ok(columns.pack(context.isa).into_iter().collect())
}

/// Whether it pays to compute two products of the same columns together with a gated unit of their results: where these would go past the
/// caches, and a panel of rows is multiplied at a time.
pub(crate) fn are_worth_gating(products: [Node<'_>; 2], isa: Isa) -> bool {
    let [Some(first), Some(second)] = products.map(|node| node.source_layout(0)) else {
        return false;
    };
    let is_one = |layout: &Layout| layout.shape()[2..] == [1, 1];
    first == second
        && is_one(products[0].layout())
        && products.iter().all(|&node| {
            matches!(node.op(), Op::MulMat { .. })
                && Product::of(node, isa).is_some_and(|product| product.goes_by_panels())
        })
}

/// A gated unit of two products, one of which is `product`: of the rows of two matrices with the columns `x`, which are packed.
pub(crate) fn gated(
    context: &KernelContext<'_>,
    product: Node<'_>,
    weights: [Operand; 2],
    x: Operand,
) -> Result<Vec<Phase>> {
    let &Op::Glu { kind, .. } = context.node.op() else {
        return Err(Error::invalid(format!(
            "{} is not gated",
            context.node.op()
        )));
    };
    let (plan, scratch, columns) = place(context, product, x, InputSource::Shared)?;
    let (result, isa, product) = (context.result(), context.isa, plan.product.within_caches());
    let ([_, m, ..], [k, n, ..]) = (weights[0].shape(), x.shape());
    let row_bytes = weights[0].layout().row_bytes();
    let [rows, part] = product.task(m, row_bytes, context.threads);
    let column_blocks = n.div_ceil(part);
    let cost = 2.0 * cost(m, n, k) + glu::cost(kind) * (m * n) as f64;
    let tasks = m.div_ceil(rows) * column_blocks;
    Ok(vec![Phase::new(tasks, cost, move |tasks, worker| {
        let scratch = scratch.at(plan.columns + worker * plan.worker);
        let mut list = ColumnList::new();
        let mut halves = [const { Lines([[0.0; PANEL]; COLUMNS]) }; 2];
        for task in tasks {
            let (first, row) = (task % column_blocks * part, task / column_blocks * rows);
            let count = (n - first).min(part);
            let last = (row + rows).min(m);
            // Few columns are multiplied with several panels at a time, which are read in streams.
            let step = PANEL * (COLUMNS / count).clamp(1, GATED_PANELS);
            for row in (row..last).step_by(step) {
                let end = (row + step).min(last);
                for (weights, half) in weights.iter().zip(&mut halves) {
                    let out = half.0.as_flattened_mut().as_mut_ptr().wrapping_sub(row);
                    let list = list.fill(count, |c| Column {
                        x: columns.at([first + c, 0, 0]),
                        out: out.wrapping_add(c * step),
                    });
                    // SAFETY: rows and columns are inside of the shapes, which inference checked to fit, and there is room for
                    // their products; workers have their own scratch.
                    unsafe { product.run(weights, [0, 0], row..end, list, scratch) };
                }
                let [Lines(a), Lines(b)] = &halves;
                let panels = step / PANEL;
                for first_line in (0..count * panels).step_by(GATED) {
                    let lines = first_line..(first_line + GATED).min(count * panels);
                    let mut out = Lines([[0.0; PANEL]; GATED]);
                    let (a, b) = (
                        a[lines.clone()].as_flattened(),
                        b[lines.clone()].as_flattened(),
                    );
                    let all = &mut out.0[..lines.len()];
                    glu::gate_slice(isa, kind, all.as_flattened_mut(), a, b);
                    for (line, out) in lines.zip(&out.0) {
                        let (c, row) = (line / panels, row + line % panels * PANEL);
                        if row >= end {
                            continue;
                        }
                        let to = result.at([first + c, 0, 0]).cast::<f32>().wrapping_add(row);
                        // SAFETY: the row is inside of the result, of which tasks write different parts.
                        unsafe { packed::store(out.as_ptr(), to, PANEL.min(end - row), true) };
                    }
                }
            }
            packed::all_stored();
        }
        Ok(())
    })])
}

/// Panels of results of a gated unit that are computed at a time.
const GATED: usize = 8;

/// Most panels of each matrix that are multiplied before results are gated.
const GATED_PANELS: usize = 16;

/// Results of some columns for a panel, aligned to cache lines.
#[repr(align(64))]
struct Lines<const N: usize>([[f32; PANEL]; N]);

fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, weights, x) = (context.result(), context.source(0)?, context.source(1)?);
    let (plan, scratch, columns) = place(context, context.node, x, context.input)?;
    let product = plan.product;
    let [_, m, w2, w3] = weights.shape();
    let [k, n, n2, n3] = x.shape();
    let (r2, r3) = (n2 / w2, n3 / w3);
    let row_bytes = weights.layout().row_bytes();
    let [rows, part] = product.task(m, row_bytes, context.threads);
    let (row_blocks, column_blocks) = (m.div_ceil(rows), n.div_ceil(part));
    let multiply = Phase::new(
        row_blocks * column_blocks * n2 * n3,
        cost(m, n * n2 * n3, k),
        move |tasks, worker| {
            let mut list = ColumnList::new();
            for task in tasks {
                let (block, rest) = (task % column_blocks, task / column_blocks);
                let (row, matrix) = (rest % row_blocks * rows, rest / row_blocks);
                let (i2, i3) = (matrix % n2, matrix / n2);
                let first = block * part;
                let list = list.fill((n - first).min(part), |c| Column {
                    x: columns.at([first + c, i2, i3]),
                    out: result.at([first + c, i2, i3]).cast(),
                });
                // SAFETY: rows and columns are inside of the shapes, which inference checked to fit; tasks write different
                // parts of the result; workers have their own scratch.
                unsafe {
                    product.run(
                        &weights,
                        [i2 / r2, i3 / r3],
                        row..(row + rows).min(m),
                        list,
                        scratch.at(plan.columns + worker * plan.worker),
                    );
                }
            }
            Ok(())
        },
    );
    Ok(columns
        .pack(context.isa)
        .into_iter()
        .chain([multiply])
        .collect())
}
