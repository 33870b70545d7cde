//! The cards of a driver as devices.

use crate::device::CudaDevice;
use crate::driver::Driver;
use crate::gpu::Gpu;
use samite_core::{Backend, Device, Error, Parameters, Rejected, Result};
use std::sync::{Arc, OnceLock};

/// Minimum compute capability: kernels are compiled for it.
const MIN_CAPABILITY: u32 = 75;

/// One device per card. The driver is loaded on first use.
#[derive(Debug)]
pub struct CudaBackend {
    /// Name of the backend, with which its devices' names begin.
    name: &'static str,
    /// Driver to use instead of the system's.
    driver: Option<Arc<dyn Driver>>,
    discovery: OnceLock<CardDiscovery>,
}

#[derive(Debug, Default)]
struct CardDiscovery {
    description: String,
    devices: Vec<Arc<dyn Device>>,
    rejected: Vec<Rejected>,
}

impl Default for CudaBackend {
    fn default() -> Self {
        CudaBackend {
            name: "cuda",
            driver: None,
            discovery: OnceLock::new(),
        }
    }
}

impl CudaBackend {
    /// Creates a backend called `name` on another driver than the system's. It is used only by
    /// name. For tests.
    pub fn with_driver(name: &'static str, driver: Arc<dyn Driver>) -> Self {
        CudaBackend {
            name,
            driver: Some(driver),
            discovery: OnceLock::new(),
        }
    }

    fn discovery(&self) -> &CardDiscovery {
        self.discovery.get_or_init(|| self.discover())
    }

    fn discover(&self) -> CardDiscovery {
        let mut found = CardDiscovery::default();
        let reject = |what: &str, why: String| Rejected {
            what: what.into(),
            why,
            named: false,
        };
        let driver = match &self.driver {
            Some(driver) => Ok(Arc::clone(driver)),
            None => crate::library::load(),
        };
        let driver = match driver {
            Ok(driver) => driver,
            Err(why) => {
                found.rejected.push(reject("NVIDIA's driver", why));
                return found;
            }
        };
        found.description = driver.description();
        for (index, info) in driver.cards().iter().enumerate() {
            let (major, minor) = (info.capability / 10, info.capability % 10);
            if info.capability < MIN_CAPABILITY {
                let why = format!(
                    "its compute capability is {major}.{minor}; kernels need {}.{}",
                    MIN_CAPABILITY / 10,
                    MIN_CAPABILITY % 10
                );
                found.rejected.push(reject(&info.name, why));
                continue;
            }
            let name = format!("{}{index}", self.name);
            let gpu = Gpu::new(name, Arc::clone(&driver), index, info.clone());
            found.devices.push(Arc::new(CudaDevice::new(gpu)));
        }
        if driver.cards().is_empty() {
            let why = "it reports no card".to_owned();
            found.rejected.push(reject("NVIDIA's driver", why));
        }
        found
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &str {
        self.name
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        &self.discovery().devices
    }

    fn features(&self) -> Vec<(String, String)> {
        let description = &self.discovery().description;
        let known = (!description.is_empty()).then(|| ("driver".to_owned(), description.clone()));
        known.into_iter().collect()
    }

    fn is_automatic(&self) -> bool {
        self.driver.is_none()
    }

    fn doubt(&self, _device: &dyn Device) -> Option<String> {
        let is_real = self.driver.is_none();
        is_real
            .then(|| "these kernels were tested by an interpreter and never ran on a card".into())
    }

    fn configure(
        &self,
        device: &Arc<dyn Device>,
        parameters: Parameters,
    ) -> Result<Arc<dyn Device>> {
        if parameters.is_empty() {
            return Ok(Arc::clone(device));
        }
        let own = device.as_any().downcast_ref::<CudaDevice>();
        let own =
            own.ok_or_else(|| Error::invalid(format!("{} is no CUDA device", device.name())))?;
        Ok(own.with_options(own.options().with(device.name(), parameters)?))
    }

    fn rejected(&self) -> Vec<Rejected> {
        self.discovery().rejected.clone()
    }
}
