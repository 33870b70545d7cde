//! Copies through the host, for memory between which no device can copy.

use crate::split::Copy;
use samite_core::{BounceBuffer, Error, Graph, Result, TensorId, TensorRef};

/// Bytes that are copied behind the last of adjacent experts, from the next expert. Some of ggml's
/// kernels read beyond an expert and multiply what they find by zero, so it must not be NaN.
const PADDING: usize = 512;

/// Copier through the host. Its buffer is large enough for all loaded plans.
#[derive(Default)]
pub(crate) struct HostCopier {
    bounce: BounceBuffer,
    /// Set for each expert in use.
    used: Vec<bool>,
    /// Tensor with the ids from which `used` was set in this run.
    ids: Option<TensorId>,
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
        let ids = graph.tensor(ids).layout.bytes();
        self.bounce.reserve((slice + PADDING).max(ids))?;
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

    /// Begins a run, in which ids may differ from those of the last one.
    pub fn begin_run(&mut self) {
        self.ids = None;
    }

    /// Copies only the experts (slices of dimension 2) that `ids` selects, adjacent ones together.
    /// The copies of a run that need the same ids one after the other read them once.
    pub fn copy_experts(
        &mut self,
        from: &TensorRef,
        to: &TensorRef,
        (id, ids): (TensorId, &TensorRef),
    ) -> Result<()> {
        let experts = from.layout().shape()[2];
        let all = from.layout().bytes();
        let slice = all / experts.max(1);
        if self.ids != Some(id) {
            self.read_ids(id, ids)?;
        }
        let mut expert = 0;
        for run in self.used[..experts].chunk_by(|a, b| a == b) {
            let range = expert..expert + run.len();
            expert = range.end;
            if !run[0] {
                continue;
            }
            let start = range.start * slice;
            let len = (run.len() * slice + PADDING).min(all - start);
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
                    let piece = slice + PADDING;
                    let bytes = self.bounce.bytes(piece)?;
                    let end = start + len;
                    for start in (start..end).step_by(piece) {
                        let bytes = &mut bytes[..piece.min(end - start)];
                        from.read(start, bytes)?;
                        to.write(start, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Sets `used` for the experts in `ids`, and clears it for others.
    fn read_ids(&mut self, id: TensorId, ids: &TensorRef) -> Result<()> {
        self.ids = None; // in case of an error
        self.used.fill(false);
        let layout = *ids.layout();
        let bytes = self.bounce.bytes(layout.bytes())?;
        ids.read(0, bytes)?;
        for r in 0..layout.rows() {
            let [i1, i2, i3] = layout.row_index(r);
            let row = &bytes[layout.row_offset(i1, i2, i3)..][..layout.row_bytes()];
            for id in row.as_chunks::<4>().0 {
                let id = i32::from_le_bytes(*id);
                // The kernel reports ids out of range, with the name of the node.
                let used = usize::try_from(id)
                    .ok()
                    .and_then(|id| self.used.get_mut(id));
                if let Some(used) = used {
                    *used = true;
                }
            }
        }
        self.ids = Some(id);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_core::{BufferType, DType, Device, Layout, TensorGroup, Usage};
    use samite_reference::{ReferenceDevice, ReferenceOptions};
    use std::sync::Arc;

    const EXPERTS: usize = 6;
    /// Bytes of an expert.
    const SLICE: usize = 4096;

    /// Experts, their copy and ids, in a graph and in memory.
    struct Setup {
        graph: Graph,
        places: Vec<Option<TensorRef>>,
        copy: Copy,
    }

    impl Setup {
        /// `is_host`: whether the host has access to the memory of the experts and of their copy.
        fn new(is_host: [bool; 2]) -> Self {
            let mut graph = Graph::new();
            let [host, own] = [true, false].map(|host_memory| -> Arc<dyn BufferType> {
                ReferenceDevice::new(ReferenceOptions {
                    host_memory,
                    ..ReferenceOptions::default()
                })
                .buffer_type()
            });
            let mut place = |name, layout: Layout, is_host| {
                graph.input(name, layout.dtype(), layout.shape()).unwrap();
                let memory = if is_host { &host } else { &own };
                let group = TensorGroup::allocate(memory, Usage::Any, &[(name, layout)]).unwrap();
                Some(group.tensors[0].tensor().clone())
            };
            let experts = Layout::contiguous(DType::I8, [SLICE, 1, EXPERTS, 1]).unwrap();
            let ids = Layout::contiguous(DType::I32, [2, 3, 1, 1]).unwrap();
            let places = vec![
                place("from", experts, is_host[0]),
                place("to", experts, is_host[1]),
                place("ids", ids, false),
            ];
            let [from, to, ids] = [0, 1, 2].map(|index| graph.ids().nth(index).unwrap());
            let from_place = places[0].as_ref().unwrap();
            from_place.write(0, &[1; EXPERTS * SLICE]).unwrap();
            Setup {
                graph,
                places,
                copy: Copy {
                    from,
                    to,
                    bytes: experts.bytes(),
                    experts: Some(ids),
                },
            }
        }

        fn place(&self, id: TensorId) -> &TensorRef {
            self.places[id.index()].as_ref().unwrap()
        }

        fn set_ids(&self, ids: [i32; 6]) {
            let bytes = ids.map(i32::to_le_bytes);
            let place = self.place(self.copy.experts.unwrap());
            place.write(0, bytes.as_flattened()).unwrap();
        }

        /// Copies, and returns the ranges of bytes that were written.
        fn written(&self, copier: &mut HostCopier) -> Vec<(usize, usize)> {
            let Copy {
                from, to, experts, ..
            } = self.copy;
            let (from, to, ids) = (self.place(from), self.place(to), experts.unwrap());
            to.write(0, &[0; EXPERTS * SLICE]).unwrap();
            copier
                .copy_experts(from, to, (ids, self.place(ids)))
                .unwrap();
            let mut bytes = vec![0; EXPERTS * SLICE];
            to.read(0, &mut bytes).unwrap();
            let mut ranges = Vec::new();
            let mut at = 0;
            for run in bytes.chunk_by(|a, b| a == b) {
                if run[0] == 1 {
                    ranges.push((at, at + run.len()));
                }
                at += run.len();
            }
            ranges
        }
    }

    #[test]
    fn only_experts_in_use_and_padding_are_written() {
        for is_host in [[true, true], [true, false], [false, true], [false, false]] {
            let setup = Setup::new(is_host);
            let mut copier = HostCopier::default();
            let Setup {
                graph,
                places,
                copy,
            } = &setup;
            copier.reserve(copy, graph, places).unwrap();
            // Ids of -1 select nothing.
            setup.set_ids([5, 1, 2, -1, 1, 2]);
            let expected = [(SLICE, 3 * SLICE + PADDING), (5 * SLICE, 6 * SLICE)];
            assert_eq!(setup.written(&mut copier), expected, "{is_host:?}");
        }
    }

    #[test]
    fn ids_are_read_once_in_a_run() {
        let setup = Setup::new([true, false]);
        let mut copier = HostCopier::default();
        copier
            .reserve(&setup.copy, &setup.graph, &setup.places)
            .unwrap();
        setup.set_ids([5; 6]);
        let last = [(5 * SLICE, 6 * SLICE)];
        assert_eq!(setup.written(&mut copier), last);
        setup.set_ids([0; 6]);
        assert_eq!(setup.written(&mut copier), last);
        copier.begin_run();
        assert_eq!(setup.written(&mut copier), [(0, SLICE + PADDING)]);
    }
}
