//! Loading of models.

use super::model_file::embedded;
use super::{ModelSetup, predicted};
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::{progress, ranks};
use indicatif::ProgressBar;
use samite::forecast::Cluster;
use samite::gguf::GgufFile;
use samite::llm::{ContextPlan, Error, FitOptions, Model, ModelOptions};
use samite::registry::{Prediction, ProcessGroup};
use samite::sched::compare::in_order;
use samite::{CancelToken, Device};
#[cfg(feature = "serve")]
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

impl ModelSetup {
    /// Loads the model and shows a progress bar.
    pub fn load(&self, cpu: &CpuArgs, cancel: &CancelToken) -> CommandResult<Arc<Model>> {
        self.path()?;
        if let Some(group) = ranks::group() {
            self.compare(group)?;
        }
        let devices = self.devices.for_model(&self.placement, cpu)?;
        self.check_split(&devices, cancel)?;
        self.load_on(devices, cancel)
    }

    /// Loads the model twice, once for each of two named devices, which keep the order of
    /// operations.
    pub fn load_pair(&self, cpu: &CpuArgs, cancel: &CancelToken) -> CommandResult<[Arc<Model>; 2]> {
        let [first, second] = self.devices.pair(cpu)?;
        let load = |side: Vec<_>| self.load_on(side.iter().map(in_order).collect(), cancel);
        Ok([load(first)?, load(second)?])
    }

    /// Reads only the header of the model's file, for plans.
    pub fn load_header(&self, cpu: &CpuArgs, cancel: &CancelToken) -> CommandResult<Arc<Model>> {
        self.load_header_on(self.devices.for_model(&self.placement, cpu)?, cancel)
    }

    /// Works like [`load_header`](Self::load_header), on the machines of a file.
    pub fn load_header_on_cluster(
        &self,
        cpu: &CpuArgs,
        cluster: &Cluster,
        cancel: &CancelToken,
    ) -> CommandResult<Arc<Model>> {
        let devices = self.devices.simulated(&self.placement, cpu, cluster)?;
        self.load_header_on(devices, cancel)
    }

    fn load_header_on(
        &self,
        devices: Vec<Arc<dyn Device>>,
        cancel: &CancelToken,
    ) -> CommandResult<Arc<Model>> {
        let options = self.model_options(devices, cancel)?;
        let header = self.file.open_header(options.load_mode)?;
        Ok(Model::without_weights(&header, &options)?)
    }

    fn load_on(
        &self,
        devices: Vec<Arc<dyn Device>>,
        cancel: &CancelToken,
    ) -> CommandResult<Arc<Model>> {
        let mut options = self.model_options(devices, cancel)?;
        let path = self.path()?;
        let bar = progress::bytes("loading");
        let shared = ProgressBar::clone(&bar);
        let tenths = AtomicU64::new(0);
        options.progress = Some(Arc::new(move |done, total| {
            shared.set_length(total);
            shared.set_position(done);
            let tenth = done.saturating_mul(10) / total.max(1);
            if tenths.fetch_max(tenth, Ordering::Relaxed) < tenth {
                tracing::info!("{}0 % of the weights are loaded", tenth);
            }
        }));
        let model = match path {
            Some(path) => Model::load(path, &options),
            None => embedded().and_then(|file| Model::from_gguf(&file, &options)),
        };
        model.map_err(|error| match error {
            Error::Core(error @ samite::Error::OutOfMemory { .. }) => CommandError::error(
                format_args!("{error}; --mmap --no-repack leaves the weights in the file"),
            ),
            error => error.into(),
        })
    }

    /// Loads a second model on the devices of the first one.
    #[cfg(feature = "serve")]
    pub fn load_beside(
        &self,
        path: &Path,
        model: &Arc<Model>,
        cancel: &CancelToken,
    ) -> CommandResult<Arc<Model>> {
        Ok(Model::load(path, &self.options_beside(model, cancel)?)?)
    }

    /// Works like [`load_beside`](Self::load_beside), but reads only the header of the file, for
    /// plans.
    #[cfg(feature = "serve")]
    pub fn load_header_beside(
        &self,
        path: &Path,
        model: &Arc<Model>,
        cancel: &CancelToken,
    ) -> CommandResult<Arc<Model>> {
        let options = self.options_beside(model, cancel)?;
        let header = GgufFile::open_header(path, options.load_mode)?;
        Ok(Model::without_weights(&header, &options)?)
    }

    #[cfg(feature = "serve")]
    fn options_beside(
        &self,
        model: &Arc<Model>,
        cancel: &CancelToken,
    ) -> CommandResult<ModelOptions> {
        let devices = model.devices().iter().cloned().collect();
        Ok(ModelOptions {
            rules: Vec::new(),
            ..self.model_options(devices, cancel)?
        })
    }

    fn model_options(
        &self,
        devices: Vec<Arc<dyn Device>>,
        cancel: &CancelToken,
    ) -> CommandResult<ModelOptions> {
        let mut options = ModelOptions::new(devices);
        options.rules = self
            .placement
            .rules(|| self.file.open_header(self.loading.mode))?;
        options.fit = self.placement.fit_margin.map(|margin| FitOptions {
            context: self.context_options(cancel),
            margin,
        });
        options.load_mode = self.loading.mode;
        options.lock = self.loading.locks;
        options.fallback = self.placement.fallback;
        options.repack = self.loading.repacks;
        options.cancel = cancel.clone();
        Ok(options)
    }

    /// Fails if dividing tensors is predicted to be slower than one device alone.
    fn check_split(&self, devices: &[Arc<dyn Device>], cancel: &CancelToken) -> CommandResult {
        if !self.placement.splits_tensors() || self.placement.splits_anyway {
            return Ok(());
        }
        let model = self.load_header_on(devices.to_vec(), cancel)?;
        let context = ContextPlan::new(model, self.context_options(cancel))?;
        let prediction = predicted(&context.plan(1)?)?;
        match prediction.filter(Prediction::is_slower) {
            None => Ok(()),
            Some(Prediction {
                best,
                alone,
                divided,
                exchanging,
            }) => Err(CommandError::error(format_args!(
                "--split-mode tensor would be slower: {:.2} ms for a token, {:.2} of them for \
                 exchanges, instead of {:.2} on {best} alone; \
                 leave it out, or do it with --split-anyway",
                divided * 1e3,
                exchanging * 1e3,
                alone * 1e3
            ))),
        }
    }

    /// Checks that settings which must be the same are the same in all processes.
    fn compare(&self, group: &ProcessGroup) -> CommandResult {
        let version = ranks::hash(env!("CARGO_PKG_VERSION"));
        group.agree("version of samite", version)?;
        let file = self.file.open_header(self.loading.mode)?;
        group.agree("model", ranks::fingerprint(&file)?)?;
        let mut adapters = Vec::new();
        for (path, share) in self.adapters.files() {
            let file = GgufFile::open_header(path, self.loading.mode)?;
            adapters.push((ranks::fingerprint(&file)?, share));
        }
        let adapters = (adapters, self.adapters.layers());
        group.agree("set of adapters", ranks::hash(adapters))?;
        let flags = (&self.context, self.placement.shared(), self.devices.is_only);
        Ok(group.agree("set of flags", ranks::hash(flags))?)
    }
}
