//! List of backends, and device lookup.

use samite_core::{Backend, Device, DeviceKind, Error, Parameters, Rejected};
use std::sync::Arc;

/// An unknown device, or an invalid list of devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// No device has this name.
    #[error("there is no device '{name}'; there are: {known}{}",
        reasons.as_ref().map_or(String::new(), |r| format!(" ({r})")))]
    UnknownDevice {
        /// Requested name.
        name: String,
        /// Available devices.
        known: String,
        /// Rejected devices that the user named, and reasons why the backend with this name does
        /// not have the device.
        reasons: Option<String>,
    },
    /// A device is named twice.
    #[error("device '{0}' is named twice")]
    Duplicate(String),
    /// Parameters that a device does not have, or that belong to no device.
    #[error("{0}")]
    Parameters(String),
    /// No device qualifies as a default.
    #[error("there is no device to take by default{0}: name one")]
    NoDefault(String),
    /// No device is named.
    #[error("no device is named; there are: {0}")]
    Empty(String),
}

// For callers that have one error type. The message is all that is left of errors that were turned
// into a `RegistryError`.
impl From<RegistryError> for Error {
    fn from(error: RegistryError) -> Self {
        Error::invalid(error.to_string())
    }
}

impl From<Error> for RegistryError {
    fn from(error: Error) -> Self {
        RegistryError::Parameters(error.to_string())
    }
}

/// Name of the environment variable with a comma-separated list of backends that are not loaded:
/// see [`BuiltIn::disable`].
pub const DISABLE_VARIABLE: &str = "SAMITE_DISABLE";

/// Built-in backends, named like their features, and whether this build contains them.
const BUILT: [(&str, bool); 9] = [
    ("blas", cfg!(feature = "blas")),
    ("cpu", cfg!(feature = "cpu")),
    ("cuda", cfg!(feature = "cuda")),
    ("cuda-emu", cfg!(feature = "cuda-emu")),
    ("ggml", cfg!(feature = "ggml")),
    ("reference", cfg!(feature = "reference")),
    ("remote", cfg!(feature = "remote")),
    ("rpc", cfg!(feature = "rpc")),
    ("wgpu", cfg!(feature = "wgpu")),
];

fn backend_names() -> impl Iterator<Item = &'static str> {
    BUILT.into_iter().map(|(name, _)| name)
}

/// Options of the built-in backends.
#[derive(Clone, Debug, Default)]
pub struct BuiltIn {
    /// Names of disabled backends, see [`BuiltIn::disable`].
    pub disabled: Vec<String>,
    /// Options of the CPU device.
    #[cfg(feature = "cpu")]
    pub cpu: samite_cpu::CpuOptions,
    /// Options of ggml's plugins. By default, no plugins are loaded.
    #[cfg(all(any(unix, windows), feature = "ggml"))]
    pub ggml: samite_ggml::GgmlOptions,
    /// Addresses of servers with ggml's RPC protocol, whose devices are used.
    #[cfg(feature = "rpc")]
    pub rpc: Vec<String>,
    /// Connection options for these servers.
    #[cfg(feature = "rpc")]
    pub rpc_client: samite_rpc::ClientOptions,
    /// Addresses of samite servers, such as `samite://192.168.0.7:50053#5d41…`, whose devices are
    /// used.
    #[cfg(feature = "remote")]
    pub remote: Vec<String>,
    /// Connection options for these servers.
    #[cfg(feature = "remote")]
    pub remote_client: samite_remote::RemoteOptions,
}

impl BuiltIn {
    /// Disables the backends of a comma-separated list: `blas`, `cpu`, `cuda`, `ggml`, `reference`,
    /// `remote`, `rpc`, `wgpu`, or one of ggml's plugins by its file name, such as `vulkan` or
    /// `ggml:cpu`. Nothing of them is loaded, not even for a trial.
    pub fn disable(&mut self, list: &str) {
        let names = list.split(',').map(str::trim);
        for name in names.filter(|name| !name.is_empty()) {
            let name = name.to_ascii_lowercase();
            #[cfg(all(any(unix, windows), feature = "ggml"))]
            match name.strip_prefix("ggml:") {
                Some(plugin) => self.ggml.disabled.push(plugin.to_owned()),
                None if backend_names().all(|known| known != name) => {
                    self.ggml.disabled.push(name.clone())
                }
                None => {}
            }
            self.disabled.push(name);
        }
    }
}

/// Returns a message about disabled names that no backend or plugin has. `plugins` are the plugins
/// found.
fn unknown(disabled: &[String], plugins: &[String]) -> Option<String> {
    let has_backend = |name: &str| {
        let plugin = match name.split_at_checked(5) {
            Some((start, plugin)) if start.eq_ignore_ascii_case("ggml:") => plugin,
            _ => name,
        };
        backend_names().any(|known| known.eq_ignore_ascii_case(name))
            || plugins
                .iter()
                .any(|known| known.eq_ignore_ascii_case(plugin))
    };
    let mut unknown: Vec<_> = Vec::new();
    for name in disabled.iter().filter(|name| !has_backend(name)) {
        let name = format!("'{name}'");
        if !unknown.contains(&name) {
            unknown.push(name);
        }
    }
    if unknown.is_empty() {
        return None;
    }
    let plugins = match plugins {
        [] => "no plugins of ggml".to_owned(),
        plugins => format!("the plugins {}", plugins.join(", ")),
    };
    Some(format!(
        "no backend is called {}, so none of that name was disabled; there are: {}, and {plugins}",
        unknown.join(" or "),
        backend_names().collect::<Vec<_>>().join(", ")
    ))
}

/// Backend of a device that was registered on its own.
struct Single([Arc<dyn Device>; 1]);

impl Backend for Single {
    fn name(&self) -> &str {
        self.0[0].name()
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        &self.0
    }
}

/// A device and its backend.
type DeviceMatch<'a> = (&'a Arc<dyn Backend>, &'a Arc<dyn Device>);

/// Maximum number of reasons in an error. Others are counted.
const MAX_REASONS: usize = 3;

/// All backends of an application.
///
/// ```
/// use samite_registry::Registry;
///
/// let registry = Registry::built_in(Default::default());
/// for device in registry.devices() {
///     println!("{}: {}", device.name(), device.description());
/// }
/// let cpu = registry.parse("cpu,threads=1")?;
/// assert_eq!(cpu[0].name(), "cpu");
/// # Ok::<_, samite_registry::RegistryError>(())
/// ```
#[derive(Clone, Default)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
    disabled: Vec<String>,
}

impl Registry {
    /// Returns a registry without backends.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Returns a registry of the built-in backends that the crate's features enable. A new backend
    /// is one more line here.
    pub fn built_in(options: BuiltIn) -> Self {
        let BuiltIn { disabled, .. } = &options;
        let used = |name: &str| !disabled.iter().any(|d| d.eq_ignore_ascii_case(name));
        #[cfg(all(any(unix, windows), feature = "ggml"))]
        let ggml = used("ggml").then(|| Arc::new(samite_ggml::GgmlBackend::find(&options.ggml)));
        #[cfg(all(any(unix, windows), feature = "ggml"))]
        let plugins = ggml.as_ref().map(|ggml| ggml.names());
        #[cfg(not(all(any(unix, windows), feature = "ggml")))]
        let plugins = Some(&[] as &[String]);
        if let Some(warning) = plugins.and_then(|plugins| unknown(disabled, plugins)) {
            tracing::warn!("{warning}");
        }
        let backends: Vec<Option<Arc<dyn Backend>>> = vec![
            #[cfg(all(any(unix, windows), feature = "blas"))]
            used("blas").then(|| Arc::new(samite_blas::BlasBackend::default()) as _),
            #[cfg(feature = "cpu")]
            used("cpu").then(|| Arc::new(samite_cpu::CpuBackend::new(options.cpu.clone())) as _),
            // First of the GPUs: the same card may also be a device of the backends below.
            #[cfg(feature = "cuda")]
            used("cuda").then(|| Arc::new(samite_cuda::CudaBackend::default()) as _),
            #[cfg(feature = "cuda-emu")]
            used("cuda-emu").then(|| Arc::new(samite_cuda_emu::backend()) as _),
            #[cfg(all(any(unix, windows), feature = "ggml"))]
            ggml.map(|ggml| ggml as _),
            #[cfg(feature = "reference")]
            used("reference").then(|| Arc::new(samite_reference::ReferenceBackend::default()) as _),
            #[cfg(feature = "remote")]
            (used("remote") && !options.remote.is_empty()).then(|| {
                let (addresses, client) = (&options.remote, &options.remote_client);
                Arc::new(samite_remote::RemoteBackend::connect(addresses, client)) as _
            }),
            #[cfg(feature = "rpc")]
            (used("rpc") && !options.rpc.is_empty()).then(|| {
                let servers = samite_rpc::RpcBackend::connect(&options.rpc, &options.rpc_client);
                Arc::new(servers) as _
            }),
            #[cfg(feature = "wgpu")]
            used("wgpu").then(|| Arc::new(samite_wgpu::WgpuBackend::default()) as _),
        ];
        let left_out = backend_names().filter(|name| !used(name));
        Registry {
            disabled: left_out.map(str::to_owned).collect(),
            backends: backends.into_iter().flatten().collect(),
        }
    }

    /// Adds a backend. Its devices rank after existing ones of the same kind. Does nothing if the
    /// backend is already registered.
    pub fn register(&mut self, backend: Arc<dyn Backend>) {
        if !self
            .backends
            .iter()
            .any(|known| Arc::ptr_eq(known, &backend))
        {
            self.backends.push(backend);
        }
    }

    /// Adds a device on its own, as a backend with its name. Does nothing if the device is already
    /// registered.
    pub fn register_device(&mut self, device: Arc<dyn Device>) {
        if !self.devices().any(|known| Arc::ptr_eq(known, &device)) {
            self.register(Arc::new(Single([device])));
        }
    }

    /// Removes the backend called `name`, ignoring case. Devices in use stay valid.
    pub fn unregister(&mut self, name: &str) -> Option<Arc<dyn Backend>> {
        let has_name = |backend: &Arc<dyn Backend>| backend.name().eq_ignore_ascii_case(name);
        let at = self.backends.iter().position(has_name)?;
        Some(self.backends.remove(at))
    }

    /// Returns the built-in backends that [`BuiltIn::disabled`] excluded.
    pub fn disabled(&self) -> &[String] {
        &self.disabled
    }

    /// Returns all backends, in order of registration.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        &self.backends
    }

    /// Iterates over all devices.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.backends.iter().flat_map(|backend| backend.devices())
    }

    /// Iterates over all devices of one kind.
    pub fn devices_of_kind(&self, kind: DeviceKind) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.devices().filter(move |device| device.kind() == kind)
    }

    fn names(&self) -> String {
        self.devices()
            .map(|device| device.name())
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Returns the device called `name` and its backend.
    fn find(&self, name: &str) -> Result<DeviceMatch<'_>, RegistryError> {
        // The backend of that name first: others may have to load libraries to list their devices.
        let has_name = |backend: &&Arc<dyn Backend>| backend.name().eq_ignore_ascii_case(name);
        let first = self.backends.iter().filter(has_name);
        first
            .chain(&self.backends)
            .flat_map(|backend| {
                backend
                    .devices()
                    .iter()
                    .map(move |device| (backend, device))
            })
            .find(|(_, device)| device.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| RegistryError::UnknownDevice {
                name: name.to_owned(),
                known: self.names(),
                reasons: self.reasons(name),
            })
    }

    /// Returns the reasons for named devices that cannot be used, then those of the backend whose
    /// name is a prefix of `name`.
    fn reasons(&self, name: &str) -> Option<String> {
        let is_requested = |backend: &str| {
            let (start, _) = name.split_once(':').unwrap_or((name, ""));
            let start = start.trim_end_matches(|c: char| c.is_ascii_digit());
            start.eq_ignore_ascii_case(backend)
        };
        if let Some((feature, _)) = BUILT.iter().find(|(name, has)| !has && is_requested(name)) {
            return Some(format!(
                "{feature} is not part of this build, which needs --features {feature} for it"
            ));
        }
        let disabled = self.disabled.iter().filter(|name| is_requested(name));
        let mut reasons: Vec<_> = disabled.map(|name| format!("{name} is disabled")).collect();
        let mut rejected: Vec<_> = self
            .backends
            .iter()
            .flat_map(|backend| {
                let asked = is_requested(backend.name());
                let rejected = backend.rejected().into_iter();
                rejected.filter(move |rejected| rejected.named || asked)
            })
            .collect();
        rejected.sort_by_key(|rejected| !rejected.named);
        reasons.extend(rejected.iter().map(|r| format!("{}: {}", r.what, r.why)));
        let more = reasons.len().saturating_sub(MAX_REASONS);
        reasons.truncate(MAX_REASONS);
        if more > 0 {
            reasons.push(format!("and {more} more"));
        }
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    /// Returns the device called `name`, ignoring case.
    ///
    /// # Errors
    /// [`RegistryError::UnknownDevice`], with the available devices, and the reasons why that
    /// backend has no more.
    pub fn device(&self, name: &str) -> Result<&Arc<dyn Device>, RegistryError> {
        Ok(self.find(name)?.1)
    }

    /// Returns the fallback devices for refused operations, on host memory: the CPU, followed by
    /// the reference device for operations without CPU kernels.
    ///
    /// # Errors
    /// [`RegistryError::UnknownDevice`] if there is no CPU device.
    pub fn fallbacks(&self) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
        Ok(vec![
            Arc::clone(self.device("cpu")?),
            #[cfg(feature = "reference")]
            samite_reference::ReferenceDevice::new(samite_reference::ReferenceOptions {
                host_memory: true,
                ..Default::default()
            }),
        ])
    }

    /// Returns the device called `name`, configured with `parameters`. With parameters, it differs
    /// from the device that [`device`](Registry::device) returns.
    ///
    /// # Errors
    /// [`RegistryError::UnknownDevice`]. [`RegistryError::Parameters`] for parameters that it does
    /// not have.
    pub fn init_by_name(
        &self,
        name: &str,
        parameters: Parameters,
    ) -> Result<Arc<dyn Device>, RegistryError> {
        let (backend, device) = self.find(name)?;
        if let Some(doubt) = backend.doubt(&**device) {
            tracing::warn!(
                "device '{}' is used because it was named: {doubt}",
                device.name()
            );
        }
        if parameters.is_empty() {
            Ok(Arc::clone(device))
        } else {
            Ok(backend.configure(device, parameters)?)
        }
    }

    /// Returns the devices of a comma-separated list such as `blas,cpu:threads=4`, in its order.
    /// Items are `name`, or `name:key=value,key=value` with parameters. `auto` means
    /// [`automatic`](Registry::automatic).
    ///
    /// # Errors
    /// [`RegistryError`] for unknown and repeated names, for parameters that a device does not
    /// have, for an empty list, and if `auto` finds nothing or is not the only item.
    pub fn parse(&self, list: &str) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
        if list.trim().eq_ignore_ascii_case("auto") {
            let devices = self.automatic();
            if devices.is_empty() {
                let disabled = self.disabled.join(" and ");
                return Err(RegistryError::NoDefault(match &*disabled {
                    "" => String::new(),
                    names => format!(" ({names} disabled)"),
                }));
            }
            return Ok(devices);
        }
        let mut devices: Vec<Arc<dyn Device>> = Vec::new();
        for (name, parameters) in with_parameters(list)? {
            if name.eq_ignore_ascii_case("auto") {
                return Err(RegistryError::Parameters(
                    "'auto' stands alone, without other devices and parameters: name devices instead".to_owned(),
                ));
            }
            let device = self.init_by_name(name, parameters)?;
            if devices.iter().any(|known| known.name() == device.name()) {
                return Err(RegistryError::Duplicate(name.to_owned()));
            }
            devices.push(device);
        }
        if devices.is_empty() {
            Err(RegistryError::Empty(self.names()))
        } else {
            Ok(devices)
        }
    }

    /// Returns the default devices, in order of preference: GPUs, or else integrated ones, and the
    /// CPU. Of two views of one physical device, the first counts. Accelerators on host memory are
    /// excluded: samite's own CPU kernels are the faster default.
    pub fn automatic(&self) -> Vec<Arc<dyn Device>> {
        let candidates: Vec<_> = self
            .backends
            .iter()
            .filter(|backend| backend.is_automatic())
            .flat_map(|backend| {
                let devices = backend.devices().iter();
                devices.filter(|device| backend.doubt(&***device).is_none())
            })
            .collect();
        let of = |kind: DeviceKind| {
            candidates
                .iter()
                .filter(move |device| device.kind() == kind)
                .copied()
        };
        let gpus: Vec<_> = match of(DeviceKind::Gpu).count() {
            0 => of(DeviceKind::IntegratedGpu).collect(),
            _ => of(DeviceKind::Gpu).collect(),
        };
        let mut seen = Vec::new();
        gpus.into_iter()
            .chain(of(DeviceKind::Cpu))
            .filter(|device| match device.physical_id() {
                Some(id) if seen.contains(&id) => false,
                id => {
                    seen.extend(id);
                    true
                }
            })
            .cloned()
            .collect()
    }

    /// Returns the single best device: a GPU, or else an integrated one, or else the CPU.
    pub fn best(&self) -> Option<Arc<dyn Device>> {
        self.automatic().into_iter().next()
    }

    /// Returns everything that was found but cannot be used, each with its backend.
    pub fn rejected(&self) -> Vec<(String, Rejected)> {
        let of = |backend: &Arc<dyn Backend>| {
            let name = backend.name().to_owned();
            let rejected = backend.rejected().into_iter();
            rejected.map(move |rejected| (name.clone(), rejected))
        };
        self.backends.iter().flat_map(of).collect()
    }
}

/// Splits a list into devices with their parameters. Names may contain a colon: the colon before a
/// device's first key is the last one before `=`. An item with `=` and without a colon before it
/// belongs to the previous device.
fn with_parameters(list: &str) -> Result<Vec<(&str, Parameters)>, RegistryError> {
    let mut devices: Vec<(&str, Parameters)> = Vec::new();
    let items = list.split(',').map(str::trim);
    for item in items.filter(|item| !item.is_empty()) {
        let parameter = match item.split_once('=') {
            None => {
                devices.push((item, Parameters::default()));
                continue;
            }
            Some((before, _)) => match before.rsplit_once(':') {
                None => item,
                Some((name, _)) => {
                    devices.push((name.trim(), Parameters::default()));
                    &item[name.len() + 1..]
                }
            },
        };
        let Some((_, parameters)) = devices.last_mut() else {
            return Err(RegistryError::Parameters(format!(
                "'{parameter}' belongs to no device: write device:key=value"
            )));
        };
        parameters.add(parameter)?;
    }
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_reference::{ReferenceDevice, ReferenceOptions};

    /// Devices, whether they are automatic, and whether one of the libraries was named.
    struct Fake(Vec<Arc<dyn Device>>, bool, bool);

    impl Backend for Fake {
        fn name(&self) -> &str {
            "fake"
        }
        fn devices(&self) -> &[Arc<dyn Device>] {
            &self.0
        }
        fn is_automatic(&self) -> bool {
            self.1
        }
        fn doubt(&self, device: &dyn Device) -> Option<String> {
            (device.name() == "doubtful").then(|| "it computes nonsense".into())
        }
        fn configure(
            &self,
            device: &Arc<dyn Device>,
            mut parameters: Parameters,
        ) -> samite_core::Result<Arc<dyn Device>> {
            let size = parameters.take_number(device.name(), "size", 1, 9)?;
            let level = parameters.take("level").unwrap_or_default();
            parameters.finish(device.name(), &["size", "level"])?;
            Ok(self::device(
                &format!("{} {size:?} {level}", device.name()),
                device.kind(),
            ))
        }
        fn rejected(&self) -> Vec<Rejected> {
            let rejected = |what: &str, named| Rejected {
                what: what.into(),
                why: "not found".into(),
                named,
            };
            vec![
                rejected("libfake.so", false),
                rejected("libnamed.so", self.2),
            ]
        }
    }

    fn device(name: &str, kind: DeviceKind) -> Arc<dyn Device> {
        ReferenceDevice::new(ReferenceOptions {
            name: name.into(),
            kind,
            ..Default::default()
        })
    }

    fn registry(devices: Vec<Arc<dyn Device>>) -> Registry {
        let mut registry = Registry::empty();
        registry.register(Arc::new(Fake(devices, true, false)));
        registry
    }

    #[test]
    fn disabled_names_without_effect_cause_a_warning() {
        let warning = |list: &str, plugins: &[&str]| {
            let names: Vec<_> = list.split(',').map(str::to_owned).collect();
            unknown(
                &names,
                &plugins.iter().map(ToString::to_string).collect::<Vec<_>>(),
            )
        };
        assert_eq!(warning("CPU,blas,ggml:vulkan,Vulkan", &["vulkan"]), None);
        let none = warning("nope,nope", &[]).unwrap();
        let begins = "no backend is called 'nope', so none of that name was disabled; there are: blas, cpu, cuda, cuda-emu, ggml, reference, remote, rpc";
        assert!(none.starts_with(begins), "{none}");
        assert!(none.ends_with(", and no plugins of ggml"), "{none}");
        let two = warning("ggml:reference,nope,cpu", &["cuda", "vulkan"]).unwrap();
        assert!(two.contains("'ggml:reference' or 'nope'"), "{two}");
        assert!(two.ends_with("and the plugins cuda, vulkan"), "{two}");
    }

    #[test]
    fn device_names_and_lists_are_parsed() {
        let registry = registry(vec![
            device("gpu0", DeviceKind::Gpu),
            device("cpu", DeviceKind::Cpu),
        ]);
        assert_eq!(registry.device("GPU0").unwrap().name(), "gpu0");
        let names = |list| {
            registry
                .parse(list)
                .map(|l| l.iter().map(|d| d.name().to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(names("cpu, gpu0").unwrap(), ["cpu", "gpu0"]);
        assert_eq!(
            names("cpu,cpu"),
            Err(RegistryError::Duplicate("cpu".into()))
        );
        assert!(matches!(names(" , "), Err(RegistryError::Empty(_))));
        let error = names("npu").unwrap_err().to_string();
        assert_eq!(error, "there is no device 'npu'; there are: gpu0, cpu");
        assert!(
            registry
                .device("fake")
                .unwrap_err()
                .to_string()
                .ends_with("(libfake.so: not found; libnamed.so: not found)")
        );
    }

    #[test]
    fn devices_take_parameters() {
        let registry = registry(vec![
            device("cpu", DeviceKind::Cpu),
            device("fake:CPU", DeviceKind::Gpu),
        ]);
        let names = |list| {
            registry
                .parse(list)
                .map(|l| l.iter().map(|d| d.name().to_owned()).collect::<Vec<_>>())
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            names("FAKE:cpu:level=a:b=c,size=2,cpu:size=3").unwrap(),
            ["fake:CPU Some(2) a:b=c", "cpu Some(3) "]
        );
        assert_eq!(names("fake:CPU,cpu").unwrap(), ["fake:CPU", "cpu"]);
        assert_eq!(
            names("cpu:colour=red").unwrap_err(),
            "device 'cpu' has no parameter 'colour'; it has: size, level"
        );
        assert!(names("cpu:size=10").unwrap_err().contains("'10'"));
        assert_eq!(
            names("size=3,cpu").unwrap_err(),
            "'size=3' belongs to no device: write device:key=value"
        );
        assert_eq!(
            names("cpu:size=3,size=4").unwrap_err(),
            "parameter 'size' is given twice"
        );
        assert!(names("npu:size=3").unwrap_err().contains("no device 'npu'"));
        for list in ["auto,cpu", "cpu,Auto", "auto:size=3"] {
            let error = names(list).unwrap_err();
            assert!(error.starts_with("'auto' stands alone"), "{error}");
        }
        // The original device is not changed.
        let parameters = "size=4".parse().unwrap();
        let other = registry.init_by_name("Cpu", parameters).unwrap();
        assert_eq!(other.name(), "cpu Some(4) ");
        assert_eq!(registry.device("cpu").unwrap().name(), "cpu");
    }

    #[test]
    fn rejected_named_plugins_appear_in_every_lookup_error() {
        let mut registry = Registry::empty();
        registry.register(Arc::new(Fake(vec![], true, true)));
        let error = |name: &str| registry.device(name).err().unwrap().to_string();
        assert!(error("npu").ends_with("there are:  (libnamed.so: not found)"));
        assert!(error("fake:GPU").ends_with("(libnamed.so: not found; libfake.so: not found)"));
        for _ in 0..2 {
            registry.register(Arc::new(Fake(vec![], true, true)));
        }
        let error = registry.device("fake:x").err().unwrap().to_string();
        assert!(
            error.ends_with("libnamed.so: not found; and 3 more)"),
            "{error}"
        );
    }

    #[test]
    fn doubtful_devices_are_used_only_when_named() {
        let registry = registry(vec![
            device("doubtful", DeviceKind::Gpu),
            device("cpu", DeviceKind::Cpu),
        ]);
        assert_eq!(registry.best().unwrap().name(), "cpu");
        assert_eq!(registry.parse("doubtful").unwrap()[0].name(), "doubtful");
    }

    #[test]
    fn devices_are_registered_and_backends_unregistered() {
        let mut registry = registry(vec![device("cpu", DeviceKind::Cpu)]);
        let one = device("npu", DeviceKind::Gpu);
        registry.register_device(Arc::clone(&one));
        registry.register_device(one);
        let twice = Arc::clone(&registry.backends()[0]);
        registry.register(twice);
        assert_eq!(registry.backends().len(), 2);
        assert_eq!(registry.best().unwrap().name(), "npu");
        assert!(registry.unregister("nobody").is_none());
        assert_eq!(registry.unregister("NPU").unwrap().name(), "npu");
        assert!(registry.device("npu").is_err());
        assert_eq!(registry.best().unwrap().name(), "cpu");
    }

    #[cfg(all(feature = "cpu", feature = "reference"))]
    #[test]
    fn disabled_backends_are_absent() {
        let mut options = BuiltIn::default();
        options.disable("Cpu, vulkan,ggml:cpu,,blas");
        #[cfg(feature = "ggml")]
        assert_eq!(options.ggml.disabled, ["vulkan", "cpu"]);
        let registry = Registry::built_in(options);
        assert_eq!(registry.disabled(), ["blas", "cpu"]);
        assert!(
            registry
                .backends()
                .iter()
                .all(|b| !["blas", "cpu"].contains(&b.name()))
        );
        let error = registry.device("CPU").err().unwrap().to_string();
        assert!(error.ends_with("(cpu is disabled)"), "{error}");
        let error = registry.parse("auto").err().unwrap().to_string();
        assert_eq!(
            error,
            "there is no device to take by default (blas and cpu disabled): name one"
        );
        assert!(Registry::empty().parse("auto").is_err());
    }

    #[test]
    fn integrated_gpus_are_used_only_without_discrete_ones() {
        let both = registry(vec![
            device("cpu", DeviceKind::Cpu),
            device("igpu", DeviceKind::IntegratedGpu),
            device("gpu", DeviceKind::Gpu),
            device("blas", DeviceKind::Accelerator),
        ]);
        let names = |r: &Registry| {
            r.automatic()
                .iter()
                .map(|d| d.name().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&both), ["gpu", "cpu"]);
        assert_eq!(both.best().unwrap().name(), "gpu");
        let one = registry(vec![
            device("cpu", DeviceKind::Cpu),
            device("igpu", DeviceKind::IntegratedGpu),
        ]);
        assert_eq!(names(&one), ["igpu", "cpu"]);
        let mut none = Registry::empty();
        none.register(Arc::new(Fake(
            vec![device("r", DeviceKind::Gpu)],
            false,
            false,
        )));
        assert!(none.best().is_none() && none.device("r").is_ok());
    }

    #[test]
    fn cargo_features_select_the_built_in_backends() {
        let registry = Registry::built_in(BuiltIn::default());
        let names: Vec<_> = registry.backends().iter().map(|b| b.name()).collect();
        let wanted: Vec<_> = [
            ("blas", cfg!(all(any(unix, windows), feature = "blas"))),
            ("cpu", cfg!(feature = "cpu")),
            ("cuda", cfg!(feature = "cuda")),
            ("cuda-emu", cfg!(feature = "cuda-emu")),
            ("ggml", cfg!(all(any(unix, windows), feature = "ggml"))),
            ("reference", cfg!(feature = "reference")),
            ("wgpu", cfg!(feature = "wgpu")),
        ]
        .into_iter()
        .filter_map(|(name, there)| there.then_some(name))
        .collect();
        assert_eq!(names, wanted);
    }

    #[cfg(not(feature = "wgpu"))]
    #[test]
    fn errors_for_missing_devices_name_the_cargo_feature() {
        for name in ["wgpu0", "WGPU12", "wgpu"] {
            let error = Registry::default().device(name).unwrap_err().to_string();
            assert!(error.contains("--features wgpu"), "{error}");
        }
        let error = Registry::default().device("gpu").unwrap_err().to_string();
        assert!(!error.contains("--features"), "{error}");
    }

    #[cfg(all(feature = "cpu", feature = "reference"))]
    #[test]
    fn built_in_devices_exist() {
        let registry = Registry::built_in(BuiltIn::default());
        assert_eq!(registry.best().unwrap().name(), "cpu");
        assert!(registry.device("reference").is_ok());
        assert_eq!(
            registry.parse("auto").unwrap().last().unwrap().name(),
            "cpu"
        );
    }
}
