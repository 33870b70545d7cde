//! `samite train`: trains a small language model or an adapter.

use crate::args::{DeviceArgs, ThreadArgs};
use crate::cpu_args::PoolArgs;
use crate::failure::{CommandError, CommandResult};
use crate::files::TextSource;
use crate::setup::DeviceSetup;
use crate::shown::{counted, escaped, say};
use crate::{files, interrupt, progress};
use clap::Args;
use samite::gguf::AtomicFile;
use samite::llm::{
    Adapter, Context, ContextOptions, GenerateOptions, Model, ModelOptions, ScaledAdapter, Session,
};
use samite::text::{Sampler, SamplerParams, Tokenizer};
use samite::train::{
    Checkpoint, Config, Curve, Dataset, Error, Order, Point, Trainer, Vocabulary, export,
    export_adapter,
};
use samite::{CancelToken, DType, Device};
use std::fs::{File, TryLockError};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Inverse of the share of free memory that a text may fill. The whole text is in memory, and each
/// of its tokens takes four bytes more.
const PARTS: usize = 8;

/// Maximum bytes of a text if the amount of free memory is unknown.
const MAX_BYTES: usize = 4 << 30;

/// Bytes of the data on which the tokenizer is trained.
const VOCABULARY_BYTES: usize = 4 << 20;

/// Flags of `samite train`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite train models/stories/train.toml -o stories
  samite train models/stories/train.toml -o stories --resume")]
pub struct TrainArgs {
    /// TOML file with the model, the training settings and the data (see docs/training.md)
    config: PathBuf,

    /// Folder for the checkpoint, the loss as a table and a plot, and the model or adapter
    #[arg(short, long, value_name = "FOLDER")]
    out: PathBuf,

    /// Resume from the checkpoint in the folder
    #[arg(long)]
    resume: bool,

    /// Stop after this many steps in total; a later run can continue with --resume
    #[arg(long, value_name = "N")]
    stop_after: Option<u64>,

    /// Prompt of the text generated at each measurement; no text if it is empty
    #[arg(long, value_name = "TEXT", default_value = "Once upon a time")]
    sample: String,

    /// Type of the matrices in the model or adapter
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    dtype: String,

    #[command(flatten)]
    devices: DeviceArgs,

    #[command(flatten)]
    threads: ThreadArgs,

    #[command(flatten)]
    pool: PoolArgs,
}

/// The files of a run.
struct Folder(PathBuf);

impl Folder {
    fn checkpoint(&self) -> PathBuf {
        self.0.join("checkpoint.gguf")
    }

    fn result(&self, subject: &Subject) -> PathBuf {
        self.0.join(match subject {
            Subject::Model(_) => "model.gguf",
            Subject::Adapter(_) => "adapter.gguf",
        })
    }

    fn table(&self) -> PathBuf {
        self.0.join("loss.csv")
    }

    fn picture(&self) -> PathBuf {
        self.0.join("loss.svg")
    }
}

impl Folder {
    /// Locks the folder, so that other processes do not train there until the result is dropped. If
    /// the process is killed, the system releases the lock.
    fn lock(&self) -> CommandResult<Option<File>> {
        // On Unix, lock the folder itself, so that no file is left behind. Other systems cannot
        // open folders.
        let file = if cfg!(unix) {
            File::open(&self.0)
        } else {
            File::create(self.0.join("lock"))
        };
        let locked = file.map_err(TryLockError::Error).and_then(|file| {
            file.try_lock()?;
            Ok(file)
        });
        match locked {
            Ok(file) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Err(CommandError::error(format_args!(
                "{}: another process trains in this folder: wait for it, or choose another folder",
                self.0.display()
            ))),
            // Some file systems do not support locks.
            Err(TryLockError::Error(error)) => {
                tracing::warn!("cannot lock {}: {error}", self.0.display());
                Ok(None)
            }
        }
    }

    /// Removes unfinished files of a run that was killed.
    fn remove_leftovers(&self) {
        const NAMES: [&str; 5] = [
            "checkpoint.gguf",
            "model.gguf",
            "adapter.gguf",
            "loss.csv",
            "loss.svg",
        ];
        let is_leftover = |name: &str| {
            let rest = name.strip_prefix('.').filter(|rest| rest.ends_with(".tmp"));
            rest.is_some_and(|rest| {
                NAMES.iter().any(|known| {
                    rest.strip_prefix(known)
                        .is_some_and(|rest| rest.starts_with('.'))
                })
            })
        };
        for entry in std::fs::read_dir(&self.0).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(is_leftover) {
                // A file that cannot be removed only takes space.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// The thing to train.
enum Subject {
    /// A new model with its own vocabulary.
    Model(Vocabulary),
    /// An adapter of a model.
    Adapter(Arc<Model>),
}

impl Subject {
    /// Creates the subject of the configuration. Trains the vocabulary on `text`.
    fn new(
        config: &Config,
        text: &str,
        devices: &[Arc<dyn Device>],
        cancel: &CancelToken,
    ) -> CommandResult<Self> {
        if let Some(lora) = &config.lora {
            let options = ModelOptions {
                // Packed weights support only inference.
                repack: false,
                cancel: cancel.clone(),
                ..ModelOptions::new(devices.to_vec())
            };
            return Ok(Subject::Adapter(Model::load(&lora.base, &options)?));
        }
        let part = text.len().min(VOCABULARY_BYTES);
        let part = text[..text.floor_char_boundary(part)].trim_end_matches(|c| c != '\n');
        let part = if part.is_empty() { text } else { part };
        let size = config.model.map_or(0, |model| model.vocabulary);
        Ok(Subject::Model(Vocabulary::train(part, size)?))
    }

    fn tokenizer(&self) -> CommandResult<Arc<Tokenizer>> {
        Ok(match self {
            Subject::Model(vocabulary) => Arc::new(vocabulary.tokenizer()?),
            Subject::Adapter(base) => Arc::clone(base.tokenizer()?),
        })
    }

    fn trainer(
        &self,
        config: Config,
        devices: &[Arc<dyn Device>],
        cancel: &CancelToken,
    ) -> CommandResult<Trainer> {
        let cancel = cancel.clone();
        Ok(match self {
            Subject::Model(_) => Trainer::new(config, devices.to_vec(), &[], cancel)?,
            Subject::Adapter(base) => Trainer::for_adapter(config, Arc::clone(base), cancel)?,
        })
    }
}

/// A training run.
struct TrainingRun {
    trainer: Trainer,
    subject: Subject,
    train: Dataset,
    held_out: Dataset,
    order: Order,
    fingerprint: u64,
    curve: Curve,
    folder: Folder,
    devices: Vec<Arc<dyn Device>>,
    sample: String,
    dtype: DType,
}

pub fn run(args: TrainArgs) -> CommandResult {
    let dtype = DType::from_name(&args.dtype).ok_or_else(|| {
        CommandError::usage(format_args!(
            "--dtype: '{}' is not a type; try f32, f16 or q8_0",
            args.dtype
        ))
    })?;
    let config = Config::read(&args.config)?;
    let folder = Folder(args.out);
    let known = folder.checkpoint().exists();
    if known && !args.resume {
        return Err(CommandError::usage(format_args!(
            "{} has a checkpoint: go on with --resume, or choose another folder",
            folder.0.display()
        )));
    }
    if args.resume && !known {
        return Err(CommandError::usage(format_args!(
            "{} has no checkpoint to go on from: leave out --resume",
            folder.0.display()
        )));
    }
    std::fs::create_dir_all(&folder.0).map_err(|error| {
        CommandError::error(format_args!("cannot make {}: {error}", folder.0.display()))
    })?;
    let _lock = folder.lock()?;
    folder.remove_leftovers();
    let cancel = interrupt::token();
    let pool = args.pool.pool(args.threads.threads)?;
    let devices = DeviceSetup::new(&args.devices).devices(pool)?;
    let mut run = TrainingRun::new(config, folder, devices, args.sample, dtype, &cancel)?;
    if known {
        Checkpoint::load(run.folder.checkpoint(), &mut run.trainer, run.fingerprint)?;
        run.curve = Curve::read_csv(run.folder.table())?;
    }
    say(format_args!(
        "{} to learn; {} to learn from, {} to measure with; step {} of {}",
        counted(run.trainer.weights(), "weight"),
        counted(run.train.tokens(), "token"),
        run.held_out.tokens(),
        run.trainer.steps(),
        run.trainer.config().training.steps
    ));
    let result = run.learn(&cancel, args.stop_after.unwrap_or(u64::MAX));
    let stopped = run.trainer.steps() < run.trainer.config().training.steps;
    if matches!(result, Ok(()) | Err(CommandError::Interrupted)) && stopped {
        run.save()?;
        say(format_args!(
            "stopped at step {}; go on with --resume",
            run.trainer.steps()
        ));
    }
    result
}

impl TrainingRun {
    fn new(
        config: Config,
        folder: Folder,
        devices: Vec<Arc<dyn Device>>,
        sample: String,
        dtype: DType,
        cancel: &CancelToken,
    ) -> CommandResult<Self> {
        let free = devices.iter().filter_map(|device| device.memory().free);
        let most = free.min().map_or(MAX_BYTES, |free| free / PARTS);
        let text = read_lines(&config.data.train, most)?;
        let subject = Subject::new(&config, &text, &devices, cancel)?;
        let (tokenizer, context) = (subject.tokenizer()?, config.context());
        let train = Dataset::from_lines(&text, &tokenizer, context)?;
        let text = read_lines(&config.data.held_out, most)?;
        let held_out = Dataset::from_lines(&text, &tokenizer, context)?;
        let (seed, windows) = (config.seed, train.len());
        let trainer = subject.trainer(config, &devices, cancel)?;
        Ok(TrainingRun {
            order: Order::new(seed, windows),
            fingerprint: train.fingerprint(),
            curve: Curve::new(),
            trainer,
            subject,
            train,
            held_out,
            folder,
            devices,
            sample,
            dtype,
        })
    }

    fn learn(&mut self, cancel: &CancelToken, stop_after: u64) -> CommandResult {
        let training = self.trainer.config().training;
        let tokens = training.batch * training.accumulate * self.trainer.config().context();
        let bar = progress::count("training", "steps");
        bar.set_length(training.steps);
        let (mut begin, mut counted) = (Instant::now(), 0);
        while self.trainer.steps() < training.steps.min(stop_after) {
            let windows = self.windows();
            let windows: Vec<_> = windows.iter().map(|&w| self.train.window(w)).collect();
            let report = self.trainer.step(&windows)?;
            let step = self.trainer.steps();
            counted += tokens;
            let last = step == training.steps;
            let measured = if last || step.is_multiple_of(training.evaluate_every) {
                let speed = counted as f64 / begin.elapsed().as_secs_f64();
                let held_out = self.measure()?;
                progress::pause(|| {
                    say(format_args!(
                        "step {step}: loss {:.4}, held-out {:.4} ± {:.4}, rate {:.2e}, gradient {:.2}, {speed:.0} tokens/s",
                        report.loss,
                        held_out.loss,
                        held_out.error,
                        report.rate,
                        report.gradient_norm
                    ));
                });
                Some(held_out.loss)
            } else {
                None
            };
            self.curve.push(Point {
                step,
                loss: report.loss,
                held_out: measured,
                rate: report.rate,
                gradient_norm: report.gradient_norm,
            });
            // Write the checkpoint last: a run that is killed earlier resumes from the previous one
            // and repeats all of this.
            if measured.is_some() {
                self.export()?;
            }
            if last || step.is_multiple_of(training.checkpoint_every) {
                self.save()?;
            }
            if measured.is_some() {
                let text = self.write_sample()?;
                progress::pause(|| text.lines().for_each(say));
                (begin, counted) = (Instant::now(), 0);
            }
            bar.set_position(step);
            cancel.check().map_err(CommandError::from)?;
        }
        drop(bar);
        if self.trainer.steps() < training.steps {
            return Ok(());
        }
        let result = self.folder.result(&self.subject);
        match self.subject {
            Subject::Model(_) => say(format_args!("the model is {}", result.display())),
            Subject::Adapter(_) => say(format_args!("the adapter is {}", result.display())),
        }
        Ok(())
    }

    /// Exports the trained model or adapter.
    fn export(&mut self) -> CommandResult {
        let path = self.folder.result(&self.subject);
        match &self.subject {
            Subject::Model(vocabulary) => export(path, &mut self.trainer, vocabulary, self.dtype)?,
            Subject::Adapter(_) => export_adapter(path, &mut self.trainer, self.dtype)?,
        }
        Ok(())
    }

    /// Returns the windows of the next step.
    fn windows(&mut self) -> Vec<usize> {
        let training = self.trainer.config().training;
        let count = (training.batch * training.accumulate) as u64;
        let first = self.trainer.steps() * count;
        (first..first + count).map(|i| self.order.at(i)).collect()
    }

    fn measure(&mut self) -> CommandResult<samite::train::Evaluation> {
        let training = self.trainer.config().training;
        let count = training.batch * training.evaluate_batches;
        let windows: Vec<_> = (0..count).map(|i| self.held_out.window(i)).collect();
        Ok(self.trainer.evaluate(&windows)?)
    }

    fn save(&mut self) -> CommandResult {
        let title = format!("{}: loss in nats per token", self.trainer.config().name);
        let table = AtomicFile::create(self.folder.table())?;
        files::finish(table, &self.curve.to_csv())?;
        let picture = AtomicFile::create(self.folder.picture())?;
        files::finish(picture, &self.curve.to_svg(&title))?;
        let (path, trainer) = (self.folder.checkpoint(), &mut self.trainer);
        Ok(Checkpoint::save(path, trainer, self.fingerprint)?)
    }

    /// Generates a sample with the current model and writes it on a line.
    fn write_sample(&self) -> CommandResult<String> {
        if self.sample.is_empty() {
            return Ok(String::new());
        }
        let path = self.folder.result(&self.subject);
        let (model, adapters) = match &self.subject {
            Subject::Model(_) => {
                let options = ModelOptions::new(self.devices.clone());
                (Model::load(path, &options)?, Vec::new())
            }
            Subject::Adapter(base) => {
                let adapter = Adapter::load(path, base)?;
                let adapters = vec![ScaledAdapter {
                    adapter,
                    share: 1.0,
                }];
                (Arc::clone(base), adapters)
            }
        };
        let text = sample(model, adapters, &self.sample)?;
        let text = format!("{}{text}", self.sample).replace('\n', " ");
        Ok(format!("  {}\n", escaped(&text)))
    }
}

/// Reads the lines of a file, which must not be empty.
fn read_lines(path: &Path, most: usize) -> CommandResult<String> {
    let text = TextSource::file(path)?.read_all(most as u64)?;
    if text.trim().is_empty() {
        return Err(CommandError::error(format_args!(
            "{}: is empty: it needs texts, one in each line",
            path.display()
        )));
    }
    Ok(text)
}

/// Returns the text that a model generates after `prompt`.
fn sample(model: Arc<Model>, adapters: Vec<ScaledAdapter>, prompt: &str) -> CommandResult<String> {
    let tokens = model.tokenizer()?.tokenize(prompt, true, false);
    let tokens = tokens.map_err(CommandError::error)?;
    let options = ContextOptions {
        adapters,
        ..ContextOptions::default()
    };
    let mut session = Session::new(Context::new(model, options)?)?;
    let mut sampler = Sampler::new(SamplerParams {
        temperature: 0.8,
        seed: 1,
        ..SamplerParams::default()
    })
    .map_err(CommandError::error)?;
    let options = GenerateOptions {
        max_tokens: Some(100),
        ..GenerateOptions::default()
    };
    let mut text = String::new();
    session.generate(&tokens, &mut sampler, &options, |piece| {
        text.push_str(piece);
        ControlFlow::Continue(())
    })?;
    Ok(text)
}

impl From<Error> for CommandError {
    fn from(error: Error) -> Self {
        match error {
            Error::Core(error) => error.into(),
            Error::Model(error) => error.into(),
            error => CommandError::error(error),
        }
    }
}
