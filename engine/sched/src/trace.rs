//! What ran when, as a file that <https://ui.perfetto.dev> opens (Chrome's trace event format).

use crate::order::{Lane, Wait, Work};
use crate::plan::Plan;
use crate::split::Copy;
use samite_core::environment::{Clock, Instant};
use samite_core::{RunObserver, TensorId};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

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
/// Spans of splits and copies of asynchronous devices show when work was issued, those of nodes when it ran, as far as the device says.
#[derive(Debug)]
pub struct Trace {
    clock: Arc<dyn Clock>,
    begin: Instant,
    spans: Arc<Spans>,
    /// Tracks that were named in what was taken out.
    named: Mutex<Vec<String>>,
}

#[derive(Debug, Default)]
struct Spans {
    all: Mutex<Vec<Span>>,
    /// By device: when its last node ended, so that work which was issued early does not seem to overlap.
    ends: Mutex<Vec<Option<Instant>>>,
}

impl Spans {
    fn lock(&self) -> MutexGuard<'_, Vec<Span>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records the nodes of one split.
struct NodeObserver {
    spans: Arc<Spans>,
    plan: Arc<Plan>,
    device: usize,
    issued: Instant,
    /// When the device began with the split, once a node of it is known.
    began: OnceLock<Instant>,
}

impl NodeObserver {
    /// When the device began: not before the work was issued, and not before it was done with what it had.
    fn began(&self) -> Instant {
        *self.began.get_or_init(|| {
            let ends = self
                .spans
                .ends
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let free = ends.get(self.device).copied().flatten();
            free.map_or(self.issued, |free| free.max(self.issued))
        })
    }

    fn ended(&self, end: Instant) {
        let mut ends = self
            .spans
            .ends
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if ends.len() <= self.device {
            ends.resize(self.device + 1, None);
        }
        ends[self.device] = Some(end);
    }
}

impl RunObserver for NodeObserver {
    fn ran(&self, node: TensorId, start: Duration, took: Duration) {
        let start = self.began() + start;
        let end = start + took;
        self.ended(end);
        let graph = &self.plan.lowered.graph;
        let tensor = graph.tensor(node);
        let operands: Vec<_> = tensor
            .operands()
            .map(|(_, source)| graph.tensor(source).layout.to_string())
            .collect();
        self.spans.lock().push(Span {
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
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Trace {
            begin: clock.now(),
            clock,
            spans: Arc::default(),
            named: Mutex::default(),
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    fn push(&self, span: Span) {
        self.spans.lock().push(span);
    }

    /// An observer for a split that is about to be issued.
    pub(crate) fn observer(&self, plan: &Arc<Plan>, device: usize) -> Arc<dyn RunObserver> {
        Arc::new(NodeObserver {
            spans: Arc::clone(&self.spans),
            plan: Arc::clone(plan),
            device,
            issued: self.clock.now(),
            began: OnceLock::new(),
        })
    }

    /// So many nodes of a split: all, or those up to the next one that a watcher sees.
    pub(crate) fn split(&self, plan: &Plan, number: usize, nodes: usize, start: Instant) {
        let split = &plan.lowered.splits[number];
        self.push(Span {
            track: plan.devices.get(split.device).name().to_owned(),
            category: "split",
            name: format!("split {number}"),
            start,
            end: self.clock.now(),
            args: json!({ "nodes": nodes }),
        });
    }

    pub(crate) fn copy(&self, plan: &Plan, copy: &Copy, lane: Lane, start: Instant) {
        self.push(Span {
            track: format!("copies{}", lane_suffix(lane)),
            category: "copy",
            name: copy_name(plan, copy),
            start,
            end: self.clock.now(),
            args: json!({ "bytes": copy.bytes }),
        });
    }

    pub(crate) fn wait(&self, lane: Lane, wait: Wait, start: Instant) {
        self.push(Span {
            track: format!("waits{}", lane_suffix(lane)),
            category: "wait",
            name: format!("wait for action {}", wait.action),
            start,
            end: self.clock.now(),
            args: json!({ "runs_ago": wait.runs_ago }),
        });
    }

    /// Number of spans recorded.
    pub fn len(&self) -> usize {
        self.spans.lock().len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes out what was recorded so far, as events of Chrome's trace event format: for long recordings, which are written as they grow.
    /// A file is `[`, the events with commas between, and `]`.
    pub fn take_events(&self) -> Vec<Value> {
        let spans = std::mem::take(&mut *self.spans.lock());
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        let mut events = Vec::with_capacity(spans.len());
        for span in spans {
            let known = named.iter().position(|track| *track == span.track);
            let number = known.unwrap_or_else(|| {
                events.push(json!({
                    "name": "thread_name", "ph": "M", "pid": 1, "tid": named.len(), "args": { "name": span.track },
                }));
                named.push(span.track);
                named.len() - 1
            });
            let start = span.start.saturating_duration_since(self.begin);
            let took = span.end.saturating_duration_since(span.start);
            let micros = |time: Duration| time.as_nanos() as f64 / 1000.0;
            events.push(json!({
                "name": span.name, "cat": span.category, "ph": "X", "pid": 1, "tid": number,
                "ts": micros(start), "dur": micros(took), "args": span.args,
            }));
        }
        events
    }

    /// The recording as a file in Chrome's trace event format. Nothing is left.
    pub fn into_json(self) -> Value {
        json!({ "displayTimeUnit": "ns", "traceEvents": self.take_events() })
    }
}

fn lane_suffix(lane: Lane) -> String {
    match lane {
        Lane::Host => " (host)".to_owned(),
        Lane::Device(device) => format!(" (device {device})"),
        Lane::Copies(device) => format!(" (copy stream of device {device})"),
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

/// What a copy is called.
fn copy_name(plan: &Plan, copy: &Copy) -> String {
    let tensor = plan.graph.tensor(copy.from);
    match &*tensor.name {
        "" => format!("copy {}", copy.from),
        name => format!("copy {} '{name}'", copy.from),
    }
}
