//! Qwen3 with experts, such as 30B-A3B: attention as in [`qwen3`], a mixture of experts in every layer.

use super::{Architecture, Blocks, TensorList, qwen3};
use crate::hparams::ExpertUse;
use samite_core::{Result, RopeMode};

#[derive(Debug)]
pub(super) struct Qwen3Moe;

impl Architecture for Qwen3Moe {
    fn name(&self) -> &'static str {
        "qwen3moe"
    }

    fn rope_mode(&self) -> RopeMode {
        RopeMode::Neox
    }

    fn expert_use(&self) -> ExpertUse {
        ExpertUse::Always
    }

    fn tensors(&self, list: &mut TensorList<'_>) {
        qwen3::tensors(list);
    }

    fn build(&self, b: &mut Blocks<'_>) -> Result<()> {
        qwen3::build(b)
    }
}
