//! Adapters: supported models, and the matrices that adapters change.

use crate::config::LoraConfig;
use crate::error::{Error, Result};
use crate::model::ParameterSpec;
use samite_core::StoredTensor;
use samite_llm::Model;
use samite_llm::adapter::{SUFFIX_A, SUFFIX_B};
use samite_llm::arch::WeightUse;
use std::sync::Arc;

/// Architectures whose models equal llama's, except for biases.
const ARCHITECTURES: [&str; 2] = ["llama", "qwen2"];

/// Returns the weights of a model by llama.cpp's names, each once.
pub(crate) fn weights(base: &Model) -> Vec<(String, Arc<StoredTensor>)> {
    let weights = base.weights();
    let stored = |name: String| {
        let own = weights.data_name(&name) == Some(&name);
        let stored = weights.get(&name).filter(|_| own).cloned()?;
        Some((name, stored))
    };
    let specs = base.spec().tensors().into_iter();
    specs.filter_map(|spec| stored(spec.name)).collect()
}

impl LoraConfig {
    /// Returns the factor of the products of pairs.
    pub(crate) fn factor(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// Returns the parameters of an adapter for `base`, each with the index of its device.
    pub(crate) fn parameters(&self, base: &Model) -> Result<Vec<(ParameterSpec, usize)>> {
        let architecture = base.architecture().name;
        if !ARCHITECTURES.contains(&architecture) || base.spec().experts().is_some() {
            return Err(Error::config(format!(
                "lora.base: {}: adapters are trained for models of architecture {} without experts, not for {architecture}",
                base.path().display(),
                ARCHITECTURES.join(" and ")
            )));
        }
        let specs = base.spec().tensors();
        let mut all = Vec::new();
        let mut found = vec![false; self.targets.len()];
        for spec in &specs {
            let name = &spec.name;
            let part = name.strip_suffix(".weight").unwrap_or(name);
            let part = part.rsplit('.').next().unwrap_or(part);
            let Some(target) = self.targets.iter().position(|target| target == part) else {
                continue;
            };
            let weights = base.weights();
            let own = weights.data_name(name) == Some(name);
            let Some(device) = weights.device(name).filter(|_| own) else {
                continue;
            };
            if spec.usage != WeightUse::Product {
                continue;
            }
            found[target] = true;
            let layer = name
                .strip_prefix("blk.")
                .and_then(|rest| rest.split('.').next()?.parse().ok());
            let [inputs, outputs, ..] = spec.shape;
            let parameter = |suffix, shape, deviation| ParameterSpec {
                name: format!("{name}{suffix}"),
                shape,
                deviation: Some(deviation),
                layer,
            };
            let deviation = (inputs as f32).sqrt().recip();
            all.push((
                parameter(SUFFIX_A, [inputs, self.rank, 1, 1], deviation),
                device,
            ));
            // Zeros, so that the adapter changes nothing initially.
            all.push((parameter(SUFFIX_B, [self.rank, outputs, 1, 1], 0.0), device));
        }
        if let Some(missing) = found.iter().position(|found| !found) {
            return Err(Error::config(format!(
                "lora.targets: the model has no matrix '{}' that an adapter can change; it has \
                 attn_q, attn_k, attn_v, attn_output, ffn_gate, ffn_up, ffn_down{}",
                self.targets[missing],
                match base.weights().data_name("output.weight") {
                    Some("output.weight") => " and output",
                    _ => "",
                }
            )));
        }
        Ok(all)
    }
}
