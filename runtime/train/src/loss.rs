//! Loss functions.

use crate::error::{Error, Result};
use samite_core::{Graph, TensorId};

/// Loss function, which reduces a graph's outputs, and their labels, to one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Mean of all outputs.
    Mean,
    /// Sum of all outputs.
    Sum,
    /// Mean over rows of the cross entropy between the softmax of outputs and labels, which are
    /// probabilities.
    CrossEntropy,
    /// Mean of squared differences between outputs and labels.
    MeanSquaredError,
}

impl Loss {
    /// Returns whether outputs are compared with labels.
    pub fn has_labels(self) -> bool {
        matches!(self, Loss::CrossEntropy | Loss::MeanSquaredError)
    }

    /// Appends the loss, one element, to `graph`. If the loss [has labels](Self::has_labels), they
    /// are required, and must have the shape of the outputs.
    ///
    /// # Errors
    /// Returns [`Error::Gradient`] if labels are missing or unexpected. Also fails if operands do
    /// not match.
    pub fn append(
        self,
        graph: &mut Graph,
        outputs: TensorId,
        labels: Option<TensorId>,
    ) -> Result<TensorId> {
        let count = graph.tensor(outputs).layout.elements();
        let share = 1.0 / count as f32;
        let loss = match (self, labels) {
            (Loss::Mean, None) => {
                let sum = graph.sum(outputs)?;
                graph.scale(sum, share)?
            }
            (Loss::Sum, None) => graph.sum(outputs)?,
            (Loss::CrossEntropy, Some(labels)) => graph.cross_entropy_loss(outputs, labels)?,
            (Loss::MeanSquaredError, Some(labels)) => {
                let difference = graph.sub(outputs, labels)?;
                let squares = graph.sqr(difference)?;
                let sum = graph.sum(squares)?;
                graph.scale(sum, share)?
            }
            (loss, labels) => {
                let how = if labels.is_some() { "with" } else { "without" };
                return Err(Error::gradient(format!(
                    "there is no loss {loss:?} {how} labels"
                )));
            }
        };
        graph.set_name(loss, "loss");
        Ok(loss)
    }
}
