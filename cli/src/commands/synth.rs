//! `samite dev synth`: writes a model of a known shape with random weights.

use crate::failure::{CommandError, CommandResult};
use crate::shown::say;
use clap::{Args, ValueEnum};
use samite::DType;
use samite::llm::SyntheticModel;
use std::path::PathBuf;

/// Flags of `samite dev synth`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite dev synth tiny.gguf
  samite dev synth model.gguf --shape tinyllama-1.1b --type q4_0
  samite dev synth tiny.gguf --arch modern-bert --type f32")]
pub struct SynthArgs {
    /// File to write
    output: PathBuf,
    /// Shape of a known model
    #[arg(long, value_enum, default_value_t = Shape::Tiny)]
    shape: Shape,
    /// Create a tiny model of this architecture instead, one of docs/models.md
    #[arg(long, value_name = "NAME", conflicts_with = "shape", value_parser = architecture)]
    arch: Option<&'static str>,
    /// Type of all matrices whose rows are whole blocks of it: f32, f16, q4_0, q8_0, q4_K, …
    #[arg(long = "type", value_name = "TYPE", default_value = "q8_0", value_parser = dtype)]
    dtype: DType,
    /// Random seed
    #[arg(short, long, value_name = "N", default_value = "1")]
    seed: u64,
    /// Write only the header of the file, which is enough for `samite plan`
    #[arg(long)]
    header: bool,
}

/// `--shape`
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shape {
    /// 3 layers of width 64
    Tiny,
    /// 12 layers of width 768: 100 million parameters
    #[value(name = "100m")]
    Small,
    /// TinyLlama 1.1B
    #[value(name = "tinyllama-1.1b")]
    TinyLlama,
    /// Qwen3 0.6B, with tied embeddings
    #[value(name = "qwen3-0.6b")]
    Qwen3Small,
    /// Qwen3 4B, with tied embeddings
    #[value(name = "qwen3-4b")]
    Qwen3,
    /// Llama 3 8B
    #[value(name = "llama3-8b")]
    Llama3,
    /// Llama 3 70B
    #[value(name = "llama3-70b")]
    Llama3Large,
    /// Qwen3 30B-A3B: 128 experts, 8 of them active
    #[value(name = "qwen3-30b-a3b")]
    Mixture,
    /// Like Qwen3 30B-A3B, but smaller: 6 layers with 64 experts of width 768, 8 of them active
    #[value(name = "small-moe")]
    SmallMixture,
    /// Gemma 3 1B: five of six layers have a sliding window
    #[value(name = "gemma3-1b")]
    Gemma3,
    /// Qwen3.5 0.8B: three of four layers are gated delta nets
    #[value(name = "qwen3.5-0.8b")]
    Qwen35,
    /// Like gpt-oss 20B, but smaller: 8 layers of half its width, with its 32 experts (4 of them
    /// active), windows and attention sinks
    #[value(name = "small-gpt-oss")]
    SmallGptOss,
    /// Like DeepSeek-V3, but smaller: 8 layers with latent attention, 64 experts of width 768 (6 of
    /// them active) and a shared expert
    #[value(name = "small-deepseek")]
    SmallDeepSeek,
    /// BERT base, an encoder of 109 million parameters
    #[value(name = "bert-base")]
    Bert,
    /// ModernBERT base, an encoder of 149 million parameters
    #[value(name = "modernbert-base")]
    ModernBert,
    /// EmbeddingGemma, an encoder of 303 million parameters
    #[value(name = "embeddinggemma-300m")]
    EmbeddingGemma,
}

fn architecture(name: &str) -> Result<&'static str, String> {
    let found = samite::llm::arch::find(name);
    found
        .map(|arch| arch.name)
        .map_err(|error| error.to_string())
}

fn dtype(name: &str) -> Result<DType, String> {
    match DType::from_name(name) {
        Some(dtype) if samite::quant::can_decode(dtype) && dtype != DType::F64 => Ok(dtype),
        _ => {
            Err("not a type that weights can be written in; try f16, q4_0, q8_0 or q4_K".to_owned())
        }
    }
}

/// Creates a model from its name, layers, width, heads, key heads, head size, feed-forward width,
/// vocabulary and context.
fn model(architecture: &'static str, n: [usize; 8], tied: bool) -> SyntheticModel {
    let [
        n_layer,
        n_embd,
        n_head,
        n_head_kv,
        head_dim,
        n_ff,
        n_vocab,
        n_ctx_train,
    ] = n;
    SyntheticModel {
        n_layer,
        n_embd,
        n_head,
        n_head_kv,
        head_dim,
        n_ff,
        n_vocab,
        n_ctx_train,
        tied,
        ..SyntheticModel::tiny(architecture)
    }
}

pub fn run(args: SynthArgs) -> CommandResult {
    let mut synthetic = match (args.arch, args.shape) {
        (Some(arch), _) => SyntheticModel::tiny(arch),
        (None, shape) => of_shape(shape),
    };
    synthetic.dtype = args.dtype;
    synthetic.seed = args.seed;
    if args.header {
        synthetic.write_header(&args.output)?;
        say(format_args!(
            "written to {}: a header without weights, for plans only",
            args.output.display()
        ));
        return Ok(());
    }
    synthetic.write(&args.output).map_err(CommandError::from)?;
    say(format_args!(
        "written to {}: random weights, for measuring and testing only",
        args.output.display()
    ));
    Ok(())
}

fn of_shape(shape: Shape) -> SyntheticModel {
    match shape {
        Shape::Tiny => SyntheticModel {
            n_embd: 256,
            n_ff: 512,
            n_head: 8,
            ..SyntheticModel::tiny("llama")
        },
        Shape::Small => model("llama", [12, 768, 12, 12, 64, 2048, 32_000, 2048], true),
        Shape::TinyLlama => model("llama", [22, 2048, 32, 4, 64, 5632, 32_000, 2048], false),
        Shape::Qwen3Small => model("qwen3", [28, 1024, 16, 8, 128, 3072, 151_936, 40_960], true),
        Shape::Llama3 => model(
            "llama",
            [32, 4096, 32, 8, 128, 14_336, 128_256, 8192],
            false,
        ),
        Shape::Llama3Large => model(
            "llama",
            [80, 8192, 64, 8, 128, 28_672, 128_256, 8192],
            false,
        ),
        Shape::Mixture => SyntheticModel {
            experts: Some([128, 8]),
            ..model(
                "qwen3moe",
                [48, 2048, 32, 4, 128, 768, 151_936, 40_960],
                false,
            )
        },
        Shape::SmallMixture => SyntheticModel {
            experts: Some([64, 8]),
            ..model("qwen3moe", [6, 2048, 32, 4, 128, 768, 32_000, 4096], false)
        },
        Shape::Gemma3 => SyntheticModel {
            extra: vec![("attention.sliding_window", 512u32.into())],
            ..model("gemma3", [26, 1152, 4, 1, 256, 6912, 262_144, 32_768], true)
        },
        Shape::Qwen35 => SyntheticModel {
            extra: vec![
                ("ssm.state_size", 128u32.into()),
                ("ssm.group_count", 16u32.into()),
                ("ssm.time_step_rank", 16u32.into()),
                ("ssm.inner_size", 2048u32.into()),
                ("full_attention_interval", 4u32.into()),
                ("rope.dimension_count", 64u32.into()),
                ("rope.dimension_sections", vec![11u32, 11, 10, 0].into()),
            ],
            ..model("qwen35", [24, 1024, 8, 2, 256, 3584, 151_936, 32_768], true)
        },
        Shape::SmallGptOss => SyntheticModel {
            experts: Some([32, 4]),
            optional: vec![
                "attn_q.bias",
                "attn_k.bias",
                "attn_v.bias",
                "attn_output.bias",
            ],
            extra: vec![("attention.sliding_window", 128u32.into())],
            ..model("gpt-oss", [8, 1440, 32, 4, 64, 1440, 32_000, 32_768], false)
        },
        Shape::SmallDeepSeek => SyntheticModel {
            experts: Some([64, 6]),
            extra: vec![
                ("rope.dimension_count", 64u32.into()),
                ("attention.kv_lora_rank", 512u32.into()),
                ("attention.q_lora_rank", 768u32.into()),
                ("attention.key_length", 576u32.into()),
                ("attention.value_length", 512u32.into()),
                ("attention.key_length_mla", 192u32.into()),
                ("attention.value_length_mla", 128u32.into()),
                ("expert_gating_func", 2u32.into()),
                ("expert_weights_norm", true.into()),
                ("expert_weights_scale", 2.5f32.into()),
            ],
            ..model(
                "deepseek2",
                [8, 1024, 16, 1, 192, 768, 32_000, 32_768],
                false,
            )
        },
        Shape::Bert => model("bert", [12, 768, 12, 12, 64, 3072, 30_522, 512], false),
        Shape::ModernBert => SyntheticModel {
            extra: vec![("attention.sliding_window", 128u32.into())],
            ..model(
                "modern-bert",
                [22, 768, 12, 12, 64, 1152, 50_368, 8192],
                false,
            )
        },
        Shape::EmbeddingGemma => SyntheticModel {
            extra: vec![
                ("attention.sliding_window", 512u32.into()),
                ("attention.sliding_window_pattern", 6u32.into()),
            ],
            ..model(
                "gemma-embedding",
                [24, 768, 3, 1, 256, 1152, 262_144, 2048],
                false,
            )
        },
        Shape::Qwen3 => model("qwen3", [36, 2560, 32, 8, 128, 9728, 151_936, 40_960], true),
    }
}
