//! A plan in words: which device runs what and why, what is copied, how much memory it takes.

use crate::order::{Lane, Work};
use crate::plan::Plan;
use samite_core::TensorId;
use serde_json::{Value, json};
use std::fmt::{self, Write};

/// Bytes for people: `512 B`, `1.5 KiB`, `3.2 GiB`.
pub fn human_bytes(bytes: usize) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

impl Plan {
    /// What `id` is called in explanations.
    fn label(&self, id: TensorId) -> String {
        let tensor = self.lowered.graph.tensor(id);
        match &*tensor.name {
            "" => format!("{id} {}", tensor.op.name()),
            name => format!("{id} {} '{name}'", tensor.op.name()),
        }
    }

    /// Runs of consecutive nodes of one split that are there for the same kind of reason.
    fn groups(&self, nodes: &[TensorId]) -> Vec<(Vec<TensorId>, String)> {
        let mut groups: Vec<(Vec<TensorId>, String, String)> = Vec::new();
        for &id in nodes {
            let reason = self.placement.reasons[id.index()].as_ref();
            let text = reason.map_or_else(String::new, ToString::to_string);
            let kind = reason.map_or_else(String::new, |reason| {
                format!("{:?}", std::mem::discriminant(reason))
            });
            match groups.last_mut() {
                Some((ids, _, last)) if *last == kind => ids.push(id),
                _ => groups.push((vec![id], text, kind)),
            }
        }
        groups
            .into_iter()
            .map(|(ids, text, _)| (ids, text))
            .collect()
    }

    /// The plan as JSON: `devices`, `splits` (with node reasons and copies), `memory`, `fallbacks`, `actions`,
    /// `bytes_copied`.
    pub fn to_json(&self) -> Value {
        let name = |device: usize| self.devices.get(device).name();
        let splits: Vec<_> = self
            .lowered
            .splits
            .iter()
            .map(|split| {
                let nodes: Vec<_> = split
                    .nodes
                    .iter()
                    .map(|&id| {
                        json!({
                            "id": id.index(),
                            "name": &*self.graph.tensor(id).name,
                            "op": self.graph.tensor(id).op.name(),
                            "reason": self.placement.reasons[id.index()],
                        })
                    })
                    .collect();
                let copies: Vec<_> = split
                    .copies
                    .iter()
                    .map(|&c| json!(self.lowered.copies[c]))
                    .collect();
                json!({ "device": name(split.device), "nodes": nodes, "copies": copies })
            })
            .collect();
        let memory: Vec<_> = self
            .memory_by_type()
            .into_iter()
            .enumerate()
            .map(|(i, (name, bytes))| json!({ "type": name, "bytes": bytes, "chunks": self.memory.chunks[i] }))
            .collect();
        let fallbacks: Vec<_> = self
            .fallbacks()
            .iter()
            .map(|r| json!({ "node": r.node.index(), "refused_by": name(r.device), "reason": r.reason }))
            .collect();
        json!({
            "devices": self.devices.iter().map(|d| json!({
                "name": d.name(), "kind": d.kind(), "description": d.description(), "memory": d.memory(), "capabilities": d.capabilities(),
            })).collect::<Vec<_>>(),
            "pipeline_copies": self.copies,
            "splits": splits,
            "bytes_copied": self.bytes_copied(),
            "memory": memory,
            "in_place": self.memory.in_place,
            "fallbacks": fallbacks,
            "actions": self.actions,
        })
    }
}

impl fmt::Display for Plan {
    /// A table: one row for each group of nodes with its device and reason, then copies, memory and fallbacks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |device: usize| self.devices.get(device).name();
        let nodes: usize = self
            .lowered
            .splits
            .iter()
            .map(|split| split.nodes.len())
            .sum();
        writeln!(
            f,
            "{nodes} operations in {} splits on {}; {} copied per run",
            self.lowered.splits.len(),
            self.devices.names(),
            human_bytes(self.bytes_copied())
        )?;
        for (number, split) in self.lowered.splits.iter().enumerate() {
            let bytes: usize = split
                .copies
                .iter()
                .map(|&c| self.lowered.copies[c].bytes)
                .sum();
            write!(
                f,
                "split {number} on {}: {} operations",
                name(split.device),
                split.nodes.len()
            )?;
            if !split.copies.is_empty() {
                write!(
                    f,
                    ", {} tensors ({}) copied in",
                    split.copies.len(),
                    human_bytes(bytes)
                )?;
            }
            f.write_char('\n')?;
            for &c in &split.copies {
                let copy = &self.lowered.copies[c];
                let part = if copy.experts.is_some() {
                    ", only experts in use"
                } else {
                    ""
                };
                writeln!(
                    f,
                    "    copy {} ({}{part})",
                    self.label(copy.from),
                    human_bytes(copy.bytes)
                )?;
            }
            for (ids, reason) in self.groups(&split.nodes) {
                let range = match (ids.first(), ids.last()) {
                    (Some(&first), Some(&last)) if first != last => {
                        format!("{} … {}", self.label(first), self.label(last))
                    }
                    (Some(&first), _) => self.label(first),
                    _ => continue,
                };
                writeln!(f, "    {range}: {reason}")?;
            }
        }
        for (memory, bytes) in self.memory_by_type() {
            writeln!(
                f,
                "memory {memory}: {} for intermediate results",
                human_bytes(bytes)
            )?;
        }
        if self.memory.in_place > 0 {
            writeln!(
                f,
                "{} results overwrite an operand in place",
                self.memory.in_place
            )?;
        }
        let waits: usize = self.actions.iter().map(|action| action.waits.len()).sum();
        if waits > 0 {
            writeln!(f, "{waits} waits between devices:")?;
            for (number, action) in self.actions.iter().enumerate() {
                for wait in &action.waits {
                    let whom = self
                        .actions
                        .get(wait.action)
                        .map_or(Work::Inputs, |a| a.work);
                    let lane = match action.lane {
                        Lane::Host => "host".to_owned(),
                        Lane::Device(device) => name(device).to_owned(),
                    };
                    let when = match wait.runs_ago {
                        0 => String::new(),
                        n => format!(" of {n} runs ago"),
                    };
                    writeln!(
                        f,
                        "    action {number} ({} on {lane}) waits for action {} ({whom}){when}",
                        action.work, wait.action
                    )?;
                }
            }
        }
        for refusal in self.fallbacks() {
            let on = self.placement.devices[refusal.node.index()].map_or("nothing", name);
            writeln!(
                f,
                "fallback: {} runs on {on}; {}: {}",
                self.label(refusal.node),
                name(refusal.device),
                refusal.reason
            )?;
        }
        Ok(())
    }
}
