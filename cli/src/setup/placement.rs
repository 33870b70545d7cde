//! Placement of a model's layers and tensors on devices.

use crate::args::{FallbackArg, PlacementArgs, SplitMode, Switch};
use crate::failure::{CommandError, CommandResult};
use crate::ranks::RankArgs;
use samite::gguf::GgufFile;
use samite::llm::PlacementRule;
use samite::registry::{MetaDevice, MetaOptions, Prediction};
use samite::sched::{Fallback, Plan};
use samite::{Device, DeviceKind};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Placement of a model on devices.
#[derive(Clone)]
pub struct PlacementSetup {
    /// Rules of `-ngl` and `-ts`.
    by_layer: Vec<PlacementRule>,
    /// Number of first layers whose expert weights stay on the CPU.
    experts_on_cpu: u16,
    /// Rules for single tensors and parts, which take precedence.
    by_name: Vec<PlacementRule>,
    /// Proportions of the devices that divide tensors.
    ratios: Option<Vec<f32>>,
    pub split_mode: SplitMode,
    /// Index of the device that has everything with [`SplitMode::None`].
    main_gpu: usize,
    /// True if tensors are divided even where one device is predicted to be faster.
    pub splits_anyway: bool,
    /// Processes that share a model.
    pub ranks: RankArgs,
    /// Bytes to leave free on each device when fitting layers, or `None` if they are not fitted.
    pub fit_margin: Option<usize>,
    pub fallback: Fallback,
}

impl PlacementSetup {
    /// Resolves the flags.
    ///
    /// # Errors
    /// Returns an error for values that the flags' types cannot exclude.
    pub fn new(args: &PlacementArgs) -> CommandResult<Self> {
        let mut by_layer = Vec::new();
        by_layer.extend(args.ngl.map(PlacementRule::LastLayers));
        let mut ratios = None;
        if let Some(split) = &args.tensor_split {
            let split = PlacementRule::parse_split(split).map_err(CommandError::usage)?;
            match (args.split_mode, split) {
                (SplitMode::Tensor, PlacementRule::Split(parts)) => ratios = Some(parts),
                (SplitMode::Tensor, _) => {
                    return Err(CommandError::usage(
                        "--tensor-split: not a list of proportions",
                    ));
                }
                (SplitMode::Layer | SplitMode::None, split) => by_layer.push(split),
            }
        }
        let mut by_name = Vec::new();
        for text in &args.override_tensor {
            by_name.extend(PlacementRule::parse_overrides(text).map_err(CommandError::usage)?);
        }
        for text in &args.place {
            by_name.extend(PlacementRule::parse_all(text).map_err(CommandError::usage)?);
        }
        Ok(PlacementSetup {
            by_layer,
            experts_on_cpu: match args.n_cpu_moe {
                _ if args.cpu_moe => u16::MAX,
                count => count.unwrap_or(0),
            },
            by_name,
            ratios,
            split_mode: args.split_mode,
            main_gpu: args.main_gpu,
            splits_anyway: args.split_anyway,
            ranks: args.ranks.clone(),
            fit_margin: match args.fit {
                Switch::On => Some((args.fit_target as usize).saturating_mul(1 << 20)),
                Switch::Off => None,
            },
            fallback: match args.fallback {
                FallbackArg::Allow => Fallback::Allow,
                FallbackArg::Warn => Fallback::Warn,
                FallbackArg::Deny => Fallback::Deny,
            },
        })
    }

    /// Returns whether tensors are divided over the devices.
    pub fn splits_tensors(&self) -> bool {
        self.split_mode == SplitMode::Tensor
    }

    /// Keeps only the device that has everything with `--split-mode none`, and libraries before it.
    /// The list is without the CPU, which may be empty or have libraries only.
    ///
    /// # Errors
    /// Returns an error if `--main-gpu` is none of several devices.
    pub fn keep_main(&self, devices: &mut Vec<Arc<dyn Device>>) -> CommandResult {
        let is_library = |device: &Arc<dyn Device>| device.kind() == DeviceKind::Accelerator;
        let mut indices = (0..devices.len()).filter(|&at| !is_library(&devices[at]));
        match indices.nth(self.main_gpu) {
            Some(main) => {
                devices.truncate(main + 1);
                let last = devices.pop();
                devices.retain(is_library);
                devices.extend(last);
                Ok(())
            }
            None if self.main_gpu == 0 => Ok(()),
            None => {
                let gpus = devices.iter().filter(|device| !is_library(device));
                let names: Vec<_> = gpus.map(|device| device.name()).collect();
                Err(CommandError::usage(format_args!(
                    "--main-gpu: there is no GPU {}: {}",
                    self.main_gpu,
                    match names.len() {
                        0 => "only the CPU is in use".to_owned(),
                        _ => format!("counted from 0, they are {}", names.join(", ")),
                    }
                )))
            }
        }
    }

    /// Returns all rules. `header` opens the model's file.
    pub fn rules(
        &self,
        header: impl FnOnce() -> CommandResult<GgufFile>,
    ) -> CommandResult<Vec<PlacementRule>> {
        let mut rules = self.by_layer.clone();
        if self.experts_on_cpu > 0
            && let Some(text) = experts_on_cpu(&header()?, self.experts_on_cpu)
        {
            rules.extend(PlacementRule::parse_overrides(&text).map_err(CommandError::usage)?);
        }
        rules.extend(self.by_name.iter().cloned());
        Ok(rules)
    }

    /// Returns how `--split-mode tensor` divides tensors.
    pub fn meta_options(&self) -> MetaOptions {
        MetaOptions {
            ratios: self.ratios.clone(),
            deadline: self.ranks.deadline(),
            ..MetaOptions::default()
        }
    }

    /// Returns the settings that must be the same in all processes that share a model.
    pub fn shared(&self) -> impl std::fmt::Debug {
        (
            &self.by_layer,
            self.experts_on_cpu,
            &self.by_name,
            &self.ratios,
            self.splits_anyway,
            self.fit_margin,
        )
    }
}

/// Returns the expert weights of the first `count` layers as llama.cpp's `--override-tensor`.
/// Returns `None` if none of these layers has experts, like the first layers of many models.
fn experts_on_cpu(header: &GgufFile, count: u16) -> Option<String> {
    let layer = |name: &str| -> Option<u16> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let is_expert = rest.contains("_exps") || rest.contains("_chexps");
        layer.parse().ok().filter(|_| is_expert)
    };
    let layers = header.tensors().iter().filter_map(|info| layer(&info.name));
    let layers: BTreeSet<u16> = layers.filter(|&layer| layer < count).collect();
    if layers.is_empty() {
        return None;
    }
    let layers: Vec<_> = layers.iter().map(u16::to_string).collect();
    let layers = layers.join("|");
    Some(format!(
        r"^blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    ))
}

/// Returns the device of a plan that divides tensors, and the nodes that it computes.
pub fn divided(plan: &Plan) -> Option<(&MetaDevice, Vec<samite::TensorId>)> {
    let mut numbered = plan.devices().iter().enumerate();
    let (number, device) = numbered
        .find_map(|(i, device)| Some((i, device.as_any().downcast_ref::<MetaDevice>()?)))?;
    let splits = plan.splits().iter().filter(|split| split.device == number);
    let nodes = splits.flat_map(|split| split.nodes.iter().copied());
    Some((device, nodes.collect()))
}

/// Returns the predicted time of a plan for one token, if tensors are divided.
pub fn predicted(plan: &Plan) -> CommandResult<Option<Prediction>> {
    let Some((device, nodes)) = divided(plan) else {
        return Ok(None);
    };
    Ok(Some(device.predict(plan.graph(), &nodes)?))
}
