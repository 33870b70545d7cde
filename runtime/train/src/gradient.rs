//! Automatic differentiation: extends a graph with a loss by the nodes that compute the loss's
//! gradients.
//!
//! This is reverse mode: going backwards from the loss, each node converts the gradient of its
//! result to those of its operands, and gradients that reach a tensor on several paths are added.
//! The rules are in [`rules`](crate::rules). They append ordinary nodes, so gradients are placed,
//! planned and run like everything else.

use crate::error::{Error, Result};
use crate::rules;
use samite_core::{DType, Graph, TensorId};

/// Gradients of one loss.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// Gradients by position of the forward tensor.
    of: Vec<Option<TensorId>>,
}

impl Gradients {
    /// Appends to `graph` the nodes that compute the gradient of `scale * loss` with respect to
    /// each of `parameters`.
    ///
    /// `scale` is the weight of the loss: `1 / n` for one of `n` micro-batches whose gradients are
    /// added.
    ///
    /// # Errors
    /// Returns [`Error::Gradient`] if `loss` is not one f32 element, or if a node on a path has no
    /// rule; the message names it.
    pub fn append(
        graph: &mut Graph,
        loss: TensorId,
        scale: f32,
        parameters: &[TensorId],
    ) -> Result<Self> {
        Self::append_recomputing(graph, loss, scale, parameters, &[])
    }

    /// Appends gradients like [`append`](Self::append), but recomputes intermediate results instead
    /// of keeping them. `kept` contains tensors in the order of the graph. When the backward pass
    /// reaches the nodes between two adjacent tensors of `kept`, these are computed again from the
    /// first of the two. The results are bit-identical. If the graph has outputs, the scheduler
    /// removes recomputed nodes that are not needed.
    ///
    /// # Errors
    /// Fails like [`append`](Self::append), and with [`Error::Gradient`] if a node in between
    /// writes to its operands.
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
        let mut again = Duplicate::default();
        for index in (0..=loss.index()).rev() {
            let id = TensorId::from_index(index);
            if let Some(place) = kept.iter().position(|&end| end == id) {
                again = Duplicate::default();
                if let Some(&start) = place.checked_sub(1).and_then(|before| kept.get(before)) {
                    again = Duplicate::append(graph, start, id)?;
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
                let part = rules::apply(graph, again.copy_of(id), gradient, number)?;
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

    /// Returns the gradient of forward tensor `id`: f32, with the same shape but possibly other
    /// strides. Returns `None` if the loss does not depend on it, or if no requested parameter
    /// depends on it.
    pub fn get(&self, id: TensorId) -> Option<TensorId> {
        self.of.get(id.index()).copied().flatten()
    }
}

/// A part of a graph that is duplicated.
#[derive(Debug, Default)]
struct Duplicate {
    /// Position of the first tensor in the part.
    first: usize,
    /// Copies of the tensors, in order.
    copies: Vec<TensorId>,
}

impl Duplicate {
    /// Appends copies of the nodes after `start` up to `end`.
    fn append(graph: &mut Graph, start: TensorId, end: TensorId) -> Result<Self> {
        let mut again = Duplicate {
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
            let source = |source: &Option<TensorId>| source.map(|source| again.copy_of(source));
            let sources: Vec<_> = tensor.sources.iter().map(source).collect();
            let copy = graph.push(op, &sources)?;
            graph.set_name(copy, format!("again:{name}"));
            again.copies.push(copy);
        }
        Ok(again)
    }

    /// Returns the copy of `id`, or `id` itself if it is not in the part.
    fn copy_of(&self, id: TensorId) -> TensorId {
        let place = id.index().checked_sub(self.first);
        let copy = place.and_then(|place| self.copies.get(place));
        copy.copied().unwrap_or(id)
    }
}

/// Returns which tensors depend on the values of one of `parameters`, by position, including the
/// parameters.
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
