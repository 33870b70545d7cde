//! Execution traces in Chrome's trace event format, for <https://ui.perfetto.dev>.

use crate::order::{Lane, Wait, Work};
use crate::plan::Plan;
use crate::split::Copy;
use samite_core::environment::{Clock, Instant};
use samite_core::{RunObserver, TensorId};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// A time span.
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
/// Spans of splits and copies of asynchronous devices show the time of issue. Spans of nodes show
/// the execution time, if the device reports it.
#[derive(Debug)]
pub struct Trace {
    clock: Arc<dyn Clock>,
    begin: Instant,
    spans: Arc<Spans>,
    /// Tracks named in events that were already taken.
    named: Mutex<Vec<String>>,
}

#[derive(Debug, Default)]
struct Spans {
    all: Mutex<Vec<Span>>,
    /// End of the last node of each device, so that work issued early does not appear to overlap.
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
    /// Start of the split on the device, set with its first node.
    began: OnceLock<Instant>,
}

impl NodeObserver {
    /// Returns when the device started the split: after the issue, and after its earlier work.
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
            args: json!({ "node": node.index(), "name": &*tensor.name,
                "result": tensor.layout.to_string(), "operands": operands }),
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

    /// Returns an observer for a split that is about to be issued.
    pub(crate) fn observer(&self, plan: &Arc<Plan>, device: usize) -> Arc<dyn RunObserver> {
        Arc::new(NodeObserver {
            spans: Arc::clone(&self.spans),
            plan: Arc::clone(plan),
            device,
            issued: self.clock.now(),
            began: OnceLock::new(),
        })
    }

    /// Records `nodes` nodes of a split: all, or those up to the next watched one.
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

    /// Returns the number of recorded spans.
    pub fn len(&self) -> usize {
        self.spans.lock().len()
    }

    /// Returns whether no spans were recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the events recorded so far, in Chrome's trace event format. For long recordings that
    /// are written incrementally. A file is `[`, the events separated by commas, and `]`.
    pub fn take_events(&self) -> Vec<Value> {
        let spans = std::mem::take(&mut *self.spans.lock());
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        let mut events = Vec::with_capacity(spans.len());
        for span in spans {
            let known = named.iter().position(|track| *track == span.track);
            let number = known.unwrap_or_else(|| {
                events.push(json!({
                    "name": "thread_name", "ph": "M", "pid": 1, "tid": named.len(),
                    "args": { "name": span.track },
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

    /// Returns the recording as a complete file in Chrome's trace event format.
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

/// Returns the name of a copy.
fn copy_name(plan: &Plan, copy: &Copy) -> String {
    let tensor = plan.graph.tensor(copy.from);
    match &*tensor.name {
        "" => format!("copy {}", copy.from),
        name => format!("copy {} '{name}'", copy.from),
    }
}
