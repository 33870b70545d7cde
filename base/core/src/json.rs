//! Graphs as JSON, and back.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Flags, Graph, TensorId};
use crate::layout::{DIMS, Layout, Shape};
use crate::op::Op;
use crate::print::roles;
use crate::stored::StoredTensor;
use serde_json::{Value, json};
use std::sync::Arc;

/// JSON form of one tensor, for [`Graph::from_json`]. Views are computed again.
#[derive(serde::Deserialize)]
struct JsonTensor {
    id: usize,
    name: String,
    op: Op,
    sources: Vec<Option<TensorId>>,
    dtype: String,
    shape: Shape,
    strides: [usize; DIMS],
    roles: Vec<String>,
}

impl Graph {
    /// Returns the graph as JSON: an array of tensors with `id`, `name`, `op`, `sources`, `dtype`,
    /// `shape`, `strides`, `view` (`base` and `offset`, for views) and `roles`. Only the memory of
    /// stored tensors is lost.
    pub fn to_json(&self) -> Value {
        self.ids()
            .map(|id| {
                let t = self.tensor(id);
                json!({
                    "id": id.index(),
                    "name": &*t.name,
                    "op": t.op,
                    "sources": t.sources,
                    "dtype": t.layout.dtype().name(),
                    "shape": t.layout.shape(),
                    "strides": t.layout.strides(),
                    "view": t.view.map(|v| json!({ "base": v.base.index(), "offset": v.offset })),
                    "roles": roles(t).collect::<Vec<_>>(),
                })
            })
            .collect()
    }

    /// Returns the graph that [`to_json`](Graph::to_json) wrote. Checks every node as if it were
    /// built. `stored` returns the memory of a stored tensor by name and layout.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::Shape`], naming the tensor, for anything that is not
    /// a graph: unknown operations, operands that come later, layouts that the operation does not
    /// produce. Also for stored tensors for which `stored` returns nothing.
    pub fn from_json(
        json: &Value,
        mut stored: impl FnMut(&str, &Layout) -> Option<Arc<StoredTensor>>,
    ) -> Result<Graph> {
        let Value::Array(entries) = json else {
            return Err(Error::invalid("a graph in JSON is an array of tensors"));
        };
        let mut graph = Graph::new();
        for (number, entry) in entries.iter().enumerate() {
            let wrong = |what: String| {
                Error::invalid(format!("tensor {number} of a graph in JSON: {what}"))
            };
            let entry: JsonTensor =
                serde::Deserialize::deserialize(entry).map_err(|error| wrong(error.to_string()))?;
            if entry.id != number {
                return Err(wrong(format!("its id is {}", entry.id)));
            }
            let dtype = DType::from_name(&entry.dtype)
                .ok_or_else(|| wrong(format!("there is no type '{}'", entry.dtype)))?;
            let layout = Layout::strided(dtype, entry.shape, entry.strides)
                .map_err(|error| wrong(error.to_string()))?;
            let mut flags = Flags::default();
            let mut is_stored = false;
            for role in &entry.roles {
                match role.as_str() {
                    "stored" => is_stored = true,
                    "input" => flags.input = true,
                    "output" => flags.output = true,
                    "copied" => flags.copied = true,
                    other => return Err(wrong(format!("there is no role '{other}'"))),
                }
            }
            let is_leaf = matches!(entry.op, Op::Leaf);
            if (is_stored || flags.input) && !is_leaf || is_stored && flags.input {
                return Err(wrong(
                    "only a leaf is stored, or an input, and not both".into(),
                ));
            }
            let memory = if is_stored {
                Some(
                    stored(&entry.name, &layout)
                        .filter(|stored| *stored.layout() == layout)
                        .ok_or_else(|| {
                            wrong(format!(
                                "there is no stored tensor '{}' ({layout})",
                                entry.name
                            ))
                        })?,
                )
            } else {
                None
            };
            let id = if is_leaf {
                graph.append_leaf(&entry.name, layout, flags, memory)?
            } else {
                graph
                    .push(entry.op, &entry.sources)
                    .map_err(|error| wrong(error.to_string()))?
            };
            let tensor = graph.tensor(id);
            if tensor.layout != layout || *tensor.sources != *entry.sources {
                return Err(wrong(format!(
                    "{} of these sources is {}, not {layout}",
                    entry.op.name(),
                    tensor.layout
                )));
            }
            graph.set_name(id, entry.name);
            graph.set_flags(id, flags);
        }
        Ok(graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Rope, RopeMode};
    use crate::{Usage, host_buffer_type};

    fn sample() -> Graph {
        let mut g = Graph::new();
        let w = g.leaf("wq", DType::Q8_0, [64, 8, 1, 1]).unwrap();
        let x = g.input("a \"name\"", DType::F32, [64, 5, 1, 1]).unwrap();
        let n = g.rms_norm(x, 1e-5).unwrap();
        let y = g.mul_mat(w, n).unwrap();
        let t = g.transpose(y).unwrap();
        g.set_output(t);
        g
    }

    #[test]
    fn json_lists_sources_parameters_views_and_roles() {
        let json = sample().to_json();
        assert_eq!(json[3]["sources"], json!([0, 2]));
        assert_eq!(
            json[3]["op"],
            json!({ "MulMat": { "precision": "Default" } })
        );
        assert_eq!(json[4]["view"], json!({ "base": 3, "offset": 0 }));
        assert_eq!(json[1]["roles"], json!(["input"]));
    }

    #[test]
    fn json_is_stable() {
        assert_eq!(
            sample().to_json()[4],
            json!({
                "id": 4, "name": "", "op": "Transpose", "sources": [3], "dtype": "f32",
                "shape": [5, 8, 1, 1],
                "strides": [32, 4, 160, 160], "view": {"base": 3, "offset": 0}, "roles": ["output"],
            })
        );
    }

    /// Returns the graph as JSON text, which distinguishes -0 from 0, unlike `PartialEq`.
    fn text(graph: &Graph) -> String {
        graph.to_json().to_string()
    }

    #[test]
    fn graphs_round_trip_through_json_exactly() {
        let mut g = sample();
        let buffer = host_buffer_type().allocate(4096, Usage::Any).unwrap();
        let layout = Layout::contiguous(DType::F32, [8, 16, 1, 1]).unwrap();
        let cache = StoredTensor::new("cache", buffer, 128, layout).unwrap();
        let c = g.stored(&cache).unwrap();
        let x = g.input("x", DType::F32, [8, 2, 1, 1]).unwrap();
        let limited = Op::Clamp {
            min: -0.0,
            max: f32::INFINITY,
        };
        let limited = g.push(limited, &[Some(x)]).unwrap();
        let filled = Op::Fill {
            value: f32::from_bits(0xffc0_1234),
        };
        let filled = g.push(filled, &[Some(limited)]).unwrap();
        let rope = Op::Rope(Rope {
            freq_scale: f32::NEG_INFINITY,
            ..Rope::new(8, RopeMode::Neox, 1e4)
        });
        let positions = g.input("positions", DType::I32, [1, 1, 1, 1]).unwrap();
        let heads = g.reshape(filled, [8, 2, 1, 1]).unwrap();
        g.push(rope, &[Some(heads), Some(positions)]).unwrap();
        let window = g.rows(c, 4, 2).unwrap();
        let written = g.cpy(filled, window).unwrap();
        g.copy_of(written, "copy").unwrap();
        let mask = g
            .push(
                Op::SoftMax {
                    scale: 1.0,
                    max_bias: 0.0,
                },
                &[Some(x), None, None],
            )
            .unwrap();
        g.set_output(mask);

        let json: Value = serde_json::from_str(&text(&g)).unwrap();
        let back = Graph::from_json(&json, |name, layout| {
            (name == "cache" && layout == cache.layout()).then(|| Arc::clone(&cache))
        })
        .unwrap();
        assert_eq!(text(&back), text(&g));
        assert!(text(&back).contains("nan:ffc01234") && text(&back).contains("\"min\":-0.0"));
        for (a, b) in g.tensors().iter().zip(back.tensors()) {
            assert_eq!((a.view, a.flags), (b.view, b.flags));
            assert_eq!(a.stored.is_some(), b.stored.is_some());
        }
        let error = Graph::from_json(&json, |_, _| None).unwrap_err();
        assert!(error.to_string().contains("cache"), "{error}");
    }

    #[test]
    fn invalid_graphs_are_refused() {
        let good = sample().to_json();
        assert!(Graph::from_json(&good, |_, _| None).is_ok());
        let changed = |at: usize, field: &str, value: Value| {
            let mut json = good.clone();
            json[at][field] = value;
            Graph::from_json(&json, |_, _| None)
                .unwrap_err()
                .to_string()
        };
        for (at, field, value, expected) in [
            (2, "id", json!(7), "id is 7"),
            (2, "op", json!("Dance"), "unknown variant"),
            (2, "sources", json!([3]), "%3"),
            (2, "sources", json!([4_000_000_000_u32]), "%4000000000"),
            (2, "sources", json!([]), "source 0 is missing"),
            (3, "shape", json!([8, 6, 1, 1]), "f32 [8, 5]"),
            (3, "shape", json!([usize::MAX, 6, 1, 1]), "overflow"),
            (3, "strides", json!([4, 36, 180, 180]), "f32 [8, 5]"),
            (0, "dtype", json!("q9_9"), "q9_9"),
            (2, "roles", json!(["input"]), "only a leaf"),
            (2, "roles", json!(["king"]), "king"),
            (2, "name", json!(null), "tensor 2"),
        ] {
            let error = changed(at, field, value);
            assert!(error.contains(expected), "{error}");
            assert!(error.contains(&format!("tensor {at}")), "{error}");
        }
        assert!(Graph::from_json(&json!({}), |_, _| None).is_err());
    }
}
