//! Flags that several commands share.

use crate::failure::{Failure, Outcome};
use crate::progress;
use clap::Args;
use samite::gguf::LoadMode;
use samite::llm::{ContextOptions, Model, ModelOptions, PlacementRule};
use samite::registry::{BuiltIn, Registry};
use samite::sched::Fallback;
use samite::{CancelToken, DType, Device};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

/// Which devices, and with how many threads.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Devices in order of preference, for example `blas,cpu`; `auto` for the best ones (see `samite devices`)
    #[arg(
        long = "device",
        visible_alias = "dev",
        value_name = "LIST",
        default_value = "auto"
    )]
    pub device: String,

    /// CPU threads; as many as this process may use by default
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
}

impl DeviceArgs {
    /// All devices, the CPU's with the wanted number of threads.
    pub fn registry(&self) -> Registry {
        registry(self.threads.map(usize::from))
    }

    /// The chosen devices. The CPU is added as the last one if the list does not end with a device that can do
    /// everything.
    pub fn devices(&self) -> Outcome<Vec<Arc<dyn Device>>> {
        let registry = self.registry();
        let mut devices = registry.parse(&self.device)?;
        if devices
            .last()
            .is_some_and(|device| device.kind() == samite::DeviceKind::Accelerator)
            && devices.iter().all(|device| device.name() != "cpu")
        {
            devices.push(Arc::clone(registry.device("cpu")?));
        }
        Ok(devices)
    }
}

/// The built-in devices with `threads` CPU threads.
pub fn registry(threads: Option<usize>) -> Registry {
    let mut options = BuiltIn::default();
    options.cpu.threads = threads;
    Registry::built_in(options)
}

/// A comma-separated list of positive numbers.
pub fn parse_list(text: &str, flag: &str) -> Outcome<Vec<usize>> {
    text.split(',')
        .map(|part| match part.trim().parse() {
            Ok(0) | Err(_) => Err(Failure::usage(format_args!(
                "{flag}: '{part}' is not a positive number"
            ))),
            Ok(number) => Ok(number),
        })
        .collect()
}

/// Which model, where its parts go, and how it is set up.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// GGUF file; of a split model, any part
    #[arg(short, long, value_name = "FILE")]
    pub model: PathBuf,

    #[command(flatten)]
    pub devices: DeviceArgs,

    /// Where parts of the model go, for example `layers=0-3:cpu`, `*_exps*:cpu`, `output:blas`; several separated by `;`
    #[arg(long, value_name = "RULES", help_heading = "Placement")]
    pub place: Vec<String>,

    /// Only the last N layers on devices other than the last one; the output counts as a layer [also: -ngl]
    #[arg(
        long = "ngl",
        visible_alias = "n-gpu-layers",
        value_name = "N|all",
        help_heading = "Placement"
    )]
    pub ngl: Option<String>,

    /// Tensors whose name matches an expression go to a device: `expression=device,…` [also: -ot]
    #[arg(
        long = "override-tensor",
        value_name = "LIST",
        help_heading = "Placement"
    )]
    pub override_tensor: Vec<String>,

    /// Proportions in which layers are divided over the devices before the last one [also: -ts]
    #[arg(long = "tensor-split", value_name = "LIST", help_heading = "Placement")]
    pub tensor_split: Option<String>,

    /// What to do about operations that land on a slower device because a faster one refuses them
    #[arg(long, value_enum, default_value_t = FallbackArg::Warn, help_heading = "Placement")]
    pub fallback: FallbackArg,

    /// How the file comes into memory
    #[arg(long, value_enum, default_value_t = LoadArg::Mmap)]
    pub load_mode: LoadArg,

    /// Size of the context in tokens; the model's own, at most 4096, by default
    #[arg(short = 'c', long, value_name = "N", value_parser = positive)]
    pub ctx_size: Option<usize>,

    /// Type of the KV cache: f16, f32, bf16, q8_0, …; or two, for keys and values: `q8_0,f16`
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv: String,

    /// Most tokens that are computed at once [also: -ub]
    #[arg(long = "ubatch-size", value_name = "N", default_value = "512", value_parser = positive)]
    pub ubatch_size: usize,

    /// Attention in several steps instead of one operation
    #[arg(long)]
    pub no_flash: bool,

    /// Copies of inputs and of tensors between devices, so that work on several asynchronous devices overlaps
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive)]
    pub copies: usize,
}

/// `--fallback`
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum FallbackArg {
    /// Nothing
    Allow,
    /// Say so
    Warn,
    /// Fail
    Deny,
}

/// `--load-mode`
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum LoadArg {
    /// Map it: quick, and shared with other processes
    Mmap,
    /// Read it
    Read,
    /// Map it and keep it from being paged out
    Mlock,
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("not a positive number".into()),
        Ok(number) => Ok(number),
    }
}

impl ModelArgs {
    fn rules(&self) -> Outcome<Vec<PlacementRule>> {
        let mut rules = Vec::new();
        match self.ngl.as_deref() {
            None | Some("all" | "auto") => {}
            Some(number) => match number.parse() {
                Ok(layers) => rules.push(PlacementRule::LastLayers(layers)),
                Err(_) => {
                    return Err(Failure::usage(format_args!(
                        "--ngl: '{number}' is neither a number nor 'all'"
                    )));
                }
            },
        }
        if let Some(split) = &self.tensor_split {
            rules.push(PlacementRule::parse_split(split).map_err(Failure::usage)?);
        }
        for text in &self.override_tensor {
            rules.extend(PlacementRule::parse_overrides(text).map_err(Failure::usage)?);
        }
        for text in &self.place {
            rules.extend(PlacementRule::parse_all(text).map_err(Failure::usage)?);
        }
        Ok(rules)
    }

    /// What the flags say about loading.
    pub fn model_options(&self, cancel: &CancelToken) -> Outcome<ModelOptions> {
        let mut options = ModelOptions::new(self.devices.devices()?);
        options.rules = self.rules()?;
        options.load_mode = match self.load_mode {
            LoadArg::Mmap => LoadMode::Mmap,
            LoadArg::Read => LoadMode::Read,
            LoadArg::Mlock => LoadMode::Mlock,
        };
        options.cancel = cancel.clone();
        Ok(options)
    }

    /// Loads the model, with a progress bar.
    pub fn load(&self, cancel: &CancelToken) -> Outcome<Arc<Model>> {
        let bar = progress::bytes("loading");
        let mut options = self.model_options(cancel)?;
        let shared = bar.clone();
        options.progress = Some(Arc::new(move |done, total| {
            shared.set_length(total);
            shared.set_position(done);
        }));
        let model = Model::load(&self.model, &options);
        bar.finish_and_clear();
        Ok(model?)
    }

    /// What the flags say about contexts.
    pub fn context_options(&self, cancel: &CancelToken) -> Outcome<ContextOptions> {
        let dtype = |name: &str| {
            DType::from_name(name.trim()).ok_or_else(|| {
                Failure::usage(format_args!(
                    "--kv: '{name}' is not a type; try f16, f32 or q8_0"
                ))
            })
        };
        let kv_types = match self.kv.split_once(',') {
            Some((keys, values)) => [dtype(keys)?, dtype(values)?],
            None => [dtype(&self.kv)?; 2],
        };
        Ok(ContextOptions {
            n_ctx: self.ctx_size,
            n_ubatch: self.ubatch_size,
            kv_types,
            flash: !self.no_flash,
            copies: self.copies,
            fallback: match self.fallback {
                FallbackArg::Allow => Fallback::Allow,
                FallbackArg::Warn => Fallback::Warn,
                FallbackArg::Deny => Fallback::Deny,
            },
            cancel: cancel.clone(),
            ..ContextOptions::default()
        })
    }
}

/// llama.cpp's flags of several letters after a single dash, and what they are here.
const SHORT_WORDS: &[(&str, &str)] = &[
    ("-ngl", "--ngl"),
    ("-ot", "--override-tensor"),
    ("-ts", "--tensor-split"),
    ("-dev", "--device"),
    ("-ub", "--ubatch-size"),
];

/// The program's arguments with llama.cpp's spellings replaced.
pub fn arguments() -> impl Iterator<Item = OsString> {
    std::env::args_os().map(|argument| {
        let known = SHORT_WORDS.iter().find(|(short, _)| argument == *short);
        known.map_or(argument, |(_, long)| OsString::from(long))
    })
}
