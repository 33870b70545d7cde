//! Tests of fused and tiled kernels, on any adapter.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod attention_tiles;
mod before_attention;
mod codebooks;
mod matrices;

use samite_core::{Backend, Device};
use samite_wgpu::{WgpuBackend, WgpuDevice};
use std::sync::Arc;

/// Opens the first adapter anew, with `parameters`.
fn device(parameters: &str) -> Option<Arc<dyn Device>> {
    let backend = WgpuBackend::default();
    let Some(device) = backend.devices().first() else {
        samite_testing::skipped("wgpu finds no adapter, not even a software one");
        return None;
    };
    let device = backend.configure(device, parameters.parse().unwrap());
    Some(device.unwrap())
}

/// Opens a device with a planted bug: it replaces `right` with `wrong` in its kernels.
fn mistaken(parameters: &str, right: &'static str, wrong: &'static str) -> Option<Arc<dyn Device>> {
    let device = device(parameters)?;
    own(&device).replace_shader_text(right, wrong);
    Some(device)
}

fn own(device: &Arc<dyn Device>) -> &WgpuDevice {
    device.as_any().downcast_ref::<WgpuDevice>().unwrap()
}
