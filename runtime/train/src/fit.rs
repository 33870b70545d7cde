//! Fitting any graph to data: the loop of [`Trainer`](crate::Trainer) for models that are not
//! language models.

use crate::data::Order;
use crate::error::{Error, Result};
use crate::evaluation::Evaluation;
use crate::gradient::Gradients;
use crate::loss::Loss;
use crate::model::ParameterSpec;
use crate::optimizer::Optimizer;
use crate::parameters::{
    StepGraph, Stored, buffer, bytes, initialize, numbers, read, scalar, store_gradients,
};
use crate::schedule::Schedule;
use samite_core::{CancelToken, DType, Device, Graph, TensorId};
use samite_sched::{Options, Scheduler};
use std::ops::Range;
use std::sync::Arc;

/// Training data: rows of numbers, with their expected outputs.
#[derive(Clone, Debug)]
pub struct Samples {
    inputs: Vec<f32>,
    labels: Vec<f32>,
    /// Elements of an input and of a label.
    lens: [usize; 2],
}

impl Samples {
    /// Creates samples from concatenated inputs of `input_len` numbers, and as many labels of
    /// `label_len` numbers, which may be 0.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if there are no inputs, or if the number of labels differs.
    pub fn new(
        inputs: Vec<f32>,
        input_len: usize,
        labels: Vec<f32>,
        label_len: usize,
    ) -> Result<Self> {
        let count = inputs.len().checked_div(input_len).unwrap_or(0);
        if count == 0 || Some(inputs.len()) != count.checked_mul(input_len) {
            return Err(Error::data(format!(
                "{} numbers are no inputs of {input_len} each",
                inputs.len()
            )));
        }
        if Some(labels.len()) != count.checked_mul(label_len) {
            return Err(Error::data(format!(
                "{} numbers are not a label of {label_len} for each of {count} inputs",
                labels.len()
            )));
        }
        Ok(Samples {
            inputs,
            labels,
            lens: [input_len, label_len],
        })
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.inputs.len() / self.lens[0]
    }

    /// Returns whether there are no samples, which does not happen.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }

    fn input(&self, index: usize) -> &[f32] {
        &self.inputs[index * self.lens[0]..][..self.lens[0]]
    }

    fn label(&self, index: usize) -> &[f32] {
        &self.labels[index * self.lens[1]..][..self.lens[1]]
    }
}

/// Options of a fit.
#[derive(Clone, Copy, Debug)]
pub struct FitOptions {
    /// Number of samples that are computed together.
    pub batch: usize,
    /// Loss to minimize.
    pub loss: Loss,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// Learning rate over the steps of all epochs.
    pub schedule: Schedule,
    /// Maximum norm of the gradient of all weights together; 0 for no limit.
    pub clip: f32,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Default for FitOptions {
    fn default() -> Self {
        FitOptions {
            batch: 1,
            loss: Loss::MeanSquaredError,
            optimizer: Optimizer::default(),
            schedule: Schedule {
                rate: 1e-3,
                last_rate: None,
                warmup: 0,
            },
            clip: 0.0,
            seed: 0,
        }
    }
}

/// Result of an epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FitReport {
    /// Loss on the training samples, measured during training.
    pub learnt: Evaluation,
    /// Loss on the held-out samples, measured after the epoch.
    pub held_back: Option<Evaluation>,
}

/// A graph from inputs to a loss, optionally with gradients.
struct FitGraph {
    graph: Graph,
    inputs: TensorId,
    labels: Option<TensorId>,
    outputs: TensorId,
    loss: TensorId,
}

/// A graph with its weights in the memory of a device.
pub struct Fit {
    options: FitOptions,
    lens: [usize; 2],
    scheduler: Scheduler,
    parameters: Vec<Stored>,
    learn: FitGraph,
    measure: FitGraph,
    change: StepGraph,
    step: u64,
    epoch: u64,
    cancel: CancelToken,
}

impl std::fmt::Debug for Fit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fit")
            .field("options", &self.options)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

impl Fit {
    /// Creates a graph with random weights on the first of `devices`. `build` appends it: from
    /// inputs f32 `[lens[0], batch]` and the weights, in the order of `parameters`, to outputs,
    /// which are f32 `[lens[1], batch]` for losses with labels.
    ///
    /// # Errors
    /// Returns the errors of `build`. Returns [`Error::Config`] if a batch has no samples, or if
    /// there are no parameters or devices. Returns [`Error::Gradient`] if outputs have another
    /// shape, or if a node has no gradient. Also fails if a device does not have enough memory or
    /// does not support an operation.
    pub fn new(
        options: FitOptions,
        lens: [usize; 2],
        parameters: Vec<ParameterSpec>,
        devices: Vec<Arc<dyn Device>>,
        cancel: CancelToken,
        build: impl Fn(&mut Graph, TensorId, &[TensorId]) -> Result<TensorId>,
    ) -> Result<Self> {
        if options.batch == 0 {
            return Err(Error::config("the batch has no samples"));
        }
        options.schedule.check()?;
        options.optimizer.check()?;
        let device = devices
            .first()
            .ok_or_else(|| Error::config("there is no device to train on"))?;
        let stored = parameters
            .into_iter()
            .map(|spec| Stored::allocate(spec, device));
        let parameters = stored.collect::<Result<Vec<_>>>()?;
        initialize(&parameters, options.seed)?;
        let work = |learns| FitGraph::new(&options, lens, &parameters, &build, learns);
        Ok(Fit {
            learn: work(true)?,
            measure: work(false)?,
            change: StepGraph::new(options.optimizer, options.clip, &parameters)?,
            scheduler: Scheduler::new(devices, Options::default())?,
            options,
            lens,
            parameters,
            step: 0,
            epoch: 0,
            cancel,
        })
    }

    /// Trains on `samples` for some epochs, each in another order. The last fraction `held_back` of
    /// the samples, from 0 to below 1, is not used for training but measured after each epoch.
    /// Incomplete batches are ignored.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if samples have other lengths, or if there are not enough for a
    /// batch of training or held-out samples. Returns [`Error::Diverged`] if a loss is not finite.
    /// Also fails if a device fails, or if it is cancelled.
    pub fn fit(
        &mut self,
        samples: &Samples,
        epochs: u64,
        held_back: f32,
    ) -> Result<Vec<FitReport>> {
        if !(0.0..1.0).contains(&held_back) {
            return Err(Error::data(format!(
                "a share of {held_back} cannot be held back: it must be from 0 to below 1"
            )));
        }
        let learnt = samples.len() - (samples.len() as f32 * held_back) as usize;
        let steps = self.step + epochs * (learnt / self.options.batch) as u64;
        let mut reports = Vec::new();
        for _ in 0..epochs {
            reports.push(FitReport {
                learnt: self.epoch(samples, 0..learnt, steps)?,
                held_back: if learnt == samples.len() {
                    None
                } else {
                    Some(self.evaluate(samples, learnt..samples.len())?)
                },
            });
        }
        Ok(reports)
    }

    /// Trains on a range of samples once; `steps` is the total number of steps in the schedule.
    fn epoch(&mut self, samples: &Samples, range: Range<usize>, steps: u64) -> Result<Evaluation> {
        let batches = self.batches(samples, &range)?;
        let batch = self.options.batch;
        let mut order = Order::new(self.options.seed, range.len());
        let first = self.epoch * range.len() as u64;
        let mut losses = Vec::new();
        for number in 0..batches {
            let positions = (number * batch..(number + 1) * batch).map(|i| first + i as u64);
            let chosen: Vec<_> = positions.map(|i| range.start + order.at(i)).collect();
            let (work, scheduler) = (&self.learn, &mut self.scheduler);
            let loss = work.run(scheduler, samples, &chosen, self.step, &self.cancel)?;
            let rate = self.options.schedule.rate(self.step, steps);
            self.change.run(scheduler, self.step, rate, &self.cancel)?;
            self.step += 1;
            losses.push(loss);
        }
        self.epoch += 1;
        Ok(Evaluation::from_losses(&losses))
    }

    /// Measures the loss on a range of samples. Incomplete batches are ignored.
    ///
    /// # Errors
    /// Fails like [`fit`](Self::fit).
    pub fn evaluate(&mut self, samples: &Samples, range: Range<usize>) -> Result<Evaluation> {
        let batches = self.batches(samples, &range)?;
        let mut losses = Vec::new();
        for number in 0..batches {
            let start = range.start + number * self.options.batch;
            let chosen: Vec<_> = (start..start + self.options.batch).collect();
            let work = &self.measure;
            let loss = work.run(
                &mut self.scheduler,
                samples,
                &chosen,
                self.step,
                &self.cancel,
            )?;
            losses.push(loss);
        }
        Ok(Evaluation::from_losses(&losses))
    }

    /// Returns the concatenated outputs for a range of samples.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the samples do not fill batches. Also fails like
    /// [`fit`](Self::fit).
    pub fn predict(&mut self, samples: &Samples, range: Range<usize>) -> Result<Vec<f32>> {
        self.batches(samples, &range)?;
        let batch = self.options.batch;
        if !range.len().is_multiple_of(batch) {
            return Err(Error::data(format!(
                "{} samples do not fill batches of {batch}",
                range.len()
            )));
        }
        let mut all = Vec::new();
        for start in range.step_by(batch) {
            let chosen: Vec<_> = (start..start + batch).collect();
            let work = &self.measure;
            work.run(
                &mut self.scheduler,
                samples,
                &chosen,
                self.step,
                &self.cancel,
            )?;
            let mut data = buffer(work.graph.tensor(work.outputs).layout.bytes())?;
            self.scheduler.read(work.outputs, 0, &mut data)?;
            all.extend(numbers(&data));
        }
        Ok(all)
    }

    /// Returns the weights of parameter `name`.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the parameter does not exist. Also fails if its memory cannot
    /// be read.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        self.scheduler.synchronize()?;
        let known = self.parameters.iter().find(|p| p.spec.name == name);
        let known =
            known.ok_or_else(|| Error::config(format!("there is no parameter '{name}'")))?;
        read(&known.weights)
    }

    /// Checks a range, and returns the number of complete batches in it.
    fn batches(&self, samples: &Samples, range: &Range<usize>) -> Result<usize> {
        if samples.lens != self.lens {
            return Err(Error::data(format!(
                "samples have {:?} numbers, not {:?}",
                samples.lens, self.lens
            )));
        }
        let batches = range.len() / self.options.batch;
        if batches == 0 || range.end > samples.len() {
            return Err(Error::data(format!(
                "samples {range:?} of {} are no batch of {}",
                samples.len(),
                self.options.batch
            )));
        }
        Ok(batches)
    }
}

impl FitGraph {
    fn new(
        options: &FitOptions,
        [input, label]: [usize; 2],
        parameters: &[Stored],
        build: impl Fn(&mut Graph, TensorId, &[TensorId]) -> Result<TensorId>,
        learns: bool,
    ) -> Result<Self> {
        let mut graph = Graph::new();
        let batch = options.batch;
        let inputs = graph.input("inputs", DType::F32, [input, batch, 1, 1])?;
        let ids = parameters
            .iter()
            .map(|p| graph.stored(&p.weights))
            .collect::<samite_core::Result<Vec<_>>>()?;
        let outputs = build(&mut graph, inputs, &ids)?;
        let labels = if options.loss.has_labels() {
            let layout = graph.tensor(outputs).layout;
            let shape = [label, batch, 1, 1];
            if layout.shape() != shape {
                return Err(Error::gradient(format!(
                    "the outputs are {layout}, but the labels have the shape {shape:?}"
                )));
            }
            Some(graph.input("labels", DType::F32, shape)?)
        } else {
            None
        };
        let loss = options.loss.append(&mut graph, outputs, labels)?;
        if learns {
            let gradients = Gradients::append(&mut graph, loss, 1.0, &ids)?;
            store_gradients(&mut graph, &gradients, parameters, &ids, false)?;
        }
        graph.set_output(outputs);
        graph.set_output(loss);
        Ok(FitGraph {
            graph,
            inputs,
            labels,
            outputs,
            loss,
        })
    }

    /// Computes the loss of some samples.
    fn run(
        &self,
        scheduler: &mut Scheduler,
        samples: &Samples,
        chosen: &[usize],
        step: u64,
        cancel: &CancelToken,
    ) -> Result<f32> {
        scheduler.load(&self.graph)?;
        let inputs = chosen.iter().flat_map(|&i| samples.input(i)).copied();
        scheduler.write(self.inputs, 0, &bytes(inputs))?;
        if let Some(labels) = self.labels {
            let values = chosen.iter().flat_map(|&i| samples.label(i)).copied();
            scheduler.write(labels, 0, &bytes(values))?;
        }
        scheduler.run(cancel)?;
        let loss = scalar(scheduler, self.loss)?;
        if !loss.is_finite() {
            let first = "the weights are as before this step: lower the learning rate".to_owned();
            return Err(Error::Diverged { step, loss, first });
        }
        Ok(loss)
    }
}
