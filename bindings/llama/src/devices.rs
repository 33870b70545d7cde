//! Selection of devices for a model: the caller's devices are matched with samite's by name.
//!
//! Callers pass addresses of objects in their own libggml. That library is loaded in this process,
//! so its functions can be called to obtain names.

use crate::entry::{Failure, Outcome};
use crate::layout::{MAX_DEVICES, ModelParams};
use crate::log::{self, Level};
use samite_core::{Device, DeviceKind};
use samite_llm::PlacementRule;
use samite_registry::{BuiltIn, Registry};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};

/// `LLAMA_SPLIT_MODE_NONE`: a single device has the whole model.
const SPLIT_NONE: c_int = 0;

/// Returns the backends of the process, which are created once so that their threads are shared.
pub fn registry() -> &'static Registry {
    static REGISTRY: OnceLock<Registry> = OnceLock::new();
    REGISTRY.get_or_init(|| Registry::built_in(BuiltIn::default()))
}

/// A caller's device selection.
#[derive(Debug, Default)]
pub struct DeviceSelection {
    /// Named devices; `None` for all available ones.
    devices: Option<Vec<String>>,
    /// Regular expressions for tensor names, each with a memory type.
    overrides: Vec<(String, String)>,
    /// Number of last layers to place on devices other than the CPU; negative for all.
    n_gpu_layers: i32,
    /// Index of the single device for the whole model.
    only: Option<usize>,
    /// Proportions of layers per device.
    split: Vec<f32>,
}

/// Placement of a model.
#[derive(Debug)]
pub struct ModelPlacement {
    /// Devices, the host's last.
    pub devices: Vec<Arc<dyn Device>>,
    /// Placement rules.
    pub rules: Vec<PlacementRule>,
}

/// Signature of a libggml function that returns a name.
type NameFn = unsafe extern "C" fn(*mut c_void) -> *const c_char;

/// Looks up a function of the caller's libggml, if that is loaded.
pub fn function(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: only looks up an address.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Returns the name of an object of the caller's libggml. The object exists, so the library is
/// loaded.
fn name_of(function: &CStr, thing: *mut c_void) -> String {
    let unknown = || "unknown".to_owned();
    let Some(found) = self::function(function).filter(|_| !thing.is_null()) else {
        return unknown();
    };
    // SAFETY: the functions looked up here have this type, and the object belongs to the same
    // library.
    let name = unsafe { std::mem::transmute::<*mut c_void, NameFn>(found)(thing) };
    if name.is_null() {
        return unknown();
    }
    // SAFETY: the name is a C string.
    let name = unsafe { CStr::from_ptr(name) };
    name.to_string_lossy().into_owned()
}

impl DeviceSelection {
    /// Reads the selection from the parameters.
    ///
    /// # Safety
    /// The caller must uphold the header's contract.
    pub unsafe fn from_params(params: &ModelParams) -> Outcome<Self> {
        let mut wanted = DeviceSelection {
            n_gpu_layers: params.n_gpu_layers,
            only: (params.split_mode == SPLIT_NONE)
                .then(|| usize::try_from(params.main_gpu).ok())
                .flatten(),
            ..DeviceSelection::default()
        };
        let mut next = params.devices;
        // SAFETY: the caller guarantees a null-terminated list.
        while let Some(&device) = unsafe { next.as_ref() } {
            let names = wanted.devices.get_or_insert_default();
            if device.is_null() {
                break;
            }
            names.push(name_of(c"ggml_backend_dev_name", device));
            // SAFETY: the entry was not the end of the list.
            next = unsafe { next.add(1) };
        }
        let mut next = params.tensor_buft_overrides;
        // SAFETY: as above.
        while let Some(entry) = unsafe { next.as_ref() } {
            if entry.pattern.is_null() {
                break;
            }
            // SAFETY: the caller guarantees a C string.
            let pattern = unsafe { CStr::from_ptr(entry.pattern) };
            let pattern = pattern
                .to_str()
                .map_err(|_| Failure::new("a pattern of tensor_buft_overrides is not UTF-8"))?;
            let memory = name_of(c"ggml_backend_buft_name", entry.buffer_type);
            wanted.overrides.push((pattern.to_owned(), memory));
            // SAFETY: the entry was not the end of the list.
            next = unsafe { next.add(1) };
        }
        if !params.tensor_split.is_null() {
            // SAFETY: the caller guarantees one number for each of the maximum number of devices.
            let split = unsafe { std::slice::from_raw_parts(params.tensor_split, MAX_DEVICES) };
            wanted.split = split.to_vec();
        }
        Ok(wanted)
    }

    /// Chooses the placement of a model.
    ///
    /// # Errors
    /// If an expression is invalid, or no CPU device exists.
    pub fn choose(&self, registry: &Registry) -> Outcome<ModelPlacement> {
        let is_host = |device: &Arc<dyn Device>| device.kind() == DeviceKind::Cpu;
        let (mut hosts, mut others): (Vec<_>, Vec<_>) =
            registry.automatic().into_iter().partition(is_host);
        if let Some(names) = &self.devices {
            let mut named: Vec<Arc<dyn Device>> = Vec::new();
            for name in names {
                let Some(device) = find(registry, &others, name) else {
                    let text = format!("device '{name}' is none of samite's: it is left out");
                    log::line(Level::Warn, &text);
                    continue;
                };
                let is_new = |known: &Arc<dyn Device>| known.name() != device.name();
                if !is_host(&device) && named.iter().all(is_new) {
                    named.push(device);
                }
            }
            others = named;
        }
        if let Some(only) = self.only
            && others.len() > 1
        {
            let device = others.get(only).ok_or_else(|| {
                Failure::new(format!("main_gpu is {only}, there are {}", others.len()))
            })?;
            others = vec![Arc::clone(device)];
        }
        let mut rules = Vec::new();
        if let Ok(layers) = usize::try_from(self.n_gpu_layers) {
            rules.push(PlacementRule::LastLayers(layers));
        }
        let split = &self.split[..self.split.len().min(others.len())];
        if split.len() > 1 && split.iter().any(|&share| share > 0.0) {
            let shares: Vec<String> = split.iter().map(f32::to_string).collect();
            rules.push(PlacementRule::parse_split(&shares.join(","))?);
        }
        hosts.truncate(1);
        others.append(&mut hosts);
        for (pattern, memory) in &self.overrides {
            let Some(device) = find(registry, &others, memory) else {
                let text = format!("memory '{memory}' is none of samite's: its tensors stay");
                log::line(Level::Warn, &text);
                continue;
            };
            if others.iter().all(|known| known.name() != device.name()) {
                others.insert(others.len().saturating_sub(1), Arc::clone(&device));
            }
            rules.push(PlacementRule::of_names(pattern, device.name())?);
        }
        Ok(ModelPlacement {
            devices: others,
            rules,
        })
    }
}

/// Finds the device for a ggml device or memory name: the one of that name, the CPU for all host
/// memory, or a GPU by its number.
fn find(registry: &Registry, others: &[Arc<dyn Device>], name: &str) -> Option<Arc<dyn Device>> {
    if name.starts_with("CPU") || name.ends_with("_Host") {
        return registry.device("cpu").ok().cloned();
    }
    if let Ok(device) = registry.device(name) {
        return Some(Arc::clone(device));
    }
    let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    let backend = name.strip_suffix(digits)?;
    let is_gpu = [
        "CUDA", "ROCm", "MUSA", "SYCL", "Vulkan", "Metal", "MTL", "OpenCL", "WebGPU",
    ];
    let mut gpus = others
        .iter()
        .filter(|device| device.kind() != DeviceKind::Cpu);
    if is_gpu.contains(&backend) {
        gpus.nth(digits.parse().unwrap_or(0)).cloned()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(wanted: &DeviceSelection) -> (Vec<String>, String) {
        let ModelPlacement { devices, rules } = wanted.choose(registry()).unwrap();
        let names = devices.iter().map(|device| device.name().to_owned());
        (names.collect(), format!("{rules:?}"))
    }

    fn named(devices: &[&str]) -> DeviceSelection {
        DeviceSelection {
            devices: Some(devices.iter().map(|&name| name.to_owned()).collect()),
            n_gpu_layers: -1,
            ..DeviceSelection::default()
        }
    }

    #[test]
    fn named_devices_are_selected() {
        assert_eq!(names(&named(&["CPU"])).0, ["cpu"]);
        assert_eq!(names(&named(&[])).0, ["cpu"]);
        assert_eq!(names(&named(&["Reference", "CPU"])).0, ["reference", "cpu"]);
        // Unknown devices are left out, and duplicates are removed.
        let twice = ["CUDA7", "reference", "reference"];
        assert_eq!(names(&named(&twice)).0, ["reference", "cpu"]);
        assert_eq!(names(&named(&["NPU"])).0, ["cpu"]);
    }

    #[test]
    fn tensor_overrides_select_devices() {
        let mut wanted = named(&[]);
        wanted.overrides = [
            ("ffn_.*", "reference"),
            ("attn", "CPU_REPACK"),
            ("x", "HBM"),
        ]
        .map(|(pattern, memory)| (pattern.to_owned(), memory.to_owned()))
        .to_vec();
        let (devices, rules) = names(&wanted);
        assert_eq!(devices, ["reference", "cpu"]);
        assert!(
            rules.contains("ffn_.*") && rules.contains("attn"),
            "{rules}"
        );
        assert!(!rules.contains("\"x\""), "{rules}");
        wanted.overrides = vec![("(".to_owned(), "CPU".to_owned())];
        assert!(wanted.choose(registry()).is_err());
    }

    #[test]
    fn layers_are_split_as_configured() {
        let mut wanted = named(&["reference", "blas"]);
        wanted.n_gpu_layers = 3;
        wanted.split = vec![0.0; MAX_DEVICES];
        assert_eq!(names(&wanted).1, "[LastLayers(3)]");
        if names(&wanted).0.len() == 3 {
            wanted.split[..2].copy_from_slice(&[3.0, 1.0]);
            assert_eq!(names(&wanted).1, "[LastLayers(3), Split([3.0, 1.0])]");
            wanted.only = Some(1);
            assert_eq!(names(&wanted).0, ["blas", "cpu"]);
            wanted.only = Some(2);
            assert!(wanted.choose(registry()).is_err());
        }
    }
}
