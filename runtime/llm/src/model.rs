//! Models: from a file to weights on devices.

use crate::adapter::Adapter;
use crate::arch::{self, Architecture, LayerCache, Spec};
use crate::context::{ContextOptions, Sizes};
use crate::cost::TokenCost;
use crate::error::{Error, Result};
use crate::fit::{Fit, FitOptions, Fitter};
use crate::graphs::GraphSource;
use crate::kv::KvPlan;
use crate::placement_fallback::{self, PlacementFallback};
use crate::rules::{Choice, PlacementRule};
use crate::vocab::{chat_sources, vocab_data};
use crate::weights::{PlannedTensor, WeightPlan, Weights};
use samite_chat::Sources;
use samite_core::environment::Instant;
use samite_core::{CancelToken, Device, Environment};
use samite_gguf::{GgufFile, KEY_ARCHITECTURE, LoadMode, Metadata};
use samite_sched::{DeviceSet, Fallback};
use samite_text::Tokenizer;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Progress callback, called with the loaded bytes and all bytes. Any thread may call it, but only
/// one at a time.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Options for loading a model.
#[derive(Clone)]
pub struct ModelOptions {
    /// Devices in order of preference; the last one is the host.
    pub devices: Vec<Arc<dyn Device>>,
    /// Rules for the placement of tensors; see [`PlacementRule`].
    pub rules: Vec<PlacementRule>,
    /// Fits layers to the free memory of the devices before the last one, unless a rule places
    /// layers.
    pub fit: Option<FitOptions>,
    /// Method for loading data into memory.
    pub load_mode: LoadMode,
    /// True to lock weights that are used in host memory, so that they are never paged out. If the
    /// system refuses, a warning names the limit to raise, and [`Weights::lock_refused`] returns
    /// it.
    pub lock: bool,
    /// Policy for weights that their device rejects and that go to another one.
    pub fallback: Fallback,
    /// True if devices may repack weights into their own layouts, which are faster.
    pub repack: bool,
    /// Number of threads that read the file; `None` uses a few.
    pub threads: Option<usize>,
    /// Progress callback.
    pub progress: Option<Progress>,
    /// Token that stops loading.
    pub cancel: CancelToken,
    /// Source of files, threads and time.
    pub environment: Environment,
}

impl ModelOptions {
    /// Returns the default options for these devices: no rules, and files are read.
    pub fn new(devices: Vec<Arc<dyn Device>>) -> Self {
        ModelOptions {
            devices,
            rules: Vec::new(),
            fit: Some(FitOptions::default()),
            load_mode: LoadMode::default(),
            lock: false,
            fallback: Fallback::default(),
            repack: true,
            threads: None,
            progress: None,
            cancel: CancelToken::new(),
            environment: Environment::system(),
        }
    }
}

impl std::fmt::Debug for ModelOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelOptions")
            .field("devices", &self.devices)
            .field("rules", &self.rules)
            .field("fit", &self.fit)
            .field("load_mode", &self.load_mode)
            .field("lock", &self.lock)
            .field("fallback", &self.fallback)
            .field("repack", &self.repack)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

/// A model that was checked, with a device for every tensor, but without its data.
#[derive(Debug)]
pub struct ModelPlan {
    architecture: &'static Architecture,
    spec: Spec,
    tokenizer: Option<Arc<Tokenizer>>,
    devices: DeviceSet,
    weights: WeightPlan,
    fit: Option<Fit>,
}

impl ModelPlan {
    /// Checks everything in `file` except the values of its weights, and places the weights.
    /// Allocates no tensor.
    ///
    /// # Errors
    /// Returns an error that names the key or tensor that makes the model unusable, or
    /// [`Error::Rule`].
    pub fn new(file: &GgufFile, options: &ModelOptions) -> Result<Self> {
        let metadata = file.metadata();
        let architecture = arch::find(metadata.require::<&str>(KEY_ARCHITECTURE)?)?;
        let has_tensor = |name: &str| file.tensor(name).is_some();
        let spec = Spec::from_metadata(metadata, file.tensors().len(), &has_tensor)?;
        let tokenizer = vocab_data(metadata)?.map(Tokenizer::new).transpose()?;
        let devices = DeviceSet::new(options.devices.clone())?;
        let fit = match &options.fit {
            Some(fit) => Fitter {
                file,
                architecture,
                spec: &spec,
                devices: &devices,
                rules: &options.rules,
                repack: options.repack,
                options: fit,
            }
            .fit()?,
            None => None,
        };
        let weights = WeightPlan::new(
            file,
            architecture,
            &spec,
            &devices,
            &options.rules,
            fit.as_ref().map(|fit| &*fit.layers),
            options.repack,
        )?;
        placement_fallback::report(&weights.displaced, options.fallback)?;
        Ok(ModelPlan {
            architecture,
            spec,
            tokenizer: tokenizer.map(Arc::new),
            devices,
            weights,
            fit,
        })
    }

    /// Returns the result of fitting layers, if they were fitted.
    pub fn fit(&self) -> Option<&Fit> {
        self.fit.as_ref()
    }

    /// Returns the structure of the model.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Returns the placement of each tensor.
    pub fn tensors(&self) -> &[PlannedTensor] {
        &self.weights.tensors
    }

    /// Returns the tensors that are on another device because theirs rejects them.
    pub fn displaced(&self) -> &[PlacementFallback] {
        &self.weights.displaced
    }

    /// Returns the bytes of weights by kind of memory: `(name, bytes)`.
    ///
    /// # Errors
    /// Returns an error if a tensor cannot be in its memory.
    pub fn memory(&self) -> Result<Vec<(String, usize)>> {
        Ok(self.weights.bytes()?.into_iter().collect())
    }
}

/// A model with its weights on devices. Contexts share it.
///
/// ```no_run
/// use samite_llm::{Model, ModelOptions};
/// # let devices = Vec::new();
///
/// let model = Model::load("model.gguf", &ModelOptions::new(devices))?;
/// println!("{}: {} parameters", model.name(), model.n_params());
/// let tokens = model.tokenizer()?.tokenize("Once upon a time", true, false)?;
/// # Ok::<_, samite_llm::Error>(())
/// ```
#[derive(Debug)]
pub struct Model {
    path: PathBuf,
    metadata: Metadata,
    architecture: &'static Architecture,
    spec: Spec,
    tokenizer: Option<Arc<Tokenizer>>,
    devices: DeviceSet,
    weights: Weights,
    kv: Vec<Choice>,
    fit: Option<Fit>,
    elements: u64,
    token_cost: TokenCost,
    file_bytes: u64,
    load_time: Duration,
    /// Bytes that loading the weights would allocate, by device; empty once they are loaded.
    unloaded: Vec<usize>,
    /// Number of adapters that were loaded for the model.
    n_adapters: AtomicU64,
}

impl Model {
    /// Loads the model from the file at `path`. For a split model, `path` can be any of its parts.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, the model is not supported or contradictory, a
    /// rule does not apply, a device does not have enough memory, or loading is cancelled.
    pub fn load(path: impl AsRef<Path>, options: &ModelOptions) -> Result<Arc<Self>> {
        let start = options.environment.clock.now();
        options.cancel.check()?;
        let file = GgufFile::open_in(&*options.environment.files, path, options.load_mode)?;
        Self::from_file(&file, options, start)
    }

    /// Loads the model from an open file.
    ///
    /// # Errors
    /// Fails like [`load`](Self::load).
    pub fn from_gguf(file: &GgufFile, options: &ModelOptions) -> Result<Arc<Self>> {
        Self::from_file(file, options, options.environment.clock.now())
    }

    /// Creates the model like [`from_gguf`](Self::from_gguf), but with weights that have no data
    /// and need no memory: for a [`ContextPlan`](crate::ContextPlan). Only the header of the file
    /// is needed ([`GgufFile::open_header`]).
    ///
    /// # Errors
    /// Fails like [`load`](Self::load), except for lack of memory.
    pub fn without_weights(file: &GgufFile, options: &ModelOptions) -> Result<Arc<Self>> {
        let plan = ModelPlan::new(file, options)?;
        let weights = plan.weights.unallocated()?;
        let unloaded = plan.weights.bytes_by_device(plan.devices.len())?;
        let mut model = Self::new(file, plan, weights);
        model.unloaded = unloaded;
        Ok(Arc::new(model))
    }

    /// Loads the model; `start` is when loading started.
    fn from_file(file: &GgufFile, options: &ModelOptions, start: Instant) -> Result<Arc<Self>> {
        let plan = ModelPlan::new(file, options)?;
        let silent: Progress = Arc::new(|_, _| {});
        let progress = options.progress.as_ref().unwrap_or(&silent);
        let weights = plan
            .weights
            .load(file, &plan.devices, options, &**progress)?;
        let mut model = Self::new(file, plan, weights);
        model.load_time = options
            .environment
            .clock
            .now()
            .saturating_duration_since(start);
        tracing::info!(
            "{} ({}) is loaded on {} in {:.2} s",
            model.path.display(),
            model.name(),
            model.devices.names(),
            model.load_time.as_secs_f64()
        );
        Ok(Arc::new(model))
    }

    fn new(file: &GgufFile, plan: ModelPlan, weights: Weights) -> Self {
        Model {
            path: file.path().to_owned(),
            metadata: file.metadata().clone(),
            architecture: plan.architecture,
            token_cost: TokenCost::new(file.tensors(), plan.spec.experts()),
            spec: plan.spec,
            tokenizer: plan.tokenizer,
            devices: plan.devices,
            weights,
            kv: plan.weights.kv,
            fit: plan.fit,
            elements: file.tensors().total_elements(),
            file_bytes: file.file_bytes(),
            load_time: Duration::ZERO,
            unloaded: Vec::new(),
            n_adapters: AtomicU64::new(0),
        }
    }

    /// Returns a copy of the model without its weights, with only the last device.
    pub(crate) fn without_data(&self) -> Result<Arc<Self>> {
        let host = self.devices.iter().last();
        Ok(Arc::new(Model {
            path: self.path.clone(),
            metadata: self.metadata.clone(),
            spec: self.spec.clone(),
            tokenizer: self.tokenizer.clone(),
            devices: DeviceSet::new(host.into_iter().cloned().collect())?,
            weights: Weights::default(),
            kv: Vec::new(),
            fit: self.fit.clone(),
            unloaded: Vec::new(),
            n_adapters: AtomicU64::new(0),
            ..*self
        }))
    }

    /// Returns a number for another adapter, greater than those before.
    pub(crate) fn next_adapter(&self) -> u64 {
        self.n_adapters.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the model's name in the file, or its architecture.
    pub fn name(&self) -> &str {
        let name = self.metadata.get::<&str>("general.name").ok().flatten();
        name.unwrap_or(self.architecture.name)
    }

    /// Returns the chat templates of the file, and the texts of the BOS and EOS tokens, which
    /// templates use.
    pub fn chat_sources(&self) -> Sources {
        chat_sources(&self.metadata, self.tokenizer.as_deref())
    }

    /// Returns the metadata of the file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns the architecture.
    pub fn architecture(&self) -> &'static Architecture {
        self.architecture
    }

    /// Returns the structure of the model.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Returns the tokenizer.
    ///
    /// # Errors
    /// Returns [`Error::Model`] if the file has no vocabulary.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        self.tokenizer.as_ref().ok_or_else(|| {
            Error::model(format!(
                "{}: has no vocabulary (key \"tokenizer.ggml.model\"): only token ids can be used \
                 with it",
                self.path.display()
            ))
        })
    }

    /// Returns the devices in order of preference.
    pub fn devices(&self) -> &DeviceSet {
        &self.devices
    }

    /// Returns the weights by name.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Returns the result of fitting layers to free memory, if they were fitted.
    pub fn fit(&self) -> Option<&Fit> {
        self.fit.as_ref()
    }

    /// Returns the device of each layer's KV cache.
    pub(crate) fn kv_choices(&self) -> &[Choice] {
        &self.kv
    }

    /// Returns the bytes that loading the weights would allocate, by device. Empty once they are
    /// loaded.
    pub(crate) fn unloaded(&self) -> &[usize] {
        &self.unloaded
    }

    /// Plans the KV cache of a context. Reports layers whose caches are on another device.
    pub(crate) fn plan_kv(&self, sizes: &Sizes, options: &ContextOptions) -> Result<KvPlan> {
        let source = self.graph_source(&[], &self.kv, options, &[], sizes);
        let plan = KvPlan::willing(&source, sizes, options.kv_types)?;
        placement_fallback::report(&plan.displaced, options.fallback)?;
        placement_fallback::report_no_flash(&plan.unfused, options.fallback);
        Ok(plan)
    }

    /// Returns the source of the model's graphs with the caches and options of a context, and the
    /// adapters that belong to sequences.
    pub(crate) fn graph_source<'a>(
        &'a self,
        layers: &'a [LayerCache],
        kv: &'a [Choice],
        options: &'a ContextOptions,
        mixed: &'a [Arc<Adapter>],
        sizes: &Sizes,
    ) -> GraphSource<'a> {
        GraphSource {
            spec: &self.spec,
            devices: &self.devices,
            weights: &self.weights,
            layers,
            kv,
            adapters: &options.adapters,
            mixed,
            flash: options.flash,
            n_ctx: sizes.n_cells,
            output: options.output,
        }
    }

    /// Returns the number of parameters.
    pub fn n_params(&self) -> u64 {
        self.elements
    }

    /// Returns the minimum cost of one token.
    pub fn token_cost(&self) -> TokenCost {
        self.token_cost
    }

    /// Returns the size of the file, or of all parts.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Returns the duration of loading.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }
}
