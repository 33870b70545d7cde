//! The models of a server: which exist, which are loaded, and which one to unload to make room for
//! another.
//!
//! A [library](crate::library) adds models while the server runs.
//!
//! A request that names a model loads it. The server plans the model's memory before it loads
//! anything. If the model does not fit beside the others, it unloads the least recently used models
//! that are idle. While a load waits for that, requests for all models queue up behind it in order,
//! so none starves.

use crate::account::Accounts;
use crate::app::{App, lock};
use crate::body::Bodies;
use crate::entry::{Entry, State, Status};
use crate::error::{ApiError, Result};
use crate::kv_transfer::KvTransfers;
use crate::library::{DownloadState, Downloads, Library};
use crate::loader::Loader;
use crate::model_events::ModelEvents;
use crate::options::ServeOptions;
use crate::stream_sessions::StreamSessions;
use crate::turns::{Turns, beside_engine};
use axum::body::Bytes;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{OwnedMutexGuard, watch};

/// Loads a model.
pub trait Source: Send + Sync + 'static {
    /// Returns the bytes that the model takes once it is loaded: weights, context and intermediate
    /// results. Loads nothing.
    ///
    /// # Errors
    /// Returns the reason why the model cannot be loaded.
    fn plan(&self) -> Result<u64, String>;

    /// Loads the model.
    ///
    /// # Errors
    /// Returns the reason why the model cannot be loaded.
    fn load(&self) -> Result<Loaded, String>;
}

/// A loaded model.
pub struct Loaded {
    /// The served model.
    pub app: App,
    /// Thread of its engine, which ends with [`Handle::end`](samite_requests::Handle::end).
    pub thread: Option<JoinHandle<()>>,
}

/// A model that can be served.
pub struct ServedModel {
    /// Names of the model in requests; the first one is its ID.
    pub names: Vec<String>,
    /// File of the model.
    pub path: PathBuf,
    /// Loads the model.
    pub source: Box<dyn Source>,
}

/// Limits on loaded models.
#[derive(Clone, Copy, Debug)]
pub struct HubLimits {
    /// Maximum number of loaded models.
    pub models: usize,
    /// Maximum bytes that they take together, by their plans.
    pub bytes: u64,
    /// True if a request that names a model loads it.
    pub loads: bool,
}

impl Default for HubLimits {
    fn default() -> Self {
        HubLimits {
            models: usize::MAX,
            bytes: u64::MAX,
            loads: true,
        }
    }
}

/// The models of a server, and their shared state.
pub struct Hub {
    pub(crate) options: ServeOptions,
    pub(crate) bodies: Bodies,
    /// Memory accounts of requests.
    pub(crate) accounts: Arc<Accounts>,
    /// Turns of requests with large bodies, until they are submitted.
    pub(crate) large: Arc<Turns>,
    pub(crate) stream_sessions: Arc<StreamSessions>,
    /// Transfers of KV caches, if they are enabled.
    pub(crate) transfers: Option<Arc<KvTransfers>>,
    pub(crate) is_draining: AtomicBool,
    /// Seconds since 1970.
    pub(crate) started: u64,
    entries: RwLock<Vec<Arc<Entry>>>,
    library: Option<Box<dyn Library>>,
    /// Held while the library's models are listed, added or deleted.
    library_changes: Mutex<()>,
    pub(crate) downloads: Downloads,
    pub(crate) events: ModelEvents,
    /// Description of the API, once it was asked for.
    pub(crate) description: OnceLock<Bytes>,
    pub(crate) limits: HubLimits,
    /// True if the only model answers to every name.
    is_single: bool,
    /// Held while models are loaded or unloaded.
    changing: Arc<tokio::sync::Mutex<()>>,
    /// Number of requests that wait for `changing`.
    waiting: AtomicUsize,
    uses: AtomicU64,
    pub(crate) loader: Loader,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// Counts a waiting request until it is dropped.
struct Waits<'h>(&'h AtomicUsize);

impl<'h> Waits<'h> {
    fn new(count: &'h AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Waits(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Removes the prefix by which Ollama's clients name models on a hub.
fn plain_name(name: &str) -> &str {
    let prefixes = ["hf.co/", "huggingface.co/"];
    let stripped = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix));
    stripped.unwrap_or(name)
}

/// Ends a download when it is dropped.
struct EndsDownload(Arc<Hub>, String);

impl Drop for EndsDownload {
    fn drop(&mut self) {
        self.0.downloads.end(&self.1);
    }
}

impl Hub {
    /// Creates a hub with one model that is loaded and stays.
    pub fn single(app: App) -> Self {
        let options = app.options.clone();
        let entry = Entry {
            names: options.names(app.model_id()),
            more_names: Mutex::default(),
            path: app.model.path().to_owned(),
            source: None,
            is_in_library: false,
            state: Mutex::new(State {
                app: Some(Arc::new(app)),
                ..State::default()
            }),
        };
        Self::with(options, vec![Arc::new(entry)], HubLimits::default(), true)
    }

    /// Creates a hub with models that are not loaded yet. If `is_single`, the only model answers to
    /// every name. `options` are those of the server.
    ///
    /// # Errors
    /// Returns an error if two models have the same name.
    pub fn new(
        options: ServeOptions,
        models: Vec<ServedModel>,
        limits: HubLimits,
        is_single: bool,
    ) -> Result<Self, String> {
        let mut seen: Vec<(&str, &PathBuf)> = Vec::new();
        for model in &models {
            for name in &model.names {
                if let Some((_, other)) = seen.iter().find(|(known, _)| known == name) {
                    return Err(format!(
                        "{} and {} would have the same name, {name}: give one of the files another name",
                        other.display(),
                        model.path.display()
                    ));
                }
                seen.push((name, &model.path));
            }
        }
        let entries = models
            .into_iter()
            .map(|model| Arc::new(Entry::new(model, false)));
        Ok(Self::with(options, entries.collect(), limits, is_single))
    }

    fn with(
        options: ServeOptions,
        entries: Vec<Arc<Entry>>,
        limits: HubLimits,
        is_single: bool,
    ) -> Self {
        let large = Turns::new("large bodies", beside_engine(), 1024);
        Hub {
            bodies: Bodies::new(
                options.body_limit,
                options.request_memory / 2,
                Arc::clone(&large),
            ),
            accounts: Arc::new(Accounts::new(options.request_memory)),
            large,
            stream_sessions: Arc::default(),
            transfers: options
                .kv_transfer
                .clone()
                .map(|transfer| KvTransfers::new(transfer, options.request_memory)),
            is_draining: AtomicBool::new(false),
            started: crate::ids::seconds(),
            options,
            entries: RwLock::new(entries),
            library: None,
            library_changes: Mutex::default(),
            description: OnceLock::new(),
            downloads: Downloads::default(),
            events: ModelEvents::default(),
            limits,
            is_single,
            changing: Arc::default(),
            waiting: AtomicUsize::new(0),
            uses: AtomicU64::new(0),
            loader: Loader::default(),
        }
    }

    /// Adds the models of a library, which administrators can extend.
    ///
    /// # Errors
    /// Returns an error if its models cannot be listed.
    pub fn with_library(mut self, library: impl Library) -> Result<Self, String> {
        self.library = Some(Box::new(library));
        self.refresh()?;
        Ok(self)
    }

    /// Lists the library's models anew. Loaded models stay.
    pub(crate) fn refresh(&self) -> Result<(), String> {
        let Some(library) = &self.library else {
            return Ok(());
        };
        let _change = lock(&self.library_changes);
        let models = library.models()?;
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let is_there = |entry: &Entry| models.iter().any(|model| model.path == entry.path);
        entries.retain(|entry| !entry.is_in_library || entry.is_loaded() || is_there(entry));
        for model in models {
            Self::add(&mut entries, model);
        }
        Ok(())
    }

    /// Adds a model of the library, or new names of a known one. Other models keep names that they
    /// share with it.
    fn add(entries: &mut Vec<Arc<Entry>>, mut model: ServedModel) {
        let is_taken = |name: &String| entries.iter().any(|entry| entry.has_name(name));
        model.names.retain(|name| !is_taken(name));
        let file = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let path = file(&model.path);
        match entries.iter().find(|entry| file(&entry.path) == path) {
            Some(known) => lock(&known.more_names).append(&mut model.names),
            None if model.names.is_empty() => {}
            None => entries.push(Arc::new(Entry::new(model, true))),
        }
    }

    /// Returns whether a model is still served.
    fn has(&self, entry: &Arc<Entry>) -> bool {
        self.entries().iter().any(|known| Arc::ptr_eq(known, entry))
    }

    /// Returns the library, for requests that change it.
    pub(crate) fn library(&self) -> Result<&dyn Library> {
        self.library.as_deref().ok_or_else(|| {
            ApiError::not_supported(
                "this server does not manage models: start it with --models-cache, or use samite pull and samite models",
            )
        })
    }

    /// Returns whether requests choose among models.
    pub(crate) fn is_router(&self) -> bool {
        !self.is_single
    }

    /// Cancels a download. Returns whether there was one.
    pub(crate) fn cancel_download(&self, name: &str) -> bool {
        let name = self.library().map(|library| library.name(plain_name(name)));
        name.is_ok_and(|name| name.is_ok_and(|name| self.downloads.cancel(&name)))
    }

    /// Begins to download a model, and returns where to follow it. If `joins`, follows a download
    /// that is running.
    pub(crate) fn download(
        self: &Arc<Self>,
        name: &str,
        joins: bool,
    ) -> Result<watch::Receiver<DownloadState>> {
        let wrong = |error: String| ApiError::field("model", error);
        let name = self.library()?.name(plain_name(name)).map_err(wrong)?;
        if let Some(state) = self.downloads.state(&name).filter(|_| joins) {
            return Ok(state);
        }
        if self.find_named(&name).is_ok() {
            return Err(ApiError::field(
                "model",
                format!("{name} is present already"),
            ));
        }
        let (state, cancel) = self.downloads.begin(&name)?;
        let followed = state.subscribe();
        // Dropped with the closure, also if the thread cannot be started.
        let ends = EndsDownload(Arc::clone(self), name);
        let run = move || {
            let EndsDownload(hub, name) = &ends;
            let mut report = |progress| {
                let mut told = None;
                state.send_if_modified(|state| {
                    let is_new = state.update(progress);
                    told = is_new.then(|| state.progress());
                    is_new
                });
                if let Some(progress) = told {
                    hub.events.send(name, "download_progress", Some(progress));
                }
            };
            let library = hub.library.as_deref();
            let result = library.map_or_else(
                || Err("there is no library".to_owned()),
                |library| library.download(name, &mut report, &cancel),
            );
            let end = result.map(|model| {
                let _change = lock(&hub.library_changes);
                let mut entries = hub.entries.write().unwrap_or_else(PoisonError::into_inner);
                Self::add(&mut entries, model);
            });
            hub.downloads.end(name);
            match &end {
                Ok(()) => hub.events.send(name, "download_finished", None),
                Err(error) => {
                    tracing::warn!("{name} was not downloaded: {error}");
                    let error = json!({"error": error});
                    hub.events.send(name, "download_failed", Some(error));
                }
            }
            state.send_modify(|state| state.end = Some(end));
        };
        let thread = samite_core::thread_builder().map(|thread| thread.name("download".to_owned()));
        thread
            .and_then(|thread| thread.spawn(run))
            .map_err(|error| ApiError::new(503, format!("no thread for the download: {error}")))?;
        Ok(followed)
    }

    /// Unloads and deletes a model of the library.
    pub(crate) async fn delete(self: &Arc<Self>, name: &str) -> Result<()> {
        self.library()?;
        let entry = self.find_named(name)?;
        if !entry.is_in_library {
            let message = "this model was not downloaded: only downloaded models can be deleted";
            return Err(ApiError::field("model", message));
        }
        let _waits = Waits::new(&self.waiting);
        let turn = Arc::clone(&self.changing).lock_owned().await;
        if !self.has(&entry) {
            return Err(self.missing(name));
        }
        // The client may disconnect: the model is deleted anyway, so that its state stays
        // consistent.
        let hub = Arc::clone(self);
        let deletion = tokio::spawn(async move {
            let _turn = turn;
            while entry.is_loaded() && !hub.try_unload(&entry).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            tokio::task::spawn_blocking(move || hub.delete_file(&entry)).await
        });
        let internal = |error: tokio::task::JoinError| ApiError::new(500, error.to_string());
        deletion.await.map_err(internal)?.map_err(internal)?
    }

    /// Deletes the file of a model that is not loaded.
    fn delete_file(&self, entry: &Arc<Entry>) -> Result<()> {
        let _change = lock(&self.library_changes);
        self.library()?.delete(&entry.path).map_err(|error| {
            ApiError::new(500, format!("{} cannot be deleted: {error}", entry.id()))
        })?;
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|other| !Arc::ptr_eq(other, entry));
        self.events.send(entry.id(), "model_remove", None);
        Ok(())
    }

    /// Returns the first model's ID.
    pub fn first_name(&self) -> String {
        let entries = self.entries();
        entries
            .first()
            .map_or(String::new(), |entry| entry.id().to_owned())
    }

    /// Returns the number of models.
    pub fn count(&self) -> usize {
        self.entries().len()
    }

    /// Plans the memory of the first `count` models.
    ///
    /// # Errors
    /// Returns an error for the first one that cannot be loaded or exceeds the limit.
    pub fn check(&self, count: usize) -> Result<(), String> {
        for entry in self.entries().iter().take(count) {
            if let Some(source) = &entry.source {
                let wrong = |error| format!("{}: {error}", entry.path.display());
                let bytes = source.plan().map_err(wrong)?;
                self.check_size(entry, bytes).map_err(wrong)?;
            }
        }
        Ok(())
    }

    fn check_size(&self, entry: &Entry, bytes: u64) -> Result<(), String> {
        let most = self.limits.bytes;
        if bytes > most {
            Err(format!(
                "{} needs {} MiB (weights, context and results in between), and all models may have {} MiB: see --models-memory and --ctx-size",
                entry.id(),
                bytes >> 20,
                most >> 20
            ))
        } else {
            Ok(())
        }
    }

    /// Stores the first model before the server starts.
    pub fn put_first(&self, loaded: Loaded) {
        if let Some(entry) = self.entries().first() {
            entry.put(loaded);
        }
    }

    /// Returns the prefix of all paths.
    pub fn prefix(&self) -> &str {
        &self.options.prefix
    }

    /// Returns the number of the next use.
    fn next_use(&self) -> u64 {
        self.uses.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn entries(&self) -> Vec<Arc<Entry>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.clone()
    }

    /// Returns the model that a request names, or the first one without a name.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<Arc<Entry>> {
        match name.filter(|_| !self.is_single) {
            Some(name) => self.find_named(name),
            None => self.entries().first().cloned().ok_or_else(|| {
                ApiError::new(404, "there is no model yet: POST /models downloads one")
            }),
        }
    }

    /// Returns the model with this name.
    pub(crate) fn find_named(&self, name: &str) -> Result<Arc<Entry>> {
        let plain = plain_name(name);
        let base = plain.strip_suffix(":latest").unwrap_or(plain);
        let names = [name, plain, base];
        let known = |entry: &&Arc<Entry>| names.iter().any(|name| entry.has_name(name));
        let found = self.entries().iter().find(known).cloned();
        found.ok_or_else(|| self.missing(name))
    }

    /// Returns the error for a name that no model has.
    fn missing(&self, name: &str) -> ApiError {
        let entries = self.entries();
        let names: Vec<&str> = entries.iter().map(|entry| entry.id()).collect();
        let name: String = name.chars().take(200).collect();
        let others = match names.as_slice() {
            [] => "no model is downloaded yet".to_owned(),
            names => format!("there are {}", names.join(", ")),
        };
        let message = format!("\"model\": there is no \"{name}\"; {others}");
        let mut error = ApiError::new(404, message);
        error.more.insert("param".to_owned(), "model".into());
        error
    }

    /// Returns a loaded model, for requests that only query it.
    pub(crate) fn look(&self, name: Option<&str>) -> Result<Arc<App>> {
        let entry = self.find(name)?;
        match entry.status() {
            Status::Loaded(app) => Ok(app),
            _ => Err(ApiError::invalid(format!(
                "\"model\": {} is not loaded",
                entry.id()
            ))),
        }
    }

    /// Returns a model for a request, which keeps it loaded. `loads` decides whether to load the
    /// model if necessary; if `None`, the limits do.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        entry: Arc<Entry>,
        loads: Option<bool>,
    ) -> Result<Arc<App>> {
        if self.waiting.load(Ordering::SeqCst) == 0
            && let Some(app) = entry.using(|| self.next_use())
        {
            return Ok(app);
        }
        let _waits = Waits::new(&self.waiting);
        let turn = Arc::clone(&self.changing).lock_owned().await;
        if let Some(app) = entry.using(|| self.next_use()) {
            return Ok(app);
        }
        if !self.has(&entry) {
            return Err(self.missing(entry.id()));
        }
        if !loads.unwrap_or(self.limits.loads) {
            return Err(ApiError::invalid(format!(
                "\"model\": {} is not loaded: POST /models/load loads it",
                entry.id()
            )));
        }
        self.load(entry, turn).await
    }

    /// Loads a model once there is room for it.
    async fn load(
        self: &Arc<Self>,
        entry: Arc<Entry>,
        turn: OwnedMutexGuard<()>,
    ) -> Result<Arc<App>> {
        let planned = Arc::clone(&entry);
        let planned = tokio::task::spawn_blocking(move || match &planned.source {
            Some(source) => source.plan(),
            None => Err("it was given up".to_owned()),
        });
        let failed = |error: String| self.load_failed(&entry, error);
        let planned = planned.await.map_err(|error| error.to_string());
        let bytes = planned.and_then(|planned| planned).map_err(failed)?;
        self.check_size(&entry, bytes).map_err(|error| {
            let mut error = ApiError::new(400, error);
            error.more.insert("param".to_owned(), "model".into());
            error
        })?;
        self.make_room(bytes).await;
        // The client may disconnect: the model is loaded anyway, so that its state stays
        // consistent.
        let hub = Arc::clone(self);
        let loaded = Arc::clone(&entry);
        let loading = self.loader.run(move || {
            let _turn = turn;
            hub.events.status(loaded.id(), "loading");
            let failed = |error: String| hub.load_failed(&loaded, error);
            loaded.load().map_err(failed)?;
            lock(&loaded.state).bytes = bytes;
            hub.events.status(loaded.id(), "loaded");
            let app = loaded.using(|| hub.next_use());
            app.ok_or_else(|| failed("it was given up".to_owned()))
        });
        let lost = || failed("the thread that loads models has failed".to_owned());
        loading.await.unwrap_or_else(|| Err(lost()))
    }

    /// Records why a model was not loaded, and returns the error for the request.
    fn load_failed(&self, entry: &Entry, error: String) -> ApiError {
        let told = json!({"status": "unloaded", "error": error});
        self.events.send(entry.id(), "model_status", Some(told));
        let failure = ApiError::new(500, format!("{} cannot be loaded: {error}", entry.id()));
        lock(&entry.state).failure = Some(error);
        failure
    }

    /// Waits until `needed` bytes are free for one more model. Unloads the least recently used
    /// models.
    async fn make_room(&self, needed: u64) {
        loop {
            let entries = self.entries();
            let loaded = entries.iter().filter_map(|entry| {
                let state = lock(&entry.state);
                state.app.as_ref().map(|_| state.bytes)
            });
            let (count, bytes) = loaded.fold((0, 0u64), |(count, sum), bytes| {
                (count + 1, sum.saturating_add(bytes))
            });
            if count < self.limits.models && bytes.saturating_add(needed) <= self.limits.bytes {
                return;
            }
            let idle = entries.iter().filter(|entry| entry.is_idle());
            match idle.min_by_key(|entry| lock(&entry.state).last_use) {
                Some(entry) => drop(self.try_unload(entry).await),
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            };
        }
    }

    /// Unloads a model once its requests are answered.
    pub(crate) async fn unload(&self, entry: &Entry) -> Result<()> {
        if entry.source.is_none() {
            let message = "\"model\": this one stays as long as the server";
            return Err(ApiError::not_supported(message));
        }
        let _waits = Waits::new(&self.waiting);
        let _turn = self.changing.lock().await;
        if lock(&entry.state).app.is_none() {
            let message = format!("\"model\": {} is not loaded", entry.id());
            return Err(ApiError::invalid(message));
        }
        while !self.try_unload(entry).await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Unloads a model, unless a request uses it.
    async fn try_unload(&self, entry: &Entry) -> bool {
        let is_unloaded = entry.unload().await;
        if is_unloaded {
            self.events.status(entry.id(), "unloaded");
        }
        is_unloaded
    }

    /// Unloads models whose idle time is over. The server calls this periodically.
    pub(crate) async fn tend(&self) {
        for entry in &self.entries() {
            if entry.source.is_some() && entry.is_over_time() {
                let Ok(_turn) = self.changing.try_lock() else {
                    return;
                };
                self.try_unload(entry).await;
            }
        }
    }

    /// Returns all loaded models.
    pub(crate) fn loaded(&self) -> impl Iterator<Item = Arc<App>> {
        let app = |entry: Arc<Entry>| lock(&entry.state).app.clone();
        self.entries().into_iter().filter_map(app)
    }

    /// Returns whether an engine has died unexpectedly.
    pub(crate) fn is_broken(&self) -> bool {
        let is_broken = |entry: &Arc<Entry>| {
            let state = lock(&entry.state);
            let handle = state.app.as_ref().and_then(|app| app.handle.as_ref());
            // A model with a source is loaded again for the next request.
            handle.is_some_and(|handle| {
                handle.is_over() && (entry.source.is_none() || !handle.is_lost())
            })
        };
        !self.is_draining.load(Ordering::SeqCst) && self.entries().iter().any(is_broken)
    }

    /// Ends all engines and waits for them. Work in progress is lost.
    pub fn end(&self) {
        self.downloads.cancel_all();
        for entry in &self.entries() {
            let mut state = lock(&entry.state);
            let (app, thread) = (state.app.take(), state.thread.take());
            drop(state);
            if let Some(handle) = app.and_then(|app| app.handle.clone()) {
                handle.end();
            }
            if let Some(thread) = thread {
                let _ = thread.join();
            }
        }
    }
}
