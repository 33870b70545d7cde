//! The loop: batches in, steps out, all of it graphs on a scheduler.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::gradient::Gradients;
use crate::lora;
use crate::model::{Constants, Forward, ParameterSpec, Parts};
use crate::optimizer::Parameter;
use samite_core::{
    CancelToken, DType, Device, Graph, Layout, StoredTensor, TensorGroup, TensorId, TensorRef,
    Usage,
};
use samite_llm::{Hyperparameters, Model};
use samite_sched::{Options, Scheduler, Watch};
use samite_text::Rng;
use std::collections::HashMap;
use std::sync::Arc;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss over the step's batches, in nats per token.
    pub loss: f32,
    /// Length of the gradient of all weights together, before it was limited.
    pub gradient_norm: f32,
    /// Learning rate.
    pub rate: f32,
}

/// How well held-out texts are predicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss, in nats per token.
    pub loss: f32,
    /// Standard error of that mean, from the differences between batches; 0 for one batch.
    pub error: f32,
}

/// One parameter in memory.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub spec: ParameterSpec,
    pub weights: Arc<StoredTensor>,
    pub gradient: Arc<StoredTensor>,
    pub means: [Arc<StoredTensor>; 2],
}

/// The model behind a loss: what does not change from one graph to the next.
struct Subject {
    hparams: Hyperparameters,
    /// The model that an adapter is trained for.
    base: Option<Arc<Model>>,
    parameters: Vec<Stored>,
    /// Weights that are used as they are.
    frozen: Vec<(String, Arc<StoredTensor>)>,
    constants: StoredConstants,
}

/// What a graph of the loss is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// The loss alone.
    Measure,
    /// Gradients that take the place of those before.
    SetGradients,
    /// Gradients that are added to those before.
    AddGradients,
}

/// A graph that computes the loss, and perhaps gradients.
struct LossGraph {
    graph: Graph,
    forward: Forward,
    context: usize,
    vocabulary: usize,
}

/// A graph that changes the weights.
struct StepGraph {
    graph: Graph,
    /// The optimizer's numbers for matrices and for other weights.
    numbers: [TensorId; 2],
    norm: TensorId,
}

/// A model with its optimizer, in the memory of devices.
pub struct Trainer {
    config: Config,
    scheduler: Scheduler,
    subject: Subject,
    evaluate: LossGraph,
    /// Sets the gradients; adds to them.
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

/// Stored constants: positions, mask, ones.
struct StoredConstants([Arc<StoredTensor>; 3]);

impl StoredConstants {
    fn new(n: usize, batch: usize, device: &Arc<dyn Device>) -> Result<Self> {
        let layout = |dtype, shape| Layout::contiguous(dtype, shape);
        let group = TensorGroup::allocate(
            &device.buffer_type(),
            Usage::Any,
            &[
                ("positions", layout(DType::I32, [n, 1, 1, 1])?),
                ("mask", layout(DType::F32, [n, n, 1, 1])?),
                ("ones", layout(DType::F32, [1, n * batch, 1, 1])?),
            ],
        )?;
        let positions: Vec<u8> = (0..n as i32).flat_map(i32::to_le_bytes).collect();
        let mask = (0..n * n).map(|i| {
            if i % n > i / n {
                f32::NEG_INFINITY
            } else {
                0.0
            }
        });
        let data = [
            positions,
            bytes(mask),
            bytes(std::iter::repeat_n(1.0, n * batch)),
        ];
        for (tensor, data) in group.tensors.iter().zip(&data) {
            tensor.tensor().write(0, data)?;
        }
        let [positions, mask, ones] = &group.tensors[..] else {
            return Err(Error::config("the constants have no memory"));
        };
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

fn bytes(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    let values = bytes.as_chunks().0.iter();
    values.map(|value| f32::from_le_bytes(*value)).collect()
}

impl Trainer {
    /// A model with random weights. Layer `i` lies on device number `layers[i]`, everything else and missing ones on the first.
    ///
    /// # Errors
    /// [`Error::Config`], also for a configuration of an adapter; if there is no device, a device has not enough memory or
    /// cannot do something.
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
        Self::build(config, model.hparams()?, None, parameters, devices, cancel)
    }

    /// A random adapter of `base` that changes nothing yet. The model's weights stay as they are, whatever their type, but
    /// must lie in their file's layout ([`ModelOptions::repack`](samite_llm::ModelOptions::repack) is off). Each pair lies on the
    /// device of its weight.
    ///
    /// # Errors
    /// [`Error::Config`], also for a configuration of a model, for architectures that cannot be trained and targets that the
    /// model does not have; if a device has not enough memory or cannot do something.
    pub fn for_adapter(config: Config, base: Arc<Model>, cancel: CancelToken) -> Result<Self> {
        config.check()?;
        let Some(lora) = &config.lora else {
            return Err(Error::config("a model is trained without another one"));
        };
        let parameters = lora.parameters(&base)?;
        let devices = base.devices().iter().cloned().collect();
        let hparams = base.hparams().clone();
        Self::build(config, hparams, Some(base), parameters, devices, cancel)
    }

    /// `parameters` are given with the numbers of their devices.
    fn build(
        config: Config,
        hparams: Hyperparameters,
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
            hparams,
            base,
        };
        let loss = |purpose| LossGraph::new(&config, &subject, purpose);
        Ok(Trainer {
            evaluate: loss(Purpose::Measure)?,
            learn: [loss(Purpose::SetGradients)?, loss(Purpose::AddGradients)?],
            change: StepGraph::new(&config, &subject.parameters)?,
            scheduler: Scheduler::new(devices, Options::default())?,
            subject,
            step: 0,
            cancel,
            config,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.step
    }

    pub(crate) fn set_steps(&mut self, steps: u64) {
        self.step = steps;
    }

    pub(crate) fn parameters(&self) -> &[Stored] {
        &self.subject.parameters
    }

    /// The model that an adapter is trained for.
    pub fn base(&self) -> Option<&Arc<Model>> {
        self.subject.base.as_ref()
    }

    /// The scheduler, for traces and plans.
    pub fn scheduler_mut(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    /// Number of weights that are learnt.
    pub fn weights(&self) -> usize {
        let elements = |p: &Stored| p.spec.shape.iter().product::<usize>();
        self.parameters().iter().map(elements).sum()
    }

    /// The weights of parameter `name`.
    ///
    /// # Errors
    /// If there is no such parameter, or its memory cannot be read.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        self.scheduler.synchronize()?;
        let known = self.parameters().iter().find(|p| p.spec.name == name);
        let known =
            known.ok_or_else(|| Error::config(format!("the model has no parameter '{name}'")))?;
        read(&known.weights)
    }

    /// One step: as many batches as the configuration accumulates, each as many windows as it has in a batch, one after the
    /// other. A window is the tokens of a context, and the one after it.
    ///
    /// # Errors
    /// [`Error::Data`] for a wrong number of windows or tokens, or a token outside of the vocabulary; [`Error::Diverged`] if a
    /// loss is not finite: then the weights are as before; if a device fails; when cancelled.
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
        let change = &self.change;
        self.scheduler.load(&change.graph)?;
        for (id, decays) in change.numbers.into_iter().zip([true, false]) {
            let values = training.optimizer.values(self.step, rate, decays);
            self.scheduler.write(id, 0, &bytes(values.into_iter()))?;
        }
        self.scheduler.run(&self.cancel)?;
        let gradient_norm = scalar(&mut self.scheduler, change.norm)?;
        self.step += 1;
        Ok(StepReport {
            loss: (sum / training.accumulate as f64) as f32,
            gradient_norm,
            rate,
        })
    }

    /// The loss of some windows, a whole number of batches.
    ///
    /// # Errors
    /// As [`step`](Self::step).
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
            losses.push(f64::from(loss));
        }
        let count = losses.len() as f64;
        let mean = losses.iter().sum::<f64>() / count;
        let spread: f64 = losses.iter().map(|loss| (loss - mean).powi(2)).sum();
        let error = if losses.len() > 1 {
            (spread / (count - 1.0) / count).sqrt()
        } else {
            0.0
        };
        Ok(Evaluation {
            loss: mean as f32,
            error: error as f32,
        })
    }

    /// Runs a batch node by node to find where the first number comes from that is not finite.
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
                    "the first result that is not finite is that of {} '{}' ({id}): lower the learning rate or limit the gradient \
                     (training.clip), and go on from the last checkpoint",
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
    let mut data = vec![0; place.layout().bytes()];
    place.read(0, &mut data)?;
    Ok(numbers(&data).iter().all(|x| x.is_finite()))
}

fn scalar(scheduler: &mut Scheduler, id: TensorId) -> Result<f32> {
    let mut data = [0; 4];
    scheduler.read(id, 0, &mut data)?;
    Ok(f32::from_le_bytes(data))
}

/// All numbers of a stored tensor.
pub(crate) fn read(tensor: &StoredTensor) -> Result<Vec<f32>> {
    let place = tensor.tensor();
    let mut data = vec![0; place.layout().bytes()];
    place.read(0, &mut data)?;
    Ok(numbers(&data))
}

impl Stored {
    fn allocate(spec: ParameterSpec, device: &Arc<dyn Device>) -> Result<Self> {
        let layout = Layout::contiguous(DType::F32, spec.shape)?;
        let names =
            ["", ".gradient", ".mean", ".square"].map(|part| format!("{}{part}", spec.name));
        let wanted: Vec<_> = names.iter().map(|name| (name.as_str(), layout)).collect();
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Any, &wanted)?;
        let [weights, gradient, mean, square] = &group.tensors[..] else {
            return Err(Error::config("a parameter has no memory"));
        };
        let zeros = vec![0; layout.bytes()];
        for tensor in [gradient, mean, square] {
            tensor.tensor().write(0, &zeros)?;
        }
        Ok(Stored {
            weights: Arc::clone(weights),
            gradient: Arc::clone(gradient),
            means: [mean, square].map(Arc::clone),
            spec,
        })
    }
}

/// Writes the initial weights: normally distributed, or ones.
fn initialize(parameters: &[Stored], seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    for parameter in parameters {
        let count = parameter.spec.shape.iter().product();
        let values: Vec<f32> = match parameter.spec.deviation {
            None => vec![1.0; count],
            Some(deviation) => std::iter::repeat_with(|| normal(&mut rng) * deviation)
                .take(count)
                .collect(),
        };
        let data = bytes(values.into_iter());
        parameter.weights.tensor().write(0, &data)?;
    }
    Ok(())
}

/// A normally distributed number (Box and Muller 1958).
fn normal(rng: &mut Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.uniform()).ln()).sqrt();
    (radius * (2.0 * std::f64::consts::PI * rng.uniform()).cos()) as f32
}

impl LossGraph {
    fn new(config: &Config, subject: &Subject, purpose: Purpose) -> Result<Self> {
        let mut graph = Graph::new();
        let constants = subject.constants.append(&mut graph)?;
        let mut weights = HashMap::new();
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
            hparams: &subject.hparams,
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
            for (parameter, id) in subject.parameters.iter().zip(ids) {
                let Some(gradient) = gradients.of(id) else {
                    continue;
                };
                let into = graph.stored(&parameter.gradient)?;
                let value = if purpose == Purpose::AddGradients {
                    graph.add(into, gradient)?
                } else {
                    gradient
                };
                graph.cpy(value, into)?;
            }
        }
        graph.set_output(forward.loss);
        Ok(LossGraph {
            graph,
            forward,
            context: config.context(),
            vocabulary: subject.hparams.n_vocab,
        })
    }

    fn write(&self, scheduler: &mut Scheduler, windows: &[&[u32]]) -> Result<()> {
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

    fn run(
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

impl StepGraph {
    fn new(config: &Config, parameters: &[Stored]) -> Result<Self> {
        let mut graph = Graph::new();
        let optimizer = config.training.optimizer;
        let shape = [optimizer.numbers(), 1, 1, 1];
        let numbers = [
            graph.input("numbers for matrices", DType::F32, shape)?,
            graph.input("numbers", DType::F32, shape)?,
        ];
        let mut all = Vec::new();
        let mut total = None;
        for parameter in parameters {
            let [m, v] = &parameter.means;
            let ids = Parameter {
                weights: graph.stored(&parameter.weights)?,
                gradient: graph.stored(&parameter.gradient)?,
                means: [graph.stored(m)?, graph.stored(v)?],
            };
            all.push(ids);
            let squares = graph.sqr(ids.gradient)?;
            let sum = graph.sum(squares)?;
            total = Some(match total {
                Some(total) => graph.add(total, sum)?,
                None => sum,
            });
        }
        let total = total.ok_or_else(|| Error::config("the model has no parameters"))?;
        let norm = graph.sqrt(total)?;
        graph.set_name(norm, "gradient norm");
        graph.set_output(norm);
        let clip = config.training.clip;
        let factor = if clip > 0.0 {
            let limit = graph.fill(norm, clip)?;
            let longest = graph.clamp(norm, clip, f32::INFINITY)?;
            Some(graph.div(limit, longest)?)
        } else {
            None
        };
        for (parameter, mut ids) in parameters.iter().zip(all) {
            if let Some(factor) = factor {
                ids.gradient = graph.mul(ids.gradient, factor)?;
            }
            let number = numbers[usize::from(!parameter.spec.is_matrix())];
            optimizer.append(&mut graph, ids, number)?;
        }
        Ok(StepGraph {
            graph,
            numbers,
            norm,
        })
    }
}
