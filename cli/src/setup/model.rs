//! A model with its placement and options.

use super::ModelFile;
use super::adapters::AdapterSetup;
use super::context::ContextSetup;
use super::devices::DeviceSetup;
use super::placement::PlacementSetup;
use crate::args::{LoadArg, LoadingArgs, ModelArgs};
#[cfg(feature = "serve")]
use crate::cpu_args::CpuArgs;
use crate::failure::CommandResult;
use samite::gguf::LoadMode;
#[cfg(feature = "serve")]
use samite::{Device, DeviceKind};
use std::path::Path;
#[cfg(feature = "serve")]
use std::{path::PathBuf, sync::Arc};

/// A model, its placement and its options.
#[derive(Clone)]
pub struct ModelSetup {
    pub file: ModelFile,
    pub adapters: AdapterSetup,
    pub devices: DeviceSetup,
    pub placement: PlacementSetup,
    pub loading: LoadingSetup,
    pub context: ContextSetup,
    /// True if another model or context needs memory on the same devices.
    pub shares_memory: bool,
}

/// Method of loading a model's file.
#[derive(Clone, Copy)]
pub struct LoadingSetup {
    pub mode: LoadMode,
    /// True if weights are never paged out.
    pub locks: bool,
    /// True if weights are packed for the device.
    pub repacks: bool,
}

impl LoadingSetup {
    fn new(args: &LoadingArgs) -> Self {
        // Of contradictory flags, only the last one is set.
        let mode = match args.load_mode {
            _ if args.mmap => LoadMode::Mmap,
            _ if args.no_mmap => LoadMode::Read,
            LoadArg::Mmap | LoadArg::Mlock => LoadMode::Mmap,
            LoadArg::Read => LoadMode::Read,
            LoadArg::Direct => LoadMode::Direct,
        };
        let mapped_or_read = args.mmap || args.no_mmap;
        LoadingSetup {
            mode,
            locks: args.mlock || (!mapped_or_read && matches!(args.load_mode, LoadArg::Mlock)),
            repacks: !args.no_repack,
        }
    }
}

impl ModelSetup {
    /// Resolves the flags.
    ///
    /// # Errors
    /// Returns an error for values that the flags' types cannot exclude.
    pub fn new(args: &ModelArgs) -> CommandResult<Self> {
        let file = ModelFile::new(args.model.clone());
        #[cfg(feature = "hub")]
        let file = file.or_named(&args.hub)?;
        Ok(ModelSetup {
            file,
            adapters: AdapterSetup::new(&args.adapters, &args.control),
            devices: DeviceSetup::new(&args.devices),
            placement: PlacementSetup::new(&args.placement)?,
            loading: LoadingSetup::new(&args.loading),
            context: ContextSetup::new(&args.context)?,
            shares_memory: false,
        })
    }

    /// Returns the path of the model's file, or `None` for the built-in model. Downloads a model
    /// given by name.
    pub fn path(&self) -> CommandResult<Option<&Path>> {
        self.file.path()
    }

    /// Returns the same setup for one of several files. Contexts without `-c` get at most 4096
    /// tokens, so that several models fit into memory.
    #[cfg(feature = "serve")]
    pub fn with_file(&self, path: PathBuf) -> Self {
        ModelSetup {
            file: ModelFile::File(path),
            shares_memory: true,
            ..self.clone()
        }
    }

    /// Leaves more memory free on each device when layers and the context are fitted to it: for
    /// what is loaded after the model.
    #[cfg(feature = "vision")]
    pub fn leaving(&self, bytes: usize) -> Self {
        let mut setup = self.clone();
        if let Some(margin) = &mut setup.placement.fit_margin {
            *margin = margin.saturating_add(bytes);
        }
        setup
    }

    /// Returns nine tenths of the bytes that are free now, on the host and on devices with their
    /// own memory.
    #[cfg(feature = "serve")]
    pub fn free_memory(&self, cpu: &CpuArgs) -> CommandResult<u64> {
        let devices = self.devices.for_model(&self.placement, cpu)?;
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
}
