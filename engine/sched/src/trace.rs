//! What ran when, as a file that <https://ui.perfetto.dev> opens (Chrome's trace event format).

use crate::order::{Lane, Wait, Work};
use crate::plan::Plan;
use crate::scheduler::copy_name;
use crate::split::Copy;
use samite_core::{RunObserver, TensorId};
use serde_json::{Value, json};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// One span of time.
#[derive(Clone, Debug)]
struct Span {
    track: String,
    category: &'static str,
    name: String,
    start: Instant,
    end: Instant,
    args: Value,
}

/// A recording of runs: a track for each device, with spans for splits, nodes, copies and waits.
///
/// Spans of asynchronous devices show when work was issued, not when it ran.
#[derive(Debug)]
pub struct Trace {
    begin: Instant,
    spans: Mutex<Vec<Span>>,
}

/// Records the nodes of one split.
pub(crate) struct NodeObserver<'a> {
    trace: &'a Trace,
    plan: &'a Plan,
    device: usize,
}

impl RunObserver for NodeObserver<'_> {
    fn ran(&self, node: TensorId, start: Instant, end: Instant) {
        let graph = &self.plan.lowered.graph;
        let tensor = graph.tensor(node);
        let operands: Vec<_> = tensor
            .operands()
            .map(|(_, source)| graph.tensor(source).layout.to_string())
            .collect();
        self.trace.push(Span {
            track: self.plan.devices.get(self.device).name().to_owned(),
            category: "node",
            name: tensor.op.name().to_owned(),
            start,
            end,
            args: json!({ "node": node.index(), "name": &*tensor.name, "result": tensor.layout.to_string(), "operands": operands }),
        });
    }
}

impl Trace {
    pub(crate) fn new() -> Self {
        Trace {
            begin: Instant::now(),
            spans: Mutex::default(),
        }
    }

    fn push(&self, span: Span) {
        self.spans
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(span);
    }

    pub(crate) fn observer<'a>(&'a self, plan: &'a Plan, device: usize) -> NodeObserver<'a> {
        NodeObserver {
            trace: self,
            plan,
            device,
        }
    }

    pub(crate) fn split(&self, plan: &Plan, number: usize, start: Instant) {
        let split = &plan.lowered.splits[number];
        self.push(Span {
            track: plan.devices.get(split.device).name().to_owned(),
            category: "split",
            name: format!("split {number}"),
            start,
            end: Instant::now(),
            args: json!({ "nodes": split.nodes.len() }),
        });
    }

    pub(crate) fn copy(&self, plan: &Plan, copy: &Copy, lane: Lane, start: Instant) {
        self.push(Span {
            track: format!("copies{}", lane_suffix(lane)),
            category: "copy",
            name: copy_name(plan, copy),
            start,
            end: Instant::now(),
            args: json!({ "bytes": copy.bytes }),
        });
    }

    pub(crate) fn wait(&self, lane: Lane, wait: Wait, start: Instant) {
        self.push(Span {
            track: format!("waits{}", lane_suffix(lane)),
            category: "wait",
            name: format!("wait for action {}", wait.action),
            start,
            end: Instant::now(),
            args: json!({ "runs_ago": wait.runs_ago }),
        });
    }

    /// Number of spans recorded.
    pub fn len(&self) -> usize {
        self.spans
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The recording in Chrome's trace event format.
    pub fn to_json(&self) -> Value {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tracks: Vec<&str> = spans.iter().map(|span| span.track.as_str()).collect();
        tracks.sort_unstable();
        tracks.dedup();
        let number = |track: &str| tracks.iter().position(|t| *t == track).unwrap_or(0);
        let names = tracks.iter().enumerate().map(|(i, track)| {
            json!({ "name": "thread_name", "ph": "M", "pid": 1, "tid": i, "args": { "name": track } })
        });
        let micros =
            |at: Instant| at.saturating_duration_since(self.begin).as_nanos() as f64 / 1000.0;
        let events = spans.iter().map(|span| {
            json!({
                "name": span.name, "cat": span.category, "ph": "X", "pid": 1, "tid": number(&span.track),
                "ts": micros(span.start), "dur": micros(span.end) - micros(span.start), "args": span.args,
            })
        });
        json!({ "displayTimeUnit": "ns", "traceEvents": names.chain(events).collect::<Vec<_>>() })
    }
}

fn lane_suffix(lane: Lane) -> String {
    match lane {
        Lane::Host => " (host)".to_owned(),
        Lane::Device(device) => format!(" (device {device})"),
    }
}

impl std::fmt::Display for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Work::Inputs => f.write_str("inputs"),
            Work::Copy(number) => write!(f, "copy {number}"),
            Work::Split(number) => write!(f, "split {number}"),
        }
    }
}
