//! Flags that several commands share.

use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
#[cfg(feature = "hub")]
use crate::hub::HubArgs;
use crate::model_name::PositionalArg;
use crate::progress;
use crate::ranks::{self, Neighbours, RankArgs};
use crate::shown::say;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use indicatif::ProgressBar;
use samite::forecast::{Cluster, plan_only};
use samite::gguf::{GgufFile, LoadMode};
use samite::llm::{
    Adapter, Context, ContextOptions, ContextPlan, Error, FitOptions, Model, ModelOptions,
    PlacementRule, ScaledAdapter,
};
use samite::registry::{
    BuiltIn, DISABLE_VARIABLE, GgmlOptions, MetaDevice, MetaOptions, Pool, Prediction,
    ProcessGroup, Registry,
};
#[cfg(feature = "remote")]
use samite::registry::{RemoteBackend, RemoteOptions};
use samite::sched::compare::in_order;
use samite::sched::{DeviceSet, Fallback};
use samite::{CancelToken, DType, Device, DeviceKind};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
#[cfg(feature = "remote")]
use std::time::Duration;

/// Number of CPU threads.
#[derive(Clone, Copy, Debug, Args)]
pub struct ThreadArgs {
    /// Number of CPU threads [default: all available]
    #[arg(short = 't', long, value_name = "N", value_parser = thread_count)]
    threads: Option<usize>,
}

impl ThreadArgs {
    /// Returns the number of threads, if the user set it.
    pub fn count(self) -> Option<usize> {
        self.threads
    }
}

/// Flags that select backends.
#[derive(Clone, Debug, Default, Args)]
pub struct RegistryArgs {
    /// Backends to disable: `blas`, or plugins such as `vulkan`; several separated by `,` [also:
    /// SAMITE_DISABLE]
    #[arg(long, value_name = "NAME", help_heading = "Backends")]
    disable: Vec<String>,

    /// ggml plugin to load, in addition to those of SAMITE_BACKEND_PATH
    #[arg(long, value_name = "FILE", help_heading = "Backends")]
    plugin: Vec<PathBuf>,

    /// RPC servers whose devices are used as RPC0, RPC1 and so on: addresses such as
    /// 192.168.0.7:50052, several separated by `,`
    #[arg(long, value_name = "SERVERS", value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new(), help_heading = "Backends")]
    rpc: Vec<String>,

    #[cfg(feature = "remote")]
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Flags for samite's own servers.
#[cfg(feature = "remote")]
#[derive(Clone, Debug, Default, Args)]
pub struct RemoteArgs {
    /// samite servers whose devices are used as remote0, remote1 and so on: addresses that `samite
    /// remote-server` prints, several separated by `,`
    #[arg(long, value_name = "SERVERS", value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new(), help_heading = "Backends")]
    remote: Vec<String>,

    /// File with the token for these servers, a copy of the token file that the server names
    #[arg(long, value_name = "FILE", help_heading = "Backends")]
    remote_token: Option<PathBuf>,

    /// Seconds to wait for the server of a lost device to come back; the model is then reloaded and
    /// resumes
    #[arg(long, value_name = "SECONDS", default_value_t = 60, help_heading = "Backends",
        value_parser = clap::value_parser!(u32).range(0..=86400))]
    remote_wait: u32,
}

#[cfg(feature = "remote")]
impl RemoteArgs {
    fn client(&self) -> RemoteOptions {
        RemoteOptions {
            token: self.remote_token.clone(),
            ..RemoteOptions::default()
        }
    }

    /// Returns the time to wait for lost servers, or `None` if none are in use.
    pub fn wait(&self) -> Option<Duration> {
        let wait = Duration::from_secs(self.remote_wait.into());
        (!self.remote.is_empty() && !wait.is_zero()).then_some(wait)
    }

    /// Returns a server that is unreachable now, and the reason.
    pub fn unreachable(&self) -> Option<String> {
        let client = self.client();
        let mut servers = self.remote.iter();
        servers.find_map(|address| {
            let place = address.split('#').next().unwrap_or_default();
            let why = RemoteBackend::check(address, &client).err()?;
            Some(format!("{place}: {why}"))
        })
    }
}

impl RegistryArgs {
    /// Returns the built-in devices with `threads` CPU threads, and the ggml plugins that flags and
    /// environment name.
    pub fn registry(&self, threads: Option<usize>) -> Registry {
        self.registry_with(threads, None)
    }

    /// Returns the same devices with an existing pool of CPU threads.
    pub fn registry_on(&self, pool: Pool) -> Registry {
        self.registry_with(Some(pool.threads()), Some(Arc::new(pool)))
    }

    fn registry_with(&self, threads: Option<usize>, pool: Option<Arc<Pool>>) -> Registry {
        let mut options = BuiltIn::default();
        options.cpu.threads = threads;
        options.cpu.pool = pool;
        options.rpc.clone_from(&self.rpc);
        #[cfg(feature = "remote")]
        {
            options.remote.clone_from(&self.remote.remote);
            options.remote_client = self.remote.client();
        }
        options.ggml = GgmlOptions::from_environment();
        // A relative path on the command line refers to the current folder.
        let plugins = self.plugin.iter();
        let plugins = plugins.map(|path| std::path::absolute(path).unwrap_or(path.clone()));
        options.ggml.paths.splice(0..0, plugins);
        options.ggml.threads = Some(threads.unwrap_or_else(samite::registry::allowed_threads));
        options.ggml.prober = prober();
        let variable = std::env::var(DISABLE_VARIABLE).unwrap_or_default();
        for list in self.disable.iter().chain([&variable]) {
            options.disable(list);
        }
        Registry::built_in(options)
    }
}

/// Devices to share with other programs.
pub struct Lent {
    /// Devices that clients see.
    pub devices: Vec<Arc<dyn Device>>,
    /// Devices that compute what those do not support.
    pub fallbacks: Vec<Arc<dyn Device>>,
}

/// Flags that select devices.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Devices in order of preference, for example `blas,cpu`, with parameters as in
    /// `cpu:threads=4`; `auto` for the best ones (see `samite devices`) [also: -dev]
    #[arg(
        long = "device",
        visible_alias = "dev",
        value_name = "LIST",
        default_value = "auto"
    )]
    list: String,

    /// Use only the named devices, without the CPU as a fallback for operations that a GPU does not
    /// support
    #[arg(long)]
    only: bool,

    #[command(flatten)]
    backends: RegistryArgs,
}

impl DeviceArgs {
    /// Returns the selected devices. The CPU device uses the threads of `pool`.
    pub fn devices(&self, pool: Pool) -> CommandResult<Vec<Arc<dyn Device>>> {
        Ok(self.backends.registry_on(pool).parse(&self.list)?)
    }

    /// Returns the selected devices for other programs, which see them separately. Of automatically
    /// selected devices, the CPU is included only if there is no other. The CPU is the fallback for
    /// what they do not support.
    pub fn lent(&self, pool: Pool) -> CommandResult<Lent> {
        let registry = self.backends.registry_on(pool);
        let mut devices = registry.parse(&self.list)?;
        if self.list.trim().eq_ignore_ascii_case("auto") && devices.len() > 1 {
            devices.retain(|device| device.kind() != DeviceKind::Cpu);
        }
        let fallbacks = if self.only {
            Vec::new()
        } else {
            registry.fallbacks()?
        };
        Ok(Lent { devices, fallbacks })
    }

    /// Returns the selected devices for a model. If the list ends with a device that is not a CPU,
    /// the CPU is added at the end, because other devices may not support every operation.
    fn devices_for_model(&self, cpu: &CpuArgs) -> CommandResult<Vec<Arc<dyn Device>>> {
        let registry = self.backends.registry_on(cpu.pool()?);
        self.with_host(&registry, registry.parse(&self.list)?)
    }

    /// Returns one device that divides tensors over the selected ones, followed by a CPU with one
    /// thread for what is not divided, such as the embedding.
    fn divided(&self, cpu: &CpuArgs, options: MetaOptions) -> CommandResult<Vec<Arc<dyn Device>>> {
        let registry = self.backends.registry_on(cpu.pool()?);
        let members = registry.parse(&self.list)?;
        if members.len() < 2 {
            return Err(CommandError::usage(
                "--split-mode tensor: name two devices or more with --device, such as cpu:cores=0-3,cpu:cores=4-7",
            ));
        }
        self.with_thread(&registry, MetaDevice::new(members, options)?)
    }

    /// Returns one device that divides tensors over processes, followed by a CPU with one thread as
    /// in [`divided`](Self::divided).
    fn divided_among(
        &self,
        cpu: &CpuArgs,
        group: &ProcessGroup,
        options: MetaOptions,
    ) -> CommandResult<Vec<Arc<dyn Device>>> {
        let neighbours = Neighbours::ask(group)?;
        let mut cpu = cpu.clone();
        cpu.share(neighbours.sharing);
        let registry = self.backends.registry_on(cpu.pool()?);
        let mut named = registry.parse(&self.list)?;
        if self.list.trim().eq_ignore_ascii_case("auto") {
            named.retain(|device| device.kind() != DeviceKind::Accelerator);
            named.truncate(1);
        }
        let own = match named.len() {
            1 => Some(&named[0]),
            count if count == neighbours.all => named.get(neighbours.before),
            _ => None,
        };
        let own = own.ok_or_else(|| {
            CommandError::usage(format_args!(
                "--device: {} for {} on this machine: name one for all, or one for each",
                samite::counted(named.len(), "device"),
                match neighbours.all {
                    1 => "1 process".to_owned(),
                    all => format!("{all} processes"),
                }
            ))
        })?;
        let device = MetaDevice::among(own, group.clone(), &neighbours.host, options)?;
        self.with_thread(&registry, device)
    }

    fn with_thread(
        &self,
        registry: &Registry,
        device: Arc<MetaDevice>,
    ) -> CommandResult<Vec<Arc<dyn Device>>> {
        let mut devices: Vec<Arc<dyn Device>> = vec![device];
        if !self.only {
            devices.push(registry.init_by_name("cpu", "threads=1".parse()?)?);
        }
        Ok(devices)
    }

    /// Returns whether the CPU was added after the devices that the user listed.
    fn adds_cpu(&self, devices: &DeviceSet) -> bool {
        let names = self.list.split(',');
        let is_cpu = |name: &str| {
            name.split(':')
                .next()
                .is_some_and(|n| n.trim().eq_ignore_ascii_case("cpu"))
        };
        let last = devices.iter().last();
        !self.list.eq_ignore_ascii_case("auto")
            && !names.clone().any(is_cpu)
            && last.is_some_and(|device| device.name() == "cpu")
    }

    /// Returns two devices, each followed by the CPU as for a model.
    fn pair(&self, cpu: &CpuArgs) -> CommandResult<[Vec<Arc<dyn Device>>; 2]> {
        let registry = self.backends.registry_on(cpu.pool()?);
        let named = match &*self.list {
            "auto" => Vec::new(),
            list => registry.parse(list)?,
        };
        let [first, second] = <[_; 2]>::try_from(named).map_err(|_| {
            CommandError::usage("--device: name two devices, such as cpu,reference")
        })?;
        Ok([
            self.with_host(&registry, vec![first])?,
            self.with_host(&registry, vec![second])?,
        ])
    }

    fn with_host(
        &self,
        registry: &Registry,
        mut devices: Vec<Arc<dyn Device>>,
    ) -> CommandResult<Vec<Arc<dyn Device>>> {
        if devices
            .last()
            .is_some_and(|device| device.kind() != DeviceKind::Cpu)
            && !self.only
            && devices.iter().all(|device| device.name() != "cpu")
        {
            devices.push(Arc::clone(registry.device("cpu")?));
        }
        Ok(devices)
    }
}

/// Returns the command that tries a plugin whose path is appended: `samite probe-plugin`.
fn prober() -> Option<Vec<std::ffi::OsString>> {
    let program = std::env::current_exe().ok()?;
    Some(vec![program.into(), "probe-plugin".into()])
}

/// Parses a number of CPU threads.
pub fn thread_count(text: &str) -> Result<usize, String> {
    number(text, 1, 1024)
}

/// Parses a capacity in tokens.
fn size(text: &str) -> Result<usize, String> {
    number(text, 1, MAX_TOKENS)
}

/// Parses a number of tokens, which may be 0.
pub fn token_count(text: &str) -> Result<usize, String> {
    number(text, 0, MAX_TOKENS)
}

/// Parses a number of sequences.
pub fn sequence_count(text: &str) -> Result<usize, String> {
    number(text, 1, 4096)
}

/// Parses a number. `all`, or llama.cpp's -1, means as many as there are.
pub fn number_or_all(text: &str) -> Result<usize, String> {
    match text {
        "all" | "-1" => Ok(usize::MAX),
        text => text
            .parse()
            .map_err(|_| "must be a number, or 'all'".to_owned()),
    }
}

/// Name of the built-in model in messages.
pub const EMBEDDED: &str = "the stories model";

/// Positions are 32-bit numbers.
const MAX_TOKENS: usize = i32::MAX as usize;

const MAX_LAYERS: i64 = 1024;

pub fn number(text: &str, least: usize, most: usize) -> Result<usize, String> {
    match text.trim().parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("must be a number from {least} to {most}")),
    }
}

/// Flags for adapters of a model.
#[derive(Clone, Debug, Args)]
pub struct AdapterArgs {
    /// LoRA adapters to apply: GGUF files, several separated by `,`
    #[arg(long, value_name = "FILE", value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new())]
    lora: Vec<String>,

    /// LoRA adapters with a scale other than 1, which may be negative: `FILE:SCALE`, several
    /// separated by `,`
    #[arg(long, value_name = "FILE:SCALE", value_delimiter = ',', value_parser = scaled_file)]
    lora_scaled: Vec<(PathBuf, f32)>,
}

impl AdapterArgs {
    /// Returns the files and their scales.
    pub fn files(&self) -> Vec<(PathBuf, f32)> {
        let plain = self.lora.iter().map(|file| (file.into(), 1.0));
        plain.chain(self.lora_scaled.iter().cloned()).collect()
    }
}

/// Flags for control vectors.
#[derive(Clone, Debug, Args)]
pub struct ControlArgs {
    /// Control vectors to add to the outputs of layers: GGUF files, several separated by `,`
    #[arg(long, value_name = "FILE", value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new(), group = "vectors")]
    control_vector: Vec<String>,

    /// Control vectors with a scale other than 1, which may be negative: `FILE:SCALE`, several
    /// separated by `,`
    #[arg(long, value_name = "FILE:SCALE", value_delimiter = ',', value_parser = scaled_file,
        group = "vectors")]
    control_vector_scaled: Vec<(PathBuf, f32)>,

    /// Layers that control vectors change, from START to END inclusive; never the first layer,
    /// number 0 [default: all]
    #[arg(long, value_names = ["START", "END"], num_args = 2, requires = "vectors")]
    control_vector_layer_range: Option<Vec<usize>>,
}

impl ControlArgs {
    /// Returns the files and their scales.
    fn files(&self) -> impl Iterator<Item = (&Path, f32)> {
        let plain = self
            .control_vector
            .iter()
            .map(|file| (Path::new(file), 1.0));
        let scaled = self.control_vector_scaled.iter();
        plain.chain(scaled.map(|(file, share)| (file.as_path(), *share)))
    }

    /// Returns the range of layers.
    fn layers(&self) -> RangeInclusive<usize> {
        match self.control_vector_layer_range.as_deref() {
            Some(&[start, end]) => start..=end,
            _ => 0..=usize::MAX,
        }
    }
}

/// Parses a file with a scale.
fn scaled_file(text: &str) -> Result<(PathBuf, f32), String> {
    match text.rsplit_once(':') {
        Some((file, scale)) if !file.is_empty() => match scale.parse::<f32>() {
            Ok(number) if ScaledAdapter::is_share(number) => Ok((file.into(), number)),
            _ => {
                let most = ScaledAdapter::MAX_SHARE;
                Err(format!("'{scale}' is not a number from -{most} to {most}"))
            }
        },
        _ => Err("must be a file and a number, such as adapter.gguf:0.5".to_owned()),
    }
}

/// Flags that select a model, its placement and its options.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// GGUF file; of a split model, any part [default: a small built-in model that generates
    /// stories]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,

    #[cfg(feature = "hub")]
    #[command(flatten)]
    hub: HubArgs,

    #[command(flatten)]
    adapters: AdapterArgs,

    #[command(flatten)]
    control: ControlArgs,

    #[command(flatten)]
    devices: DeviceArgs,

    /// Placement of model parts on the devices in use: `layers=0-3:cpu`, `*_exps*:cpu`,
    /// `output:blas`; several separated by `;`
    #[arg(long, value_name = "RULES", help_heading = "Placement",
        value_parser = NonEmptyStringValueParser::new())]
    place: Vec<String>,

    /// Place only the last N layers, including the output, on devices other than the last one
    /// [also: -ngl]
    #[arg(
        long = "ngl",
        visible_alias = "n-gpu-layers",
        value_name = "N|all",
        help_heading = "Placement",
        value_parser = number_or_all,
        allow_negative_numbers = true
    )]
    ngl: Option<usize>,

    /// Place tensors whose names match a regular expression on a device: `expression=device,…`
    /// [also: -ot]
    #[arg(
        long = "override-tensor",
        value_name = "LIST",
        help_heading = "Placement"
    )]
    override_tensor: Vec<String>,

    /// Keep all expert weights on the CPU [also: -cmoe]
    #[arg(long, help_heading = "Placement")]
    cpu_moe: bool,

    /// Keep the expert weights of the first N layers on the CPU [also: -ncmoe]
    #[arg(
        long,
        value_name = "N",
        help_heading = "Placement",
        value_parser = clap::value_parser!(u16).range(..=MAX_LAYERS)
    )]
    n_cpu_moe: Option<u16>,

    /// Split a model across devices by whole layers; by tensors, so that all devices named by
    /// --device compute each layer together; or not at all, so that the first device has everything
    /// [also: -sm]
    #[arg(long, value_enum, default_value_t = SplitMode::Layer, value_name = "MODE",
        help_heading = "Placement")]
    split_mode: SplitMode,

    /// Split tensors even if a single device is predicted to be faster
    #[arg(long, help_heading = "Placement")]
    split_anyway: bool,

    /// Proportions for splitting layers across the devices before the last one, or tensors across
    /// all [also: -ts]
    #[arg(long = "tensor-split", value_name = "LIST", help_heading = "Placement")]
    tensor_split: Option<String>,

    #[command(flatten)]
    ranks: RankArgs,

    /// Fit layers to the free memory of the devices before the last one, unless other flags place
    /// layers [also: -fit]
    #[arg(long, value_enum, default_value_t = Switch::On, help_heading = "Placement")]
    fit: Switch,

    /// MiB to leave free on each device when fitting layers [also: -fitt]
    #[arg(long, value_name = "MIB", default_value = "512", help_heading = "Placement",
        value_parser = clap::value_parser!(u32))]
    fit_target: u32,

    /// Action for operations that run on a slower device because a faster one refuses them
    #[arg(long, value_enum, default_value_t = FallbackArg::Warn, help_heading = "Placement")]
    fallback: FallbackArg,

    /// Method of loading the file. A file that is read causes an error at worst; if a mapped file
    /// is shortened, or its disk goes away, the system kills the program (SIGBUS)
    #[arg(long, value_enum, default_value_t = LoadArg::Read, value_name = "MODE",
        help_heading = "Loading")]
    load_mode: LoadArg,

    /// Same as `--load-mode mmap`: weights that need no packing stay in the file, which must not be
    /// shortened while in use
    #[arg(long, overrides_with_all = ["load_mode", "no_mmap"], help_heading = "Loading")]
    mmap: bool,

    /// Same as `--load-mode read` (default)
    #[arg(long, overrides_with_all = ["load_mode", "mmap"], help_heading = "Loading")]
    no_mmap: bool,

    /// Lock the weights in host memory, packed or mapped, so that they are never paged out; the
    /// system limits how much (see `ulimit -l`)
    #[arg(long, help_heading = "Loading")]
    mlock: bool,

    /// Keep weights in the file's layout instead of the device's own, which computes faster [also:
    /// -nr]
    #[arg(long)]
    no_repack: bool,

    /// Context size in tokens; 0 for the model's own, as far as memory allows [default: 0]
    #[arg(short = 'c', long, value_name = "N", value_parser = token_count)]
    ctx_size: Option<usize>,

    /// Type of the KV cache: f16, f32, bf16, q8_0, …; or two types, for keys and values: `q8_0,f16`
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    kv: String,

    /// Type of cached keys; overrides --kv [also: -ctk]
    #[arg(long, value_name = "TYPE")]
    cache_type_k: Option<String>,

    /// Type of cached values; overrides --kv [also: -ctv]
    #[arg(long, value_name = "TYPE")]
    cache_type_v: Option<String>,

    /// Maximum number of tokens computed at once [also: -ub]
    #[arg(long = "ubatch-size", value_name = "N", default_value = "512", value_parser = size)]
    pub ubatch_size: usize,

    /// Compute attention in several operations instead of one
    #[arg(long)]
    no_flash: bool,

    /// Keep all tokens of the context in sliding-window layers, instead of only those in the
    /// window: uses more memory, but the context can be rewound to any point
    #[arg(long)]
    swa_full: bool,

    /// Keep matrix products of long prompts on the CPU if their weights are there, even if a GPU
    /// could compute them
    #[arg(long, alias = "nopo")]
    no_op_offload: bool,

    /// Number of copies of inputs and of tensors passed between devices, so that work on several
    /// asynchronous devices overlaps
    #[arg(long, value_name = "N", default_value = "1",
        value_parser = clap::value_parser!(u8).range(1..=16))]
    copies: u8,

    /// True if another model or context needs memory on the same devices.
    #[arg(skip)]
    shares_memory: bool,
}

/// `--split-mode`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SplitMode {
    /// Whole layers
    Layer,
    /// Tensors: every device has a part of each layer
    Tensor,
    /// No split: the first device has everything
    None,
}

/// A flag that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    /// Enable
    On,
    /// Disable
    Off,
}

/// `--fallback`
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum FallbackArg {
    /// Continue silently
    Allow,
    /// Print a warning
    Warn,
    /// Fail
    Deny,
}

/// `--load-mode`
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum LoadArg {
    /// Read the file
    Read,
    /// Read the file past the system's page cache, whose contents stay; where the system refuses,
    /// as `read` with a warning
    Direct,
    /// Map the file: shared with other processes, and may be larger than memory
    Mmap,
    /// Same as `mmap` with --mlock
    Mlock,
}

impl ModelArgs {
    /// Servers of samite's own.
    #[cfg(feature = "remote")]
    pub fn remote(&self) -> &RemoteArgs {
        &self.devices.backends.remote
    }

    /// Returns whether the CPU was added after the devices that the user listed.
    pub fn adds_cpu(&self, devices: &DeviceSet) -> bool {
        self.devices.adds_cpu(devices)
    }

    fn rules(&self) -> CommandResult<Vec<PlacementRule>> {
        let mut rules = Vec::new();
        rules.extend(self.ngl.map(PlacementRule::LastLayers));
        if let (Some(split), false) = (&self.tensor_split, self.splits_tensors()) {
            rules.push(PlacementRule::parse_split(split).map_err(CommandError::usage)?);
        }
        for text in self.experts_on_cpu()?.iter().chain(&self.override_tensor) {
            rules.extend(PlacementRule::parse_overrides(text).map_err(CommandError::usage)?);
        }
        for text in &self.place {
            rules.extend(PlacementRule::parse_all(text).map_err(CommandError::usage)?);
        }
        Ok(rules)
    }

    /// Translates `--cpu-moe` and `--n-cpu-moe` to `--override-tensor`. Returns `None` if none of
    /// the selected layers has experts, like the first layers of many models.
    fn experts_on_cpu(&self) -> CommandResult<Option<String>> {
        let count = match self.n_cpu_moe {
            _ if self.cpu_moe => u16::MAX,
            count => count.unwrap_or(0),
        };
        if count == 0 {
            return Ok(None);
        }
        let header = self.header(self.load_mode())?;
        let layer = |name: &str| -> Option<u16> {
            let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
            let is_expert = rest.contains("_exps") || rest.contains("_chexps");
            layer.parse().ok().filter(|_| is_expert)
        };
        let layers = header.tensors().iter().filter_map(|info| layer(&info.name));
        let layers: BTreeSet<u16> = layers.filter(|&layer| layer < count).collect();
        if layers.is_empty() {
            return Ok(None);
        }
        let layers: Vec<_> = layers.iter().map(u16::to_string).collect();
        let layers = layers.join("|");
        Ok(Some(format!(
            r"^blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
        )))
    }

    fn splits_tensors(&self) -> bool {
        self.split_mode == SplitMode::Tensor
    }

    /// Connects the other processes that share the model, if there are any. Must be called before
    /// anything else.
    pub fn ranks(&self) -> CommandResult<Option<&'static ProcessGroup>> {
        self.ranks.start(self.splits_tensors())
    }

    /// Returns the devices that `--device` and `--split-mode` select.
    fn chosen_devices(&self, cpu: &CpuArgs) -> CommandResult<Vec<Arc<dyn Device>>> {
        match self.split_mode {
            SplitMode::Layer => self.devices.devices_for_model(cpu),
            SplitMode::None => {
                let mut devices = self.devices.devices_for_model(cpu)?;
                let is_first = |device: &Arc<dyn Device>| device.kind() != DeviceKind::Accelerator;
                let first = devices.iter().position(is_first).unwrap_or(0);
                // Keep the CPU at the end of the list.
                let host = devices.pop_if(|last| last.kind() == DeviceKind::Cpu);
                devices.truncate(first + 1);
                devices.extend(host);
                Ok(devices)
            }
            SplitMode::Tensor => {
                let options = self.meta_options()?;
                match ranks::group() {
                    Some(group) => self.devices.divided_among(cpu, group, options),
                    None => {
                        self.ranks.refuse()?;
                        self.devices.divided(cpu, options)
                    }
                }
            }
        }
    }

    /// Returns how `--split-mode tensor` divides tensors.
    fn meta_options(&self) -> CommandResult<MetaOptions> {
        let ratios = self.tensor_split.as_ref().map(|split| {
            match PlacementRule::parse_split(split).map_err(CommandError::usage)? {
                PlacementRule::Split(parts) => Ok(parts),
                _ => Err(CommandError::usage(
                    "--tensor-split: not a list of proportions",
                )),
            }
        });
        Ok(MetaOptions {
            ratios: ratios.transpose()?,
            deadline: self.ranks.deadline(),
            ..MetaOptions::default()
        })
    }

    /// Returns the machines of a file as devices that plan like the CPU but have no memory,
    /// arranged by `--split-mode`.
    pub fn simulated_devices(
        &self,
        cpu: &CpuArgs,
        cluster: &Cluster,
    ) -> CommandResult<Vec<Arc<dyn Device>>> {
        let registry = self.devices.backends.registry_on(cpu.pool()?);
        let like = registry.device("cpu")?;
        let host = || plan_only(like, "cpu", cluster.host.memory, None);
        let members = cluster.members.iter().map(|member| {
            let through = member.reached.as_ref().map(|(through, _)| *through);
            plan_only(like, &member.name, member.device.memory, through)
        });
        let mut devices: Vec<_> = members.collect();
        match self.split_mode {
            SplitMode::Tensor => {
                devices = vec![MetaDevice::new(devices, self.meta_options()?)?, host()];
            }
            SplitMode::None => {
                devices.truncate(1);
                devices.push(host());
            }
            SplitMode::Layer => devices.push(host()),
        }
        // A CPU of the host needs no other CPU as a fallback.
        if cluster
            .members
            .last()
            .is_some_and(|last| last.reached.is_none())
            && !self.splits_tensors()
        {
            devices.pop();
        }
        Ok(devices)
    }

    /// Works like [`load_header`](Self::load_header), on these devices.
    pub fn load_header_on(
        &self,
        devices: Vec<Arc<dyn Device>>,
        cancel: &CancelToken,
    ) -> CommandResult<Arc<Model>> {
        let options = self.model_options(devices, cancel)?;
        Ok(Model::without_weights(
            &self.header(options.load_mode)?,
            &options,
        )?)
    }

    /// Fails if dividing tensors is predicted to be slower than one device alone.
    fn check_split(&self, devices: &[Arc<dyn Device>], cancel: &CancelToken) -> CommandResult {
        if !self.splits_tensors() || self.split_anyway {
            return Ok(());
        }
        let options = self.model_options(devices.to_vec(), cancel)?;
        let model = Model::without_weights(&self.header(options.load_mode)?, &options)?;
        let context = ContextPlan::new(model, self.context_options(cancel)?)?;
        let prediction = predicted(&context.plan(1)?)?;
        match prediction.filter(Prediction::is_slower) {
            None => Ok(()),
            Some(Prediction {
                best,
                alone,
                divided,
                exchanging,
            }) => Err(CommandError::error(format_args!(
                "--split-mode tensor would be slower: {:.2} ms for a token, {:.2} of them for \
                 exchanges, instead of {:.2} on {best} alone; \
                 leave it out, or do it with --split-anyway",
                divided * 1e3,
                exchanging * 1e3,
                alone * 1e3
            ))),
        }
    }

    /// Checks that settings which must be the same are the same in all processes.
    fn compare(&self, group: &ProcessGroup, cancel: &CancelToken) -> CommandResult {
        let version = ranks::hash(env!("CARGO_PKG_VERSION"));
        group.agree("version of samite", version)?;
        let file = self.header(self.load_mode())?;
        group.agree("model", ranks::fingerprint(&file)?)?;
        let mut adapters = Vec::new();
        let plain = self.adapters.files();
        let plain = plain.iter().map(|(path, share)| (path.as_path(), *share));
        for (path, share) in plain.chain(self.control.files()) {
            let file = GgufFile::open_header(path, self.load_mode())?;
            adapters.push((ranks::fingerprint(&file)?, share));
        }
        let adapters = (adapters, self.control.layers());
        group.agree("set of adapters", ranks::hash(adapters))?;
        let ContextOptions {
            n_ctx,
            n_ubatch,
            kv_types,
            flash,
            full_windows,
            offload,
            copies,
            ..
        } = self.context_options(cancel)?;
        let context = (
            n_ctx,
            n_ubatch,
            kv_types,
            flash,
            full_windows,
            offload,
            copies,
        );
        let placement = (
            &self.place,
            self.ngl,
            (&self.override_tensor, self.cpu_moe, self.n_cpu_moe),
            &self.tensor_split,
        );
        let others = (
            self.split_anyway,
            self.fit,
            self.fit_target,
            self.devices.only,
        );
        let flags = ranks::hash((context, placement, others));
        Ok(group.agree("set of flags", flags)?)
    }

    fn header(&self, mode: LoadMode) -> CommandResult<GgufFile> {
        Ok(match self.file()? {
            Some(path) => GgufFile::open_header(path, mode)?,
            None => embedded()?,
        })
    }

    /// Returns the model's file, or `None` for the built-in model. Downloads a model given by name.
    pub fn file(&self) -> CommandResult<Option<&Path>> {
        #[cfg(feature = "hub")]
        return self.hub.path(&self.model);
        #[cfg(not(feature = "hub"))]
        Ok(self.model.as_deref())
    }

    /// Loads the model and shows a progress bar.
    pub fn load(&self, cpu: &CpuArgs, cancel: &CancelToken) -> CommandResult<Arc<Model>> {
        self.file()?;
        if let Some(group) = ranks::group() {
            self.compare(group, cancel)?;
        }
        let devices = self.chosen_devices(cpu)?;
        self.check_split(&devices, cancel)?;
        self.load_on(devices, cancel)
    }

    /// Returns the flags for one of several files. Contexts without `-c` get at most 4096 tokens,
    /// so that several models fit into memory.
    #[cfg(feature = "serve")]
    pub fn with_file(&self, path: PathBuf) -> Self {
        let mut args = self.clone();
        args.model = Some(path);
        args.shares_memory = true;
        #[cfg(feature = "hub")]
        args.hub.forget();
        args
    }

    /// Returns nine tenths of the bytes that are free now, on the host and on devices with their
    /// own memory.
    #[cfg(feature = "serve")]
    pub fn free_memory(&self, cpu: &CpuArgs) -> CommandResult<u64> {
        let devices = self.chosen_devices(cpu)?;
        let free = |device: &Arc<dyn Device>| device.memory().free.unwrap_or(0) as u64;
        let of = |kind: DeviceKind| devices.iter().filter(move |device| device.kind() == kind);
        let host = of(DeviceKind::Cpu).map(free).max().unwrap_or(0);
        let own: u64 = of(DeviceKind::Gpu).map(free).sum();
        match host + own {
            // Some systems do not report free memory.
            0 => Ok(u64::MAX),
            bytes => Ok(bytes / 10 * 9),
        }
    }

    /// Limits contexts without `-c` to 4096 tokens, because something else needs memory as well.
    #[cfg(feature = "serve")]
    pub fn share_memory(&mut self) {
        self.shares_memory = true;
    }

    /// Uses the model that a positional argument names.
    ///
    /// # Errors
    /// Returns an error if flags name another model.
    pub fn set_name(&mut self, name: &str) -> CommandResult {
        if !self.is_embedded() {
            return Err(CommandError::usage(format_args!(
                "'{}' names a model, and so do the flags: leave out one of them",
                name.escape_debug()
            )));
        }
        match PositionalArg::new(name) {
            #[cfg(feature = "hub")]
            PositionalArg::Repository(reference) => self.hub.set(reference),
            PositionalArg::File | PositionalArg::Other => self.model = Some(name.into()),
        }
        Ok(())
    }

    /// Returns whether the model is the built-in one.
    pub fn is_embedded(&self) -> bool {
        #[cfg(feature = "hub")]
        let is_named = self.hub.is_named();
        #[cfg(not(feature = "hub"))]
        let is_named = false;
        self.model.is_none() && !is_named
    }

    /// Loads the model twice, once for each of two named devices, which keep the order of
    /// operations.
    pub fn load_pair(&self, cpu: &CpuArgs, cancel: &CancelToken) -> CommandResult<[Arc<Model>; 2]> {
        let [first, second] = self.devices.pair(cpu)?;
        let load = |side: Vec<_>| self.load_on(side.iter().map(in_order).collect(), cancel);
        Ok([load(first)?, load(second)?])
    }

    fn load_on(
        &self,
        devices: Vec<Arc<dyn Device>>,
        cancel: &CancelToken,
    ) -> CommandResult<Arc<Model>> {
        let mut options = self.model_options(devices, cancel)?;
        let file = self.file()?;
        let bar = progress::bytes("loading");
        let shared = ProgressBar::clone(&bar);
        options.progress = Some(Arc::new(move |done, total| {
            shared.set_length(total);
            shared.set_position(done);
        }));
        let model = match file {
            Some(path) => Model::load(path, &options),
            None => embedded().and_then(|file| Model::from_gguf(&file, &options)),
        };
        model.map_err(|error| match error {
            Error::Core(error @ samite::Error::OutOfMemory { .. }) => CommandError::error(
                format_args!("{error}; --mmap --no-repack leaves the weights in the file"),
            ),
            error => error.into(),
        })
    }

    /// Loads a second model on the devices of the first one.
    #[cfg(feature = "serve")]
    pub fn load_beside(
        &self,
        path: &Path,
        model: &Arc<Model>,
        cancel: &CancelToken,
    ) -> CommandResult<Arc<Model>> {
        Ok(Model::load(path, &self.options_beside(model, cancel)?)?)
    }

    /// Works like [`load_beside`](Self::load_beside), but reads only the header of the file, for
    /// plans.
    #[cfg(feature = "serve")]
    pub fn load_header_beside(
        &self,
        path: &Path,
        model: &Arc<Model>,
        cancel: &CancelToken,
    ) -> CommandResult<Arc<Model>> {
        let options = self.options_beside(model, cancel)?;
        let header = GgufFile::open_header(path, options.load_mode)?;
        Ok(Model::without_weights(&header, &options)?)
    }

    #[cfg(feature = "serve")]
    fn options_beside(
        &self,
        model: &Arc<Model>,
        cancel: &CancelToken,
    ) -> CommandResult<ModelOptions> {
        let devices = model.devices().iter().cloned().collect();
        Ok(ModelOptions {
            rules: Vec::new(),
            ..self.model_options(devices, cancel)?
        })
    }

    /// Reads only the header of the model's file, for plans.
    pub fn load_header(&self, cpu: &CpuArgs, cancel: &CancelToken) -> CommandResult<Arc<Model>> {
        self.load_header_on(self.chosen_devices(cpu)?, cancel)
    }

    fn model_options(
        &self,
        devices: Vec<Arc<dyn Device>>,
        cancel: &CancelToken,
    ) -> CommandResult<ModelOptions> {
        let mut options = ModelOptions::new(devices);
        options.rules = self.rules()?;
        options.fit = match self.fit {
            Switch::On => Some(FitOptions {
                context: self.context_options(cancel)?,
                margin: self.margin(),
            }),
            Switch::Off => None,
        };
        options.load_mode = self.load_mode();
        options.lock = self.lock();
        options.fallback = self.fallback();
        options.repack = !self.no_repack;
        options.cancel = cancel.clone();
        Ok(options)
    }

    fn fallback(&self) -> Fallback {
        match self.fallback {
            FallbackArg::Allow => Fallback::Allow,
            FallbackArg::Warn => Fallback::Warn,
            FallbackArg::Deny => Fallback::Deny,
        }
    }

    fn load_mode(&self) -> LoadMode {
        match self.load_mode {
            _ if self.mmap => LoadMode::Mmap,
            _ if self.no_mmap => LoadMode::Read,
            LoadArg::Mmap | LoadArg::Mlock => LoadMode::Mmap,
            LoadArg::Read => LoadMode::Read,
            LoadArg::Direct => LoadMode::Direct,
        }
    }

    fn lock(&self) -> bool {
        // Of contradictory flags, only the last one is set.
        let mapped_or_read = self.mmap || self.no_mmap;
        self.mlock || (!mapped_or_read && matches!(self.load_mode, LoadArg::Mlock))
    }

    /// Returns the types of cached keys and values.
    pub fn kv_types(&self) -> CommandResult<[DType; 2]> {
        let dtype = |flag: &str, name: &str| {
            DType::from_name(name.trim()).ok_or_else(|| {
                CommandError::usage(format_args!(
                    "{flag}: '{name}' is not a type; try f16, f32 or q8_0"
                ))
            })
        };
        let (keys, values) = self.kv.split_once(',').unwrap_or((&self.kv, &self.kv));
        let choose = |flag, special: &Option<String>, both| match special {
            Some(name) => dtype(flag, name),
            None => dtype("--kv", both),
        };
        Ok([
            choose("--cache-type-k", &self.cache_type_k, keys)?,
            choose("--cache-type-v", &self.cache_type_v, values)?,
        ])
    }

    /// Returns whether attention must use several steps.
    pub fn no_flash(&self) -> bool {
        self.no_flash
    }

    /// Returns the context options that the flags set.
    pub fn context_options(&self, cancel: &CancelToken) -> CommandResult<ContextOptions> {
        let kv_types = self.kv_types()?;
        if self.no_flash && kv_types[1].is_quantized() {
            return Err(CommandError::usage(format_args!(
                "--kv, --cache-type-v: values of type {} need flash attention: leave out --no-flash, or choose f16",
                kv_types[1]
            )));
        }
        Ok(ContextOptions {
            n_ctx: self.ctx_size(),
            n_ubatch: self.ubatch_size,
            kv_types,
            flash: !self.no_flash,
            full_windows: self.swa_full,
            offload: !self.no_op_offload,
            copies: usize::from(self.copies),
            fallback: self.fallback(),
            cancel: cancel.clone(),
            ..ContextOptions::default()
        })
    }

    /// Returns the context size of `-c`, or `None` if the choice is left to samite.
    pub fn ctx_size(&self) -> Option<usize> {
        self.ctx_size.filter(|&n_ctx| n_ctx > 0)
    }

    /// Returns the number of weight adapters, which come first in a context.
    #[cfg(feature = "serve")]
    pub fn n_loras(&self) -> usize {
        self.adapters.files().len()
    }

    /// Returns whether adapters change the model.
    pub fn has_adapters(&self) -> bool {
        !self.adapters.files().is_empty() || self.control.files().next().is_some()
    }

    /// Creates a context for `model` with the adapters that the flags name.
    pub fn context(&self, model: Arc<Model>, options: ContextOptions) -> CommandResult<Context> {
        let options = self.with_adapters(&model, options)?;
        Context::new(model, options).map_err(|error| match error {
            Error::Core(error @ samite::Error::OutOfMemory { .. }) => CommandError::error(
                format_args!("{error}; see --ctx-size (-c) and --ubatch-size (-ub)"),
            ),
            error => error.into(),
        })
    }

    /// Works like [`context`](Self::context), but only plans.
    pub fn context_plan(
        &self,
        model: Arc<Model>,
        options: ContextOptions,
    ) -> CommandResult<ContextPlan> {
        let options = self.with_adapters(&model, options)?;
        Ok(ContextPlan::new(model, options)?)
    }

    /// Returns the context size to use without `-c`; `None` for the library's default.
    fn default_context(
        &self,
        model: &Arc<Model>,
        options: &ContextOptions,
    ) -> CommandResult<Option<usize>> {
        let trained = model.spec().n_ctx_train;
        // Processes that share a model may have different amounts of memory.
        if ranks::group().is_some() || self.shares_memory {
            return Ok(None);
        }
        if self.fit == Switch::Off {
            return Ok(Some(trained));
        }
        let n_ctx = options.longest_context(model, self.margin())?;
        let least = trained.min(ContextOptions::DEFAULT_CONTEXT);
        let chosen = n_ctx.unwrap_or(least);
        if chosen < trained {
            say(format_args!(
                "the context has {chosen} of the model's {trained} tokens{}; -c sets another size",
                if chosen > least {
                    ", as many as free memory allows"
                } else {
                    ""
                }
            ));
        }
        Ok(Some(chosen))
    }

    /// Returns the bytes to leave free on each device.
    fn margin(&self) -> usize {
        (self.fit_target as usize).saturating_mul(1 << 20)
    }

    fn with_adapters(
        &self,
        model: &Arc<Model>,
        mut options: ContextOptions,
    ) -> CommandResult<ContextOptions> {
        options.output = options.output.resolve(model.spec());
        for (path, share) in self.adapters.files() {
            let adapter = Adapter::load(path, model)?;
            options.adapters.push(ScaledAdapter { adapter, share });
        }
        for (path, share) in self.control.files() {
            let adapter = Adapter::load_control_vector(path, model, self.control.layers())?;
            options.adapters.push(ScaledAdapter { adapter, share });
        }
        if options.n_ctx.is_none() {
            options.n_ctx = self.default_context(model, &options)?;
        }
        Ok(options)
    }
}

/// Returns the device of a plan that divides tensors, and the nodes that it computes.
pub fn divided(plan: &samite::sched::Plan) -> Option<(&MetaDevice, Vec<samite::TensorId>)> {
    let mut numbered = plan.devices().iter().enumerate();
    let (number, device) = numbered
        .find_map(|(i, device)| Some((i, device.as_any().downcast_ref::<MetaDevice>()?)))?;
    let splits = plan.splits().iter().filter(|split| split.device == number);
    let nodes = splits.flat_map(|split| split.nodes.iter().copied());
    Some((device, nodes.collect()))
}

/// Returns the predicted time of a plan for one token, if tensors are divided.
pub fn predicted(plan: &samite::sched::Plan) -> CommandResult<Option<Prediction>> {
    let Some((device, nodes)) = divided(plan) else {
        return Ok(None);
    };
    Ok(Some(device.predict(plan.graph(), &nodes)?))
}

/// Returns the built-in model.
fn embedded() -> samite::llm::Result<GgufFile> {
    Ok(GgufFile::from_static(EMBEDDED, samite_stories::MODEL)?)
}
