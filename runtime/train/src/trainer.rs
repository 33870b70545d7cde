//! The training loop, which runs the graphs of batches and of steps.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::evaluation::Evaluation;
use crate::lora;
use crate::loss_graph::{LossGraph, Purpose, StoredConstants, Subject};
use crate::model::ParameterSpec;
use crate::parameters::{StepGraph, Stored, initialize, read, read_pieces};
use samite_core::{CancelToken, DType, Device, TensorRef};
use samite_llm::Model;
use samite_llm::arch::Spec;
use samite_sched::{Options, Scheduler, Watch};
use std::sync::Arc;

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss over the step's batches, in nats per token.
    pub loss: f32,
    /// Norm of the gradient of all weights together, before it was clipped.
    pub gradient_norm: f32,
    /// Learning rate.
    pub rate: f32,
}

/// A model with its optimizer, in the memory of devices.
pub struct Trainer {
    config: Config,
    scheduler: Scheduler,
    subject: Subject,
    evaluate: LossGraph,
    /// Graphs that set the gradients, and that add to them.
    learn: [LossGraph; 2],
    change: StepGraph,
    step: u64,
    cancel: CancelToken,
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer")
            .field("config", &self.config)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

impl Trainer {
    /// Creates a model with random weights. Layer `i` is on device `layers[i]`; other tensors, and
    /// layers without an entry, are on the first device.
    ///
    /// # Errors
    /// Returns [`Error::Config`] for an invalid configuration or one of an adapter. Also fails if
    /// there is no device, or if a device does not have enough memory or does not support an
    /// operation.
    pub fn new(
        config: Config,
        devices: Vec<Arc<dyn Device>>,
        layers: &[usize],
        cancel: CancelToken,
    ) -> Result<Self> {
        config.check()?;
        let Some(model) = config.model else {
            return Err(Error::config("an adapter needs its model: load it first"));
        };
        let place = |spec: ParameterSpec| {
            let number = spec.layer.and_then(|layer| layers.get(layer)).copied();
            (spec, number.unwrap_or(0))
        };
        let parameters = model.parameters().into_iter().map(place).collect();
        Self::build(config, model.spec()?, None, parameters, devices, cancel)
    }

    /// Creates a random adapter for `base`, which initially changes nothing. The model's weights do
    /// not change, and may have any type, but must have their file's layout
    /// ([`ModelOptions::repack`](samite_llm::ModelOptions::repack) is off). Each pair is on the
    /// device of its weight.
    ///
    /// # Errors
    /// Returns [`Error::Config`] for an invalid configuration or one of a model, for architectures
    /// that cannot be trained, and for targets that the model does not have. Also fails if a device
    /// does not have enough memory or does not support an operation.
    pub fn for_adapter(config: Config, base: Arc<Model>, cancel: CancelToken) -> Result<Self> {
        config.check()?;
        let Some(lora) = &config.lora else {
            return Err(Error::config("a model is trained without another one"));
        };
        let parameters = lora.parameters(&base)?;
        let devices = base.devices().iter().cloned().collect();
        let spec = base.spec().clone();
        Self::build(config, spec, Some(base), parameters, devices, cancel)
    }

    /// Builds the trainer; `parameters` come with the indices of their devices.
    fn build(
        config: Config,
        spec: Spec,
        base: Option<Arc<Model>>,
        parameters: Vec<(ParameterSpec, usize)>,
        devices: Vec<Arc<dyn Device>>,
        cancel: CancelToken,
    ) -> Result<Self> {
        let Some(first) = devices.first().map(Arc::clone) else {
            return Err(Error::config("there is no device to train on"));
        };
        let mut stored = Vec::new();
        for (spec, number) in parameters {
            let device = devices.get(number).ok_or_else(|| {
                Error::config(format!("there is no device {number} for {}", spec.name))
            })?;
            stored.push(Stored::allocate(spec, device)?);
        }
        initialize(&stored, config.seed)?;
        let subject = Subject {
            frozen: base.as_ref().map_or(Vec::new(), |base| lora::weights(base)),
            constants: StoredConstants::new(config.context(), config.training.batch, &first)?,
            parameters: stored,
            spec,
            base,
        };
        let training = config.training;
        let loss = |purpose| LossGraph::new(&config, &subject, purpose);
        Ok(Trainer {
            evaluate: loss(Purpose::Measure)?,
            learn: [loss(Purpose::SetGradients)?, loss(Purpose::AddGradients)?],
            change: StepGraph::new(training.optimizer, training.clip, &subject.parameters)?,
            scheduler: Scheduler::new(devices, Options::default())?,
            subject,
            step: 0,
            cancel,
            config,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the number of steps done.
    pub fn steps(&self) -> u64 {
        self.step
    }

    pub(crate) fn set_steps(&mut self, steps: u64) {
        self.step = steps;
    }

    pub(crate) fn parameters(&self) -> &[Stored] {
        &self.subject.parameters
    }

    /// Returns the model that an adapter is trained for.
    pub fn base(&self) -> Option<&Arc<Model>> {
        self.subject.base.as_ref()
    }

    /// Returns the scheduler, for traces and plans.
    pub fn scheduler_mut(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    /// Returns the number of trained weights.
    pub fn weights(&self) -> usize {
        let elements = |p: &Stored| p.spec.shape.iter().product::<usize>();
        self.parameters().iter().map(elements).sum()
    }

    /// Returns the weights of parameter `name`.
    ///
    /// # Errors
    /// Returns an error if the parameter does not exist, or if its memory cannot be read.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        self.scheduler.synchronize()?;
        let known = self.parameters().iter().find(|p| p.spec.name == name);
        let known =
            known.ok_or_else(|| Error::config(format!("the model has no parameter '{name}'")))?;
        read(&known.weights)
    }

    /// Runs one step with the configured number of batches, whose windows are concatenated in
    /// `windows`. A window consists of the tokens of a context and the next one.
    ///
    /// # Errors
    /// Returns [`Error::Data`] for a wrong number of windows or tokens, or a token outside the
    /// vocabulary. Returns [`Error::Diverged`] if a loss is not finite; the weights are unchanged
    /// then. Also fails if a device fails, or if it is cancelled.
    pub fn step(&mut self, windows: &[&[u32]]) -> Result<StepReport> {
        let training = self.config.training;
        if windows.len() != training.batch * training.accumulate {
            return Err(Error::data(format!(
                "a step has {} windows, not {}",
                training.batch * training.accumulate,
                windows.len()
            )));
        }
        let mut sum = 0.0;
        for (number, batch) in windows.chunks(training.batch).enumerate() {
            let work = &self.learn[usize::from(number > 0)];
            let loss = work.run(&mut self.scheduler, batch, &self.cancel)?;
            if !loss.is_finite() {
                return Err(self.diverged(loss, batch)?);
            }
            sum += f64::from(loss);
        }
        let rate = training.schedule.rate(self.step, training.steps);
        let gradient_norm =
            (self.change).run(&mut self.scheduler, self.step, rate, &self.cancel)?;
        self.step += 1;
        Ok(StepReport {
            loss: (sum / training.accumulate as f64) as f32,
            gradient_norm,
            rate,
        })
    }

    /// Measures the loss on some windows, a whole number of batches.
    ///
    /// # Errors
    /// Fails like [`step`](Self::step).
    pub fn evaluate(&mut self, windows: &[&[u32]]) -> Result<Evaluation> {
        let batch = self.config.training.batch;
        if windows.is_empty() || !windows.len().is_multiple_of(batch) {
            return Err(Error::data(format!(
                "{} windows are not a number of batches of {batch}",
                windows.len()
            )));
        }
        let mut losses = Vec::new();
        for batch in windows.chunks(batch) {
            let loss = self
                .evaluate
                .run(&mut self.scheduler, batch, &self.cancel)?;
            losses.push(loss);
        }
        Ok(Evaluation::from_losses(&losses))
    }

    /// Runs a batch node by node to find the first result that is not finite.
    fn diverged(&mut self, loss: f32, batch: &[&[u32]]) -> Result<Error> {
        let work = &self.evaluate;
        work.write(&mut self.scheduler, batch)?;
        let mut first = None;
        let graph = &work.graph;
        let cancel = CancelToken::new();
        let watched = self.scheduler.run_watched(
            &cancel,
            |id| {
                graph
                    .tensors()
                    .get(id.index())
                    .is_some_and(|t| t.is_computed())
            },
            |id, place| {
                if place.layout().dtype() == DType::F32 && !is_finite(place)? {
                    first = Some(id);
                    return Ok(Watch::Stop);
                }
                Ok(Watch::Continue)
            },
        );
        if first.is_none() {
            watched?;
        }
        let first = match first {
            Some(id) => {
                let tensor = graph.tensor(id);
                format!(
                    "the first result that is not finite is that of {} '{}' ({id}): lower the \
                     learning rate or limit the gradient (training.clip), and go on from the last \
                     checkpoint",
                    tensor.op, tensor.name
                )
            }
            None => "computed once more, everything is finite: a device is not reliable".to_owned(),
        };
        Ok(Error::Diverged {
            step: self.step,
            loss,
            first,
        })
    }
}

fn is_finite(place: &TensorRef) -> samite_core::Result<bool> {
    let mut all = true;
    read_pieces(place, |piece| {
        all &= piece.iter().all(|x| x.is_finite());
        Ok(())
    })?;
    Ok(all)
}
