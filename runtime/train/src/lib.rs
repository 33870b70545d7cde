//! Gradients of compute graphs, optimizers, and training of small language models.
//!
//! # How a step goes
//! 1. [`Forward`] appends a model and its loss to a graph; [`Gradients`] appends the nodes that compute the gradients of the
//!    loss. Both are ordinary nodes: the scheduler places them on devices, plans their memory and runs them like any others.
//! 2. [`Trainer`] keeps what is learnt, a model's weights or an adapter's, gradients and the optimizer's means as stored
//!    tensors. One graph sets the gradients, a second one adds to them for further batches of the same step, and a third one
//!    limits their length and lets the [`Optimizer`] change the weights. All of them are planned once.
//! 3. [`Checkpoint`], [`export()`] and [`export_adapter`] write what was learnt: the first to go on exactly where a run stopped,
//!    the others as a model or adapter that everything that reads GGUF can run.
//!
//! [`Fit`] does the same for graphs that are no language models, with any [`Loss`].
//!
//! # Contract
//! - A run is a function of its [`Config`] and its data: from the same seed, the same weights, bit for bit, also when it was
//!   stopped and went on from a checkpoint, and with any number of threads.
//! - A file on disk is complete or not there: checkpoints replace each other at once, and a full disk leaves the last one.
//! - A loss that is not finite ends the run before the weights change, with the first result that is to blame.
//! - The crate knows devices only as [`samite_core::Device`].
#![forbid(unsafe_code)]

mod checkpoint;
mod config;
mod curve;
mod data;
mod error;
mod evaluation;
mod export;
mod fit;
mod gradient;
mod lora;
mod loss;
mod loss_graph;
mod model;
mod optimizer;
mod parameters;
mod rules;
mod schedule;
mod trainer;
mod vocabulary;

pub use checkpoint::Checkpoint;
pub use config::{Config, DataConfig, LoraConfig, ModelConfig, TrainingConfig};
pub use curve::{Curve, Point};
pub use data::{Dataset, Order};
pub use error::{Error, Result};
pub use evaluation::Evaluation;
pub use export::{export, export_adapter};
pub use fit::{Fit, FitOptions, FitReport, Samples};
pub use gradient::Gradients;
pub use loss::Loss;
pub use model::{Constants, Forward, ParameterSpec, Parts};
pub use optimizer::{Optimizer, Parameter};
pub use schedule::Schedule;
pub use trainer::{StepReport, Trainer};
pub use vocabulary::Vocabulary;
