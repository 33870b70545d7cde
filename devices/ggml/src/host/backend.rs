//! All plugins that were found, as one backend.

use super::check::computes;
use super::device::GgmlDevice;
use super::discover::{Candidate, in_directory};
use super::library::Plugin;
use super::probe::ask;
use samite_core::{Backend, Device};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The environment variable with plugins, or directories of plugins, separated by `:`; all paths absolute.
pub const PATH_VARIABLE: &str = "SAMITE_BACKEND_PATH";

/// Where plugins are looked for, and how they are used.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct GgmlOptions {
    /// Plugins, or directories of plugins. Absolute paths.
    pub paths: Vec<PathBuf>,
    /// Threads of plugins that compute on the CPU; their own default if `None`.
    pub threads: Option<usize>,
    /// A command that prints [`probe`](super::probe()) of the path which is appended to it. Without one, plugins are loaded
    /// without being tried before.
    pub prober: Option<Vec<OsString>>,
}

impl GgmlOptions {
    /// The places of the environment variable [`PATH_VARIABLE`], and the directory of the running program.
    pub fn from_environment() -> Self {
        let mut paths: Vec<_> = std::env::var_os(PATH_VARIABLE)
            .map(|list| std::env::split_paths(&list).collect())
            .unwrap_or_default();
        paths.retain(|path| !path.as_os_str().is_empty());
        let program = std::env::current_exe().ok();
        paths.extend(program.and_then(|program| Some(program.parent()?.to_owned())));
        GgmlOptions {
            paths,
            ..Self::default()
        }
    }
}

/// The plugins that were found.
pub struct GgmlBackend {
    devices: Vec<Arc<dyn Device>>,
    features: Vec<(String, String)>,
    rejected: Vec<(String, String)>,
}

/// Collects plugins.
struct Search<'a> {
    options: &'a GgmlOptions,
    rejected: Vec<(String, String)>,
}

impl Search<'_> {
    fn reject(&mut self, path: &Path, reason: impl Into<String>) {
        self.rejected
            .push((path.display().to_string(), reason.into()));
    }

    /// All candidates by name; files that were named themselves have groups of their own.
    fn candidates(&mut self) -> Vec<Vec<PathBuf>> {
        let mut named = Vec::new();
        let mut groups: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for path in &self.options.paths {
            if !path.is_absolute() {
                self.reject(path, "the path is not absolute");
            } else if path.is_dir() && path.extension().is_none_or(|extension| extension != "so") {
                match in_directory(path) {
                    Ok(found) => {
                        for Candidate { name, path } in found {
                            groups.entry(name).or_default().push(path);
                        }
                    }
                    Err(reason) => self.reject(path, reason),
                }
            } else {
                named.push(vec![path.clone()]);
            }
        }
        named.extend(groups.into_values());
        named
    }

    /// The best usable one of some files.
    fn best(&mut self, group: Vec<PathBuf>) -> Option<Plugin> {
        let Some(prober) = &self.options.prober else {
            return self.best_loaded(group);
        };
        let mut scored = Vec::new();
        for path in group {
            match ask(prober, &path) {
                Ok(score) => scored.push((score, path)),
                Err(reason) => self.reject(&path, reason),
            }
        }
        // The first of equals, as listed.
        scored.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
        let mut best: Option<(i32, Plugin)> = None;
        for (score, path) in scored {
            if let Some((best, plugin)) = &best {
                let reason = not_best(score, *best, &plugin.path);
                self.reject(&path, reason);
                continue;
            }
            match Plugin::load(&path) {
                Ok(plugin) => best = Some((score, plugin)),
                Err(reason) => self.reject(&path, reason),
            }
        }
        best.map(|(_, plugin)| plugin)
    }

    fn best_loaded(&mut self, group: Vec<PathBuf>) -> Option<Plugin> {
        let mut best: Option<Plugin> = None;
        for path in group {
            match (Plugin::load(&path), &best) {
                (Ok(plugin), Some(known)) if plugin.score <= known.score => {
                    let reason = not_best(plugin.score, known.score, &known.path);
                    self.reject(&path, reason);
                }
                (Ok(plugin), known) => {
                    if let Some(known) = known {
                        let (path, reason) = (
                            known.path.clone(),
                            not_best(known.score, plugin.score, &plugin.path),
                        );
                        self.reject(&path, reason);
                    }
                    best = Some(plugin);
                }
                (Err(reason), _) => self.reject(&path, reason),
            }
        }
        best
    }
}

fn not_best(score: i32, best: i32, path: &Path) -> String {
    format!("score {score}: {} fits better, with {best}", path.display())
}

impl GgmlBackend {
    /// Finds and loads plugins.
    pub fn find(options: &GgmlOptions) -> Self {
        let mut search = Search {
            options,
            rejected: Vec::new(),
        };
        let mut devices: Vec<Arc<dyn Device>> = Vec::new();
        let mut features = Vec::new();
        for group in search.candidates() {
            let Some(plugin) = search.best(group) else {
                continue;
            };
            let plugin = Arc::new(plugin);
            features.push((
                plugin.name.clone(),
                format!(
                    "{} ({}, score {})",
                    plugin.path.display(),
                    plugin.release,
                    plugin.score
                ),
            ));
            let about = plugin.features().into_iter();
            features.extend(about.map(|(name, value)| (format!("{}.{name}", plugin.name), value)));
            for &device in &plugin.devices {
                let is_taken = |name: &str| devices.iter().any(|device| device.name() == name);
                let device =
                    GgmlDevice::new(Arc::clone(&plugin), device, options.threads, is_taken)
                        .and_then(|device| {
                            let device: Arc<dyn Device> = device;
                            // Who has a prober has checked this there.
                            match plugin.alone && options.prober.is_none() {
                                true => computes(&device).map(|()| device),
                                false => Ok(device),
                            }
                        });
                match device {
                    Ok(device) => devices.push(device),
                    Err(reason) => search.reject(&plugin.path, reason),
                }
            }
        }
        GgmlBackend {
            devices,
            features,
            rejected: search.rejected,
        }
    }
}

impl Backend for GgmlBackend {
    fn name(&self) -> &str {
        "ggml"
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    fn features(&self) -> Vec<(String, String)> {
        self.features.clone()
    }

    fn rejected(&self) -> Vec<(String, String)> {
        self.rejected.clone()
    }
}
