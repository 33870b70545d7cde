//! Models in the download cache, for a server that downloads and deletes them.

use super::ServeArgs;
use super::source::ModelSource;
use crate::failure::CommandResult;
use crate::hub;
use crate::setup::ModelSetup;
use samite::CancelToken;
use samite::hub::{Cache, Cached, DownloadProgress, Hub, Reference};
use samite::serve::{FileProgress, Library, ServeOptions, ServedModel};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Revision to download.
const REVISION: &str = "main";

/// The models in the user's download cache.
pub struct CachedModels {
    args: Arc<ServeArgs>,
    setup: ModelSetup,
    options: ServeOptions,
    cache: Cache,
    hub: Hub,
}

impl CachedModels {
    pub fn new(
        args: &Arc<ServeArgs>,
        setup: &ModelSetup,
        options: &ServeOptions,
    ) -> CommandResult<Self> {
        Ok(CachedModels {
            args: Arc::clone(args),
            setup: setup.clone(),
            options: options.clone(),
            cache: hub::cache()?,
            hub: hub::hub(&args.model.hub.access),
        })
    }

    fn served(&self, names: Vec<String>, path: PathBuf) -> ServedModel {
        let setup = self.setup.with_file(path.clone());
        ModelSource::new(&self.args, setup, self.options.clone()).served_as(names, &path)
    }
}

fn parsed(name: &str) -> Result<Reference, String> {
    name.parse()
        .map_err(|error: samite::hub::Error| error.to_string())
}

impl Library for CachedModels {
    fn models(&self) -> Result<Vec<ServedModel>, String> {
        let models = self.cache.models().map_err(|error| error.to_string())?;
        let models = models.into_iter().filter(Cached::is_model);
        let served = models.map(|model| {
            let Cached {
                repository,
                file,
                name,
                path,
                ..
            } = model;
            let mut names = vec![name, format!("{repository}:{file}")];
            // The name without a quantization means the one that a download would choose.
            if let Ok(reference) = parsed(&repository)
                && self.cache.find(&reference, REVISION).as_ref() == Some(&path)
            {
                names.push(repository);
            }
            names.dedup();
            self.served(names, path)
        });
        Ok(served.collect())
    }

    fn name(&self, text: &str) -> Result<String, String> {
        Ok(parsed(text)?.to_string())
    }

    fn download(
        &self,
        name: &str,
        progress: &mut dyn FnMut(FileProgress),
        cancel: &CancelToken,
    ) -> Result<ServedModel, String> {
        let reference = parsed(name)?;
        let mut download = || -> samite::hub::Result<(String, PathBuf)> {
            let listing = self.hub.list(&reference, REVISION)?;
            let files = listing.choose(&reference)?;
            let mut first = None;
            for file in files {
                let mut report = |now| {
                    if let DownloadProgress::Received(done) = now {
                        progress(FileProgress {
                            file: file.path.clone(),
                            sha256: file.sha256.clone(),
                            done,
                            total: file.size,
                        });
                    }
                };
                let path = self
                    .hub
                    .fetch(&self.cache, &listing, file, &mut report, cancel)?;
                first.get_or_insert((listing.reference(&file.path).to_string(), path));
            }
            first.ok_or_else(|| samite::hub::Error::NotFound(format!("{reference}: no file")))
        };
        let (short, path) = download().map_err(|error| error.to_string())?;
        let mut names = vec![short, name.to_owned()];
        names.dedup();
        Ok(self.served(names, path))
    }

    fn delete(&self, path: &Path) -> Result<(), String> {
        let models = self.cache.models().map_err(|error| error.to_string())?;
        let model = models.into_iter().find(|model| model.path == path);
        let model = model.ok_or_else(|| format!("{} is not in the cache", path.display()))?;
        let reference = Reference {
            repository: model.repository,
            wanted: Some(model.file),
        };
        let removed = self.cache.remove(&reference);
        removed.map(drop).map_err(|error| error.to_string())
    }
}
