//! What a divided device does with nodes of a graph, for people and as data.

use crate::device::MetaDevice;
use crate::partition::{Conversion, Exchange, Partition};
use crate::state::State;
use samite_core::{Graph, Result, TensorId, counted};
use serde::Serialize;
use std::fmt;

/// How many conversions of one kind are listed as text.
const SHOWN: usize = 8;

/// What members have of the tensors that are stored.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Stored {
    /// All have all of it.
    pub mirrored: usize,
    /// Split along dimension 0: columns of a matrix, elements of a vector.
    pub columns: usize,
    /// Split along another one.
    pub rows: usize,
}

/// How a graph is divided among the members of a device.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// The device's name.
    pub device: String,
    /// The members, with their shares.
    pub members: Vec<(String, f32)>,
    /// The states of stored tensors, counted.
    pub stored: Stored,
    /// By tensor of the graph: its state, for those that there are.
    pub states: Vec<Option<State>>,
    /// What was not in the state that was needed.
    pub conversions: Vec<Conversion>,
    /// How often members exchange something in a run.
    pub exchanges: usize,
    /// Bytes of everything that they exchange in a run.
    pub bytes: usize,
}

impl MetaDevice {
    /// How nodes of a graph are divided.
    ///
    /// # Errors
    /// As [`partition`](MetaDevice::partition).
    pub fn explain(&self, graph: &Graph, nodes: &[TensorId]) -> Result<Explanation> {
        let partition: Partition = self.partition(graph, nodes)?;
        let mut stored = Stored::default();
        for (tensor, state) in graph.tensors().iter().zip(&partition.states) {
            match (&tensor.stored, state) {
                (Some(_), Some(State::Split { axis: 0, .. })) => stored.columns += 1,
                (Some(_), Some(State::Split { .. })) => stored.rows += 1,
                (Some(_), Some(State::Mirrored | State::Partial)) => stored.mirrored += 1,
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
        let Stored {
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
