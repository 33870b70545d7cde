//! All plugins that were found, as one backend.

use super::check::computes;
use super::device::GgmlDevice;
use super::discover::{Candidate, EXTENSION, backend_name, in_directory};
use super::library::Plugin;
use super::probe::{ProbeResult, ask};
use samite_core::{Backend, Device, Error, Parameters, Rejected, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Environment variable with plugins or directories of plugins, separated by `:` (`;` on Windows).
/// All paths must be absolute.
pub const PATH_VARIABLE: &str = "SAMITE_BACKEND_PATH";

/// Search paths of plugins, and their options.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct GgmlOptions {
    /// Plugins, or directories of plugins, as absolute paths.
    pub paths: Vec<PathBuf>,
    /// Directory of the program. Files in it that another user can change are not loaded.
    pub program_folder: Option<PathBuf>,
    /// Threads of plugins that compute on the CPU; `None` for their own default.
    pub threads: Option<usize>,
    /// Names of plugins to ignore, such as `vulkan` for `libggml-vulkan.so`.
    pub disabled: Vec<String>,
    /// Command that prints the lines of [`probe`](super::probe()) for the path appended to it,
    /// optionally preceded by `--load-only`, which skips graphs. Without a prober, plugins are
    /// loaded without a trial, and used only if the user names them.
    pub prober: Option<Vec<OsString>>,
}

impl GgmlOptions {
    /// Returns options with the paths of the environment variable [`PATH_VARIABLE`] and the
    /// directory of the running program.
    pub fn from_environment() -> Self {
        let mut paths: Vec<_> = std::env::var_os(PATH_VARIABLE)
            .map(|list| std::env::split_paths(&list).collect())
            .unwrap_or_default();
        paths.retain(|path| !path.as_os_str().is_empty());
        let program = std::env::current_exe().ok();
        let program_folder = program.and_then(|program| Some(program.parent()?.to_owned()));
        GgmlOptions {
            paths,
            program_folder,
            ..Self::default()
        }
    }
}

/// The plugins that were found.
pub struct GgmlBackend {
    devices: Vec<Arc<dyn Device>>,
    /// Devices that failed to compute a small graph, by name, with the reason.
    doubts: HashMap<String, String>,
    features: Vec<(String, String)>,
    rejected: Vec<Rejected>,
    names: Vec<String>,
}

/// A search for plugins.
struct PluginSearch<'a> {
    options: &'a GgmlOptions,
    /// Names of all files that could be plugins, without duplicates.
    names: BTreeSet<String>,
    rejected: Vec<Rejected>,
}

impl PluginSearch<'_> {
    /// Records a file or folder as unusable. Warns if the user named it.
    fn reject(&mut self, path: &Path, reason: impl Into<String>) {
        let rejected = Rejected {
            what: path.display().to_string(),
            why: reason.into(),
            named: self.options.paths.iter().any(|named| named == path),
        };
        if rejected.named {
            tracing::warn!("{} cannot be used: {}", rejected.what, rejected.why);
        }
        self.rejected.push(rejected);
    }

    fn is_disabled(&self, name: &str) -> bool {
        let mut disabled = self.options.disabled.iter();
        disabled.any(|disabled| disabled.eq_ignore_ascii_case(name))
    }

    /// Returns all candidates by name, in ggml's order. Files that the user named come first and
    /// replace those of the same name in directories.
    fn candidates(&mut self) -> Vec<Vec<PathBuf>> {
        let mut named: Vec<PathBuf> = Vec::new();
        let mut groups: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for path in &self.options.paths {
            if !path.is_absolute() {
                self.reject(path, "the path is not absolute");
            } else if path.is_dir()
                && path
                    .extension()
                    .is_none_or(|extension| extension != EXTENSION)
            {
                match in_directory(path) {
                    Ok(found) => {
                        for Candidate { name, path } in found {
                            self.names.insert(name.clone());
                            groups.entry(name).or_default().push(path);
                        }
                    }
                    Err(reason) => self.reject(path, reason),
                }
            } else {
                let name = backend_name(path);
                self.names.extend(name.map(str::to_owned));
                if name.is_some_and(|name| self.is_disabled(name)) {
                    self.reject(path, DISABLED);
                } else if !named.contains(path) {
                    named.push(path.clone());
                }
            }
        }
        self.add_from_program_folder(&mut groups);
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|(name, _)| preference(name));
        let mut chosen: Vec<_> = named.iter().map(|path| vec![path.clone()]).collect();
        for (name, group) in groups {
            if self.is_disabled(&name) {
                for path in group {
                    self.reject(&path, DISABLED);
                }
                continue;
            }
            let of_name = |path: &PathBuf| backend_name(path) == Some(&name);
            match named.iter().find(|path| of_name(path)) {
                Some(instead) => {
                    for path in group.iter().filter(|path| *path != instead) {
                        self.reject(path, format!("{} was named", instead.display()));
                    }
                }
                None => chosen.push(group),
            }
        }
        chosen
    }

    /// Adds the plugins of the program's folder if only this user and root can change them.
    fn add_from_program_folder(&mut self, groups: &mut BTreeMap<String, Vec<PathBuf>>) {
        let Some(folder) = &self.options.program_folder else {
            return;
        };
        let found = match in_directory(folder) {
            Ok(found) => found,
            Err(reason) => return self.reject(&folder.clone(), reason),
        };
        let folder = may_change(folder);
        for Candidate { name, path } in found {
            let group = groups.entry(name.clone()).or_default();
            if group.contains(&path) {
                continue;
            }
            if let Some(reason) = folder.or_else(|| may_change(&path)) {
                self.reject(&path, format!("{reason}: name it with --plugin to use it"));
                continue;
            }
            if !self.is_disabled(&name) {
                tracing::info!("{} beside the program is used", path.display());
            }
            self.names.insert(name);
            group.push(path);
        }
        groups.retain(|_, group| !group.is_empty());
    }

    /// Returns the best usable file of a group.
    fn best(&mut self, group: Vec<PathBuf>) -> Option<(Plugin, Option<ProbeResult>)> {
        let Some(prober) = &self.options.prober else {
            return self.best_loaded(group).map(|plugin| (plugin, None));
        };
        let mut scored = Vec::new();
        for path in group {
            match ask(prober, &path) {
                Ok(answer) => scored.push((answer, path)),
                Err(reason) => self.reject(&path, reason),
            }
        }
        // The sort is stable: of equal scores, the first file wins.
        scored.sort_by_key(|(answer, _)| std::cmp::Reverse(answer.score));
        let mut best: Option<(Plugin, ProbeResult)> = None;
        for (answer, path) in scored {
            if let Some((plugin, best)) = &best {
                let reason = not_best(answer.score, best.score, &plugin.path);
                self.reject(&path, reason);
                continue;
            }
            match Plugin::load(&path, answer.release) {
                Ok(plugin) => best = Some((plugin, answer)),
                Err(reason) => self.reject(&path, reason),
            }
        }
        best.map(|(plugin, answer)| (plugin, Some(answer)))
    }

    fn best_loaded(&mut self, group: Vec<PathBuf>) -> Option<Plugin> {
        let mut best: Option<Plugin> = None;
        for path in group {
            match (Plugin::load(&path, None), &best) {
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

/// Returns the reason why another user may have chosen the content of a file or directory, if there
/// is one.
fn may_change(path: &Path) -> Option<&'static str> {
    let Ok(about) = std::fs::metadata(path) else {
        return Some("its owner is not known");
    };
    if !samite_core::environment::is_own(&about) {
        return Some("it, or its folder, belongs to another user");
    }
    #[cfg(unix)]
    if std::os::unix::fs::PermissionsExt::mode(&about.permissions()) & 0o002 != 0 {
        return Some("every user can write it, or its folder");
    }
    None
}

const DISABLED: &str = "it is disabled";

/// Order in which ggml loads backends, and so the order of their devices: if two backends support
/// one card, the first is used. ggml 0.28 has ET only as a built-in backend. Others come last.
const ORDER: [&str; 16] = [
    "blas", "zendnn", "cann", "cuda", "hip", "metal", "rpc", "sycl", "vulkan", "virtgpu", "opencl",
    "hexagon", "musa", "openvino", "et", "cpu",
];

fn preference(name: &str) -> usize {
    let known = ORDER.iter().position(|known| *known == name);
    known.unwrap_or(ORDER.len())
}

fn not_best(score: i32, best: i32, path: &Path) -> String {
    format!("score {score}: {} fits better, with {best}", path.display())
}

/// Returns the reason why a device is not used unless the user names it, if there is one.
fn doubt(device: &GgmlDevice, answer: Option<&ProbeResult>) -> Option<String> {
    let Some(answer) = answer else {
        return Some("no other process tried it: there is no prober".into());
    };
    let identity = device.identity();
    let mut tried = answer.devices.iter();
    match tried.find(|(tried, _)| *tried == identity) {
        Some((_, doubt)) => doubt.clone(),
        None => Some("it was not there when the plugin was tried".into()),
    }
}

impl GgmlBackend {
    /// Finds and loads plugins.
    pub fn find(options: &GgmlOptions) -> Self {
        let mut search = PluginSearch {
            options,
            names: BTreeSet::new(),
            rejected: Vec::new(),
        };
        let mut devices: Vec<Arc<dyn Device>> = Vec::new();
        let mut doubts = HashMap::new();
        let mut features = Vec::new();
        for group in search.candidates() {
            let Some((plugin, answer)) = search.best(group) else {
                continue;
            };
            let plugin = Arc::new(plugin);
            if plugin.devices.is_empty() {
                search.reject(&plugin.path, "it finds no device on this machine");
            }
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
                            // The prober has already checked this.
                            if plugin.alone && options.prober.is_none() {
                                computes(&(Arc::clone(&device) as Arc<dyn Device>))?;
                            }
                            Ok(device)
                        });
                match device {
                    Ok(device) => {
                        if let Some(doubt) = doubt(&device, answer.as_ref()) {
                            doubts.insert(device.name().to_owned(), doubt);
                        }
                        devices.push(device);
                    }
                    Err(reason) => search.reject(&plugin.path, reason),
                }
            }
        }
        GgmlBackend {
            devices,
            doubts,
            features,
            rejected: search.rejected,
            names: search.names.into_iter().collect(),
        }
    }

    /// Returns the names of all plugins that were found, used or not, in alphabetical order.
    pub fn names(&self) -> &[String] {
        &self.names
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

    fn doubt(&self, device: &dyn Device) -> Option<String> {
        self.doubts.get(device.name()).cloned()
    }

    fn configure(
        &self,
        device: &Arc<dyn Device>,
        parameters: Parameters,
    ) -> Result<Arc<dyn Device>> {
        let own = device.as_any().downcast_ref::<GgmlDevice>();
        let own = own.ok_or_else(|| Error::invalid("a device of another backend"))?;
        Ok(own.configure(parameters)?)
    }

    fn rejected(&self) -> Vec<Rejected> {
        self.rejected.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the groups of candidates, by file name, and the rejected files.
    fn candidates(paths: &[&Path]) -> (Vec<Vec<String>>, Vec<(String, String)>) {
        let options = GgmlOptions {
            paths: paths.iter().map(|path| path.to_path_buf()).collect(),
            ..GgmlOptions::default()
        };
        let mut search = PluginSearch {
            options: &options,
            names: BTreeSet::new(),
            rejected: Vec::new(),
        };
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        let groups = search.candidates().into_iter();
        let groups = groups.map(|group| group.iter().map(|path| name(path)).collect());
        let groups = groups.collect();
        let rejected = search.rejected.into_iter();
        let rejected = rejected.map(|r| (name(Path::new(&r.what)), r.why));
        (groups, rejected.collect())
    }

    #[test]
    fn plugins_are_used_in_ggml_order() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["cpu-b", "opencl", "zzz", "cuda", "cpu-a", "vulkan", "blas"] {
            std::fs::write(folder.path().join(format!("libggml-{name}.so")), "").unwrap();
        }
        let (groups, rejected) = candidates(&[folder.path()]);
        let flat = |groups: Vec<Vec<String>>| groups.concat().join(" ");
        assert_eq!(groups.len(), 6);
        assert_eq!(
            flat(groups),
            "libggml-blas.so libggml-cuda.so libggml-vulkan.so libggml-opencl.so libggml-cpu-a.so libggml-cpu-b.so libggml-zzz.so"
        );
        assert_eq!(rejected, []);
    }

    #[test]
    fn a_named_plugin_file_replaces_its_variants() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(format!("libggml-{name}.so"));
        for name in ["cpu-a", "cpu-b", "vulkan"] {
            std::fs::write(path(name), "").unwrap();
        }
        let named = path("cpu-b");
        let (groups, rejected) = candidates(&[folder.path(), &named, &named]);
        assert_eq!(groups, [["libggml-cpu-b.so"], ["libggml-vulkan.so"]]);
        let reason = format!("{} was named", named.display());
        assert_eq!(rejected, [("libggml-cpu-a.so".to_owned(), reason)]);
    }

    #[cfg(unix)]
    #[test]
    fn world_writable_plugins_in_the_program_folder_are_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let set_mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let path = |name: &str| folder.path().join(format!("libggml-{name}.so"));
        for (name, mode) in [("cpu", 0o644), ("vulkan", 0o646)] {
            std::fs::write(path(name), "").unwrap();
            set_mode(&path(name), mode);
        }
        let search = |paths: Vec<PathBuf>| {
            let options = GgmlOptions {
                paths,
                program_folder: Some(folder.path().to_owned()),
                ..GgmlOptions::default()
            };
            let mut search = PluginSearch {
                options: &options,
                names: BTreeSet::new(),
                rejected: Vec::new(),
            };
            let found = search.candidates();
            let rejected = search.rejected.into_iter().map(|rejected| rejected.why);
            (found, rejected.collect::<Vec<_>>())
        };
        let (found, rejected) = search(Vec::new());
        assert_eq!(found, [[path("cpu")]]);
        assert!(
            rejected.len() == 1 && rejected[0].contains("--plugin"),
            "{rejected:?}"
        );
        // A file that the user names is always used.
        let (found, _) = search(vec![path("vulkan")]);
        assert_eq!(found.concat(), [path("vulkan"), path("cpu")]);
        set_mode(folder.path(), 0o777);
        let (found, rejected) = search(Vec::new());
        assert!(found.is_empty() && rejected.len() == 2, "{rejected:?}");
    }

    #[test]
    fn disabled_plugins_are_not_tried() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(format!("libggml-{name}.so"));
        for name in ["cpu-a", "vulkan", "opencl"] {
            std::fs::write(path(name), "").unwrap();
        }
        let options = GgmlOptions {
            paths: vec![folder.path().into(), path("opencl")],
            disabled: vec!["CPU".into(), "opencl".into()],
            ..GgmlOptions::default()
        };
        let mut search = PluginSearch {
            options: &options,
            names: BTreeSet::new(),
            rejected: Vec::new(),
        };
        assert_eq!(search.candidates(), [[path("vulkan")]]);
        let rejected = search.rejected.iter();
        let rejected: Vec<_> = rejected
            .map(|r| (Path::new(&r.what), &*r.why, r.named))
            .collect();
        let (cpu, opencl) = (path("cpu-a"), path("opencl"));
        assert!(rejected.contains(&(&*cpu, DISABLED, false)));
        assert!(rejected.contains(&(&*opencl, DISABLED, true)));
    }
}
