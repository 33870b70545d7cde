//! Models that a server downloads and deletes while it runs.

use crate::app::lock;
use crate::error::{ApiError, Result};
use crate::hub::ServedModel;
use samite_core::CancelToken;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use tokio::sync::watch;

/// Source of further models, such as a download cache.
pub trait Library: Send + Sync + 'static {
    /// Returns the models that are present.
    ///
    /// # Errors
    /// Returns the reason why they cannot be listed.
    fn models(&self) -> Result<Vec<ServedModel>, String>;

    /// Returns the usual spelling of a model's name, before it is present.
    ///
    /// # Errors
    /// Returns the reason why no model can have this name.
    fn name(&self, text: &str) -> Result<String, String>;

    /// Downloads a model, unless it is present.
    ///
    /// # Errors
    /// Returns the reason why it is not present, such as a cancelled download.
    fn download(
        &self,
        name: &str,
        progress: &mut dyn FnMut(FileProgress),
        cancel: &CancelToken,
    ) -> Result<ServedModel, String>;

    /// Deletes the model with this [file](ServedModel::path).
    ///
    /// # Errors
    /// Returns the reason why it is still present.
    fn delete(&self, path: &Path) -> Result<(), String>;
}

/// Progress of a file that is downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileProgress {
    /// Name of the file.
    pub file: String,
    /// SHA-256 of its content in hexadecimal, if it is known.
    pub sha256: Option<String>,
    /// Bytes that are present.
    pub done: u64,
    /// Bytes of the whole file.
    pub total: u64,
}

/// State of a download.
#[derive(Clone, Debug, Default)]
pub struct DownloadState {
    /// Files so far.
    pub files: Vec<FileProgress>,
    /// Result, once the download has ended.
    pub end: Option<Result<(), String>>,
}

impl DownloadState {
    /// Updates the progress of a file. Returns whether that is worth an event: at the ends of a
    /// file, and at each percent.
    pub fn update(&mut self, progress: FileProgress) -> bool {
        match self.files.last_mut() {
            Some(last) if last.file == progress.file => {
                let percent = |done: u64| done.saturating_mul(100) / progress.total.max(1);
                let is_new = percent(last.done) != percent(progress.done);
                *last = progress;
                is_new
            }
            _ => {
                self.files.push(progress);
                true
            }
        }
    }

    /// Returns the progress in llama-server's format.
    pub fn progress(&self) -> Value {
        let files = self.files.iter().map(|file| {
            let progress = json!({"done": file.done, "total": file.total});
            (file.file.clone(), progress)
        });
        Value::Object(files.collect::<Map<_, _>>())
    }
}

/// The downloads in progress, by name.
#[derive(Debug, Default)]
pub struct Downloads(Mutex<BTreeMap<String, RunningDownload>>);

#[derive(Debug)]
struct RunningDownload {
    state: watch::Receiver<DownloadState>,
    cancel: CancelToken,
}

impl Downloads {
    /// Maximum number of downloads at a time.
    const MAX_DOWNLOADS: usize = 4;

    /// Begins a download. Returns where to report its state, and its cancel token.
    ///
    /// # Errors
    /// Returns an error if this download is running, or if too many others are.
    pub fn begin(&self, name: &str) -> Result<(watch::Sender<DownloadState>, CancelToken)> {
        let mut running = lock(&self.0);
        if running.contains_key(name) {
            let message = format!("{name} is being downloaded already");
            return Err(ApiError::field("model", message));
        }
        if running.len() >= Self::MAX_DOWNLOADS {
            let message = format!(
                "{} models are being downloaded: try again later",
                running.len()
            );
            return Err(ApiError::new(503, message));
        }
        let (sender, state) = watch::channel(DownloadState::default());
        let cancel = CancelToken::new();
        let download = RunningDownload {
            state,
            cancel: cancel.clone(),
        };
        running.insert(name.to_owned(), download);
        Ok((sender, cancel))
    }

    /// Removes a download that has ended.
    pub fn end(&self, name: &str) {
        lock(&self.0).remove(name);
    }

    /// Cancels a download. Returns whether there was one.
    pub fn cancel(&self, name: &str) -> bool {
        let running = lock(&self.0);
        let download = running.get(name);
        if let Some(download) = download {
            download.cancel.cancel();
        }
        download.is_some()
    }

    /// Cancels all downloads.
    pub fn cancel_all(&self) {
        for download in lock(&self.0).values() {
            download.cancel.cancel();
        }
    }

    /// Returns the state of a download.
    pub fn state(&self, name: &str) -> Option<watch::Receiver<DownloadState>> {
        Some(lock(&self.0).get(name)?.state.clone())
    }

    /// Returns the names of all downloads and their progress.
    pub fn progress(&self) -> Vec<(String, Value)> {
        let running = lock(&self.0);
        let told = running.iter().map(|(name, download)| {
            let progress = download.state.borrow().progress();
            (name.clone(), progress)
        });
        told.collect()
    }
}
