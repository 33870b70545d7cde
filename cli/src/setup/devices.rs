//! Devices to use.

use super::BackendSetup;
use super::placement::PlacementSetup;
use crate::args::{DeviceArgs, SplitMode};
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::ranks::{self, Neighbours};
use samite::forecast::{Cluster, plan_only};
use samite::registry::{MetaDevice, MetaOptions, Pool, ProcessGroup, Registry};
use samite::sched::DeviceSet;
use samite::{Device, DeviceKind};
use std::sync::Arc;

/// Devices that flags name.
#[derive(Clone)]
pub struct DeviceSetup {
    /// Devices in order of preference, or `auto`.
    list: String,
    /// True if the CPU is not added as a fallback.
    pub is_only: bool,
    pub backends: BackendSetup,
}

/// Devices to share with other programs.
pub struct Lent {
    /// Devices that clients see.
    pub devices: Vec<Arc<dyn Device>>,
    /// Devices that compute what those do not support.
    pub fallbacks: Vec<Arc<dyn Device>>,
}

impl DeviceSetup {
    /// Resolves the flags.
    pub fn new(args: &DeviceArgs) -> Self {
        DeviceSetup {
            list: args.list.clone(),
            is_only: args.only,
            backends: BackendSetup::new(&args.backends),
        }
    }

    /// Returns the devices. The CPU device uses the threads of `pool`.
    pub fn devices(&self, pool: Pool) -> CommandResult<Vec<Arc<dyn Device>>> {
        Ok(self.backends.registry_on(pool).parse(&self.list)?)
    }

    /// Returns the GPUs, as a list without the CPU and without libraries that compute on it.
    #[cfg(feature = "serve")]
    pub fn gpus(&self, registry: &Registry) -> CommandResult<Vec<Arc<dyn Device>>> {
        let mut devices = registry.parse(&self.list)?;
        devices.retain(|d| !matches!(d.kind(), DeviceKind::Cpu | DeviceKind::Accelerator));
        Ok(devices)
    }

    /// Returns the devices for other programs, which see them separately. Of automatically selected
    /// devices, the CPU is included only if there is no other. The CPU is the fallback for what
    /// they do not support.
    pub fn lent(&self, pool: Pool) -> CommandResult<Lent> {
        let registry = self.backends.registry_on(pool);
        let mut devices = registry.parse(&self.list)?;
        if self.list.trim().eq_ignore_ascii_case("auto") && devices.len() > 1 {
            devices.retain(|device| device.kind() != DeviceKind::Cpu);
        }
        let fallbacks = if self.is_only {
            Vec::new()
        } else {
            registry.fallbacks()?
        };
        Ok(Lent { devices, fallbacks })
    }

    /// Returns the devices for a model that is placed like this.
    pub fn for_model(
        &self,
        placement: &PlacementSetup,
        cpu: &CpuArgs,
    ) -> CommandResult<Vec<Arc<dyn Device>>> {
        match placement.split_mode {
            SplitMode::Layer => self.with_fallback(cpu),
            SplitMode::None => {
                let mut devices = self.with_fallback(cpu)?;
                // Keep the CPU at the end of the list.
                let host = devices.pop_if(|last| last.kind() == DeviceKind::Cpu);
                placement.keep_main(&mut devices)?;
                devices.extend(host);
                Ok(devices)
            }
            SplitMode::Tensor => {
                let options = placement.meta_options();
                match ranks::group() {
                    Some(group) => self.divided_among(cpu, group, options),
                    None => {
                        placement.ranks.refuse()?;
                        self.divided(cpu, options)
                    }
                }
            }
        }
    }

    /// Returns the machines of a file as devices that plan like the CPU but have no memory, for a
    /// model that is placed like this.
    pub fn simulated(
        &self,
        placement: &PlacementSetup,
        cpu: &CpuArgs,
        cluster: &Cluster,
    ) -> CommandResult<Vec<Arc<dyn Device>>> {
        let registry = self.backends.registry_on(cpu.pool()?);
        let like = registry.device("cpu")?;
        let host = || plan_only(like, "cpu", cluster.host.memory, None);
        let members = cluster.members.iter().map(|member| {
            let through = member.reached.as_ref().map(|(through, _)| *through);
            plan_only(like, &member.name, member.device.memory, through)
        });
        let mut devices: Vec<_> = members.collect();
        match placement.split_mode {
            SplitMode::Tensor => {
                devices = vec![MetaDevice::new(devices, placement.meta_options())?, host()];
            }
            SplitMode::None => {
                placement.keep_main(&mut devices)?;
                devices.push(host());
            }
            SplitMode::Layer => devices.push(host()),
        }
        // A CPU of the host needs no other CPU as a fallback.
        if cluster
            .members
            .last()
            .is_some_and(|last| last.reached.is_none())
            && !placement.splits_tensors()
        {
            devices.pop();
        }
        Ok(devices)
    }

    /// Returns two devices, each followed by the CPU as for a model.
    pub fn pair(&self, cpu: &CpuArgs) -> CommandResult<[Vec<Arc<dyn Device>>; 2]> {
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

    /// Returns whether the CPU was added after the devices that the user listed.
    pub fn adds_cpu(&self, devices: &DeviceSet) -> bool {
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

    /// Returns the devices. If the list ends with a device that is not a CPU, the CPU is added at
    /// the end, because other devices may not support every operation.
    fn with_fallback(&self, cpu: &CpuArgs) -> CommandResult<Vec<Arc<dyn Device>>> {
        let registry = self.backends.registry_on(cpu.pool()?);
        self.with_host(&registry, registry.parse(&self.list)?)
    }

    /// Returns one device that divides tensors over the named ones, followed by a CPU with one
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
        if !self.is_only {
            devices.push(registry.init_by_name("cpu", "threads=1".parse()?)?);
        }
        Ok(devices)
    }

    fn with_host(
        &self,
        registry: &Registry,
        mut devices: Vec<Arc<dyn Device>>,
    ) -> CommandResult<Vec<Arc<dyn Device>>> {
        if devices
            .last()
            .is_some_and(|device| device.kind() != DeviceKind::Cpu)
            && !self.is_only
            && devices.iter().all(|device| device.name() != "cpu")
        {
            devices.push(Arc::clone(registry.device("cpu")?));
        }
        Ok(devices)
    }
}
