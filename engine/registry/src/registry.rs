//! The list of backends, and questions about it.

use samite_core::{Backend, Device, DeviceKind};
use std::sync::Arc;

/// A device that does not exist, or a list of devices that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// No device has this name.
    #[error("there is no device '{name}'; there are: {known}{}", reason.as_ref().map_or(String::new(), |r| format!(" ({r})")))]
    UnknownDevice {
        /// What was asked for.
        name: String,
        /// The devices that exist.
        known: String,
        /// Why a backend of that name has no device.
        reason: Option<String>,
    },
    /// A device is named twice.
    #[error("device '{0}' is named twice")]
    Duplicate(String),
    /// No device is named.
    #[error("no device is named; there are: {0}")]
    Empty(String),
}

/// Options of the backends that come with samite.
#[derive(Clone, Debug, Default)]
pub struct BuiltIn {
    /// The CPU device.
    #[cfg(feature = "cpu")]
    pub cpu: samite_cpu::CpuOptions,
    /// ggml's plugins. By default, none are looked for.
    #[cfg(all(unix, feature = "ggml"))]
    pub ggml: samite_ggml::GgmlOptions,
}

/// All backends of an application.
#[derive(Clone, Default)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
}

impl Registry {
    /// A registry without backends.
    pub fn empty() -> Self {
        Self::default()
    }

    /// The backends that come with samite, as far as the crate's features have them. A new one is one more line here.
    pub fn built_in(options: BuiltIn) -> Self {
        let backends: Vec<Arc<dyn Backend>> = vec![
            #[cfg(all(any(unix, windows), feature = "blas"))]
            Arc::new(samite_blas::BlasBackend::default()),
            #[cfg(feature = "cpu")]
            Arc::new(samite_cpu::CpuBackend::new(options.cpu.clone())),
            #[cfg(all(unix, feature = "ggml"))]
            Arc::new(samite_ggml::GgmlBackend::find(&options.ggml)),
            #[cfg(feature = "reference")]
            Arc::new(samite_reference::ReferenceBackend::default()),
        ];
        // Devices without options leave nothing to read.
        let _ = &options;
        Registry { backends }
    }

    /// Adds a backend. Its devices are preferred after those of the same kind that are there already.
    pub fn register(&mut self, backend: Arc<dyn Backend>) {
        self.backends.push(backend);
    }

    /// All backends in order of registration.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        &self.backends
    }

    /// All devices.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.backends.iter().flat_map(|backend| backend.devices())
    }

    /// All devices of one kind.
    pub fn devices_of_kind(&self, kind: DeviceKind) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.devices().filter(move |device| device.kind() == kind)
    }

    fn names(&self) -> String {
        self.devices()
            .map(|device| device.name())
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// The device called `name`, in any mixture of upper and lower case.
    ///
    /// # Errors
    /// [`RegistryError::UnknownDevice`], with the devices that exist and why a backend of that name has none.
    pub fn device(&self, name: &str) -> Result<&Arc<dyn Device>, RegistryError> {
        // The backend of that name first: others may have to load libraries to know their devices.
        let backend = self
            .backends
            .iter()
            .find(|backend| backend.name().eq_ignore_ascii_case(name));
        backend
            .into_iter()
            .flat_map(|backend| backend.devices())
            .chain(self.devices())
            .find(|device| device.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| {
                let reason = backend.and_then(|backend| backend.rejected().into_iter().next());
                RegistryError::UnknownDevice {
                    name: name.to_owned(),
                    known: self.names(),
                    reason: reason.map(|(what, why)| format!("{what}: {why}")),
                }
            })
    }

    /// The devices of a comma-separated list such as `blas,cpu`, in its order. `auto` stands for
    /// [`automatic`](Registry::automatic).
    ///
    /// # Errors
    /// [`RegistryError`] for unknown and repeated names and for an empty list.
    pub fn parse(&self, list: &str) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
        if list.trim().eq_ignore_ascii_case("auto") {
            return Ok(self.automatic());
        }
        let mut devices: Vec<Arc<dyn Device>> = Vec::new();
        for name in list
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
        {
            let device = self.device(name)?;
            if devices.iter().any(|known| known.name() == device.name()) {
                return Err(RegistryError::Duplicate(name.to_owned()));
            }
            devices.push(Arc::clone(device));
        }
        if devices.is_empty() {
            Err(RegistryError::Empty(self.names()))
        } else {
            Ok(devices)
        }
    }

    /// The devices to use when nothing is said, most wanted first: GPUs, or else integrated ones, and the CPU. Of two
    /// views of one physical device, the first counts. Accelerators on host memory are left out: samite's own CPU kernels
    /// are the faster default.
    pub fn automatic(&self) -> Vec<Arc<dyn Device>> {
        let candidates: Vec<_> = self
            .backends
            .iter()
            .filter(|backend| backend.is_automatic())
            .flat_map(|backend| backend.devices())
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

    /// The single best device: a GPU, or else an integrated one, or else the CPU.
    pub fn best(&self) -> Option<Arc<dyn Device>> {
        self.automatic().into_iter().next()
    }

    /// Everything that was found but cannot be used: backend, what, why.
    pub fn rejected(&self) -> Vec<(String, String, String)> {
        let of = |backend: &Arc<dyn Backend>| {
            let name = backend.name().to_owned();
            backend
                .rejected()
                .into_iter()
                .map(move |(what, why)| (name.clone(), what, why))
                .collect::<Vec<_>>()
        };
        self.backends.iter().flat_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_reference::{ReferenceDevice, ReferenceOptions};

    struct Fake(Vec<Arc<dyn Device>>, bool);

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
        fn rejected(&self) -> Vec<(String, String)> {
            vec![("libfake.so".into(), "not found".into())]
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
        registry.register(Arc::new(Fake(devices, true)));
        registry
    }

    #[test]
    fn names_and_lists() {
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
                .ends_with("(libfake.so: not found)")
        );
    }

    #[test]
    fn integrated_gpus_count_only_without_others() {
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
        none.register(Arc::new(Fake(vec![device("r", DeviceKind::Gpu)], false)));
        assert!(none.best().is_none() && none.device("r").is_ok());
    }

    #[test]
    fn features_decide_what_is_built_in() {
        let registry = Registry::built_in(BuiltIn::default());
        let names: Vec<_> = registry.backends().iter().map(|b| b.name()).collect();
        let wanted: Vec<_> = [
            ("blas", cfg!(all(any(unix, windows), feature = "blas"))),
            ("cpu", cfg!(feature = "cpu")),
            ("ggml", cfg!(all(unix, feature = "ggml"))),
            ("reference", cfg!(feature = "reference")),
        ]
        .into_iter()
        .filter_map(|(name, there)| there.then_some(name))
        .collect();
        assert_eq!(names, wanted);
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
