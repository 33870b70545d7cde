//! Describes devices and memory in llama-server's words, for programs that start it and read them.

use crate::cpu_args::CpuArgs;
use crate::failure::CommandResult;
use crate::setup::DeviceSetup;
use crate::shown::one_line;
use samite::llm::{Context, Model};
use samite::registry::Registry;
use samite::{Device, DeviceKind};
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use tracing::Level;

const MIB: f64 = (1 << 20) as f64;

/// Longest feature in the line of the system, in bytes.
const MAX_FEATURE: usize = 40;

/// Prints the GPUs, one per line.
pub fn list_devices(setup: &DeviceSetup) -> CommandResult {
    let gpus = setup.gpus(&setup.backends.registry())?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "Available devices:")?;
    for gpu in &gpus {
        writeln!(out, "  {}", device_line(&**gpu))?;
    }
    if gpus.is_empty() {
        writeln!(out, "  (none)")?;
    }
    Ok(())
}

fn device_line(device: &dyn Device) -> String {
    let memory = device.memory();
    let mib = |bytes: Option<usize>| bytes.unwrap_or(0) >> 20;
    let description = device.description();
    format!(
        "{}: {} ({} MiB, {} MiB free)",
        device.name(),
        one_line(&description),
        mib(memory.total),
        mib(memory.free)
    )
}

/// Logs the GPUs and the system before a model is loaded. Readers stop at the line of the system,
/// so it comes last.
pub fn system(setup: &DeviceSetup, cpu: &CpuArgs) -> CommandResult {
    // Finding devices takes time.
    if !tracing::enabled!(Level::INFO) {
        return Ok(());
    }
    let registry = setup.backends.registry();
    for (index, gpu) in setup.gpus(&registry)?.iter().enumerate() {
        for line in gpu_lines(index, &**gpu) {
            tracing::info!("{line}");
        }
    }
    tracing::info!("{}", system_line(cpu.counts(), &registry));
    Ok(())
}

fn gpu_lines(index: usize, gpu: &dyn Device) -> [String; 2] {
    let description = gpu.description();
    let description = one_line(&description);
    let id = gpu.physical_id();
    [
        format!("Device {index}: {description}"),
        format!(
            "using device {} ({description}) ({}) - {} MiB free",
            gpu.name(),
            id.as_deref().unwrap_or("unknown id"),
            gpu.memory().free.unwrap_or(0) >> 20
        ),
    ]
}

fn system_line([single, batch]: [usize; 2], registry: &Registry) -> String {
    let allowed = samite::registry::allowed_threads();
    let mut line =
        format!("system_info: n_threads = {single} (n_threads_batch = {batch}) / {allowed}");
    for backend in registry.backends() {
        // Longer values explain what is missing.
        let features = backend.features().into_iter();
        for (name, value) in features.filter(|(_, value)| value.len() <= MAX_FEATURE) {
            line.push_str(&format!(" | {} : {name} = {value}", backend.name()));
        }
    }
    line
}

/// Memory of a model and its contexts, logged by kind of memory.
pub struct MemoryLog {
    /// Layers on GPUs, and all layers, each with the output as one more.
    layers: (usize, usize),
    /// GPU of each memory.
    gpus: BTreeMap<String, String>,
    /// Bytes of weights, caches and intermediate results by memory.
    bytes: BTreeMap<String, [usize; 3]>,
}

impl MemoryLog {
    /// Creates a log without contexts.
    pub fn new(model: &Arc<Model>) -> Self {
        let devices = model.devices();
        let is_gpu: Vec<_> = devices.iter().map(|device| is_gpu(&**device)).collect();
        let mut gpus = BTreeMap::new();
        for device in devices.iter().filter(|device| self::is_gpu(&***device)) {
            let name = device.name();
            gpus.insert(device.buffer_type().name().to_owned(), name.to_owned());
            if let Some(host) = device.host_buffer_type() {
                gpus.insert(host.name().to_owned(), format!("{name}_Host"));
            }
        }
        let placed = model.weights().devices();
        MemoryLog {
            layers: offloaded(placed, &is_gpu, model.spec().n_layer()),
            gpus,
            bytes: BTreeMap::new(),
        }
    }

    /// Adds a context and the weights of its model.
    pub fn add_model(&mut self, context: &Context) {
        self.add(context, true);
    }

    /// Adds a context whose model's weights are added already, or nothing else is.
    pub fn add_context(&mut self, context: &Context) {
        self.add(context, self.bytes.is_empty());
    }

    fn add(&mut self, context: &Context, has_weights: bool) {
        for used in context.memory() {
            let name = match self.gpus.get(&used.memory) {
                Some(name) => name.clone(),
                None => host_name(&used.memory),
            };
            let weights = if has_weights { used.weights } else { 0 };
            let bytes = self.bytes.entry(name).or_default();
            for (sum, more) in bytes.iter_mut().zip([weights, used.kv, used.compute]) {
                *sum += more;
            }
        }
    }

    /// Logs the layers on GPUs and the memory.
    pub fn print(&self) {
        for line in self.lines() {
            tracing::info!("{line}");
        }
    }

    fn lines(&self) -> Vec<String> {
        let (layers, all) = self.layers;
        let mut lines = vec![format!("offloaded {layers}/{all} layers to GPU")];
        for (memory, bytes) in &self.bytes {
            for (purpose, &bytes) in ["model", "KV", "compute"].iter().zip(bytes) {
                if bytes > 0 {
                    let mib = bytes as f64 / MIB;
                    lines.push(format!("{memory} {purpose} buffer size = {mib:8.2} MiB"));
                }
            }
        }
        lines
    }
}

fn is_gpu(device: &dyn Device) -> bool {
    !matches!(device.kind(), DeviceKind::Cpu | DeviceKind::Accelerator)
}

/// Returns a name for memory of the host. Readers take all names that begin with `CPU` for it.
fn host_name(memory: &str) -> String {
    match memory.strip_prefix("cpu-").unwrap_or(memory) {
        "host" => "CPU".to_owned(),
        other => format!("CPU_{}", other.replace(' ', "_")),
    }
}

/// Counts the layers whose weights are all on GPUs, and all layers, each with the output as one
/// more. `placed` has the name of each weight and the index of its device.
fn offloaded<'a>(
    placed: impl Iterator<Item = (&'a str, usize)>,
    is_gpu: &[bool],
    n_layer: usize,
) -> (usize, usize) {
    let mut are_on_gpus: Vec<Option<bool>> = vec![None; n_layer + 1];
    for (name, device) in placed {
        let layer = match name.strip_prefix("blk.") {
            Some(rest) => rest.split('.').next().and_then(|layer| layer.parse().ok()),
            None => name.starts_with("output.").then_some(n_layer),
        };
        if let Some(layer) = layer.and_then(|layer: usize| are_on_gpus.get_mut(layer)) {
            *layer = Some(layer.unwrap_or(true) && is_gpu[device]);
        }
    }
    let on_gpus = are_on_gpus.iter().filter(|layer| **layer == Some(true));
    (on_gpus.count(), n_layer + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_count_if_all_their_weights_are_on_gpus() {
        let placed = [
            ("blk.0.attn_q.weight", 1),
            ("blk.0.ffn_up.weight", 0),
            ("blk.1.attn_q.weight", 0),
            ("blk.10.attn_q.weight", 0),
            ("output.weight", 0),
            ("output_norm.weight", 1),
            ("token_embd.weight", 1),
        ];
        let counted = |is_gpu: [bool; 2]| offloaded(placed.into_iter(), &is_gpu, 2);
        assert_eq!(counted([true, false]), (2, 3));
        assert_eq!(counted([true, true]), (3, 3));
        assert_eq!(counted([false, true]), (0, 3));
    }

    #[test]
    fn memory_lines_name_the_host_cpu() {
        let bytes = [
            ("host", [1 << 20, 3 << 19, 0]),
            ("cpu-packed", [1 << 30, 0, 0]),
            ("RPC0", [0, 0, 1 << 19]),
        ];
        let name = |memory: &str| match memory {
            "RPC0" => memory.to_owned(),
            memory => host_name(memory),
        };
        let bytes = bytes.map(|(memory, bytes)| (name(memory), bytes));
        let log = MemoryLog {
            layers: (0, 31),
            gpus: BTreeMap::new(),
            bytes: bytes.into(),
        };
        let expected = [
            "offloaded 0/31 layers to GPU",
            "CPU model buffer size =     1.00 MiB",
            "CPU KV buffer size =     1.50 MiB",
            "CPU_packed model buffer size =  1024.00 MiB",
            "RPC0 compute buffer size =     0.50 MiB",
        ];
        assert_eq!(log.lines(), expected);
    }
}
