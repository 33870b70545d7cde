//! Decodes in two contexts in lockstep, node by node.

use super::Context;
use crate::batch::Batch;
use crate::error::Result;
use samite_core::Error;
use samite_sched::Watch;
use samite_sched::compare::{Pair, in_step};

impl Context {
    /// Decodes `batch` in lockstep in two contexts of the same model on different devices, and
    /// calls `see` with every node. Both must have the same options and have decoded the same
    /// batches before. Devices must [keep the order](samite_sched::compare::in_order) of nodes. The
    /// first context continues with the results of the second. Logits are not kept.
    ///
    /// # Errors
    /// Returns [`samite_core::Error::Stopped`] if `see` stops the comparison. Also fails like
    /// [`decode`](Self::decode) and [`in_step`].
    pub fn compare(
        contexts: [&mut Context; 2],
        batch: &Batch,
        mut see: impl FnMut(&Pair<'_>) -> Result<Watch, Error>,
    ) -> Result<()> {
        let [first, second] = contexts;
        first.begin(batch)?;
        second.begin(batch)?;
        let result = compare_all([first, second], batch, &mut see);
        let result = second.end(result);
        first.end(result)
    }
}

fn compare_all(
    [first, second]: [&mut Context; 2],
    batch: &Batch,
    see: &mut impl FnMut(&Pair<'_>) -> Result<Watch, Error>,
) -> Result<()> {
    let batch = &*first.prepared(batch)?;
    for (part, room) in first.micro_batches(batch) {
        for context in [&mut *first, &mut *second] {
            context.load_part(batch, part, room)?;
        }
        let schedulers = [&mut first.scheduler, &mut second.scheduler];
        in_step(schedulers, &first.options.cancel, &mut *see)?;
    }
    Ok(())
}
