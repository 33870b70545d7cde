//! Models by name: downloads with a progress bar.

use crate::args::{AccessArgs, HubArgs};
use crate::failure::{CommandError, CommandResult};
use crate::shown::{escaped, say};
use crate::{interrupt, progress};
use samite::hub::{
    Cache, DownloadProgress, Error, Hub, HubOptions, Listing, Reference, RemoteFile,
};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Returns the hub that the environment names.
pub fn hub(access: &AccessArgs) -> Hub {
    Hub::new(options(access))
}

fn options(access: &AccessArgs) -> HubOptions {
    let mut options = HubOptions::from_environment();
    options.token = access.hf_token.clone().or(options.token);
    options
}

/// A model that is named rather than given as a file. It is downloaded when its file is needed.
#[derive(Clone, Debug)]
pub struct NamedModel {
    reference: Reference,
    options: HubOptions,
    is_offline: bool,
    found: OnceLock<PathBuf>,
}

impl NamedModel {
    /// Returns the model that flags name, if they name one.
    pub fn new(args: &HubArgs) -> CommandResult<Option<Self>> {
        let Some(repository) = &args.hf_repo else {
            return Ok(None);
        };
        let reference = match &args.hf_file {
            Some(file) => format!("{}:{file}", repository.repository).parse()?,
            None => repository.clone(),
        };
        Ok(Some(NamedModel {
            reference,
            options: options(&args.access),
            is_offline: args.offline,
            found: OnceLock::new(),
        }))
    }

    /// Returns the model's file, which is downloaded first.
    pub fn path(&self) -> CommandResult<&Path> {
        if let Some(path) = self.found.get() {
            return Ok(path);
        }
        let path = self.find()?;
        Ok(self.found.get_or_init(|| path))
    }

    fn find(&self) -> CommandResult<PathBuf> {
        let cache = cache()?;
        if self.is_offline {
            return found(&cache, &self.reference);
        }
        let cached = cache.find(&self.reference, "main");
        let hub = Hub::new(self.options.clone());
        let listing = {
            let _spinner = progress::waiting("asking the hub");
            // A model that was downloaded before needs no answer.
            let impatient = cached
                .is_some()
                .then(|| Hub::new(self.options.clone().with_short_timeout()));
            list(impatient.as_ref().unwrap_or(&hub), &self.reference, "main")
        };
        match listing {
            Ok(listing) => {
                let files = listing.choose(&self.reference)?;
                Ok(fetch(&hub, &cache, &listing, &files)?.swap_remove(0))
            }
            Err(error) if error.is_connection() => {
                let path = cached.ok_or(error)?;
                say(format_args!(
                    "the hub cannot be reached: {} is used as it was downloaded",
                    escaped(&self.reference.to_string())
                ));
                Ok(path)
            }
            Err(error) => Err(error.into()),
        }
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
