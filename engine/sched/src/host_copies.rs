//! Copies through the host, for memory between which no device can copy.

use crate::split::Copy;
use samite_core::{BounceBuffer, Error, Graph, Result, TensorRef};

/// Copier through the host. Its buffer is large enough for all loaded plans.
#[derive(Default)]
pub(crate) struct HostCopier {
    bounce: BounceBuffer,
    /// Set for each expert in use.
    used: Vec<bool>,
}

impl HostCopier {
    /// Reserves memory for `copy`, so that making it does not allocate.
    pub fn reserve(
        &mut self,
        copy: &Copy,
        graph: &Graph,
        places: &[Option<TensorRef>],
    ) -> Result<()> {
        let (Some(from), Some(to)) = (&places[copy.from.index()], &places[copy.to.index()]) else {
            return Ok(()); // making the copy reports it
        };
        let Some(ids) = copy.experts else {
            return to.reserve_bounce(from, &mut self.bounce);
        };
        let experts = from.layout().shape()[2];
        let slice = from.layout().bytes() / experts.max(1);
        let row = graph.tensor(ids).layout.row_bytes();
        self.bounce.reserve(slice.max(row))?;
        let more = experts.saturating_sub(self.used.len());
        self.used
            .try_reserve_exact(more)
            .map_err(|_| Error::OutOfMemory {
                device: "host".into(),
                what: "copies of experts".into(),
                asked: experts,
                free: None,
            })?;
        self.used.resize(experts.max(self.used.len()), false);
        Ok(())
    }

    /// Copies a whole tensor.
    pub fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        to.copy_with(from, &mut self.bounce)
    }

    /// Copies only the experts (slices of dimension 2) selected by `ids`. Merges adjacent experts
    /// if the host can read the ids.
    pub fn copy_experts(
        &mut self,
        from: &TensorRef,
        to: &TensorRef,
        ids: &TensorRef,
    ) -> Result<()> {
        let experts = from.layout().shape()[2];
        let slice = from.layout().bytes() / experts.max(1);
        let used = &mut self.used[..experts];
        used.fill(false);
        let layout = *ids.layout();
        let row = self.bounce.bytes(layout.row_bytes())?;
        for r in 0..layout.rows() {
            let [i1, i2, i3] = layout.row_index(r);
            ids.read(layout.row_offset(i1, i2, i3), row)?;
            for id in row.as_chunks::<4>().0 {
                let id = i32::from_le_bytes(*id);
                // The kernel reports ids out of range, with the name of the node.
                if let Some(flag) = usize::try_from(id).ok().and_then(|id| used.get_mut(id)) {
                    *flag = true;
                }
            }
        }
        let mut expert = 0;
        for run in used.chunk_by(|a, b| a == b) {
            let range = expert..expert + run.len();
            expert = range.end;
            if !run[0] {
                continue;
            }
            let (start, len) = (range.start * slice, run.len() * slice);
            let at = from.slot.offset + start;
            match (from.buffer.host(), to.buffer.host()) {
                (Some(memory), Some(target)) => {
                    memory.copy_to(at, target, to.slot.offset + start, len)?
                }
                // As in other copies, the range lock of writable memory is not held while waiting
                // for another one.
                (Some(memory), None) if !memory.is_writable() => {
                    memory.with_bytes(at, len, |data| to.write(start, data))??;
                }
                _ => {
                    let bytes = self.bounce.bytes(slice)?;
                    for start in range.map(|expert| expert * slice) {
                        from.read(start, bytes)?;
                        to.write(start, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }
}
