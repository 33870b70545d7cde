//! The system's GPU adapters, and the selection of those that samite offers.

use crate::device::WgpuDevice;
use crate::gpu::Gpu;
use crate::waiting::{IN_BROWSER, ready};
use samite_core::{Backend, Device, DeviceKind, Error, Parameters, Rejected, Result};
use std::sync::{Arc, OnceLock};

/// One device per adapter. Adapters are enumerated on first use, because loading the drivers takes
/// a moment.
#[derive(Default)]
pub struct WgpuBackend(OnceLock<AdapterDiscovery>);

struct AdapterDiscovery {
    devices: Vec<Arc<dyn Device>>,
    rejected: Vec<Rejected>,
}

/// Graphics APIs to query, in order of preference.
const INTERFACES: [wgpu::Backend; 4] = [
    wgpu::Backend::Vulkan,
    wgpu::Backend::Metal,
    wgpu::Backend::Dx12,
    wgpu::Backend::BrowserWebGpu,
];

/// Error message if no adapter was found.
const NONE: &str = if IN_BROWSER {
    "this browser has no WebGPU or no adapter for it, or cannot suspend a program that waits (promise integration of WebAssembly)"
} else {
    "no driver offers one: there is no GPU, or no Vulkan loader or driver (Debian: libvulkan1 and mesa-vulkan-drivers)"
};

impl WgpuBackend {
    fn discovery(&self) -> &AdapterDiscovery {
        self.0.get_or_init(find)
    }
}

fn find() -> AdapterDiscovery {
    let reject = |what: &str, why: String| Rejected {
        what: what.into(),
        why,
        named: false,
    };
    let interfaces = INTERFACES.into_iter().map(wgpu::Backends::from).collect();
    if !wgpu::Instance::enabled_backend_features().intersects(interfaces) {
        let why = "this system has none of Vulkan, Metal and DirectX 12".to_owned();
        return AdapterDiscovery {
            devices: Vec::new(),
            rejected: vec![reject("GPU adapters", why)],
        };
    }
    let mut description = wgpu::InstanceDescriptor::new_without_display_handle();
    description.backends = interfaces;
    description.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(description);
    let mut adapters = ready(instance.enumerate_adapters(interfaces)).unwrap_or_default();
    let rank = |adapter: &wgpu::Adapter| {
        let interface = adapter.get_info().backend;
        INTERFACES.iter().position(|&known| known == interface)
    };
    adapters.sort_by_key(rank);
    let mut devices: Vec<Arc<dyn Device>> = Vec::new();
    let mut rejected = Vec::new();
    for adapter in adapters {
        let info = adapter.get_info();
        let id = physical_id(&info);
        let twin = id.as_ref().and_then(|id| {
            let same = |device: &&Arc<dyn Device>| device.physical_id().as_ref() == Some(id);
            devices.iter().find(same)
        });
        if let Some(twin) = twin {
            let why = format!("it is {} over another interface", twin.name());
            rejected.push(reject(&format!("{} ({})", info.name, info.backend), why));
            continue;
        }
        let name = format!("wgpu{}", devices.len());
        match Gpu::new(&name, adapter) {
            Ok(gpu) => devices.push(Arc::new(WgpuDevice::new(gpu, id))),
            Err(why) => rejected.push(reject(&info.name, why)),
        }
    }
    if devices.is_empty() && rejected.is_empty() {
        rejected.push(reject("GPU adapters", NONE.to_owned()));
    }
    AdapterDiscovery { devices, rejected }
}

/// Returns an identifier of the card that is the same for every graphics API: its bus address, if
/// the driver reports one.
fn physical_id(info: &wgpu::AdapterInfo) -> Option<String> {
    let address = &info.device_pci_bus_id;
    (!address.is_empty()).then(|| address.to_ascii_lowercase())
}

impl Backend for WgpuBackend {
    fn name(&self) -> &str {
        "wgpu"
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        &self.discovery().devices
    }

    fn doubt(&self, device: &dyn Device) -> Option<String> {
        let device = device.as_any().downcast_ref::<WgpuDevice>()?;
        let why = match device.kind() {
            _ if device.is_software() => "it is a program on the host's processors, not a GPU",
            DeviceKind::IntegratedGpu => {
                "it shares the host's memory, and none like it was ever tried"
            }
            _ => return None,
        };
        Some(why.to_owned())
    }

    fn configure(
        &self,
        device: &Arc<dyn Device>,
        parameters: Parameters,
    ) -> Result<Arc<dyn Device>> {
        if parameters.is_empty() {
            return Ok(Arc::clone(device));
        }
        let own = device.as_any().downcast_ref::<WgpuDevice>();
        let own =
            own.ok_or_else(|| Error::invalid(format!("{} is no device of wgpu's", device.name())))?;
        Ok(own.with_options(own.options().with(device.name(), parameters)?))
    }

    fn rejected(&self) -> Vec<Rejected> {
        self.discovery().rejected.clone()
    }
}
