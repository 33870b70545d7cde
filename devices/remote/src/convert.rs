//! Converts between messages and samite's types.

use crate::proto;
use samite_core::{DType, Error, Graph, Layout, Node, Op, Result, Role, TensorId, Usage};
use serde_json::{Value, json};
use std::sync::Arc;

/// Converts a layout to a message.
pub(crate) fn layout_to(layout: &Layout) -> proto::Layout {
    let numbers = |numbers: [usize; 4]| numbers.map(|number| number as u64).to_vec();
    proto::Layout {
        dtype: layout.dtype().name().to_owned(),
        shape: numbers(layout.shape()),
        strides: numbers(layout.strides()),
    }
}

/// Converts and validates a layout.
pub(crate) fn layout_of(layout: &proto::Layout) -> Result<Layout> {
    let numbers = |numbers: &[u64]| -> Option<[usize; 4]> {
        let numbers = <[u64; 4]>::try_from(numbers).ok()?;
        let mut all = [0; 4];
        for (to, from) in all.iter_mut().zip(numbers) {
            *to = usize::try_from(from).ok()?;
        }
        Some(all)
    };
    let dtype = DType::from_name(&layout.dtype)
        .ok_or_else(|| Error::invalid(format!("there is no type '{}'", layout.dtype)))?;
    match (numbers(&layout.shape), numbers(&layout.strides)) {
        (Some(shape), Some(strides)) => Layout::strided(dtype, shape, strides),
        _ => Err(Error::invalid("a layout has four extents and four strides")),
    }
}

/// Converts a usage to a message.
pub(crate) fn usage_to(usage: Usage) -> i32 {
    let usage = match usage {
        Usage::Any => proto::Usage::Any,
        Usage::Weights => proto::Usage::Weights,
        Usage::Compute => proto::Usage::Compute,
    };
    usage.into()
}

/// Converts a usage from a message.
pub(crate) fn usage_of(usage: i32) -> Usage {
    match proto::Usage::try_from(usage) {
        Ok(proto::Usage::Weights) => Usage::Weights,
        Ok(proto::Usage::Compute) => Usage::Compute,
        _ => Usage::Any,
    }
}

/// Converts a role to a message.
pub(crate) fn role_to(role: Role) -> String {
    match serde_json::to_value(role) {
        Ok(Value::String(role)) => role,
        _ => String::new(),
    }
}

/// Converts a role from a message. Unknown roles become the default.
pub(crate) fn role_of(role: &str) -> Role {
    serde_json::from_value(Value::String(role.to_owned())).unwrap_or_default()
}

/// Converts an error to a message.
pub(crate) fn failure(error: &Error) -> proto::Failure {
    use proto::failure::Code;
    let (code, text, what, asked) = match error {
        Error::Unsupported { what, reason, .. } => {
            (Code::Unsupported, reason.to_string(), what.to_string(), 0)
        }
        Error::OutOfMemory { what, asked, .. } => (
            Code::OutOfMemory,
            error.to_string(),
            what.to_string(),
            *asked,
        ),
        Error::Shape(text) | Error::InvalidArgument(text) => {
            (Code::Invalid, text.to_string(), String::new(), 0)
        }
        Error::Cancelled => (Code::Cancelled, String::new(), String::new(), 0),
        Error::DeviceLost { message, .. } => (Code::Lost, message.to_string(), String::new(), 0),
        Error::Device { message, .. } => (Code::Device, message.to_string(), String::new(), 0),
        other => (Code::Device, other.to_string(), String::new(), 0),
    };
    proto::Failure {
        code: code.into(),
        text: short(text),
        what: short(what),
        asked: asked as u64,
    }
}

/// Truncates a text, which may contain names that others chose.
fn short(mut text: String) -> String {
    const MOST: usize = 4096;
    if text.len() > MOST {
        let end = (0..=MOST).rev().find(|&at| text.is_char_boundary(at));
        text.truncate(end.unwrap_or(0));
    }
    text
}

/// Creates the failure for an exceeded quota.
pub(crate) fn over_quota(text: String) -> proto::Failure {
    proto::Failure {
        code: proto::failure::Code::Quota.into(),
        text,
        ..proto::Failure::default()
    }
}

/// Converts a failure to an error of the device called `device`.
pub(crate) fn error(device: &str, failure: proto::Failure) -> Error {
    use proto::failure::Code;
    match failure.code() {
        Code::Invalid => Error::invalid(failure.text),
        Code::Unsupported => Error::unsupported(device, failure.what, failure.text),
        Code::OutOfMemory => Error::OutOfMemory {
            device: device.into(),
            what: failure.what.into(),
            asked: usize::try_from(failure.asked).unwrap_or(usize::MAX),
            free: None,
        },
        Code::Cancelled => Error::Cancelled,
        Code::Lost => Error::DeviceLost {
            device: device.into(),
            message: failure.text.into(),
        },
        Code::Device | Code::Quota => Error::device(device, failure.text),
    }
}

/// Some nodes of a graph as a separate graph in JSON. Inputs that other nodes compute become
/// leaves.
#[derive(Default)]
pub(crate) struct JsonSubgraph {
    entries: Vec<Value>,
    /// Tensor at each position in the part.
    pub tensors: Vec<TensorId>,
    /// Stored tensors of the part.
    pub stored: Vec<TensorId>,
}

/// Builds a part.
struct Maker<'a> {
    graph: &'a Graph,
    part: JsonSubgraph,
    /// Position in the part, by position in the graph.
    places: Vec<Option<usize>>,
    /// True if tensors keep their names.
    named: bool,
    /// Selects the stored tensors that stay stored.
    is_stored: &'a dyn Fn(Node<'_>) -> bool,
}

impl Maker<'_> {
    fn add(
        &mut self,
        id: TensorId,
        op: &Op,
        sources: &[Option<usize>],
        role: Option<&str>,
    ) -> usize {
        let tensor = self.graph.tensor(id);
        let number = self.part.entries.len();
        self.part.entries.push(json!({
            "id": number,
            "name": if self.named { &*tensor.name } else { "" },
            "op": op,
            "sources": sources,
            "dtype": tensor.layout.dtype().name(),
            "shape": tensor.layout.shape(),
            "strides": tensor.layout.strides(),
            "roles": role.as_slice(),
        }));
        self.part.tensors.push(id);
        self.places[id.index()] = Some(number);
        number
    }

    /// Returns the position of a node's source.
    fn refer(&mut self, id: TensorId) -> usize {
        if let Some(number) = self.places[id.index()] {
            return number;
        }
        // View chains are short. The memory of a view matters if it is a weight or a cache, or is
        // computed in this part.
        let mut views = Vec::new();
        let mut root = id;
        while self.places[root.index()].is_none()
            && self.graph.tensor(root).op.is_view()
            && let Some(Some(next)) = self.graph.tensor(root).sources.first()
        {
            views.push(root);
            root = *next;
        }
        let node = self.graph.node(root);
        let is_stored = node.tensor().stored.is_some() && (self.is_stored)(node);
        if self.places[root.index()].is_none() && !is_stored {
            return self.add(id, &Op::Leaf, &[], None);
        }
        let mut number = match self.places[root.index()] {
            Some(number) => number,
            None => {
                self.part.stored.push(root);
                self.add(root, &Op::Leaf, &[], Some("stored"))
            }
        };
        for view in views.into_iter().rev() {
            let op = &self.graph.tensor(view).op;
            number = self.add(view, op, &[Some(number)], None);
        }
        number
    }

    fn node(&mut self, id: TensorId, is_read: bool) {
        let graph = self.graph;
        let tensor = graph.tensor(id);
        if self.places[id.index()].is_some() {
            return;
        }
        let sources = tensor.sources.iter();
        let sources: Vec<_> = sources
            .map(|source| source.map(|source| self.refer(source)))
            .collect();
        self.add(id, &tensor.op, &sources, is_read.then_some("output"));
    }
}

impl JsonSubgraph {
    /// Converts `nodes` of a graph, in their order and with names.
    pub fn new(graph: &Graph, nodes: &[TensorId]) -> Self {
        Self::with_stored(graph, nodes, &|_| true)
    }

    /// Works like `of`, but stored tensors for which `is_stored` returns false become leaves,
    /// because they are copied.
    pub fn with_stored(
        graph: &Graph,
        nodes: &[TensorId],
        is_stored: &dyn Fn(Node<'_>) -> bool,
    ) -> Self {
        let mut is_here = vec![false; graph.len()];
        for id in nodes {
            is_here[id.index()] = true;
        }
        // Without outputs and writes, every node is a result.
        let tensors = graph.tensors();
        let all = !tensors
            .iter()
            .any(|tensor| tensor.flags.output || tensor.written().next().is_some());
        let mut is_read = vec![all; graph.len()];
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            if tensor.flags.output || tensor.flags.copied {
                is_read[id.index()] = true;
            }
            if !is_here[id.index()] {
                for (_, source) in tensor.operands() {
                    is_read[source.index()] = true;
                }
            }
        }
        // A reader of a view also reads the viewed tensor. (Lowered graphs are unordered, but views
        // follow the tensors that they view.)
        for id in graph.ids().rev() {
            let tensor = graph.tensor(id);
            if is_read[id.index()] && tensor.op.is_view() {
                for (_, source) in tensor.operands() {
                    is_read[source.index()] = true;
                }
            }
        }
        let mut maker = Maker {
            graph,
            part: JsonSubgraph::default(),
            places: vec![None; graph.len()],
            named: true,
            is_stored,
        };
        for &id in nodes {
            if graph.tensor(id).is_computed() {
                maker.node(id, is_read[id.index()]);
            }
        }
        maker.part
    }

    /// Converts one node and its sources, without names: nodes with the same properties are equal.
    pub fn question(node: Node<'_>, is_stored: &dyn Fn(Node<'_>) -> bool) -> Self {
        let graph = node.graph();
        let mut maker = Maker {
            graph,
            part: JsonSubgraph::default(),
            places: vec![None; graph.len()],
            named: false,
            is_stored,
        };
        maker.node(node.id(), node.tensor().flags.output);
        maker.part
    }

    /// Returns the JSON text.
    pub fn json(self) -> Vec<u8> {
        Value::Array(self.entries).to_string().into_bytes()
    }
}

/// Parses the graph of a message. `stored` returns the memory of stored tensors, by position.
pub(crate) fn graph_of(
    json: &[u8],
    most_tensors: usize,
    mut stored: impl FnMut(usize, &str, &Layout) -> Result<Arc<samite_core::StoredTensor>>,
) -> Result<Graph> {
    let json: Value = serde_json::from_slice(json)
        .map_err(|error| Error::invalid(format!("a graph is no JSON: {error}")))?;
    let entries = json.as_array().map_or(&[][..], Vec::as_slice);
    if entries.len() > most_tensors {
        return Err(Error::invalid(format!(
            "a graph of {} tensors: the server takes at most {most_tensors}",
            entries.len()
        )));
    }
    let is_stored = |entry: &Value| {
        let roles = entry["roles"].as_array();
        roles.is_some_and(|roles| roles.iter().any(|role| role == "stored"))
    };
    let mut positions = (0..).zip(entries).filter(|(_, entry)| is_stored(entry));
    let mut failure = None;
    let graph = Graph::from_json(&json, |name, layout| {
        let (position, _) = positions.next()?;
        stored(position, name, layout)
            .map_err(|error| failure = Some(error))
            .ok()
    });
    match failure {
        Some(error) => Err(error),
        None => graph,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_core::{StoredTensor, host_buffer_type};

    #[test]
    fn subgraphs_are_self_contained() {
        let mut g = Graph::new();
        let buffer = host_buffer_type().allocate(4096, Usage::Weights).unwrap();
        let layout = Layout::contiguous(DType::F32, [8, 16, 1, 1]).unwrap();
        let weight = StoredTensor::new("w", buffer, 0, layout).unwrap();
        let w = g.stored(&weight).unwrap();
        let rows = g.rows(w, 4, 2).unwrap();
        let x = g.input("x", DType::F32, [8, 2, 1, 1]).unwrap();
        let before = g.sqr(x).unwrap();
        let turned = g.transpose(before).unwrap();
        let turned = g.transpose(turned).unwrap();
        let sum = g.add(turned, rows).unwrap();
        let inner = g.sqr(sum).unwrap();
        let view = g.rows(inner, 1, 1).unwrap();
        let last = g.sqr(view).unwrap();
        let after = g.sqr(inner).unwrap();
        g.set_output(after);
        let part = JsonSubgraph::new(&g, &[sum, inner, view, last]);
        assert_eq!(part.tensors, [turned, w, rows, sum, inner, view, last]);
        assert_eq!(part.stored, [w]);
        let json = part.json();
        let back = graph_of(&json, 7, |position, name, _| {
            assert_eq!((position, name), (1, "w"));
            Ok(Arc::clone(&weight))
        })
        .unwrap();
        let read: Vec<_> = back.tensors().iter().map(|t| t.flags.output).collect();
        assert_eq!(read, [false, false, false, false, true, false, false]);
        assert!(graph_of(&json, 6, |_, _, _| Ok(Arc::clone(&weight))).is_err());
        let error = graph_of(&json, 7, |_, _, _| Err(Error::invalid("not there")));
        assert!(error.unwrap_err().to_string().contains("not there"));
    }

    #[test]
    fn errors_round_trip() {
        for error in [
            Error::invalid("a"),
            Error::unsupported("d", "b", "c"),
            Error::device("d", "e"),
            Error::Cancelled,
            Error::DeviceLost {
                device: "d".into(),
                message: "f".into(),
            },
        ] {
            let back = super::error("d", failure(&error));
            assert_eq!(back.to_string(), error.to_string());
        }
    }

    #[test]
    fn layouts_are_checked() {
        let layout = Layout::contiguous(DType::Q4_0, [64, 3, 1, 1]).unwrap();
        let message = layout_to(&layout);
        assert_eq!(layout_of(&message).unwrap(), layout);
        let wrong = |change: &dyn Fn(&mut proto::Layout)| {
            let mut message = message.clone();
            change(&mut message);
            layout_of(&message).is_err()
        };
        assert!(wrong(&|m| m.dtype = "q9".into()));
        assert!(wrong(&|m| m.shape = vec![64]));
        assert!(wrong(&|m| m.shape[1] = u64::MAX));
        assert!(wrong(&|m| m.shape[0] = 33));
        assert!(wrong(&|m| m.strides.push(1)));
    }
}
