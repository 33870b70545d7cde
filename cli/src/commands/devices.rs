//! `samite devices`: lists devices, their features, and devices that cannot be used.

use crate::args::RegistryArgs;
use crate::failure::CommandResult;
use crate::log;
use crate::setup::BackendSetup;
use clap::Args;
use samite::sched::explain::human_bytes;
use samite::{Device, Rejected};
use serde_json::{Map, json};
use std::io::Write;

/// Flags of `samite devices`.
#[derive(Debug, Args)]
#[command(
    after_help = "With -v, also prints features, capabilities, and the devices and \
plugins that were found but cannot be used.

Examples:
  samite devices
  samite devices -v
  samite devices --disable blas --plugin ./libggml-vulkan.so"
)]
pub struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    backends: RegistryArgs,
}

pub fn run(args: DevicesArgs) -> CommandResult {
    let registry = BackendSetup::new(&args.backends).registry();
    let automatic: Vec<_> = registry
        .automatic()
        .iter()
        .map(|device| device.name().to_owned())
        .collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        let backends: Vec<_> = registry
            .backends()
            .iter()
            .map(|backend| {
                let devices: Vec<_> = backend
                    .devices()
                    .iter()
                    .map(|device| {
                        json!({
                            "name": device.name(),
                            "description": device.description(),
                            "kind": device.kind(),
                            "physical_id": device.physical_id(),
                            "memory": device.memory(),
                            "capabilities": device.capabilities(),
                            "doubt": backend.doubt(&**device),
                            "automatic": automatic.iter().any(|name| name == device.name()),
                        })
                    })
                    .collect();
                let features = backend.features().into_iter();
                let features: Map<_, _> = features.map(|(k, v)| (k, v.into())).collect();
                let rejected = backend.rejected().into_iter();
                let rejected: Vec<_> = rejected
                    .map(|r| json!({ "what": r.what, "why": r.why }))
                    .collect();
                json!({
                    "name": backend.name(),
                    "devices": devices,
                    "features": features,
                    "rejected": rejected,
                })
            })
            .collect();
        writeln!(
            out,
            "{:#}",
            json!({ "backends": backends, "disabled": registry.disabled() })
        )?;
        return Ok(());
    }
    writeln!(
        out,
        "  {:<12} {:<6} {:>10} {:>10}  description",
        "device", "kind", "free", "total"
    )?;
    for device in registry.devices() {
        let memory = device.memory();
        let bytes = |bytes: Option<usize>| bytes.map_or_else(|| "-".to_owned(), human_bytes);
        let mark = if automatic.iter().any(|name| name == device.name()) {
            '*'
        } else {
            ' '
        };
        writeln!(
            out,
            "{mark} {:<12} {:<6} {:>10} {:>10}  {}",
            device.name(),
            kind(&**device),
            bytes(memory.free),
            bytes(memory.total),
            device.description()
        )?;
    }
    writeln!(out, "* used when no device is named")?;
    if cfg!(not(feature = "wgpu")) {
        writeln!(
            out,
            "this build uses only NVIDIA's GPUs: build with --features wgpu, or add ggml's \
             plugins\nwith --plugin"
        )?;
    }
    for backend in registry.backends() {
        for device in backend.devices() {
            if let Some(doubt) = backend.doubt(&**device) {
                writeln!(
                    out,
                    "{} is used only when it is named: {doubt}",
                    device.name()
                )?;
            }
        }
    }
    if log::is_verbose() {
        for backend in registry.backends() {
            writeln!(out, "\nbackend {}", backend.name())?;
            for (name, value) in backend.features() {
                writeln!(out, "    {name}: {value}")?;
            }
            for device in backend.devices() {
                let c = device.capabilities();
                let named = [
                    (c.asynchronous, "asynchronous"),
                    (c.events, "events"),
                    (c.host_buffer, "host buffers"),
                    (c.import_host, "imports host memory"),
                ];
                let list: Vec<_> = named
                    .iter()
                    .filter(|(has, _)| *has)
                    .map(|(_, name)| *name)
                    .collect();
                writeln!(
                    out,
                    "    {}: memory '{}'; {}",
                    device.name(),
                    device.buffer_type().name(),
                    if list.is_empty() {
                        "synchronous".to_owned()
                    } else {
                        list.join(", ")
                    }
                )?;
            }
            for Rejected { what, why, .. } in backend.rejected() {
                writeln!(out, "    not usable: {what}: {why}")?;
            }
        }
        for name in registry.disabled() {
            writeln!(out, "\nbackend {name}\n    disabled")?;
        }
    }
    Ok(())
}

/// Returns the kind of a device in one word. The reference device reports itself as a GPU, but only
/// tests use it.
fn kind(device: &dyn Device) -> String {
    if device.name().starts_with("reference") {
        "tests".to_owned()
    } else {
        device.kind().to_string()
    }
}
