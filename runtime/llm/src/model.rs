//! Models: from a file to weights on devices.

use crate::adapter::Adapter;
use crate::arch::{self, Architecture, LayerCache, Spec};
use crate::context::{ContextOptions, Sizes};
use crate::cost::TokenCost;
use crate::displaced::{self, Displaced};
use crate::error::{Error, Result};
use crate::fit::{Fit, FitOptions, Fitter};
use crate::graphs::GraphSource;
use crate::kv::KvPlan;
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

/// Is told the bytes that are loaded and the bytes in all; from any thread, by one at a time.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// How to load a model.
#[derive(Clone)]
pub struct ModelOptions {
    /// Devices in order of preference; the last one is the host.
    pub devices: Vec<Arc<dyn Device>>,
    /// Which device holds what; see [`PlacementRule`].
    pub rules: Vec<PlacementRule>,
    /// Fits layers to the free memory of the devices before the last one, unless a rule says where they go.
    pub fit: Option<FitOptions>,
    /// How data comes into memory.
    pub load_mode: LoadMode,
    /// Locks the weights that are computed with in host memory, so that they are never paged out. If the system refuses, there is a warning that says which
    /// limit to raise, and [`Weights::lock_refused`] keeps it.
    pub lock: bool,
    /// About weights that their device refuses, which go elsewhere.
    pub fallback: Fallback,
    /// Whether devices may hold weights in layouts of their own, which are faster to compute with.
    pub repack: bool,
    /// Threads that read the file; `None` for a few.
    pub threads: Option<usize>,
    /// Told about the progress.
    pub progress: Option<Progress>,
    /// Stops the loading.
    pub cancel: CancelToken,
    /// Where files, threads and time come from.
    pub environment: Environment,
}

impl ModelOptions {
    /// The defaults on these devices: no rules, files are read.
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

/// A model that was checked, with a place for every tensor, but without its data.
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
    /// Checks everything in `file` but the values of its weights, and decides where they go. Allocates no tensor.
    ///
    /// # Errors
    /// Whatever makes the model unusable, by key or tensor; [`Error::Rule`].
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
        displaced::report(&weights.displaced, options.fallback)?;
        Ok(ModelPlan {
            architecture,
            spec,
            tokenizer: tokenizer.map(Arc::new),
            devices,
            weights,
            fit,
        })
    }

    /// Where layers were fitted, if they were.
    pub fn fit(&self) -> Option<&Fit> {
        self.fit.as_ref()
    }

    /// What the model is made of.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Where each tensor goes.
    pub fn tensors(&self) -> &[PlannedTensor] {
        &self.weights.tensors
    }

    /// The tensors that do not lie where they were wanted, because the device there refuses them.
    pub fn displaced(&self) -> &[Displaced] {
        &self.weights.displaced
    }

    /// Bytes of weights by kind of memory: `(name, bytes)`.
    ///
    /// # Errors
    /// If a tensor cannot lie in its memory.
    pub fn memory(&self) -> Result<Vec<(String, usize)>> {
        Ok(self.weights.bytes()?.into_iter().collect())
    }
}

/// A model with its weights on devices. Contexts share it.
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
    /// Adapters that were loaded for it.
    n_adapters: AtomicU64,
}

impl Model {
    /// Loads the model in the file at `path`; of a split model, any part may be named.
    ///
    /// # Errors
    /// If the file cannot be read, the model is not supported or contradicts itself, a rule does not apply, or a device
    /// has not enough memory; when cancelled.
    pub fn load(path: impl AsRef<Path>, options: &ModelOptions) -> Result<Arc<Self>> {
        let start = options.environment.clock.now();
        options.cancel.check()?;
        let file = GgufFile::open_in(&*options.environment.files, path, options.load_mode)?;
        Self::from_file(&file, options, start)
    }

    /// Loads the model in an open file.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_gguf(file: &GgufFile, options: &ModelOptions) -> Result<Arc<Self>> {
        Self::from_file(file, options, options.environment.clock.now())
    }

    /// The model in a file of which only the header is needed ([`GgufFile::open_header`]), as [`from_gguf`](Self::from_gguf) would
    /// make it, but with weights that have no data and take no memory: for a [`ContextPlan`](crate::ContextPlan).
    ///
    /// # Errors
    /// As [`load`](Self::load), but for memory.
    pub fn without_weights(file: &GgufFile, options: &ModelOptions) -> Result<Arc<Self>> {
        let plan = ModelPlan::new(file, options)?;
        let weights = plan.weights.unallocated()?;
        let unloaded = plan.weights.bytes_by_device(plan.devices.len())?;
        let mut model = Self::new(file, plan, weights);
        model.unloaded = unloaded;
        Ok(Arc::new(model))
    }

    /// `start` is when loading began.
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

    /// What is known of the model, without its weights and devices but the last one.
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

    /// A number for a further adapter, greater than those before.
    pub(crate) fn next_adapter(&self) -> u64 {
        self.n_adapters.fetch_add(1, Ordering::Relaxed)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file calls the model, or its architecture.
    pub fn name(&self) -> &str {
        let name = self.metadata.get::<&str>("general.name").ok().flatten();
        name.unwrap_or(self.architecture.name)
    }

    /// The chat templates of the file, and the texts of the tokens that begin and end a text, which templates write.
    pub fn chat_sources(&self) -> Sources {
        chat_sources(&self.metadata, self.tokenizer.as_deref())
    }

    /// All keys and values of the file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The architecture.
    pub fn architecture(&self) -> &'static Architecture {
        self.architecture
    }

    /// What the model is made of.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`Error::Model`] if the file has no vocabulary.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        self.tokenizer.as_ref().ok_or_else(|| {
            Error::model(format!(
                "{}: has no vocabulary (key \"tokenizer.ggml.model\"): only token ids can be used with it",
                self.path.display()
            ))
        })
    }

    /// The devices, in order of preference.
    pub fn devices(&self) -> &DeviceSet {
        &self.devices
    }

    /// The weights by name.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Where layers were fitted to free memory, if they were.
    pub fn fit(&self) -> Option<&Fit> {
        self.fit.as_ref()
    }

    /// Returns the devices that cached keys and values of each layer are for.
    pub(crate) fn kv_choices(&self) -> &[Choice] {
        &self.kv
    }

    /// Returns the bytes that loading the weights would allocate, by device; nothing once they are
    /// loaded.
    pub(crate) fn unloaded(&self) -> &[usize] {
        &self.unloaded
    }

    /// Plans the KV cache of a context. Reports layers whose caches do not lie where they belong.
    pub(crate) fn plan_kv(&self, sizes: &Sizes, options: &ContextOptions) -> Result<KvPlan> {
        let source = self.graph_source(&[], &self.kv, options, &[], sizes);
        let plan = KvPlan::willing(&source, sizes, options.kv_types)?;
        displaced::report(&plan.displaced, options.fallback)?;
        Ok(plan)
    }

    /// What its graphs are made of, with caches and options of a context, and the adapters that sequences have for themselves.
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

    /// Number of parameters.
    pub fn n_params(&self) -> u64 {
        self.elements
    }

    /// The least that one token costs.
    pub fn token_cost(&self) -> TokenCost {
        self.token_cost
    }

    /// Size of the file, or of all parts.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// How long loading took.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }
}
