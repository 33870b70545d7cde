//! Models of a server, loaded on request.

use super::{MemoryLog, ServeArgs, draft_context, draft_failure};
use crate::failure::{CommandError, CommandResult};
use crate::setup::ModelSetup;
use samite::CancelToken;
use samite::llm::arch::spec::Spec;
use samite::llm::{ContextPlan, MemoryUse, sampler_params};
use samite::serve::{App, Loaded, ROOM, ServeOptions, ServedModel, Source};
use samite::text::{Generator, Sampler, SamplerParams};
use samite::vision::EncoderPlan;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model and its serving options.
pub struct ModelSource {
    args: Arc<ServeArgs>,
    setup: ModelSetup,
    options: ServeOptions,
    /// Name of the model's subfolder of the disk cache, if other models use the folder as well.
    disk_name: Option<String>,
}

impl ModelSource {
    pub fn new(args: &Arc<ServeArgs>, setup: ModelSetup, options: ServeOptions) -> Self {
        ModelSource {
            args: Arc::clone(args),
            setup,
            options,
            disk_name: None,
        }
    }

    /// Returns the single model of a server, under its aliases, or else this name.
    pub fn served(self, name: String) -> ServedModel {
        let path = match self.setup.path() {
            Ok(Some(path)) => path.to_owned(),
            _ => PathBuf::new(),
        };
        ServedModel {
            names: self.options.names(name),
            path,
            source: Box::new(self),
        }
    }

    /// Returns one of several models, under the name of its file.
    pub fn served_file(self, path: &Path) -> ServedModel {
        let file = path.file_name().unwrap_or(path.as_os_str());
        let mut names = vec![name_of(path), file.to_string_lossy().into_owned()];
        names.dedup();
        self.served_as(names, path)
    }

    /// Returns one of several models, under these names. The first one is its ID.
    pub fn served_as(mut self, names: Vec<String>, path: &Path) -> ServedModel {
        self.options.aliases = names[..1].to_vec();
        self.options.is_embedded = false;
        // A name that is valid as that of a folder.
        self.disk_name = Some(names[0].replace(['/', ':'], "--"));
        ServedModel {
            names,
            path: path.to_owned(),
            source: Box::new(self),
        }
    }

    fn writes(&self, spec: &Spec) -> bool {
        spec.head.output.is_some() && !spec.is_bidirectional() && !self.args.requests.reranking
    }

    fn embeds(&self, writes: bool) -> bool {
        self.args.requests.embeddings || self.args.requests.reranking || !writes
    }

    fn planned(&self) -> CommandResult<u64> {
        let args = &self.args;
        let encoder = args.plan_encoder(&self.setup)?;
        let encoder_bytes = encoder.as_ref().map_or(0, EncoderPlan::bytes);
        let setup = &self.setup.leaving(encoder_bytes);
        let model = setup.load_header(&args.cpu, &CancelToken::new())?;
        let writes = self.writes(model.spec());
        // Contexts of a model share its weights.
        let weights = |uses: &[MemoryUse]| uses.iter().map(|row| row.weights).sum::<usize>();
        let context = |uses: &[MemoryUse]| {
            let bytes = uses.iter().map(|row| row.kv + row.compute);
            bytes.sum::<usize>()
        };
        let (mut model_weights, mut others) = (0, encoder_bytes);
        if writes {
            let engine = args.engine_options();
            let spec = encoder.as_ref().map(EncoderPlan::spec);
            let options = args.writing_context(setup, &engine, spec);
            let plan = setup.context_plan(Arc::clone(&model), options.clone())?;
            let uses = plan.memory()?;
            model_weights = weights(&uses);
            others += context(&uses);
            if let Some(path) = &args.requests.model_draft {
                let draft = setup.load_header_beside(path, &model, &options.cancel);
                let draft = draft.map_err(draft_failure)?;
                let options = draft_context(&options, plan.n_ctx(), &engine);
                let uses = ContextPlan::new(draft, options)?.memory()?;
                others += weights(&uses) + context(&uses);
            }
        }
        if self.embeds(writes) {
            let (_, options) = args.embedding_context(setup, model.spec());
            let uses = setup.context_plan(Arc::clone(&model), options)?.memory()?;
            model_weights = weights(&uses);
            others += context(&uses);
        }
        Ok((model_weights + others) as u64)
    }

    /// Checks that a limited address space (`ulimit -v`) has room for the model's plan and the
    /// server. While the model loads, a small allocation that fails aborts the program, so loading
    /// must stay below the limit.
    pub fn check_address_space(&self) -> CommandResult {
        // Planning allocates as well.
        for planned in [|_: &Self| Ok(0), Self::planned] {
            let Some(free) = samite::free_address_space() else {
                return Ok(());
            };
            let needed = planned(self)?;
            if needed.saturating_add(ROOM as u64) > free {
                let mib = |bytes: u64| bytes.div_ceil(1 << 20);
                let model = match needed {
                    0 => String::new(),
                    bytes => format!("{} MiB for the model and its context and ", mib(bytes)),
                };
                return Err(CommandError::error(format_args!(
                    "not enough memory: a server needs {model}{} MiB for threads and requests, and \
                     the limit of address space (ulimit -v) leaves {} MiB; raise it or set a \
                     smaller --ctx-size",
                    ROOM >> 20,
                    free >> 20
                )));
            }
        }
        Ok(())
    }

    /// Loads the model.
    pub fn loaded(&self, stop: &CancelToken) -> CommandResult<Loaded> {
        let args = &self.args;
        let encoder = args.plan_encoder(&self.setup)?;
        let setup = self.setup.leaving(encoder.map_or(0, |plan| plan.bytes()));
        let model = setup.load(&args.cpu, stop)?;
        let mut options = self.options.clone();
        // Seeds must give the same results as in llama-server.
        let defaults = SamplerParams {
            generator: Generator::Mersenne,
            ..sampler_params(model.metadata())?
        };
        options.sampling = args.sampling.params(defaults)?;
        Sampler::new(options.sampling.clone()).map_err(CommandError::usage)?;
        options.seed = args
            .sampling
            .has_seed()
            .then_some(options.sampling.seed & 0xffff_ffff);
        let writes = self.writes(model.spec());
        let embeds = self.embeds(writes);
        options.embeddings = embeds;
        options.reranking = args.requests.reranking;
        let (mut handle, mut thread) = (None, None);
        let mut memory = MemoryLog::new(&model);
        let mut encoder = None;
        if !writes && args.encoder.path().is_some() {
            return Err(CommandError::usage(
                "--mmproj: this model does not generate text, so that it takes no images",
            ));
        }
        if writes {
            let name = self.disk_name.as_deref();
            encoder = args.load_encoder(&self.setup, &model)?;
            let (new, driver) = args.engine(
                &self.setup,
                &model,
                &mut options,
                encoder.as_ref(),
                name,
                &mut memory,
            )?;
            (handle, thread) = (Some(new), Some(driver));
        }
        let embedder = if embeds {
            Some(args.embedder(&self.setup, &model, &mut memory)?)
        } else {
            None
        };
        memory.print();
        let app = App::new(options, model, handle, embedder).map_err(CommandError::usage)?;
        let app = match encoder {
            Some(encoder) => app.with_encoder(encoder),
            None => app,
        };
        Ok(Loaded { app, thread })
    }
}

impl Source for ModelSource {
    fn plan(&self) -> Result<u64, String> {
        self.planned().map_err(|failure| failure.text())
    }

    fn load(&self) -> Result<Loaded, String> {
        // Signals do not interrupt loading: the waiting client gets an answer.
        self.loaded(&CancelToken::new())
            .map_err(|failure| failure.text())
    }
}

/// Returns the name of a model file: without its extension and the suffix of split models.
fn name_of(path: &Path) -> String {
    let name = path.file_stem().unwrap_or(path.as_os_str());
    let name = name.to_string_lossy();
    match part(&name) {
        Some((model, _)) => model.to_owned(),
        None => name.into_owned(),
    }
}

/// Returns the model name and the number of a part, such as `model-00001-of-00003`.
fn part(name: &str) -> Option<(&str, u32)> {
    let (before, count) = name.rsplit_once("-of-")?;
    let (model, number) = before.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let number = Some(number).filter(|_| is_number(number) && is_number(count))?;
    Some((model, number.parse().ok()?))
}

/// Returns the models of a folder in order: its GGUF files, and of split models the first part.
///
/// # Errors
/// Returns an error if the folder cannot be read.
pub fn folder(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_gguf = path
            .extension()
            .is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        // An image projector is not a model.
        let is_model = !stem.starts_with("mmproj") && part(&stem).is_none_or(|(_, n)| n == 1);
        if is_gguf && is_model && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_in_a_folder_are_found_by_name() {
        let folder_of_models = tempfile::tempdir().unwrap();
        for name in [
            "b.gguf",
            "a.GGUF",
            "c-00001-of-00002.gguf",
            "c-00002-of-00002.gguf",
            "mmproj-b.gguf",
            "notes.txt",
        ] {
            std::fs::write(folder_of_models.path().join(name), "").unwrap();
        }
        let files = folder(folder_of_models.path()).unwrap();
        let names: Vec<String> = files.iter().map(|path| name_of(path)).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(part("c-1-of-2"), None);
    }
}
