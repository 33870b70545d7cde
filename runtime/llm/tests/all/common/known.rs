//! The models for which llama.cpp computed logits, which are in `tests/fixtures/llama_cpp`.

use samite_core::DType;
use samite_gguf::{StringArray, Value};
use samite_llm::arch::spec::Pooling;
use samite_llm::{SyntheticAdapter, SyntheticModel};
use std::path::{Path, PathBuf};

/// Number of decoded tokens: enough for slow rotations to have an effect.
pub const N_TOKENS: usize = 96;

/// A model and the operations on it.
pub struct Known {
    /// Name of the fixture.
    pub name: &'static str,
    pub model: SyntheticModel,
    /// Number of positions, starting at 8, that are removed before a second batch; 0 for a single
    /// batch.
    pub cut: usize,
    /// Scales of the adapters that change all of its matrices, by number of the adapter.
    pub adapters: Vec<f32>,
}

impl Known {
    /// Returns whether the adapters change a tensor: llama.cpp cannot change an embedding that is
    /// also the output matrix.
    pub fn is_changed(&self, tensor: &str) -> bool {
        !(self.model.tied && tensor == "token_embd.weight")
    }
}

/// Creates a model whose heads share the width evenly, which all architectures support.
fn narrow(architecture: &'static str) -> SyntheticModel {
    SyntheticModel {
        head_dim: 16,
        n_vocab: 259,
        n_layer: 2,
        ..SyntheticModel::tiny(architecture)
    }
}

fn wide(architecture: &'static str) -> SyntheticModel {
    SyntheticModel {
        head_dim: 32,
        ..narrow(architecture)
    }
}

/// Creates a model wide enough for blocks of 256 weights.
fn quantized(architecture: &'static str, dtype: DType) -> SyntheticModel {
    SyntheticModel {
        n_embd: 256,
        head_dim: 64,
        n_ff: 512,
        dtype,
        ..narrow(architecture)
    }
}

/// Adds YaRN: some rotations are so fast that they extrapolate, some so slow that they interpolate,
/// and some are in between.
fn yarn(model: SyntheticModel) -> SyntheticModel {
    SyntheticModel {
        n_ctx_train: 8192,
        extra: vec![
            ("rope.scaling.type", "yarn".into()),
            ("rope.scaling.factor", 4.0f32.into()),
            ("rope.scaling.original_context_length", 2048u32.into()),
        ],
        ..model
    }
}

/// Returns all models.
pub fn known() -> Vec<Known> {
    let tied = |model| SyntheticModel {
        tied: true,
        ..model
    };
    let with = |model, extra: Vec<(&'static str, Value)>| SyntheticModel { extra, ..model };
    let having = |model, optional: &[&'static str]| SyntheticModel {
        optional: optional.to_vec(),
        ..model
    };
    let experts = |model, [count, used]: [usize; 2]| SyntheticModel {
        experts: Some([count, used]),
        ..model
    };
    // Without their own width, the used experts share the width of the feed-forward network.
    let mut shared_width = experts(narrow("qwen3moe"), [6, 3]);
    shared_width.extra = vec![
        ("expert_feed_forward_length", 0u32.into()),
        ("feed_forward_length", 288u32.into()),
    ];
    let qkv_biases = ["attn_q.bias", "attn_k.bias", "attn_v.bias"];
    let other_biases = [
        "attn_output.bias",
        "ffn_gate.bias",
        "ffn_up.bias",
        "ffn_down.bias",
    ];
    let linear = vec![
        ("rope.scaling.type", "linear".into()),
        ("rope.scaling.factor", 4.0f32.into()),
    ];
    let mut implicit = yarn(wide("llama"));
    implicit.extra.pop();
    let mut magnified = yarn(wide("qwen3"));
    magnified
        .extra
        .push(("rope.scaling.attn_factor", 1.25f32.into()));

    let mut all: Vec<(&'static str, SyntheticModel, usize)> = vec![
        ("llama", narrow("llama"), 0),
        ("llama-tied", tied(narrow("llama")), 0),
        ("llama-wide-heads", wide("llama"), 0),
        (
            "llama-rope-freqs",
            having(wide("llama"), &["rope_freqs.weight"]),
            0,
        ),
        ("llama-linear", with(wide("llama"), linear.clone()), 0),
        (
            "llama-old-linear",
            with(
                wide("llama"),
                vec![("rope.scale_linear", Value::from(2.0f32))],
            ),
            0,
        ),
        ("llama-yarn", yarn(wide("llama")), 0),
        ("llama-yarn-implicit", implicit, 0),
        (
            "llama-base",
            with(
                wide("llama"),
                vec![
                    ("rope.freq_base", Value::from(500_000.0f32)),
                    ("attention.layer_norm_rms_epsilon", Value::from(1e-2f32)),
                ],
            ),
            0,
        ),
        (
            "llama-biases",
            having(wide("llama"), &[&qkv_biases[..], &other_biases].concat()),
            0,
        ),
        ("llama-shift", narrow("llama"), 5),
        (
            "llama-rope-freqs-shift",
            having(wide("llama"), &["rope_freqs.weight"]),
            5,
        ),
        ("llama-linear-shift", with(wide("llama"), linear.clone()), 5),
        ("qwen2", narrow("qwen2"), 0),
        ("qwen2-tied", tied(narrow("qwen2")), 0),
        (
            "qwen2-output-bias",
            having(narrow("qwen2"), &["output.bias"]),
            0,
        ),
        ("qwen2-yarn", yarn(narrow("qwen2")), 0),
        ("qwen2-linear", with(narrow("qwen2"), linear), 0),
        ("qwen2-shift", narrow("qwen2"), 7),
        ("qwen3", narrow("qwen3"), 0),
        ("qwen3-wide-heads", wide("qwen3"), 0),
        ("qwen3-tied", tied(wide("qwen3")), 0),
        ("qwen3-yarn", magnified, 0),
        ("qwen3-biases", having(wide("qwen3"), &qkv_biases), 0),
        ("qwen3-shift", wide("qwen3"), 11),
        ("qwen3moe", narrow("qwen3moe"), 0),
        ("qwen3moe-one", experts(wide("qwen3moe"), [5, 1]), 0),
        ("qwen3moe-all", tied(experts(wide("qwen3moe"), [4, 4])), 0),
        ("qwen3moe-shared-width", shared_width, 0),
        ("llama-experts", experts(narrow("llama"), [8, 3]), 0),
        (
            "qwen3-no-scaling",
            with(
                wide("qwen3"),
                vec![
                    ("rope.scaling.type", Value::from("none")),
                    ("rope.scaling.factor", Value::from(4.0f32)),
                ],
            ),
            0,
        ),
    ];
    for (name, architecture, dtype) in [
        ("llama-f16", "llama", DType::F16),
        ("llama-bf16", "llama", DType::BF16),
        ("llama-q8_0", "llama", DType::Q8_0),
        ("llama-q4_K", "llama", DType::Q4_K),
        ("qwen2-q4_0", "qwen2", DType::Q4_0),
        ("qwen2-q5_K", "qwen2", DType::Q5_K),
        ("qwen3-q6_K", "qwen3", DType::Q6_K),
        ("qwen3-q4_K", "qwen3", DType::Q4_K),
        ("qwen3moe-f16", "qwen3moe", DType::F16),
        ("qwen3moe-q8_0", "qwen3moe", DType::Q8_0),
        ("qwen3moe-q4_0", "qwen3moe", DType::Q4_0),
        ("qwen3moe-q4_K", "qwen3moe", DType::Q4_K),
    ] {
        // With the first seed, one token of one of these models has two almost equally probable
        // experts.
        let seed = 2;
        let model = quantized(architecture, dtype);
        all.push((name, SyntheticModel { seed, ..model }, 0));
    }
    // State spaces, alone and combined with attention.
    for name in ["mamba", "mamba2", "jamba", "falcon-h1"] {
        let mut model = narrow(name);
        model.n_layer = 3;
        all.push((name, model, 0));
    }
    // llama.cpp supports no other numbers.
    let streams = vec![
        ("embedding_length_per_layer_input", Value::from(256u32)),
        ("attention.shared_kv_layers", 0u32.into()),
    ];
    all.push(("gemma3n", with(narrow("gemma3n"), streams), 0));
    let known = |name, model, cut, adapters: &[f32]| Known {
        name,
        model,
        cut,
        adapters: adapters.to_vec(),
    };
    let plain = all
        .into_iter()
        .map(|(name, model, cut)| known(name, model, cut, &[]));
    let adapted = [
        known("llama-lora", narrow("llama"), 0, &[1.0]),
        known("llama-loras", narrow("llama"), 0, &[0.5, -1.5]),
        known(
            "llama-lora-biases",
            having(wide("llama"), &qkv_biases),
            0,
            &[1.0],
        ),
        known("qwen3-lora-tied", tied(wide("qwen3")), 0, &[0.75]),
        known("qwen3moe-lora", narrow("qwen3moe"), 0, &[1.0, 0.25]),
    ];
    plain.chain(adapted).collect()
}

/// Returns the path of an adapter for a model's file.
pub fn adapter_path(model: &Path, number: usize) -> PathBuf {
    model.with_extension(format!("lora{number}.gguf"))
}

/// Writes adapter `number` of the model in a file: random pairs for all matrices for whose names
/// `changes` returns true. The first adapter has a factor, and the second one has none.
pub fn write_adapter(
    model: &Path,
    number: usize,
    changes: impl Fn(&str) -> bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let adapter = SyntheticAdapter {
        rank: 4 + 3 * number,
        alpha: if number == 0 { 6.0 } else { 0.0 },
    };
    let mut rng = samite_text::Rng::new(7 + number as u64);
    let next = || (0.5 * rng.uniform() - 0.25) as f32;
    Ok(adapter.write(model, adapter_path(model, number), changes, next)?)
}

/// Returns the tokens to decode.
pub fn known_tokens() -> Vec<u32> {
    (0..N_TOKENS as u32)
        .map(|i| 3 + (i * 37 + i * i * 11) % 250)
        .collect()
}

/// A model with known embeddings of some texts.
pub struct KnownEmbedding {
    /// Name of the fixture.
    pub name: &'static str,
    pub model: SyntheticModel,
    pub pooling: Pooling,
}

/// Returns the texts with known embeddings, for one batch, with more and fewer tokens than the
/// window of tiny models.
pub fn known_texts() -> [Vec<u32>; 3] {
    let tokens = known_tokens();
    [&tokens[..23], &tokens[23..28], &tokens[28..45]].map(<[u32]>::to_vec)
}

/// Returns all models with known embeddings.
pub fn known_embeddings() -> Vec<KnownEmbedding> {
    let model = |name, optional: &[&'static str], extra: &[(&'static str, Value)]| {
        let mut model = SyntheticModel::tiny(name);
        // Heads share the width evenly.
        model.head_dim = 16;
        model.n_vocab = 259;
        model.optional.extend(optional);
        model.extra = extra.to_vec();
        model
    };
    let biases = &[
        "attn_q.bias",
        "attn_k.bias",
        "attn_v.bias",
        "attn_output.bias",
        "ffn_up.bias",
        "ffn_down.bias",
    ];
    let labels = |labels: &[&str]| {
        let labels: StringArray = labels.iter().map(ToString::to_string).collect();
        ("classifier.output_labels", Value::from(labels))
    };
    let classifier = &[
        "cls.weight",
        "cls.bias",
        "cls.output.weight",
        "cls.output.bias",
    ];
    let code = &[
        "attn_q_norm.weight",
        "attn_q_norm.bias",
        "attn_k_norm.weight",
        "attn_k_norm.bias",
        "attn_norm_2.weight",
        "attn_norm_2.bias",
    ];
    let head = &["cls.weight", "cls.norm.weight", "cls.output.weight"];
    let dense = &["dense_2.weight", "dense_3.weight"];
    let three = [labels(&["no", "maybe", "yes"])];
    let two = [labels(&["yes", "no"])];
    let silu = [("hidden_activation", Value::from("silu"))];
    let of_first = [("classifier.pooling_type", Value::from(2u32))];
    let short = [("embedding_length_out", Value::from(40u32))];
    let both = [("attention.causal", Value::from(false))];
    let mut fused = model("jina-bert-v2", &[], &[]);
    fused.optional.retain(|&name| name != "ffn_gate.weight");
    let known = [
        ("bert-none", model("bert", &[], &[]), Pooling::None),
        ("bert-mean", model("bert", &[], &[]), Pooling::Mean),
        ("bert-cls", model("bert", biases, &[]), Pooling::Cls),
        (
            "bert-last",
            model("bert", &["attn_qkv.weight", "attn_qkv.bias"], &[]),
            Pooling::Last,
        ),
        ("bert-rank", model("bert", classifier, &[]), Pooling::Rank),
        (
            "bert-rank-direct",
            model("bert", &classifier[2..], &three),
            Pooling::Rank,
        ),
        (
            "nomic-bert-mean",
            model("nomic-bert", &[], &[]),
            Pooling::Mean,
        ),
        (
            "nomic-bert-moe-mean",
            model("nomic-bert-moe", biases, &[]),
            Pooling::Mean,
        ),
        (
            "jina-bert-v2-mean",
            model("jina-bert-v2", &[], &[]),
            Pooling::Mean,
        ),
        (
            "jina-bert-v2-code",
            model("jina-bert-v2", code, &[]),
            Pooling::Mean,
        ),
        ("jina-bert-v2-fused", fused, Pooling::Mean),
        (
            "jina-bert-v2-rank",
            model("jina-bert-v2", &classifier[..2], &[]),
            Pooling::Rank,
        ),
        (
            "jina-bert-v3-mean",
            model("jina-bert-v3", biases, &[]),
            Pooling::Mean,
        ),
        (
            "modern-bert-cls",
            model("modern-bert", &[], &[]),
            Pooling::Cls,
        ),
        (
            "modern-bert-silu",
            model("modern-bert", &[], &silu),
            Pooling::Mean,
        ),
        (
            "modern-bert-rank",
            model("modern-bert", head, &[]),
            Pooling::Rank,
        ),
        (
            "modern-bert-rank-first",
            model("modern-bert", head, &of_first),
            Pooling::Rank,
        ),
        ("neo-bert-cls", model("neo-bert", &[], &[]), Pooling::Cls),
        ("eurobert-mean", model("eurobert", &[], &[]), Pooling::Mean),
        (
            "llama-embed-mean",
            model("llama-embed", &[], &[]),
            Pooling::Mean,
        ),
        (
            "gemma-embedding-none",
            model("gemma-embedding", &[], &[]),
            Pooling::None,
        ),
        (
            "gemma-embedding-dense",
            model("gemma-embedding", dense, &[]),
            Pooling::Mean,
        ),
        (
            "lfm2-dense",
            model("lfm2", &dense[..1], &short),
            Pooling::Last,
        ),
        ("lfm2-both-sides", model("lfm2", &[], &both), Pooling::Mean),
        ("llama-mean", model("llama", &[], &[]), Pooling::Mean),
        ("llama-last", model("llama", &[], &[]), Pooling::Last),
        (
            "qwen2-both-sides",
            model("qwen2", &[], &both),
            Pooling::Mean,
        ),
        (
            "qwen3-rank",
            model("qwen3", &classifier[2..3], &two),
            Pooling::Rank,
        ),
        ("dream-mean", model("dream", &[], &[]), Pooling::Mean),
    ];
    let known = known.into_iter();
    known
        .map(|(name, model, pooling)| KnownEmbedding {
            name,
            model,
            pooling,
        })
        .collect()
}

/// Number of tokens to decode; the logits of the last ones are known.
pub const N_DECODED: usize = 45;

/// Returns the language models for which `transformers` computed logits: the most widely used ones.
/// Each has the name of its architecture.
pub fn known_decoders() -> Vec<(&'static str, SyntheticModel)> {
    let biases: &[_] = &["attn_q.bias", "attn_k.bias", "attn_v.bias"];
    let all_biases = &[biases, &["attn_output.bias"]].concat();
    let sums = [
        ("expert_gating_func", Value::from(2u32)),
        ("expert_weights_norm", true.into()),
        ("expert_weights_scale", 2.5f32.into()),
    ];
    let groups = [
        ("expert_group_count", Value::from(2u32)),
        ("expert_group_used_count", 1u32.into()),
    ];
    let choice = &["exp_probs_b.bias"];
    let yarn = [
        ("rope.scaling.type", Value::from("yarn")),
        ("rope.scaling.factor", 4.0f32.into()),
        ("rope.scaling.original_context_length", 64u32.into()),
    ];
    // Fewer elements are rotated than a head has.
    let half = [("rope.dimension_count", Value::from(8u32))];
    let of = |architecture, optional: &[&'static str], extra: &[&[(&'static str, Value)]]| {
        let mut model = SyntheticModel::tiny(architecture);
        model.n_vocab = 259;
        model.optional.extend(optional);
        model.extra = extra.concat();
        (architecture, model)
    };
    let deeper = |n_layer, (name, model): (&'static str, SyntheticModel)| {
        (name, SyntheticModel { n_layer, ..model })
    };
    vec![
        of("llama", &[], &[]),
        of("mistral3", &[], &[]),
        of("qwen2", &[], &[]),
        of("qwen3", &[], &[]),
        of("qwen3vl", &[], &[]),
        of("qwen3moe", &[], &[]),
        of("qwen35", &[], &[]),
        of("qwen35moe", &[], &[]),
        // Every sixth layer has full attention; in Gemma 4, the last one must.
        deeper(7, of("gemma3", &[], &[])),
        deeper(
            6,
            of(
                "gemma4",
                &["layer_output_scale.weight"],
                &[&[("attention.shared_kv_layers", Value::from(2u32))]],
            ),
        ),
        of("phi3", &[], &[]),
        of("gpt-oss", all_biases, &[&yarn]),
        of("deepseek2", choice, &[&sums, &groups]),
        of(
            "glm4moe",
            &[biases, &["attn_q_norm.weight", "attn_k_norm.weight"]].concat(),
            &[&sums, &half],
        ),
        of("minimax-m2", &[], &[&half]),
        of("lfm2", &[], &[&[("attention.sliding_window", 0u32.into())]]),
        of("granitehybrid", &["ssm_conv1d.bias"], &[]),
        of("nemotron_h_moe", &["ssm_conv1d.bias"], &[]),
    ]
}
