//! Attention of many tokens: a task is some blocks of query rows, which walk over blocks of keys together.

use super::block::{Block, Blocks, LANES_STRIDE, Lanes, ROWS, Sums, cap, soften};
use super::{Extents, Memory, Operands, rows_of, too_large};
use crate::detect::Isa;
use crate::kernels::softmax::scale_row;
use crate::packed::outer::{self as halves, Rounded};
use crate::prepare::{Phase, Scratch, Site};
use crate::simd::outer::{self, Outer, OuterFn};
use samite_core::{DType, Node, Result};
use std::array::from_fn;

/// Keys of a block.
const KEYS: usize = 64;

/// Most blocks of query rows of a task: keys and values become operands once for all.
const MOST_BLOCKS: usize = 4;

/// How many tasks there should be before they get more than one block.
const ENOUGH_TASKS: usize = 64;

const _: () = assert!(ROWS == halves::BESIDE && ROWS.is_multiple_of(halves::STEP));

/// How queries are multiplied with keys, and weights with values.
#[derive(Clone, Copy)]
enum Arithmetic {
    /// As they are.
    F32(OuterFn),
    /// Rounded to [numbers of 16 bits](crate::packed::outer), where keys and values are of lower precision.
    Halves(halves::Products),
}

/// How the work is divided. The blocks of a task depend on shapes only.
#[derive(Clone, Copy)]
struct Plan {
    extents: Extents,
    blocks: Blocks,
    /// Blocks of a task.
    each: usize,
    arithmetic: Arithmetic,
    /// Numbers in the memory of a worker for each of a task's blocks: queries, weights of keys and sums of values.
    own: [usize; 3],
    /// Numbers that blocks need one after the other: decoded keys and values, both rounded, and what becomes queries or weights.
    shared: [usize; 5],
    floats: usize,
}

impl Plan {
    /// `None` if it takes too much memory.
    fn new(node: Node<'_>, isa: Isa) -> Option<Self> {
        let extents = Extents::of(node, 0)?;
        let Extents { d, dv, .. } = extents;
        let blocks = Blocks::new(extents);
        let all = blocks.of_a_head().checked_mul(blocks.kv_heads())?;
        let each = (all / ENOUGH_TASKS).clamp(1, MOST_BLOCKS);
        let arithmetic = Arithmetic::of(node, isa, extents)?;
        let values = dv.checked_mul(ROWS)?;
        let (own, rounded) = match arithmetic {
            Arithmetic::F32(_) => {
                let own = [d.checked_mul(ROWS)?, KEYS * ROWS, values];
                (own, [0; 3])
            }
            Arithmetic::Halves(_) => {
                let weights = Rounded::words(KEYS, ROWS)?;
                let own = [Rounded::words(d, ROWS)?, weights, values];
                let [keys, values] = [Rounded::words(d, KEYS)?, Rounded::words(KEYS, dv)?];
                (own, [keys, values, d.max(KEYS).checked_mul(ROWS)?])
            }
        };
        let [decoded_keys, decoded_values] = [d.checked_mul(KEYS)?, dv.checked_mul(KEYS)?];
        let [keys, values, lanes] = rounded;
        let shared = [decoded_keys, decoded_values, keys, values, lanes];
        let sum = |parts: &[usize]| {
            let mut parts = parts.iter();
            parts.try_fold(0_usize, |sum, part| sum.checked_add(*part))
        };
        let floats = sum(&own)?.checked_mul(each)?.checked_add(sum(&shared)?)?;
        Some(Plan {
            extents,
            blocks,
            each,
            arithmetic,
            own,
            shared,
            floats,
        })
    }
}

impl Arithmetic {
    /// `None` if there is no kernel.
    fn of(node: Node<'_>, isa: Isa, Extents { d, dv, .. }: Extents) -> Option<Self> {
        let is_coarse = |source| {
            let layout = node.source_layout(source);
            layout.is_some_and(|layout| layout.dtype() != DType::F32)
        };
        let fits = d.is_multiple_of(halves::STEP) && dv.is_multiple_of(halves::STEP);
        match halves::products(isa) {
            Some(products) if fits && is_coarse(1) && is_coarse(2) => {
                Some(Arithmetic::Halves(products))
            }
            _ => outer::sums(isa, DType::F32).map(Arithmetic::F32),
        }
    }
}

pub(super) fn scratch(node: Node<'_>, isa: Isa, threads: usize) -> Option<usize> {
    let floats = Plan::new(node, isa)?.floats;
    floats.checked_mul(size_of::<f32>())?.checked_mul(threads)
}

/// Everything that tasks need.
#[derive(Clone, Copy)]
struct Attention {
    plan: Plan,
    operands: Operands,
    scratch: Scratch,
}

pub(super) fn build(site: &Site<'_>) -> Result<Vec<Phase>> {
    let plan = Plan::new(site.node, site.isa).ok_or_else(too_large)?;
    let bytes = scratch(site.node, site.isa, site.threads).ok_or_else(too_large)?;
    let attention = Attention {
        plan,
        operands: Operands::of(site)?,
        scratch: site.scratch(bytes)?,
    };
    let of_a_head = plan.blocks.of_a_head().div_ceil(plan.each);
    let tasks = of_a_head * plan.blocks.kv_heads();
    Ok(vec![Phase::new(
        tasks,
        plan.extents.work(),
        move |tasks, worker| {
            for task in tasks {
                let first = task % of_a_head * plan.each;
                // SAFETY: blocks are inside of the shapes, which inference checked to fit; they write different rows of the
                // result; workers have their own memory.
                unsafe { attention.blocks(task / of_a_head, first, worker) };
            }
            Ok(())
        },
    )])
}

/// A block and what it has seen so far.
struct State<'a> {
    block: Block,
    sums: Sums,
    /// How many keys of the current block of keys it sees.
    len: usize,
    /// Turned queries.
    queries: &'a mut [f32],
    /// Weights of keys.
    weights: &'a mut [f32],
    /// Sums of weighted values: a row for each row of the block.
    values: &'a mut [f32],
}

/// What blocks need one after the other.
struct Shared<'a> {
    /// Those of the current block of keys.
    keys: &'a mut [f32],
    values: &'a mut [f32],
    rounded_keys: &'a mut [f32],
    rounded_values: &'a mut [f32],
    /// Queries, or weights, before they are rounded.
    lanes: &'a mut [Lanes],
}

impl Attention {
    /// Blocks of head `kv_head` of keys from number `first` on.
    ///
    /// # Safety
    /// See [`Operand`](crate::operand::Operand); blocks and worker must exist.
    unsafe fn blocks(&self, kv_head: usize, first: usize, worker: usize) {
        let Plan { blocks, floats, .. } = self.plan;
        let Extents { dv, keys, .. } = self.plan.extents;
        let own = &self.operands;
        let at = worker * floats * size_of::<f32>();
        // SAFETY: each worker has such a part of the scratch memory.
        let mut memory = unsafe { Memory::new(self.scratch, at, floats) };
        let [keys_of, values_of, rounded_keys, rounded_values, lanes] =
            self.plan.shared.map(|count| memory.floats(count));
        let shared = &mut Shared {
            keys: keys_of,
            values: values_of,
            rounded_keys,
            rounded_values,
            lanes: lanes.as_chunks_mut().0,
        };
        let end = blocks.of_a_head().min(first + self.plan.each);
        let mut states: [Option<State<'_>>; MOST_BLOCKS] = from_fn(|i| {
            let number = first + i;
            let [queries, weights, values] =
                (number < end).then(|| self.plan.own.map(|count| memory.floats(count)))?;
            values.fill(0.0);
            let block = blocks.block(kv_head, number);
            // SAFETY: the block exists.
            unsafe { self.turn(block, queries, shared) };
            Some(State {
                block,
                sums: Sums::NONE,
                len: 0,
                queries,
                weights,
                values,
            })
        });
        let Block { kv_head, batch, .. } = blocks.block(kv_head, first);

        for key in (0..keys).step_by(KEYS) {
            let most = KEYS.min(keys - key);
            let mut len = 0;
            for state in states.iter_mut().flatten() {
                // SAFETY: masks are at least as large as there are tokens and keys.
                state.len = unsafe { state.block.visible(own.mask, key, most) };
                len = len.max(state.len);
            }
            if len > 0 {
                // SAFETY: so many keys and values are inside of their shapes.
                unsafe { self.step([key, kv_head, batch], len, &mut states, shared) };
            }
        }

        for state in states.iter().flatten() {
            for (row, (head, token)) in state.block.places().enumerate() {
                // SAFETY: the row is inside of the result, and this task alone writes it.
                unsafe {
                    let out = own.result.row_mut::<f32>([head, token, batch]);
                    out.copy_from_slice(&state.values[row * dv..][..dv]);
                    let Sums { max, sum, .. } = &state.sums;
                    scale_row(own.isa, out, own.sinks.factor(head, max[row], sum[row]));
                }
            }
        }
    }

    /// Takes all blocks through the `len` keys from `place` on.
    ///
    /// # Safety
    /// They must exist.
    unsafe fn step(
        &self,
        place: [usize; 3],
        len: usize,
        states: &mut [Option<State<'_>>],
        shared: &mut Shared<'_>,
    ) {
        let Extents { d, dv, .. } = self.plan.extents;
        let own = &self.operands;
        let mut seen = [false; KEYS];
        // SAFETY: the caller's contract; there is room for all in the worker's memory.
        unsafe {
            let decode = own.k.dtype() != DType::F32;
            let keys = rows_of(own.isa, &own.k, decode, place, len, shared.keys);
            if let Arithmetic::Halves(_) = self.plan.arithmetic {
                let to = Rounded::at(shared.rounded_keys, d, KEYS);
                halves::round_columns(own.isa, &shared.keys[..len * d], to);
            }
            for state in states.iter_mut().flatten().filter(|state| state.len > 0) {
                self.weigh(state, place[0], keys, shared, &mut seen);
            }

            // What no row sees may hold anything, NaN too.
            let clear = seen[..len].contains(&false);
            // Halves would be converted once for every few columns.
            let decode = clear || own.v.dtype() != DType::F32;
            let values = rows_of(own.isa, &own.v, decode, place, len, shared.values);
            for key in (0..len).filter(|key| clear && !seen[*key]) {
                shared.values[key * dv..][..dv].fill(0.0);
            }
            if let Arithmetic::Halves(products) = self.plan.arithmetic {
                let to = Rounded::at(shared.rounded_values, KEYS, dv);
                (products.round)(shared.values.as_ptr(), len, dv, to);
            }
            for state in states.iter_mut().flatten().filter(|state| state.len > 0) {
                self.add(state, values, shared);
            }
        }
    }

    /// Turns the queries of a block.
    ///
    /// # Safety
    /// The block must exist.
    unsafe fn turn(&self, block: Block, queries: &mut [f32], shared: &mut Shared<'_>) {
        let (own, d) = (&self.operands, self.plan.extents.d);
        let rows = block
            .places()
            .map(|(head, token)| own.q.at([token, head, block.batch]).cast_const().cast());
        let scale = own.logits.scale;
        // SAFETY: queries are f32 without gaps in rows of `d`.
        unsafe {
            match self.plan.arithmetic {
                Arithmetic::F32(_) => block.turn(rows, scale, queries.as_chunks_mut().0),
                Arithmetic::Halves(products) => {
                    block.turn(rows, scale, &mut shared.lanes[..d]);
                    let to = Rounded::at(queries, d, ROWS);
                    (products.round)(shared.lanes.as_ptr().cast(), d, ROWS, to);
                }
            }
        }
    }

    /// Computes the weights of the keys that a block sees of those from number `key` on, which are at `keys` in rows of some distance,
    /// and marks those that have any.
    ///
    /// # Safety
    /// They must be there, and rounded where they have to be.
    unsafe fn weigh(
        &self,
        state: &mut State<'_>,
        key: usize,
        keys: (*const u8, usize),
        shared: &mut Shared<'_>,
        seen: &mut [bool; KEYS],
    ) {
        let (own, d) = (&self.operands, self.plan.extents.d);
        let (block, len) = (state.block, state.len);
        let logits: &mut [Lanes] = match self.plan.arithmetic {
            Arithmetic::F32(_) => state.weights.as_chunks_mut().0,
            Arithmetic::Halves(_) => shared.lanes,
        };
        let logits = &mut logits[..len];
        // SAFETY: the caller's contract; there is room for all logits.
        unsafe {
            match self.plan.arithmetic {
                Arithmetic::F32(products) => products(&Outer {
                    rows: state.queries.as_ptr().cast(),
                    row_stride: LANES_STRIDE,
                    len: block.lanes(),
                    terms: d,
                    factors: keys.0.cast(),
                    column_stride: keys.1,
                    term_stride: size_of::<f32>(),
                    out: logits.as_mut_ptr().cast(),
                    out_stride: LANES_STRIDE,
                    columns: len,
                    add: false,
                }),
                Arithmetic::Halves(products) => (products.along)(&halves::Outer {
                    rows: Rounded::at(state.queries, d, ROWS),
                    lanes: ROWS,
                    groups: d.div_ceil(halves::GROUP),
                    factors: Rounded::at(shared.rounded_keys, d, KEYS),
                    columns: len,
                    out: logits.as_mut_ptr().cast(),
                    before: None,
                }),
            }
            if own.logits.softcap != 0.0 {
                cap(own.isa, logits, own.logits.softcap);
            }
            let hidden = own
                .mask
                .is_some_and(|mask| block.mask(mask, &own.slopes, key, logits));
            soften(own.isa, logits, &mut state.sums);
            for (seen, weights) in seen.iter_mut().zip(&*logits) {
                *seen = *seen || !hidden || weights[..block.rows()].iter().any(|w| *w != 0.0);
            }
            if let Arithmetic::Halves(products) = self.plan.arithmetic {
                let to = Rounded::at(state.weights, KEYS, ROWS);
                (products.round)(shared.lanes.as_ptr().cast(), len, ROWS, to);
            }
        }
    }

    /// Adds the weighted values of the keys that a block sees, which are at `values` in rows of some distance.
    ///
    /// # Safety
    /// They must be there, and rounded where they have to be.
    unsafe fn add(
        &self,
        state: &mut State<'_>,
        values: (*const u8, usize),
        shared: &mut Shared<'_>,
    ) {
        let (isa, dv) = (self.operands.isa, self.plan.extents.dv);
        let rows = state.block.rows();
        match self.plan.arithmetic {
            Arithmetic::F32(products) => {
                let sums = state.values.chunks_exact_mut(dv.max(1));
                let sums = sums.zip(&state.sums.factor).take(rows);
                for (sums, &factor) in sums.filter(|(_, factor)| **factor != 1.0) {
                    scale_row(isa, sums, factor);
                }
                // SAFETY: the caller's contract.
                unsafe {
                    products(&Outer {
                        rows: values.0,
                        row_stride: values.1,
                        len: dv,
                        terms: state.len,
                        factors: state.weights.as_ptr(),
                        column_stride: size_of::<f32>(),
                        term_stride: LANES_STRIDE,
                        out: state.values.as_mut_ptr(),
                        out_stride: dv * size_of::<f32>(),
                        columns: rows,
                        add: true,
                    });
                }
            }
            // SAFETY: the caller's contract.
            Arithmetic::Halves(products) => unsafe {
                (products.beside)(&halves::Outer {
                    rows: Rounded::at(shared.rounded_values, KEYS, dv),
                    lanes: dv,
                    groups: state.len.div_ceil(halves::GROUP),
                    factors: Rounded::at(state.weights, KEYS, ROWS),
                    columns: rows,
                    out: state.values.as_mut_ptr(),
                    before: Some(&state.sums.factor),
                });
            },
        }
    }
}
