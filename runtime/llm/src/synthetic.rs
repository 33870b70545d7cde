//! Models with random weights, and adapters for them, of any architecture, size and type, for tests
//! and benchmarks.

use crate::adapter::{EMBEDDING, KEY_ADAPTER_TYPE, KEY_ALPHA, KEY_TYPE, SUFFIX_A, SUFFIX_B};
use crate::arch::{Spec, TensorSpec, WeightUse};
use crate::error::{Error, Result, try_filled};
use crate::quantize::{Mixture, for_rows_of};
use samite_core::DType;
use samite_gguf::{
    AtomicFile, GgufFile, KEY_ARCHITECTURE, LoadMode, Metadata, StringArray,
    TensorSpec as FileTensor, Value, Writer,
};
use samite_quant::{can_decode, can_encode, encode_row, random_row};
use samite_text::Rng;
use std::path::Path;

/// Smallest vocabulary: three special tokens and all bytes.
pub const MIN_VOCABULARY: usize = 3 + 256;

/// Architectures whose synthetic models have mixtures of experts.
const MIXTURES: [&str; 36] = [
    "qwen3moe",
    "qwen2moe",
    "qwen3vlmoe",
    "qwen3next",
    "qwen35moe",
    "lfm2moe",
    "glm4moe",
    "cohere2moe",
    "deepseek2",
    "mistral4",
    "afmoe",
    "arctic",
    "bailingmoe",
    "bailingmoe2",
    "dbrx",
    "deepseek",
    "dots1",
    "ernie4_5-moe",
    "exaone-moe",
    "gpt-oss",
    "grok",
    "hunyuan-moe",
    "hy_v3",
    "laguna",
    "llama4",
    "maple",
    "mellum",
    "mimo2",
    "minimax-m2",
    "olmoe",
    "phimoe",
    "smallthinker",
    "step35",
    "llada-moe",
    "rnd1",
    "nomic-bert-moe",
];

/// Architectures with norms after the residual additions, and with token types.
const BERTS: [&str; 5] = [
    "bert",
    "nomic-bert",
    "nomic-bert-moe",
    "jina-bert-v2",
    "jina-bert-v3",
];

/// Tensors of [`BERTS`] that are optional in files.
const BERT_TENSORS: [&str; 4] = [
    "token_types.weight",
    "token_embd_norm.bias",
    "attn_output_norm.bias",
    "layer_output_norm.bias",
];

/// Number of distinct random rows of a matrix. Further rows repeat them, so that large models are
/// written quickly.
const DISTINCT_ROWS: usize = 1024;

/// A synthetic model. The weights keep activations of order 1 through all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticModel {
    /// Name of the architecture.
    pub architecture: &'static str,
    /// Number of layers.
    pub n_layer: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Number of query heads.
    pub n_head: usize,
    /// Number of key and value heads.
    pub n_head_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the feed-forward network.
    pub n_ff: usize,
    /// Number of experts in each layer, each of width `n_ff`, and number of experts that a token
    /// uses.
    pub experts: Option<[usize; 2]>,
    /// Size of the vocabulary, at least [`MIN_VOCABULARY`].
    pub n_vocab: usize,
    /// Context length of the training.
    pub n_ctx_train: usize,
    /// Type of all matrices, except those whose rows are not whole blocks of it; these get a type
    /// from quantization. Vectors are F32.
    pub dtype: DType,
    /// True if the embedding table is also the output matrix.
    pub tied: bool,
    /// Optional tensors in the file, such as `output.bias`, or `attn_q.bias` for all layers.
    pub optional: Vec<&'static str>,
    /// Metadata under the architecture's prefix, such as `rope.freq_base`: more keys, or other
    /// values.
    pub extra: Vec<(&'static str, Value)>,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl SyntheticModel {
    /// Creates a tiny model with everything that its architecture requires. All heads together are
    /// wider than the model, except for architectures that do not allow that, such as qwen2.
    pub fn tiny(architecture: &'static str) -> Self {
        // Most architectures require heads that share the width evenly.
        let wide = ["llama", "qwen3", "qwen3moe"].contains(&architecture);
        let head_dim = if wide { 32 } else { 16 };
        SyntheticModel {
            architecture,
            n_layer: 3,
            n_embd: 64,
            n_head: 4,
            // Encoders have equally many heads of all three kinds, and some have one matrix for
            // them.
            n_head_kv: match architecture {
                "modern-bert" | "neo-bert" => 4,
                name if BERTS.contains(&name) => 4,
                _ => 2,
            },
            head_dim,
            n_ff: 96,
            experts: MIXTURES.contains(&architecture).then_some([6, 2]),
            n_vocab: 320,
            n_ctx_train: 256,
            dtype: DType::F32,
            tied: false,
            // Optional in samite, but required by llama.cpp.
            optional: match architecture {
                "gemma4" => vec!["rope_freqs.weight"],
                "afmoe" | "laguna" | "lfm2moe" => vec!["exp_probs_b.bias"],
                "modern-bert" | "neo-bert" => vec!["attn_qkv.weight"],
                "jamba" => vec!["ssm_conv1d.bias", "ssm_dt_norm.weight"],
                "mamba" | "mamba2" => vec!["ssm_conv1d.bias"],
                "falcon-h1" => vec!["ssm_conv1d.bias", "ffn_norm"],
                "jina-bert-v2" => {
                    let demanded = ["ffn_gate.weight", "attn_output.bias", "ffn_down.bias"];
                    [&BERT_TENSORS[..], &demanded].concat()
                }
                name if BERTS.contains(&name) => BERT_TENSORS.to_vec(),
                _ => Vec::new(),
            },
            extra: Vec::new(),
            seed: 1,
        }
    }

    /// Returns the metadata of the file.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the vocabulary is too small.
    pub fn metadata(&self) -> Result<Metadata> {
        if self.n_vocab < MIN_VOCABULARY {
            return Err(Error::invalid(format!(
                "a vocabulary of {}: at least {MIN_VOCABULARY} tokens are needed",
                self.n_vocab
            )));
        }
        let mut metadata = Metadata::new();
        metadata.set(KEY_ARCHITECTURE, self.architecture)?;
        metadata.set("general.name", "synthetic")?;
        if let Some(file_type) = Mixture::file_type_of(self.dtype) {
            metadata.set("general.file_type", file_type)?;
        }
        let [count, used] = self.experts.unwrap_or_default();
        for (key, value) in [
            ("block_count", self.n_layer),
            ("context_length", self.n_ctx_train),
            ("embedding_length", self.n_embd),
            ("feed_forward_length", self.n_ff),
            ("expert_feed_forward_length", self.n_ff),
            ("expert_count", count),
            ("expert_used_count", used),
            ("attention.head_count", self.n_head),
            ("attention.head_count_kv", self.n_head_kv),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.head_dim),
        ] {
            if key.starts_with("expert") && self.experts.is_none() {
                continue;
            }
            let value = u32::try_from(value)
                .map_err(|_| Error::invalid(format!("{key} of {value} is too large")))?;
            metadata.set(&format!("{}.{key}", self.architecture), value)?;
        }
        let eps = format!("{}.attention.layer_norm_rms_epsilon", self.architecture);
        metadata.set(&eps, 1e-5f32)?;
        for (key, value) in self.required_keys() {
            metadata.set(&format!("{}.{key}", self.architecture), value)?;
        }
        if BERTS.contains(&self.architecture) {
            metadata.set("tokenizer.ggml.token_type_count", 2u32)?;
        }
        for (key, value) in &self.extra {
            metadata.set(&format!("{}.{key}", self.architecture), value.clone())?;
        }
        self.set_vocabulary(&mut metadata)?;
        Ok(metadata)
    }

    /// Returns the keys that architectures require in addition to the usual ones.
    fn required_keys(&self) -> Vec<(&'static str, Value)> {
        const USUAL: [&str; 4] = ["llama", "qwen2", "qwen3", "qwen3moe"];
        if USUAL.contains(&self.architecture) {
            return Vec::new();
        }
        let extent = |value: usize| Value::from(u32::try_from(value).unwrap_or(u32::MAX));
        let size = self.head_dim;
        let mut keys = vec![
            ("attention.layer_norm_epsilon", 1e-5f32.into()),
            ("attention.sliding_window", extent(8)),
            ("attention.max_alibi_bias", 8f32.into()),
            ("logit_scale", 0.5f32.into()),
            ("xielu.alpha_n", 0.8f32.into()),
            ("xielu.alpha_p", 0.8f32.into()),
            ("xielu.beta", 0.5f32.into()),
            ("xielu.eps", 1e-6f32.into()),
            ("ssm.conv_kernel", extent(4)),
            ("ssm.state_size", extent(size)),
            ("ssm.group_count", extent(self.n_head_kv)),
            ("ssm.time_step_rank", extent(self.n_head)),
            ("ssm.inner_size", extent(size * self.n_head)),
            ("full_attention_interval", extent(2)),
            ("shortconv.l_cache", extent(3)),
            ("moe_every_n_layers", extent(2)),
        ];
        if self.experts.is_some() {
            keys.extend([
                ("expert_shared_count", extent(1)),
                ("interleave_moe_layer_step", extent(1)),
                ("leading_dense_block_count", extent(1)),
            ]);
        }
        if self.architecture.starts_with("qwen3") || self.architecture == "qwen2vl" {
            // Pairs of each axis of a position, for programs that rotate them by several axes.
            let each = u32::try_from((size / 2).div_ceil(3)).unwrap_or(0);
            let sections = vec![each, each, each, 0];
            keys.push(("rope.dimension_sections", sections.into()));
        }
        // llama.cpp supports no other width.
        if ["mamba", "mamba2", "jamba", "granitehybrid"].contains(&self.architecture) {
            keys.push(("ssm.inner_size", extent(2 * self.n_embd)));
        }
        match self.architecture {
            // llama.cpp detects it by this key alone.
            "llama-embed" => keys.push(("attention.causal", false.into())),
            // The last layer attends to all tokens.
            "gemma-embedding" => keys.extend([
                ("attention.sliding_window_pattern", extent(self.n_layer)),
                ("dense_2_feat_out", extent(2 * self.n_embd)),
                ("dense_3_feat_in", extent(2 * self.n_embd)),
                ("dense_3_feat_out", extent(self.n_embd)),
            ]),
            // A state space, attention, and a feed-forward network in turn.
            "nemotron_h" | "nemotron_h_moe" => {
                let of_layers = |value: usize, turn: usize| {
                    let values = (0..self.n_layer).map(|il| if il % 3 == turn { value } else { 0 });
                    let values = values.map(|value| u32::try_from(value).unwrap_or(u32::MAX));
                    values.collect::<Vec<_>>().into()
                };
                keys.extend([
                    ("attention.head_count_kv", of_layers(self.n_head_kv, 1)),
                    ("feed_forward_length", of_layers(self.n_ff, 2)),
                    ("expert_shared_feed_forward_length", extent(self.n_ff)),
                ]);
            }
            // Every other layer has a short convolution or a state space.
            "lfm2" | "lfm2moe" | "granitehybrid" | "jamba" => {
                let heads = (0..self.n_layer).map(|il| {
                    let heads = if il % 2 == 0 { 0 } else { self.n_head_kv };
                    u32::try_from(heads).unwrap_or(u32::MAX)
                });
                keys.push(("attention.head_count_kv", heads.collect::<Vec<_>>().into()));
            }
            // Rotated elements after others, and rows shorter than all heads together.
            "deepseek2" | "mistral4" | "minicpm3" | "plm" => keys.extend([
                ("rope.dimension_count", extent(size / 2)),
                ("attention.kv_lora_rank", extent(size)),
                ("attention.q_lora_rank", extent(size)),
            ]),
            _ => {}
        }
        if matches!(self.architecture, "gemma3n" | "gemma4") {
            // Layers with and without a window alternate; the last one uses the keys and values of
            // an earlier one.
            let windowed = (0..self.n_layer).map(|il| u32::from(il % 2 == 0));
            keys.extend([
                ("embedding_length_per_layer_input", extent(size)),
                ("attention.key_length_swa", extent(size)),
                ("attention.value_length_swa", extent(size)),
                ("attention.shared_kv_layers", extent(1)),
                (
                    "attention.sliding_window_pattern",
                    windowed.collect::<Vec<_>>().into(),
                ),
            ]);
        }
        if matches!(self.architecture, "deepseek2" | "mistral4") {
            keys.extend([
                ("attention.key_length", extent(size + size / 2)),
                ("attention.value_length", extent(size)),
                ("attention.key_length_mla", extent(size)),
                ("attention.value_length_mla", extent(size)),
            ]);
        }
        keys
    }

    /// Sets a SentencePiece-style vocabulary: special tokens, bytes, then made-up words.
    fn set_vocabulary(&self, metadata: &mut Metadata) -> Result<()> {
        const NORMAL: i32 = 1;
        let special =
            [("<unk>", 2), ("<s>", 3), ("</s>", 3)].map(|(text, kind)| (text.to_owned(), kind));
        let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), 6));
        let words = (0..self.n_vocab - MIN_VOCABULARY).map(|i| (word(i), NORMAL));
        let (texts, kinds): (Vec<String>, Vec<i32>) =
            special.into_iter().chain(bytes).chain(words).unzip();
        let scores: Vec<f32> = (0..texts.len()).map(|i| -(i as f32)).collect();
        metadata.set("tokenizer.ggml.model", "llama")?;
        metadata.set(
            "tokenizer.ggml.tokens",
            texts.into_iter().collect::<StringArray>(),
        )?;
        metadata.set("tokenizer.ggml.scores", scores)?;
        metadata.set("tokenizer.ggml.token_type", kinds)?;
        metadata.set("tokenizer.ggml.bos_token_id", 1u32)?;
        metadata.set("tokenizer.ggml.eos_token_id", 2u32)?;
        metadata.set("tokenizer.ggml.unknown_token_id", 0u32)?;
        Ok(())
    }

    /// Returns the tensors of the file: those that the architecture requires, and the chosen
    /// optional ones.
    fn tensors(&self, metadata: &Metadata) -> Result<Vec<TensorSpec>> {
        // A chosen tensor may decide the form of the others.
        let is_chosen = |name: &str| self.optional.contains(&within_layer(name));
        let spec = Spec::from_metadata(metadata, usize::MAX, &is_chosen)?;
        let wanted = |spec: &TensorSpec| {
            spec.required
                || spec.name == "output.weight" && !self.tied
                || self.optional.contains(&within_layer(&spec.name))
        };
        Ok(spec.tensors().into_iter().filter(wanted).collect())
    }

    /// Writes the header of the model's file without weights, which is enough for plans.
    ///
    /// # Errors
    /// Fails like [`write`](SyntheticModel::write).
    pub fn write_header(&self, path: impl AsRef<Path>) -> Result<()> {
        let (metadata, _, files) = self.header()?;
        let mut file = AtomicFile::create(path)?;
        Writer::new(&mut file, &metadata, files)?;
        Ok(file.commit()?)
    }

    fn header(&self) -> Result<(Metadata, Vec<TensorSpec>, Vec<FileTensor>)> {
        // Types that can only be decoded get random blocks.
        if !(can_encode(self.dtype) || self.dtype.is_quantized() && can_decode(self.dtype)) {
            return Err(Error::invalid(format!(
                "matrices of type {} cannot be written",
                self.dtype
            )));
        }
        let metadata = self.metadata()?;
        let specs = self.tensors(&metadata)?;
        let files = specs.iter().map(|spec| {
            let dims = match spec.shape {
                [_, _, matrices, _] if matrices > 1 || spec.usage == WeightUse::Experts => 3,
                [_, 1, ..] => 1,
                _ => 2,
            };
            FileTensor::new(&spec.name, self.type_of(spec), &spec.shape[..dims])
        });
        let files = files.collect::<Result<_, _>>()?;
        Ok((metadata, specs, files))
    }

    fn type_of(&self, spec: &TensorSpec) -> DType {
        match spec.usage {
            // Routers are small and influential.
            WeightUse::Product if spec.name.ends_with("ffn_gate_inp.weight") => DType::F32,
            WeightUse::Rows | WeightUse::Product | WeightUse::Experts => {
                for_rows_of(self.dtype, spec.shape[0])
            }
            WeightUse::Scale
            | WeightUse::Bias
            | WeightUse::ExpertBias
            | WeightUse::Convolution
            | WeightUse::Decay
            | WeightUse::RopeDivisors => DType::F32,
        }
    }

    /// Writes the model to `path`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the numbers are inconsistent, or if matrices of this
    /// type cannot be written. Also fails if the file cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let (metadata, specs, files) = self.header()?;
        let types = |spec: &TensorSpec| self.type_of(spec);
        let mut writer = Writer::create(path, &metadata, files)?;
        for spec in &specs {
            // Seeded by name: the contents of a tensor do not depend on the other tensors.
            let mut rng = Rng::new(self.seed ^ hash(&spec.name));
            let dtype = types(spec);
            let [width, rows, matrices, _] = spec.shape;
            let rows = rows * matrices;
            let (mean, deviation) = match spec.usage {
                WeightUse::Rows | WeightUse::Product | WeightUse::Experts => {
                    (0.0, 0.8 / (width as f32).sqrt())
                }
                WeightUse::Scale => (1.0, 0.05),
                WeightUse::RopeDivisors => (4.0, 1.0),
                WeightUse::Convolution => (0.0, 0.5),
                WeightUse::Decay => (-1.0, 0.2),
                WeightUse::Bias | WeightUse::ExpertBias => (0.0, 0.1),
            };
            let mut values = try_filled(0.0, Some(width), "a row")?;
            let distinct = rows.min(DISTINCT_ROWS);
            let bytes = dtype.row_bytes(width)?.checked_mul(distinct);
            let mut encoded = try_filled(0, bytes, "rows")?;
            for row in 0..rows {
                let bytes = dtype.row_bytes(width)?;
                let start = row % DISTINCT_ROWS * bytes;
                if row < DISTINCT_ROWS {
                    let encoded = &mut encoded[start..start + bytes];
                    if can_encode(dtype) {
                        values.fill_with(|| mean + deviation * normal(&mut rng));
                        encode_row(dtype, &values, encoded)?;
                    } else {
                        random_row(dtype, deviation, || rng.next_u64(), encoded)?;
                    }
                }
                writer.append(&encoded[start..start + bytes])?;
            }
        }
        Ok(writer.commit()?)
    }
}

/// A synthetic adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SyntheticAdapter {
    /// Rank of the pairs.
    pub rank: usize,
    /// Factor of the product of a pair, times the rank; 0 for no factor.
    pub alpha: f32,
}

impl SyntheticAdapter {
    /// Writes an adapter for the model in the file `model` to `path`. It has a pair for each matrix
    /// for whose name `changes` returns true, in the model's order, with numbers from `next`.
    ///
    /// # Errors
    /// Returns an error if the model cannot be read, or if the file cannot be written.
    pub fn write(
        &self,
        model: impl AsRef<Path>,
        path: impl AsRef<Path>,
        changes: impl Fn(&str) -> bool,
        mut next: impl FnMut() -> f32,
    ) -> Result<()> {
        let base = GgufFile::open(model, LoadMode::Read)?;
        let architecture: &str = base.metadata().require(KEY_ARCHITECTURE)?;
        let mut metadata = Metadata::new();
        metadata.set(KEY_TYPE, "adapter")?;
        metadata.set(KEY_ARCHITECTURE, architecture)?;
        metadata.set(KEY_ADAPTER_TYPE, "lora")?;
        metadata.set(KEY_ALPHA, self.alpha)?;
        let mut specs = Vec::new();
        let infos = base.tensors().iter();
        for info in infos.filter(|info| info.n_dims >= 2 && changes(&info.name)) {
            let [inputs, outputs, matrices, _] = info.shape;
            let [a, b] = match &*info.name {
                EMBEDDING => [[self.rank, outputs, 1], [self.rank, inputs, 1]],
                _ => [
                    [inputs, self.rank, matrices],
                    [self.rank, outputs, matrices],
                ],
            };
            for (suffix, dims) in [(SUFFIX_A, a), (SUFFIX_B, b)] {
                let name = format!("{}{suffix}", info.name);
                specs.push(FileTensor::new(&name, DType::F32, &dims[..info.n_dims])?);
            }
        }
        let mut writer = Writer::create(path, &metadata, specs)?;
        while let Some(size) = writer.next_tensor().map(FileTensor::size) {
            let data: Vec<u8> = (0..size / 4).flat_map(|_| next().to_le_bytes()).collect();
            writer.append(&data)?;
        }
        Ok(writer.commit()?)
    }
}

/// Returns the name of a tensor without `blk.N.`.
fn within_layer(name: &str) -> &str {
    let rest = name.strip_prefix("blk.").and_then(|s| s.split_once('.'));
    rest.map_or(name, |(_, rest)| rest)
}

/// Returns the FNV-1a hash of a name.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Returns the made-up word `i`: single letters first, then longer words.
fn word(mut i: usize) -> String {
    const LETTERS: &[u8; 26] = b"abcdefghijklmnopqrstuvwxyz";
    if i < LETTERS.len() {
        return char::from(LETTERS[i]).to_string();
    }
    i -= LETTERS.len();
    let mut letters = String::from("\u{2581}");
    loop {
        letters.push(char::from(LETTERS[i % 26]));
        i /= 26;
        if i == 0 {
            return letters;
        }
        i -= 1;
    }
}

/// Returns an approximately normal random number with deviation 1: the sum of four uniform numbers.
fn normal(rng: &mut Rng) -> f32 {
    let bits = rng.next_u64();
    let sum: f32 = (0..4).map(|i| f32::from((bits >> (16 * i)) as u16)).sum();
    // Each of them has variance 2^32 / 12.
    (sum - 4.0 * 32767.5) / (65536.0 * (4.0f32 / 12.0).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_unique() {
        let words: std::collections::HashSet<String> = (0..40_000).map(word).collect();
        assert_eq!(words.len(), 40_000);
    }

    #[test]
    fn random_values_are_approximately_normal() {
        let mut rng = Rng::new(3);
        let values: Vec<f32> = (0..20_000).map(|_| normal(&mut rng)).collect();
        let mean = values.iter().sum::<f32>() / 20_000.0;
        let variance = values.iter().map(|v| v * v).sum::<f32>() / 20_000.0;
        assert!(
            mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05,
            "{mean} {variance}"
        );
    }

    #[test]
    fn layer_prefixes_are_removed_from_names() {
        assert_eq!(within_layer("blk.12.attn_output.bias"), "attn_output.bias");
        assert_eq!(within_layer("output.bias"), "output.bias");
    }

    #[test]
    fn the_file_type_matches_the_matrices() {
        for (dtype, number) in [
            (DType::F32, 0),
            (DType::F16, 1),
            (DType::BF16, 32),
            (DType::Q4_0, 2),
            (DType::Q8_0, 7),
            (DType::Q4_K, 14),
            (DType::Q6_K, 18),
            (DType::MXFP4, 38),
            (DType::IQ2_XXS, 19),
            (DType::IQ3_S, 26),
            (DType::Q1_0, 40),
        ] {
            let model = SyntheticModel {
                dtype,
                ..SyntheticModel::tiny("llama")
            };
            let metadata = model.metadata().unwrap();
            let found = metadata.get::<u32>("general.file_type").unwrap();
            assert_eq!(found, Some(number), "{dtype}");
        }
    }

    #[test]
    fn invalid_synthetic_models_are_refused() {
        let small = SyntheticModel {
            n_vocab: 10,
            ..SyntheticModel::tiny("llama")
        };
        assert!(small.metadata().unwrap_err().to_string().contains("259"));
        let unknown = SyntheticModel::tiny("abacus");
        let error = unknown
            .write("/nonexistent/x.gguf")
            .unwrap_err()
            .to_string();
        assert!(error.contains("abacus"), "{error}");
    }
}
