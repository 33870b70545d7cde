//! Models by name: flags, and downloads with a progress bar.

use crate::failure::{CommandError, CommandResult};
use crate::shown::{escaped, say};
use crate::{interrupt, progress};
use clap::Args;
use samite::hub::{
    Cache, DownloadProgress, Error, Hub, HubOptions, Listing, Reference, RemoteFile,
};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Flags for a model that is named rather than given as a file.
#[derive(Clone, Debug, Args)]
pub struct HubArgs {
    /// Model on a hub instead of a file: OWNER/NAME of its repository, optionally with a
    /// quantization type; downloaded if not present [also: -hf, -hfr]
    #[arg(
        long,
        value_name = "OWNER/NAME[:TYPE]",
        conflicts_with = "model",
        help_heading = "Model by name"
    )]
    hf_repo: Option<Reference>,

    /// File of that repository, instead of a quantization type [also: -hff]
    #[arg(
        long,
        value_name = "PATH",
        requires = "hf_repo",
        help_heading = "Model by name"
    )]
    hf_file: Option<String>,

    #[command(flatten)]
    access: AccessArgs,

    /// Use only models that were downloaded before
    #[arg(long, requires = "hf_repo", help_heading = "Model by name")]
    offline: bool,

    #[arg(skip)]
    found: OnceLock<PathBuf>,
}

/// Flags for access to the hub.
#[derive(Clone, Debug, Args)]
pub struct AccessArgs {
    /// Access token for the hub [default: HF_TOKEN, or the token stored by the hub's own program]
    /// [also: -hft]
    #[arg(long, value_name = "TOKEN", help_heading = "Model by name")]
    hf_token: Option<String>,
}

impl AccessArgs {
    /// Returns the hub that the environment names.
    pub fn hub(&self) -> Hub {
        Hub::new(self.options())
    }

    /// Returns the hub with a short timeout and without retries, for an optional answer.
    fn impatient_hub(&self) -> Hub {
        Hub::new(self.options().with_short_timeout())
    }

    fn options(&self) -> HubOptions {
        let mut options = HubOptions::from_environment();
        options.token = self.hf_token.clone().or(options.token);
        options
    }
}

impl HubArgs {
    /// Returns whether a model is named.
    pub fn is_named(&self) -> bool {
        self.hf_repo.is_some()
    }

    /// Sets the name of the model.
    pub fn set(&mut self, reference: Reference) {
        self.hf_repo = Some(reference);
    }

    /// Removes the name of the model.
    #[cfg(feature = "serve")]
    pub fn forget(&mut self) {
        self.hf_repo = None;
        self.found = OnceLock::new();
    }

    /// Returns the model's file: `file`, or that of the named model, which is downloaded first.
    pub fn path<'a>(&'a self, file: &'a Option<PathBuf>) -> CommandResult<Option<&'a Path>> {
        let Some(repository) = &self.hf_repo else {
            return Ok(file.as_deref());
        };
        if let Some(path) = self.found.get() {
            return Ok(Some(path));
        }
        let mut reference = repository.clone();
        if let Some(file) = &self.hf_file {
            let named = format!("{}:{file}", repository.repository);
            reference = named.parse()?;
        }
        let cache = cache()?;
        let path = if self.offline {
            found(&cache, &reference)?
        } else {
            let cached = cache.find(&reference, "main");
            let hub = self.access.hub();
            let listing = {
                let _spinner = progress::waiting("asking the hub");
                let impatient = cached.is_some().then(|| self.access.impatient_hub());
                list(impatient.as_ref().unwrap_or(&hub), &reference, "main")
            };
            match listing {
                Ok(listing) => {
                    let mut paths = fetch(&hub, &cache, &listing, &listing.choose(&reference)?)?;
                    paths.swap_remove(0)
                }
                Err(error) if error.is_connection() => {
                    let path = cached.ok_or(error)?;
                    say(format_args!(
                        "the hub cannot be reached: {} is used as it was downloaded",
                        escaped(&reference.to_string())
                    ));
                    path
                }
                Err(error) => return Err(error.into()),
            }
        };
        Ok(Some(self.found.get_or_init(|| path)))
    }
}

/// Returns the user's cache.
pub fn cache() -> CommandResult<Cache> {
    Ok(Cache::of_user().ok_or(Error::NoCache)?)
}

fn found(cache: &Cache, reference: &Reference) -> CommandResult<PathBuf> {
    cache.find(reference, "main").ok_or_else(|| {
        CommandError::error(format_args!(
            "--offline: {} is not in {}: download it first, with samite pull",
            escaped(&reference.to_string()),
            cache.folder().display()
        ))
    })
}

/// Lists the files of a repository. A signal ends the program at once.
pub fn list(hub: &Hub, reference: &Reference, revision: &str) -> Result<Listing, Error> {
    interrupt::at_once(|| hub.list(reference, revision))
}

/// Downloads files with a progress bar, and returns their paths.
pub fn fetch(
    hub: &Hub,
    cache: &Cache,
    listing: &Listing,
    files: &[&RemoteFile],
) -> CommandResult<Vec<PathBuf>> {
    let cancel = interrupt::token();
    let bar = progress::bytes("downloading");
    bar.set_length(files.iter().map(|file| file.size).sum());
    let (mut paths, mut before) = (Vec::new(), 0);
    for &file in files {
        let mut hear = |progress| match progress {
            DownloadProgress::Received(bytes) => {
                bar.set_message("downloading");
                bar.set_position(before + bytes);
            }
            DownloadProgress::Checked(bytes) => {
                bar.set_message("checking");
                bar.set_position(before + bytes);
            }
        };
        paths.push(hub.fetch(cache, listing, file, &mut hear, &cancel)?);
        before += file.size;
    }
    Ok(paths)
}

impl From<Error> for CommandError {
    fn from(error: Error) -> Self {
        match error {
            Error::Cancelled => CommandError::Interrupted,
            error => CommandError::error(error),
        }
    }
}
