//! The nodes after the last norm if embeddings are requested.

use super::Builder;
use crate::arch::graph::Input;
use crate::arch::spec::{Classifier, Head, Pooling};
use samite_core::{DType, Result, TensorId};

impl Builder<'_> {
    /// Returns the embeddings of tokens or texts from the result of the last norm.
    pub(super) fn embeddings(
        &mut self,
        head: &Head,
        normed: TensorId,
        pooling: Pooling,
    ) -> Result<TensorId> {
        let mut x = match self.shape.n_means {
            0 => normed,
            _ => self.means(normed)?,
        };
        match (&head.classifier, pooling) {
            (Some(classifier), Pooling::Rank) => x = self.scores(classifier, x)?,
            _ => {
                for linear in &head.dense {
                    x = self.linear(x, linear, linear.name)?;
                }
            }
        }
        if x != normed {
            self.graph.set_name(x, "result_embd_pooled");
        }
        Ok(x)
    }

    /// Returns the mean over the tokens of each sequence.
    fn means(&mut self, x: TensorId) -> Result<TensorId> {
        let shape = [self.shape.n_tokens, self.shape.n_means, 1, 1];
        let shares = self.input(Input::Means, DType::F32, shape)?;
        let turned = self.graph.transpose(x)?;
        let turned = self.graph.cont(turned)?;
        self.graph.mul_mat(turned, shares)
    }

    /// Returns one score for each label.
    fn scores(&mut self, classifier: &Classifier, mut x: TensorId) -> Result<TensorId> {
        if let Some((linear, function)) = &classifier.dense {
            x = self.linear(x, linear, "cls")?;
            x = self.graph.unary(x, *function)?;
        }
        x = self.maybe_norm(x, &classifier.norm)?;
        if let Some(linear) = &classifier.output {
            x = self.linear(x, linear, "cls_out")?;
        }
        if classifier.shares {
            self.graph.soft_max(x, None, None, 1.0, 0.0)
        } else {
            Ok(x)
        }
    }
}
