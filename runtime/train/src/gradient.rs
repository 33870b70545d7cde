//! Differentiation: from a graph with a loss to the same graph with the nodes that compute the loss's gradients.
//!
//! Reverse mode: going backwards from the loss, each node turns the gradient of its result into those of its operands, and
//! what reaches a tensor on several ways is added. The rules are in [`rules`](crate::rules); what they append are ordinary
//! nodes, so gradients are placed, planned and run like everything else.

use crate::error::{Error, Result};
use crate::rules;
use samite_core::{DType, Graph, TensorId};

/// The gradients of one loss.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// By position of the forward tensor.
    of: Vec<Option<TensorId>>,
}

impl Gradients {
    /// Appends to `graph` the nodes that compute the gradient of `scale * loss` with respect to each of `parameters`.
    ///
    /// `scale` is what the loss counts: `1 / n` for one of `n` micro-batches whose gradients are added up.
    ///
    /// # Errors
    /// [`Error::Gradient`] if `loss` is not one f32 element, or if a node on the way has no rule: the message names it.
    pub fn append(
        graph: &mut Graph,
        loss: TensorId,
        scale: f32,
        parameters: &[TensorId],
    ) -> Result<Self> {
        Self::append_recomputing(graph, loss, scale, parameters, &[])
    }

    /// As [`append`](Self::append), but what lies between two neighbours of `kept`, which are in the order of the graph, is
    /// computed once more when the backward pass comes there, from the first of the two, instead of being kept until then. The
    /// results are the same, bit for bit; what is computed again and not needed is dropped by the scheduler if the graph has
    /// outputs.
    ///
    /// # Errors
    /// As [`append`](Self::append); [`Error::Gradient`] if a node in between writes to its operands.
    pub fn append_recomputing(
        graph: &mut Graph,
        loss: TensorId,
        scale: f32,
        parameters: &[TensorId],
        kept: &[TensorId],
    ) -> Result<Self> {
        let loss_layout = graph.tensor(loss).layout;
        if loss_layout.elements() != 1 || loss_layout.dtype() != DType::F32 {
            return Err(Error::gradient(format!(
                "the loss '{}' is {loss_layout}; it must be one f32 element",
                graph.tensor(loss).name
            )));
        }
        let wanted = depends_on(graph, parameters);
        let mut gradients = Gradients {
            of: vec![None; graph.len()],
        };
        if wanted[loss.index()] {
            let seed = graph.fill(loss, scale)?;
            graph.set_name(seed, "grad:loss");
            gradients.of[loss.index()] = Some(seed);
        }
        let mut again = Again::default();
        for index in (0..=loss.index()).rev() {
            let id = TensorId::from_index(index);
            if let Some(place) = kept.iter().position(|&end| end == id) {
                again = Again::default();
                if let Some(&start) = place.checked_sub(1).and_then(|before| kept.get(before)) {
                    again = Again::append(graph, start, id)?;
                }
            }
            let (Some(gradient), true) = (gradients.of[index], wanted[index]) else {
                continue;
            };
            let sources: Vec<_> = graph
                .tensor(id)
                .operands()
                .filter(|&(number, source)| {
                    wanted[source.index()] && rules::depends_on(&graph.tensor(id).op, number)
                })
                .collect();
            for (number, source) in sources {
                let part = rules::apply(graph, again.of(id), gradient, number)?;
                gradients.add(graph, source, part)?;
            }
        }
        for &id in parameters {
            if let Some(gradient) = gradients.of[id.index()] {
                let name = format!("grad:{}", graph.tensor(id).name);
                graph.set_name(gradient, name);
            }
        }
        Ok(gradients)
    }

    fn add(&mut self, graph: &mut Graph, id: TensorId, part: TensorId) -> Result<()> {
        let (tensor, given) = (graph.tensor(id), graph.tensor(part));
        if tensor.layout.shape() != given.layout.shape() {
            return Err(Error::gradient(format!(
                "the gradient of {:?} has the shape {:?}",
                graph.node(id),
                given.layout.shape()
            )));
        }
        let sum = match self.of[id.index()] {
            Some(known) => graph.add(known, part)?,
            None => part,
        };
        self.of[id.index()] = Some(sum);
        Ok(())
    }

    /// The gradient of forward tensor `id`: f32, of its shape, though perhaps with other strides. `None` if the loss does not
    /// depend on it, or nobody asked for a parameter behind it.
    pub fn of(&self, id: TensorId) -> Option<TensorId> {
        self.of.get(id.index()).copied().flatten()
    }
}

/// Part of a graph that is there a second time.
#[derive(Debug, Default)]
struct Again {
    /// Position of the first tensor in the part.
    first: usize,
    /// For each of them, the one that takes its place.
    copies: Vec<TensorId>,
}

impl Again {
    /// Appends the nodes behind `start` up to `end` once more.
    fn append(graph: &mut Graph, start: TensorId, end: TensorId) -> Result<Self> {
        let mut again = Again {
            first: start.index() + 1,
            copies: Vec::new(),
        };
        for index in again.first..=end.index() {
            let id = TensorId::from_index(index);
            let tensor = graph.tensor(id);
            if tensor.sources.is_empty() {
                again.copies.push(id);
                continue;
            }
            if tensor.written().next().is_some() {
                return Err(Error::gradient(format!(
                    "{:?} writes to memory and cannot be computed once more: let it be kept",
                    graph.node(id)
                )));
            }
            let (op, name) = (tensor.op, tensor.name.clone());
            let source = |source: &Option<TensorId>| source.map(|source| again.of(source));
            let sources: Vec<_> = tensor.sources.iter().map(source).collect();
            let copy = graph.push(op, &sources)?;
            graph.set_name(copy, format!("again:{name}"));
            again.copies.push(copy);
        }
        Ok(again)
    }

    /// What takes the place of `id`: itself, if it is not in the part.
    fn of(&self, id: TensorId) -> TensorId {
        let place = id.index().checked_sub(self.first);
        let copy = place.and_then(|place| self.copies.get(place));
        copy.copied().unwrap_or(id)
    }
}

/// Which tensors depend on the values of one of `parameters`, by position; those are among them.
fn depends_on(graph: &Graph, parameters: &[TensorId]) -> Vec<bool> {
    let mut depends = vec![false; graph.len()];
    for id in graph.ids() {
        let tensor = graph.tensor(id);
        let through = |(number, source): (usize, TensorId)| {
            depends[source.index()]
                && rules::depends_on(&tensor.op, number)
                && graph.tensor(source).layout.dtype() == DType::F32
        };
        depends[id.index()] = parameters.contains(&id) || tensor.operands().any(through);
    }
    depends
}
