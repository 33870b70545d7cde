//! Gradients of compute graphs, optimizers, and training of small language models.
//!
//! # The path of a step
//! 1. [`Forward`] appends a model and its loss to a graph; [`Gradients`] appends the nodes that
//!    compute the gradients of the loss. Both are ordinary nodes: the scheduler places them on
//!    devices, plans their memory and runs them like any others.
//! 2. [`Trainer`] keeps the trained weights (of a model or an adapter), gradients and the
//!    optimizer's means as stored tensors. One graph sets the gradients, a second one adds to them
//!    for further batches of the same step, and a third one clips them and lets the [`Optimizer`]
//!    change the weights. All of them are planned once.
//! 3. [`Checkpoint`], [`export()`] and [`export_adapter`] write the trained weights. A checkpoint
//!    serves to resume a run exactly where it stopped. The exports are models or adapters that any
//!    GGUF reader can run.
//!
//! [`Fit`] does the same for graphs that are not language models, with any [`Loss`].
//!
//! # Contract
//! - A run is a function of its [`Config`] and its data. The same seed results in the same weights,
//!   bit for bit, even if the run was stopped and resumed from a checkpoint, and with any number of
//!   threads.
//! - A file on disk is complete or does not exist: checkpoints are replaced atomically, and a full
//!   disk leaves the previous one.
//! - A loss that is not finite ends the run before the weights change, and the error names the
//!   first result that is not finite.
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
