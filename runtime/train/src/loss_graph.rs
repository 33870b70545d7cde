//! The graphs that compute the loss of texts, and gradients.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::gradient::Gradients;
use crate::model::{Constants, Forward, Parts};
use crate::parameters::{Stored, scalar, store_gradients, write};
use half::f16;
use samite_core::{CancelToken, DType, Device, Graph, Layout, StoredTensor, TensorGroup, Usage};
use samite_llm::Model;
use samite_llm::arch::Spec;
use samite_sched::Scheduler;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The model of a loss: everything that the graphs share.
pub(crate) struct Subject {
    pub spec: Spec,
    /// Model that an adapter is trained for.
    pub base: Option<Arc<Model>>,
    pub parameters: Vec<Stored>,
    /// Weights that do not change.
    pub frozen: Vec<(String, Arc<StoredTensor>)>,
    pub constants: StoredConstants,
}

/// Purpose of a graph of the loss.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Computes only the loss.
    Measure,
    /// Computes gradients that replace the previous ones.
    SetGradients,
    /// Computes gradients that are added to the previous ones.
    AddGradients,
}

/// A graph that computes the loss, and optionally gradients.
pub(crate) struct LossGraph {
    pub graph: Graph,
    forward: Forward,
    context: usize,
    vocabulary: usize,
}

/// Stored constants: positions, mask, ones.
pub(crate) struct StoredConstants([Arc<StoredTensor>; 3]);

impl StoredConstants {
    pub fn new(n: usize, batch: usize, device: &Arc<dyn Device>) -> Result<Self> {
        let layout = |dtype, shape| Layout::contiguous(dtype, shape);
        let group = TensorGroup::allocate(
            &device.buffer_type(),
            Usage::Any,
            &[
                ("positions", layout(DType::I32, [n, 1, 1, 1])?),
                ("mask", layout(DType::F16, [n, n, 1, 1])?),
                ("ones", layout(DType::F32, [1, n * batch, 1, 1])?),
            ],
        )?;
        let [positions, mask, ones] = &group.tensors[..] else {
            return Err(Error::config("the constants have no memory"));
        };
        write(positions, (0..n as i32).map(i32::to_le_bytes))?;
        let seen = |i: usize| {
            if i % n <= i / n {
                f16::ZERO
            } else {
                f16::NEG_INFINITY
            }
        };
        write(mask, (0..n * n).map(|i| seen(i).to_le_bytes()))?;
        write(ones, std::iter::repeat_n(1f32.to_le_bytes(), n * batch))?;
        Ok(StoredConstants([positions, mask, ones].map(Arc::clone)))
    }

    fn append(&self, graph: &mut Graph) -> Result<Constants> {
        let [positions, mask, ones] = &self.0;
        Ok(Constants {
            positions: graph.stored(positions)?,
            mask: graph.stored(mask)?,
            ones: graph.stored(ones)?,
        })
    }
}

impl LossGraph {
    pub fn new(config: &Config, subject: &Subject, purpose: Purpose) -> Result<Self> {
        let mut graph = Graph::new();
        let constants = subject.constants.append(&mut graph)?;
        let mut weights = BTreeMap::new();
        for (name, stored) in &subject.frozen {
            weights.insert(name.clone(), graph.stored(stored)?);
        }
        let mut ids = Vec::new();
        for parameter in &subject.parameters {
            let id = graph.stored(&parameter.weights)?;
            weights.insert(parameter.spec.name.clone(), id);
            ids.push(id);
        }
        let parts = Parts {
            spec: &subject.spec,
            context: config.context(),
            batch: config.training.batch,
            weights: &weights,
            adapter_factor: config.lora.as_ref().map_or(1.0, |lora| lora.factor()),
            constants,
        };
        let forward = Forward::append(&mut graph, parts)?;
        if purpose != Purpose::Measure {
            let share = 1.0 / config.training.accumulate as f32;
            let kept = if config.training.recompute {
                &forward.layers[..]
            } else {
                &[]
            };
            let gradients =
                Gradients::append_recomputing(&mut graph, forward.loss, share, &ids, kept)?;
            let adds = purpose == Purpose::AddGradients;
            store_gradients(&mut graph, &gradients, &subject.parameters, &ids, adds)?;
        }
        graph.set_output(forward.loss);
        Ok(LossGraph {
            graph,
            forward,
            context: config.context(),
            vocabulary: subject.spec.n_vocab,
        })
    }

    pub fn write(&self, scheduler: &mut Scheduler, windows: &[&[u32]]) -> Result<()> {
        let (context, vocabulary) = (self.context, self.vocabulary);
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for window in windows {
            if window.len() != context + 1 {
                return Err(Error::data(format!(
                    "a window has {} tokens, not {}",
                    window.len(),
                    context + 1
                )));
            }
            if let Some(id) = window.iter().find(|&&id| id as usize >= vocabulary) {
                return Err(Error::data(format!(
                    "token {id} is not one of the {vocabulary} of the vocabulary"
                )));
            }
            for pair in window.windows(2) {
                let place = targets.len() / 8 * vocabulary + pair[1] as usize;
                tokens.extend((pair[0] as i32).to_le_bytes());
                targets.extend((place as i64).to_le_bytes());
            }
        }
        scheduler.load(&self.graph)?;
        scheduler.write(self.forward.tokens, 0, &tokens)?;
        scheduler.write(self.forward.targets, 0, &targets)?;
        Ok(())
    }

    pub fn run(
        &self,
        scheduler: &mut Scheduler,
        windows: &[&[u32]],
        cancel: &CancelToken,
    ) -> Result<f32> {
        self.write(scheduler, windows)?;
        scheduler.run(cancel)?;
        scalar(scheduler, self.forward.loss)
    }
}
