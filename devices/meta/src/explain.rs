//! Explains how a device divides the nodes of a graph, as text and as data.

use crate::device::MetaDevice;
use crate::partition::{Conversion, Exchange, Partition};
use crate::state::SplitState;
use samite_core::{Graph, Result, TensorId, counted};
use serde::Serialize;
use std::fmt;

/// Maximum number of conversions of one kind to list as text.
const SHOWN: usize = 8;

/// Number of stored tensors in each state.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct StoredCounts {
    /// Replicated on all members.
    pub mirrored: usize,
    /// Split along dimension 0: columns of a matrix, elements of a vector.
    pub columns: usize,
    /// Split along another dimension.
    pub rows: usize,
}

/// Division of a graph among the members of a device.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// Name of the device.
    pub device: String,
    /// Members, with their shares.
    pub members: Vec<(String, f32)>,
    /// Number of stored tensors in each state.
    pub stored: StoredCounts,
    /// State of each tensor of the graph that the nodes refer to.
    pub states: Vec<Option<SplitState>>,
    /// Tensors that were not in the state that was needed.
    pub conversions: Vec<Conversion>,
    /// Number of exchanges in a run.
    pub exchanges: usize,
    /// Bytes of all exchanges in a run.
    pub bytes: usize,
}

impl MetaDevice {
    /// Explains how nodes of a graph are divided.
    ///
    /// # Errors
    /// Returns the errors of [`partition`](MetaDevice::partition).
    pub fn explain(&self, graph: &Graph, nodes: &[TensorId]) -> Result<Explanation> {
        let partition: Partition = self.partition(graph, nodes)?;
        let mut stored = StoredCounts::default();
        for (tensor, state) in graph.tensors().iter().zip(&partition.states) {
            match (&tensor.stored, state) {
                (Some(_), Some(SplitState::Split { axis: 0, .. })) => stored.columns += 1,
                (Some(_), Some(SplitState::Split { .. })) => stored.rows += 1,
                (Some(_), Some(SplitState::Mirrored | SplitState::Partial)) => stored.mirrored += 1,
                _ => {}
            }
        }
        let names = self.members().iter().map(|member| member.name().to_owned());
        Ok(Explanation {
            device: self.name.clone(),
            members: names.zip(self.ratios().iter().copied()).collect(),
            stored,
            exchanges: partition.exchanges(),
            bytes: partition.bytes_exchanged(),
            states: partition.states,
            conversions: partition.conversions,
        })
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members: Vec<_> = self
            .members
            .iter()
            .map(|(name, share)| format!("{name} ({share})"))
            .collect();
        let StoredCounts {
            mirrored,
            columns,
            rows,
        } = self.stored;
        writeln!(
            f,
            "{} divides tensors among {}",
            self.device,
            members.join(", ")
        )?;
        writeln!(
            f,
            "    stored: {rows} by rows, {columns} by columns, {mirrored} whole with each member"
        )?;
        writeln!(
            f,
            "    {} of {} bytes in a run",
            counted(self.exchanges, "exchange"),
            self.bytes
        )?;
        let kinds = [
            Some(Exchange::Sum),
            Some(Exchange::Gather),
            Some(Exchange::Broadcast),
            None,
        ];
        for kind in kinds {
            let all: Vec<_> = self
                .conversions
                .iter()
                .filter(|conversion| conversion.exchange == kind)
                .collect();
            let what = kind.map_or_else(|| "cut".to_owned(), |kind| kind.to_string());
            for conversion in all.iter().take(SHOWN) {
                let Conversion {
                    tensor,
                    name,
                    from,
                    to,
                    bytes,
                    reason,
                    ..
                } = conversion;
                writeln!(
                    f,
                    "    {what} {tensor} '{name}' ({bytes} bytes): {from} becomes {to} for {reason}"
                )?;
            }
            if all.len() > SHOWN {
                writeln!(f, "    … {} more of kind {what}", all.len() - SHOWN)?;
            }
        }
        Ok(())
    }
}
