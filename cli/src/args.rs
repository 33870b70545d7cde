//! Flags that several commands share.

use crate::failure::{Failure, Outcome};
use clap::Args;
use samite::Device;
use samite::registry::{BuiltIn, Registry};
use std::sync::Arc;

/// Which devices, and with how many threads.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Devices in order of preference, for example `blas,cpu`; `auto` for the best ones (see `samite devices`)
    #[arg(long = "device", visible_alias = "dev", value_name = "LIST", default_value = "auto")]
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
        if devices.last().is_some_and(|device| device.kind() == samite::DeviceKind::Accelerator)
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
            Ok(0) | Err(_) => Err(Failure::usage(format_args!("{flag}: '{part}' is not a positive number"))),
            Ok(number) => Ok(number),
        })
        .collect()
}
