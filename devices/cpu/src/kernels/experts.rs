//! Matrix products with selected experts.

use super::columns::Columns;
use super::matmul::{ColumnList, Product, cost};
use super::rows::expert_number;
use crate::detect::Isa;
use crate::kernel::{Fault, KernelContext, Phase, Scratch};
use crate::kernel::{Kernel, UnsupportedKernel, decodable, dense_rows};
use crate::operand::Operand;
use crate::product::Column;
use samite_core::{Error, Node, Result};

/// Layout of the scratch memory. The columns come first.
struct ExpertsScratchLayout {
    product: Product,
    lists: usize,
    workers: usize,
    worker: usize,
    total: usize,
}

fn plan(node: Node<'_>, isa: Isa, threads: usize) -> Option<ExpertsScratchLayout> {
    let (weights, x) = (node.source_layout(0)?, node.source_layout(1)?);
    let choices = node.source_layout(2)?.elements();
    let [k, _, experts, _] = weights.shape();
    let product = Product::for_node(node, isa)?;
    let lists = Columns::bytes(product.form, x)?;
    let list_bytes = experts
        .checked_add(choices)?
        .checked_add(1)?
        .checked_mul(4)?;
    let workers = lists
        .checked_add(list_bytes)?
        .checked_next_multiple_of(64)?;
    let worker = product.worker_bytes(k)?;
    Some(ExpertsScratchLayout {
        product,
        lists,
        workers,
        worker,
        total: workers.checked_add(worker.checked_mul(threads)?)?,
    })
}

pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    let weights = node.source_layout(0).ok_or("there are no weights")?;
    decodable(weights.dtype())?;
    dense_rows(node, 0)?;
    let choices = node.source_layout(2).map_or(0, |ids| ids.elements());
    if choices > u32::MAX as usize {
        return Err("there are more than 2^32 - 1 choices".into());
    }
    Ok(Kernel::with_scratch(
        |node, isa, threads| Some(plan(node, isa, threads)?.total),
        build,
    ))
}

/// Choices of each expert: `ends[e]..ends[e + 1]` of `order`. Skipped choices follow them.
#[derive(Clone, Copy)]
struct Lists {
    scratch: Scratch,
    offset: usize,
    experts: usize,
    choices: usize,
}

impl Lists {
    /// # Safety
    /// No other code may use the lists.
    #[allow(clippy::mut_from_ref)] // scratch memory is an address
    unsafe fn parts_mut(&self) -> (&mut [u32], &mut [u32]) {
        let ends = self.scratch.at(self.offset).cast::<u32>();
        // SAFETY: the plan has room for both.
        unsafe {
            (
                std::slice::from_raw_parts_mut(ends, self.experts + 1),
                std::slice::from_raw_parts_mut(ends.add(self.experts + 1), self.choices),
            )
        }
    }

    /// Returns the choices of one expert, or the skipped ones if `expert` is the number of experts.
    ///
    /// # Safety
    /// The lists must be complete, and must not be changed.
    unsafe fn choices(&self, expert: usize) -> &[u32] {
        let ends = self.scratch.at(self.offset).cast::<u32>();
        // SAFETY: `fill` wrote `experts + 1` ends, and `expert` is at most `experts`. Ends are in
        // ascending order and at most `choices`, so these numbers are in the list after the ends.
        unsafe {
            let start = *ends.add(expert) as usize;
            let end = match expert {
                _ if expert == self.experts => self.choices,
                _ => *ends.add(expert + 1) as usize,
            };
            std::slice::from_raw_parts(ends.add(self.experts + 1 + start), end - start)
        }
    }

    /// Sorts the choices by expert.
    ///
    /// # Safety
    /// See [`Operand`]. No other code may use the lists.
    unsafe fn fill(&self, ids: &Operand) -> Result<(), Fault> {
        let [used, tokens, ..] = ids.shape();
        // SAFETY: no other code uses the lists, so they may be borrowed for writing.
        let (ends, order) = unsafe { self.parts_mut() };
        // SAFETY: all choices are inside the shape.
        let expert = |choice: usize| unsafe {
            expert_number(ids, 2, [choice / used, 0, 0], choice % used, self.experts)
        };
        ends.fill(0);
        for choice in 0..used * tokens {
            if let Some(expert) = expert(choice)? {
                ends[expert + 1] += 1;
            }
        }
        for expert in 0..self.experts {
            ends[expert + 1] += ends[expert];
        }
        let (chosen, mut skipped) = (ends[self.experts], self.choices as u32);
        // Going backwards, each expert's end moves to its start. Then starts are the ends of the
        // previous experts.
        for choice in (0..used * tokens).rev() {
            let end = expert(choice)?.map_or(&mut skipped, |expert| &mut ends[expert + 1]);
            *end -= 1;
            order[*end as usize] = choice as u32;
        }
        ends.copy_within(1.., 0);
        ends[self.experts] = chosen;
        Ok(())
    }
}

fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, weights) = (context.result(), context.source(0)?);
    let (x, ids) = (context.source(1)?, context.source(2)?);
    let plan = plan(context.node, context.isa, context.threads)
        .ok_or_else(|| Error::shape("mul_mat_id: the size of its workspace overflows"))?;
    let scratch = context.scratch(plan.total)?;
    let product = plan.product;
    let columns = Columns::new(x, context.input, product.form, scratch);
    let [k, m, experts, _] = weights.shape();
    let repeated = x.shape()[1];
    let [used, tokens, ..] = ids.shape();
    let lists = Lists {
        scratch,
        offset: plan.lists,
        experts,
        choices: used * tokens,
    };
    let each = lists.choices / experts.max(1);
    let [rows, part] = product.expert_task(weights.layout(), each, context.threads);
    let row_blocks = m.div_ceil(rows);

    let sort = Phase::new(1, lists.choices as f64 * 10.0, move |_, _| {
        // SAFETY: this phase has one task.
        unsafe { lists.fill(&ids) }
    });
    let multiply = Phase::new(
        row_blocks * (experts + 1),
        cost(m, lists.choices, k),
        move |tasks, worker| {
            let mut list = ColumnList::new();
            for task in tasks {
                let (expert, row) = (task / row_blocks, task % row_blocks * rows);
                // SAFETY: the phase before completed the lists.
                let choices = unsafe { lists.choices(expert) };
                let rows = row..(row + rows).min(m);
                if expert == experts {
                    for &choice in choices {
                        let (slot, token) = (choice as usize % used, choice as usize / used);
                        // SAFETY: choices are inside the shape. Tasks write different parts.
                        let row = unsafe { result.row_mut::<f32>([slot, token, 0]) };
                        row[rows.clone()].fill(0.0);
                    }
                    continue;
                }
                for part in choices.chunks(part) {
                    let list = list.fill(part.len(), |c| {
                        let choice = part[c] as usize;
                        let (slot, token) = (choice % used, choice / used);
                        Column {
                            x: columns.at([slot % repeated, token, 0]),
                            out: result.at([slot, token, 0]).cast(),
                        }
                    });
                    // SAFETY: rows, columns and experts are inside the shapes. Tasks write
                    // different parts of the result. Workers have their own scratch memory.
                    unsafe {
                        product.run(
                            &weights,
                            [expert, 0],
                            rows.clone(),
                            list,
                            scratch.at(plan.workers + worker * plan.worker),
                        );
                    }
                }
            }
            Ok(())
        },
    );
    let pack = columns.pack(context.isa);
    Ok([sort].into_iter().chain(pack).chain([multiply]).collect())
}
