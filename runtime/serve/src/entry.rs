//! A model of the server, loaded or not.

use crate::app::{App, lock};
use crate::hub::{Loaded, ServedModel, Source};
use samite_requests::Handle;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A model.
pub struct Entry {
    pub names: Vec<String>,
    /// Names by which it was downloaded.
    pub more_names: Mutex<Vec<String>>,
    pub path: PathBuf,
    pub source: Option<Box<dyn Source>>,
    /// True if it is from the server's library.
    pub is_in_library: bool,
    pub state: Mutex<State>,
}

/// State of a model.
#[derive(Default)]
pub struct State {
    pub app: Option<Arc<App>>,
    pub thread: Option<JoinHandle<()>>,
    pub is_loading: bool,
    /// Reason why the last attempt to load it failed.
    pub failure: Option<String>,
    /// Bytes of memory that it takes.
    pub bytes: u64,
    /// Last use, as a count.
    pub last_use: u64,
    /// Start of its idle time, and the time that it may stay idle.
    pub idle_since: Option<Instant>,
    pub stays: Option<Duration>,
}

impl State {
    fn is_lost(&self) -> bool {
        let handle = self.app.as_ref().and_then(|app| app.handle.as_ref());
        handle.is_some_and(Handle::is_lost)
    }
}

/// Status of a model.
pub enum Status {
    Unloaded(Option<String>),
    Loading,
    Loaded(Arc<App>),
}

impl Entry {
    pub fn new(model: ServedModel, is_in_library: bool) -> Self {
        Entry {
            names: model.names,
            more_names: Mutex::default(),
            path: model.path,
            source: Some(model.source),
            is_in_library,
            state: Mutex::default(),
        }
    }

    /// Sets the time that the model stays loaded while it is idle; `None` for as long as there is
    /// room.
    pub fn set_stay(&self, stays: Option<Duration>) {
        lock(&self.state).stays = stays;
    }

    /// Returns whether requests can call the model by this name.
    pub fn has_name(&self, name: &str) -> bool {
        let is_it = |known: &String| known == name;
        self.names.iter().any(is_it) || lock(&self.more_names).iter().any(is_it)
    }

    pub fn id(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    pub fn is_loaded(&self) -> bool {
        lock(&self.state).app.is_some()
    }

    pub fn status(&self) -> Status {
        let state = lock(&self.state);
        match &state.app {
            Some(app) => Status::Loaded(Arc::clone(app)),
            None if state.is_loading => Status::Loading,
            None => Status::Unloaded(state.failure.clone()),
        }
    }

    /// Returns the time until the model is unloaded if no request uses it.
    pub fn leaves_in(&self) -> Option<Duration> {
        lock(&self.state).stays
    }

    /// Returns the model if it is loaded, and marks it as used.
    pub fn using(&self, use_number: impl FnOnce() -> u64) -> Option<Arc<App>> {
        let mut state = lock(&self.state);
        if self.source.is_some() && state.is_lost() {
            // The next request loads it again. Its thread is ending, and requests that still use it
            // get an error.
            state.app = None;
            state.thread = None;
            state.bytes = 0;
        }
        let app = state.app.clone()?;
        state.last_use = use_number();
        state.idle_since = None;
        Some(app)
    }

    /// Loads the model.
    pub fn load(&self) -> Result<(), String> {
        let Some(source) = &self.source else {
            return Ok(());
        };
        lock(&self.state).is_loading = true;
        let loaded = source.load();
        lock(&self.state).is_loading = false;
        match loaded {
            Ok(loaded) => {
                self.put(loaded);
                Ok(())
            }
            Err(error) => {
                lock(&self.state).failure = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Stores the loaded model.
    pub fn put(&self, loaded: Loaded) {
        let mut state = lock(&self.state);
        state.app = Some(Arc::new(loaded.app));
        state.thread = loaded.thread;
        state.failure = None;
        state.idle_since = None;
    }

    /// Returns whether the model is loaded and no request uses it.
    pub fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        let app = state.app.as_ref().filter(|_| self.source.is_some());
        app.is_some_and(|app| Arc::strong_count(app) == 1)
    }

    /// Returns whether the model has been idle for longer than it may stay.
    pub fn is_over_time(&self) -> bool {
        let is_idle = self.is_idle();
        let mut state = lock(&self.state);
        let Some(stays) = state.stays.filter(|_| is_idle) else {
            state.idle_since = None;
            return false;
        };
        let since = *state.idle_since.get_or_insert_with(Instant::now);
        since.elapsed() >= stays
    }

    /// Takes the model out, unless a request uses it.
    fn take_idle(&self) -> Option<(Arc<App>, Option<JoinHandle<()>>)> {
        let mut state = lock(&self.state);
        let app = state.app.take_if(|app| Arc::strong_count(app) == 1)?;
        state.stays = None;
        state.bytes = 0;
        Some((app, state.thread.take()))
    }

    /// Unloads the model, unless a request uses it.
    pub async fn unload(&self) -> bool {
        let Some((app, thread)) = self.take_idle() else {
            return false;
        };
        let ended = tokio::task::spawn_blocking(move || {
            if let Some(handle) = &app.handle {
                handle.end();
            }
            if let Some(thread) = thread {
                let _ = thread.join();
            }
            drop(app);
        });
        let _ = ended.await;
        true
    }
}
