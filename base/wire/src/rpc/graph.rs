//! Graph messages: the nodes to compute, and all tensors, sources first.

use super::Fields;
use super::record::{RECORD, Record};
use super::version::Protocol;
use crate::UnsupportedConversion;
use crate::numbers::MAX_SRC;
use std::collections::{BTreeMap, BTreeSet};

/// Number of operands of a node.
pub const MAX_SOURCES: usize = MAX_SRC;

/// Uid of every graph of a protocol without uids, whose servers cache the last graph.
pub const LAST: u64 = 1;

/// Reads the uid of a graph, or returns [`LAST`] if the protocol has none.
pub(super) fn read_uid(
    fields: &mut Fields<'_>,
    protocol: &Protocol,
) -> Result<u64, UnsupportedConversion> {
    if protocol.has_uids() {
        fields.u64()
    } else {
        Ok(LAST)
    }
}

/// Appends the uid of a graph, if the protocol has uids.
pub(super) fn write_uid(out: &mut Vec<u8>, protocol: &Protocol, uid: u64) {
    if protocol.has_uids() {
        out.extend(uid.to_le_bytes());
    }
}

/// A graph.
#[derive(Clone, Debug)]
pub struct GraphMessage {
    /// Device that computes the graph.
    pub device: u32,
    /// Number by which the client refers to the graph later, or 0 for none.
    pub uid: u64,
    /// Nodes to compute, as indices in [`tensors`](GraphMessage::tensors), in order.
    pub nodes: Vec<usize>,
    /// All tensors. Tensors come after the tensors that they refer to.
    pub tensors: Vec<Record>,
    places: BTreeMap<u64, usize>,
}

impl GraphMessage {
    /// Reads a graph and validates it. Every node exists, once, and every tensor refers only to
    /// earlier ones, so following references terminates.
    ///
    /// # Errors
    /// If it is invalid, or has more than `most` tensors.
    pub fn read(
        payload: &[u8],
        protocol: &Protocol,
        most: usize,
    ) -> Result<Self, UnsupportedConversion> {
        let too_many =
            |n| UnsupportedConversion::from(format!("a graph of {n} tensors; {most} are allowed"));
        let mut fields = Fields::new(payload);
        let device = fields.u32()?;
        let uid = read_uid(&mut fields, protocol)?;
        let count = fields.u32()? as usize;
        if count > most {
            return Err(too_many(count));
        }
        if count > fields.rest().len() / 8 {
            return Err("a message ends too early".into());
        }
        let mut ids = Vec::with_capacity(count);
        for _ in 0..count {
            ids.push(fields.u64()?);
        }
        let count = fields.u32()? as usize;
        if count > most {
            return Err(too_many(count));
        }
        if count > fields.rest().len() / RECORD {
            return Err("a message ends too early".into());
        }
        let mut tensors = Vec::with_capacity(count);
        let mut places = BTreeMap::new();
        for place in 0..count {
            let record = Record::read(&mut fields)?;
            // A cast refers to itself as an operand.
            let known = |id: u64| id == 0 || id == record.id || places.contains_key(&id);
            let related = record.src.into_iter().chain([record.view_src]);
            if let Some(missing) = related.into_iter().find(|&id| !known(id)) {
                return Err(format!(
                    "tensor '{}' refers to a tensor {missing:#x} that is not before it",
                    record.name()
                )
                .into());
            }
            if record.id == 0 || places.insert(record.id, place).is_some() {
                return Err(format!("two tensors {:#x}, or none", record.id).into());
            }
            tensors.push(record);
        }
        // Trailing data is left to later versions.
        let mut nodes = Vec::with_capacity(ids.len());
        let mut seen = BTreeSet::new();
        for id in ids {
            let place = places.get(&id).copied();
            let place = place.ok_or_else(|| format!("node {id:#x} is not there"))?;
            if !seen.insert(place) {
                return Err(format!("node {id:#x} is there twice").into());
            }
            nodes.push(place);
        }
        Ok(GraphMessage {
            device,
            uid,
            nodes,
            tensors,
            places,
        })
    }

    /// Returns the index of the tensor with `id`.
    pub fn place(&self, id: u64) -> Option<usize> {
        self.places.get(&id).copied()
    }

    /// Returns the payload of the message.
    pub fn write(
        protocol: &Protocol,
        device: u32,
        uid: u64,
        nodes: &[u64],
        tensors: &[Record],
    ) -> Vec<u8> {
        let mut out = Vec::with_capacity(20 + 8 * nodes.len() + RECORD * tensors.len());
        out.extend(device.to_le_bytes());
        write_uid(&mut out, protocol, uid);
        out.extend((nodes.len() as u32).to_le_bytes());
        nodes.iter().for_each(|id| out.extend(id.to_le_bytes()));
        out.extend((tensors.len() as u32).to_le_bytes());
        tensors.iter().for_each(|tensor| tensor.write(&mut out));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::version::{V7, V8};

    fn tensor(id: u64, sources: &[u64]) -> Record {
        let mut record = Record { id, ..Record::NONE };
        record.src[..sources.len()].copy_from_slice(sources);
        record
    }

    fn refused(nodes: &[u64], tensors: &[Record]) -> String {
        let bytes = GraphMessage::write(&V8, 0, 1, nodes, tensors);
        let read = GraphMessage::read(&bytes, &V8, 1000);
        read.unwrap_err().into_owned()
    }

    #[test]
    fn graph_messages_round_trip() {
        let tensors = [tensor(7, &[]), tensor(9, &[7, 0, 7]), tensor(3, &[9, 3])];
        for (protocol, uid) in [(V7, LAST), (V8, 6)] {
            let mut bytes = GraphMessage::write(&protocol, 5, 6, &[9, 3], &tensors);
            bytes.extend([1, 2, 3]); // of a later version
            let read = |most| GraphMessage::read(&bytes, &protocol, most);
            let graph = read(3).unwrap();
            assert_eq!((graph.device, graph.uid), (5, uid));
            assert_eq!(
                (&graph.nodes, &graph.tensors[..]),
                (&vec![1, 2], &tensors[..])
            );
            assert_eq!((graph.place(3), graph.place(4)), (Some(2), None));
            assert!(read(2).is_err());
        }
    }

    #[test]
    fn fields_lie_in_the_order_of_upstream() {
        let bytes = |protocol| GraphMessage::write(protocol, 1, 2, &[], &[]);
        assert_eq!(bytes(&V7), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let mut wanted = [0; 20];
        (wanted[0], wanted[4]) = (1, 2);
        assert_eq!(bytes(&V8), wanted);
    }

    #[test]
    fn invalid_graphs_are_refused() {
        let chain = [tensor(7, &[]), tensor(9, &[7])];
        assert!(refused(&[0], &chain).contains("not there"));
        assert!(refused(&[8], &chain).contains("not there"));
        assert!(refused(&[9, 9], &chain).contains("twice"));
        assert!(refused(&[9], &[tensor(9, &[7])]).contains("not before it"));
        let circle = [tensor(7, &[9]), tensor(9, &[7])];
        assert!(refused(&[9], &circle).contains("not before it"));
        assert!(refused(&[], &[tensor(7, &[]), tensor(7, &[])]).contains("two tensors"));
        assert!(refused(&[], &[tensor(0, &[])]).contains("none"));
        let view = Record {
            view_src: 8,
            ..tensor(7, &[])
        };
        assert!(refused(&[7], &[view]).contains("not before it"));
    }

    #[test]
    fn false_counts_allocate_no_memory() {
        for protocol in [V7, V8] {
            for (nodes, tensors) in [(u32::MAX, 0), (0, u32::MAX), (1, 0)] {
                let mut bytes = vec![0; if protocol.has_uids() { 12 } else { 4 }];
                bytes.extend(nodes.to_le_bytes());
                bytes.extend(tensors.to_le_bytes());
                assert!(GraphMessage::read(&bytes, &protocol, usize::MAX).is_err());
            }
            let bytes = GraphMessage::write(&protocol, 0, 1, &[7], &[tensor(7, &[])]);
            for len in 0..bytes.len() {
                let read = GraphMessage::read(&bytes[..len], &protocol, 1000);
                assert!(read.is_err(), "{len}");
            }
        }
    }
}
