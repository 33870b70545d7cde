//! Nodes that a fallback device computes although it cannot access the memory of their tensors.
//! Their bytes are copied to its memory before, and results are copied back after.
//!
//! The copies are of memory ranges rather than tensors, so tensors that share bytes in the original
//! memory also share them in the copy.

use super::places::allocate;
use super::session::PIECE;
use samite_core::{
    Charge, DType, Device, Graph, Layout, Ledger, Location, Result as Outcome, Slot, TensorId,
    TensorRef, Usage, unallocated,
};
use samite_wire::UnsupportedConversion;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Alignment of ranges. It preserves the alignment of tensors.
const ALIGNMENT: usize = 256;

/// Memory of one device, and its copy in the memory of another.
#[derive(Default)]
pub(super) struct Staged {
    ranges: Vec<Range>,
}

struct Range {
    there: TensorRef,
    here: TensorRef,
    is_written: bool,
}

/// A tensor that the device cannot access.
struct Use<'p> {
    id: TensorId,
    start: Location,
    end: usize,
    place: &'p TensorRef,
    is_written: bool,
}

impl Staged {
    /// Allocates memory of `device` for the tensors of `nodes` that it cannot access. Returns it
    /// with the new locations of these tensors.
    pub fn new(
        graph: &Graph,
        nodes: &[TensorId],
        places: &[Option<TensorRef>],
        device: &dyn Device,
        ledger: &Arc<Ledger>,
        charges: &mut Vec<Charge>,
    ) -> Result<(Self, Vec<(TensorId, TensorRef)>), UnsupportedConversion> {
        let mut staged = Staged::default();
        let mut moved = Vec::new();
        let mut uses: Vec<Use> = uses(graph, nodes, places, device).into_values().collect();
        uses.sort_by_key(|tensor| tensor.start);
        let mut uses = uses.iter().peekable();
        while let Some(first) = uses.next() {
            let mut together = vec![first];
            let mut end = first.end;
            while let Some(next) = uses
                .next_if(|next| next.start.memory == first.start.memory && next.start.offset < end)
            {
                end = end.max(next.end);
                together.push(next);
            }
            let bytes = end - first.start.offset;
            let text = |error: samite_core::Error| UnsupportedConversion::from(error.to_string());
            let layout = Layout::contiguous(DType::I8, [bytes, 1, 1, 1]).map_err(text)?;
            // Distance from the start of the range to the first tensor.
            let lead = first.place.location().offset - first.start.offset;
            let there = TensorRef {
                buffer: Arc::clone(&first.place.buffer),
                slot: Slot {
                    offset: first.place.slot.offset - lead,
                    layout,
                },
            };
            let here = TensorRef {
                buffer: match bytes {
                    0 => unallocated(&device.buffer_type(), 0, Usage::Compute),
                    _ => allocate(device, bytes, ledger, charges)?,
                },
                slot: Slot { offset: 0, layout },
            };
            for tensor in &together {
                let offset = tensor.place.location().offset - first.start.offset;
                let layout = tensor.place.slot.layout;
                let buffer = Arc::clone(&here.buffer);
                let slot = Slot { offset, layout };
                moved.push((tensor.id, TensorRef { buffer, slot }));
            }
            staged.ranges.push(Range {
                there,
                here,
                is_written: together.iter().any(|tensor| tensor.is_written),
            });
        }
        Ok((staged, moved))
    }

    /// Copies the inputs of the nodes to the device, through `piece`, which grows as needed.
    pub fn bring(&self, piece: &mut Vec<u8>) -> Outcome<()> {
        for range in &self.ranges {
            copy(&range.there, &range.here, piece)?;
        }
        Ok(())
    }

    /// Copies the results of the nodes back.
    pub fn bring_back(&self, piece: &mut Vec<u8>) -> Outcome<()> {
        for range in self.ranges.iter().filter(|range| range.is_written) {
            copy(&range.here, &range.there, piece)?;
        }
        Ok(())
    }
}

/// Copies a range piece by piece.
fn copy(from: &TensorRef, to: &TensorRef, piece: &mut Vec<u8>) -> Outcome<()> {
    let len = from.layout().bytes();
    piece.resize(piece.len().max(len.min(PIECE)), 0);
    for at in (0..len).step_by(PIECE) {
        let count = PIECE.min(len - at);
        from.read(at, &mut piece[..count])?;
        to.write(at, &piece[..count])?;
    }
    Ok(())
}

/// Returns the tensors of `nodes` in memory that `device` cannot access.
fn uses<'p>(
    graph: &Graph,
    nodes: &[TensorId],
    places: &'p [Option<TensorRef>],
    device: &dyn Device,
) -> BTreeMap<TensorId, Use<'p>> {
    let mut uses = BTreeMap::<_, Use>::new();
    for &node in nodes {
        let tensor = graph.tensor(node);
        let written: Vec<TensorId> = tensor.written().map(|(_, id)| id).collect();
        let operands = tensor.operands().map(|(_, id)| id);
        for id in operands.chain([node]) {
            let Some(place) = &places[id.index()] else {
                continue;
            };
            if device.supports_buffer_type(place.buffer.buffer_type()) {
                continue;
            }
            let Location { memory, offset } = place.location();
            let lead = place.slot.offset % ALIGNMENT;
            let start = Location {
                memory,
                offset: offset - lead,
            };
            let tensor = uses.entry(id).or_insert_with(|| Use {
                id,
                start,
                end: offset + place.slot.layout.bytes(),
                place,
                is_written: false,
            });
            tensor.is_written |= id == node || written.contains(&id);
        }
    }
    uses
}
