//! Plans as text: which device runs what and why, what is copied, how much memory it takes.

use crate::order::{Lane, Work};
use crate::placement::Reason;
use crate::plan::Plan;
use samite_core::{TensorId, counted};
use serde_json::{Value, json};
use std::fmt::{self, Write};

/// Formats a number of bytes: `512 B`, `1.5 KiB`, `3.2 GiB`.
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

/// Maximum number of node groups in the explanation of a split. With more, the reasons are only
/// counted.
const MAX_GROUPS: usize = 4;

impl Plan {
    /// Returns the name of `id` in explanations.
    fn label(&self, id: TensorId) -> String {
        let tensor = self.lowered.graph.tensor(id);
        match &*tensor.name {
            "" => format!("{id} {}", tensor.op.name()),
            name => format!("{id} {} '{name}'", tensor.op.name()),
        }
    }

    /// Returns groups of consecutive nodes of one split that have the same kind of reason. If
    /// reasons alternate often, returns one group of all nodes with the reasons counted.
    fn groups<'p>(&'p self, nodes: &'p [TensorId]) -> Vec<(&'p [TensorId], String)> {
        let reason = |id: &TensorId| self.placement.reasons[id.index()].as_ref();
        let kind = |id: &TensorId| reason(id).map_or("", Reason::summary);
        let runs: Vec<_> = nodes.chunk_by(|a, b| kind(a) == kind(b)).collect();
        if runs.len() <= MAX_GROUPS {
            let text =
                |run: &[TensorId]| reason(&run[0]).map_or_else(String::new, Reason::to_string);
            return runs.into_iter().map(|run| (run, text(run))).collect();
        }
        let mut counts: Vec<(usize, &str)> = Vec::new();
        for id in nodes {
            match counts.iter_mut().find(|(_, known)| *known == kind(id)) {
                Some((count, _)) => *count += 1,
                None => counts.push((1, kind(id))),
            }
        }
        counts.sort_by_key(|&(count, _)| std::cmp::Reverse(count));
        let text: Vec<_> = counts
            .into_iter()
            .map(|(count, kind)| format!("{count} {kind}"))
            .collect();
        vec![(nodes, text.join(", "))]
    }

    /// Returns every split with its copies, and one line for every node with its size, device and
    /// reason and those of its sources, as ggml prints with `GGML_SCHED_DEBUG=2`.
    pub fn nodes(&self) -> impl fmt::Display {
        fmt::from_fn(|f| {
            for (number, split) in self.lowered.splits.iter().enumerate() {
                let device = self.devices.get(split.device).name();
                let (nodes, copies) = (split.nodes.len(), split.copies.len());
                writeln!(
                    f,
                    "split {number} on {device}: {nodes} operations, {copies} copies"
                )?;
                for &copy in &split.copies {
                    writeln!(f, "  input {}", self.placed(self.lowered.copies[copy].from))?;
                }
                for &id in &split.nodes {
                    writeln!(f, "  {}", self.placed(id))?;
                    for (_, source) in self.lowered.graph.tensor(id).operands() {
                        writeln!(f, "    of {}", self.placed(source))?;
                    }
                }
            }
            Ok(())
        })
    }

    /// Returns a tensor with its size, device and reason.
    fn placed(&self, id: TensorId) -> String {
        let bytes = human_bytes(self.lowered.graph.tensor(id).layout.bytes());
        let device = self.lowered.devices[id.index()];
        let device = device.map_or("nothing", |device| self.devices.get(device).name());
        // Tensors after the original ones are copies.
        let reason = match self.placement.reasons.get(id.index()) {
            Some(reason) => reason.as_ref().map_or_else(String::new, Reason::to_string),
            None => "a copy".to_owned(),
        };
        format!("{} ({bytes}) on {device}: {reason}", self.label(id))
    }

    /// Returns the plan as JSON: `devices`, `splits` (with node reasons, copies and kept memory),
    /// `memory`, `fallbacks`, `actions`, `bytes_copied`, and the numbers of copies that go
    /// `through_host`.
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
                json!({ "device": name(split.device), "nodes": nodes, "copies": copies,
                    "kept": split.kept })
            })
            .collect();
        let memory: Vec<_> = self
            .memory_by_type()
            .into_iter()
            .enumerate()
            .map(|(i, (name, bytes))| {
                json!({ "type": name, "bytes": bytes,
                "chunks": self.memory.chunks[i] })
            })
            .collect();
        let fallbacks: Vec<_> = self
            .fallbacks()
            .iter()
            .map(|r| {
                json!({ "node": r.node.index(), "refused_by": name(r.device),
                "reason": r.reason })
            })
            .collect();
        json!({
            "devices": self.devices.iter().map(|d| json!({
                "name": d.name(), "kind": d.kind(), "description": d.description(),
                "memory": d.memory(), "capabilities": d.capabilities(),
            })).collect::<Vec<_>>(),
            "pipeline_copies": self.copies,
            "splits": splits,
            "bytes_copied": self.bytes_copied(),
            "through_host": self.detours().collect::<Vec<_>>(),
            "memory": memory,
            "in_place": self.memory.in_place,
            "fallbacks": fallbacks,
            "actions": self.actions,
        })
    }
}

impl fmt::Display for Plan {
    /// Writes a table. Each split has its copies, then one row for each group of nodes with its
    /// reason (or one row for all nodes, with the reasons counted, if they alternate). Memory,
    /// waits and fallbacks follow.
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
            "{} in {} on {}; {} copied per run",
            counted(nodes, "operation"),
            counted(self.lowered.splits.len(), "split"),
            self.devices.names(),
            human_bytes(self.bytes_copied())
        )?;
        let detours: Vec<usize> = self.detours().collect();
        if !detours.is_empty() {
            let bytes = detours.iter().map(|&c| self.lowered.copies[c].bytes).sum();
            writeln!(
                f,
                "copies through the host, because no device makes them: {} ({})",
                detours.len(),
                human_bytes(bytes)
            )?;
        }
        for (number, split) in self.lowered.splits.iter().enumerate() {
            let bytes: usize = split
                .copies
                .iter()
                .map(|&c| self.lowered.copies[c].bytes)
                .sum();
            write!(
                f,
                "split {number} on {}: {}",
                name(split.device),
                counted(split.nodes.len(), "operation")
            )?;
            if !split.copies.is_empty() {
                write!(
                    f,
                    ", {} ({}) copied in",
                    counted(split.copies.len(), "tensor"),
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
                let way = if detours.contains(&c) {
                    ", through the host"
                } else {
                    ""
                };
                writeln!(
                    f,
                    "    copy {} ({}{part}{way})",
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
                        Lane::Copies(device) => format!("{}'s copies", name(device)),
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
