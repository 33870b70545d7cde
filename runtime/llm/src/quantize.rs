//! Converts the weights of a model file to other types.
//!
//! A [`Mixture`] is a quantization with llama.cpp's name: mostly one type, with more bits for
//! important tensors. The choice of types follows llama.cpp's rules for models of the llama family.

use crate::convert::{Change, Converter, cancelled};
use crate::importance::ImportanceMatrix;
use samite_core::{CancelToken, DType};
use samite_gguf::{Error, ErrorKind, GgufFile, Metadata, TensorInfo, TensorSpec, Writer};
use samite_quant::{can_decode, can_quantize};
use std::path::Path;
use std::str::FromStr;

/// A named choice of types: name, llama.cpp's number for `general.file_type`, and the type of most
/// tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    name: &'static str,
    file_type: u32,
    base: DType,
}

const fn mixture(name: &'static str, file_type: u32, base: DType) -> Mixture {
    Mixture {
        name,
        file_type,
        base,
    }
}

const MIXTURES: &[Mixture] = &[
    mixture("F32", 0, DType::F32),
    mixture("F16", 1, DType::F16),
    mixture("BF16", 32, DType::BF16),
    mixture("F8_E4M3", 42, DType::F8_E4M3),
    mixture("Q8_0", 7, DType::Q8_0),
    mixture("Q4_0", 2, DType::Q4_0),
    mixture("Q4_1", 3, DType::Q4_1),
    mixture("Q5_0", 8, DType::Q5_0),
    mixture("Q5_1", 9, DType::Q5_1),
    mixture("Q2_K", 10, DType::Q2_K),
    mixture("Q2_K_S", 21, DType::Q2_K),
    mixture("Q3_K_S", 11, DType::Q3_K),
    mixture("Q3_K_M", 12, DType::Q3_K),
    mixture("Q3_K_L", 13, DType::Q3_K),
    mixture("Q4_K_S", 14, DType::Q4_K),
    mixture("Q4_K_M", 15, DType::Q4_K),
    mixture("Q5_K_S", 16, DType::Q5_K),
    mixture("Q5_K_M", 17, DType::Q5_K),
    mixture("Q6_K", 18, DType::Q6_K),
    mixture("IQ1_S", 24, DType::IQ1_S),
    mixture("IQ1_M", 31, DType::IQ1_M),
    mixture("IQ2_XXS", 19, DType::IQ2_XXS),
    mixture("IQ2_XS", 20, DType::IQ2_XS),
    mixture("IQ2_S", 28, DType::IQ2_XS),
    mixture("IQ2_M", 29, DType::IQ2_S),
    mixture("IQ3_XXS", 23, DType::IQ3_XXS),
    mixture("IQ3_XS", 22, DType::IQ3_S),
    mixture("IQ3_S", 26, DType::IQ3_S),
    mixture("IQ3_M", 27, DType::IQ3_S),
    mixture("IQ4_NL", 25, DType::IQ4_NL),
    mixture("IQ4_XS", 30, DType::IQ4_XS),
    mixture("MXFP4_MOE", 38, DType::MXFP4),
    mixture("TQ1_0", 36, DType::TQ1_0),
    mixture("TQ2_0", 37, DType::TQ2_0),
    mixture("Q1_0", 40, DType::Q1_0),
    mixture("Q2_0", 41, DType::Q2_0),
];

/// Keeps the types of all tensors.
const COPY: Mixture = mixture("COPY", u32::MAX, DType::F32);

/// Short names, which llama.cpp accepts as well.
const ALIASES: &[(&str, &str)] = &[("Q3_K", "Q3_K_M"), ("Q4_K", "Q4_K_M"), ("Q5_K", "Q5_K_M")];

impl Mixture {
    /// Returns all mixtures except `COPY`, which keeps the types of all tensors.
    pub fn all() -> impl Iterator<Item = Mixture> {
        MIXTURES.iter().copied()
    }

    /// Returns llama.cpp's name, such as `Q4_K_M`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the type of most tensors.
    pub fn base(&self) -> DType {
        self.base
    }

    /// Returns the mixture with llama.cpp's number.
    pub fn of_file_type(number: u32) -> Option<Self> {
        Mixture::all().find(|mixture| mixture.file_type == number)
    }

    /// Returns llama.cpp's number for a file whose matrices have this type.
    pub(crate) fn file_type_of(dtype: DType) -> Option<u32> {
        match dtype {
            DType::NVFP4 => return Some(39),
            // The mixtures with these names use other types for most tensors.
            DType::IQ2_S => return Some(28),
            DType::IQ3_S => return Some(26),
            _ => {}
        }
        let pure = |mixture: &&Mixture| mixture.base == dtype;
        MIXTURES.iter().find(pure).map(|mixture| mixture.file_type)
    }

    /// Returns the type for `tensor`.
    fn choose(&self, tensor: &TensorInfo, place: TensorPosition, model: &Traits) -> DType {
        use DType::*;
        let part = TensorRole::from_name(&tensor.name);
        let is_output =
            part == TensorRole::Output || part == TensorRole::Embedding && !model.has_output;
        let name = self.name;
        match part {
            _ if !self.base.is_quantized() => self.base,
            _ if is_output => match name {
                "MXFP4_MOE" => Q8_0,
                _ if model.is_falcon || !tensor.shape[0].is_multiple_of(self.base.block_len()) => {
                    Q8_0
                }
                "IQ1_S" | "IQ1_M" | "IQ2_XXS" | "IQ2_XS" | "IQ2_S" | "IQ2_M" | "IQ3_XXS" => Q5_K,
                "Q8_0" => Q8_0,
                _ => Q6_K,
            },
            // In models of Bailing's third generation, attention also has matrices with three
            // extents.
            _ if name == "MXFP4_MOE" => match part {
                TensorRole::Up | TensorRole::Gate | TensorRole::Down if tensor.shape[2] > 1 => {
                    MXFP4
                }
                _ if tensor.shape[2] > 1 && !model.is_bailing => MXFP4,
                _ => Q8_0,
            },
            TensorRole::Embedding => match name {
                "IQ1_S" | "IQ1_M" | "IQ2_XXS" | "IQ2_XS" => Q2_K,
                "IQ2_S" | "IQ2_M" | "IQ3_XXS" => IQ3_S,
                "TQ1_0" | "TQ2_0" | "Q2_0" => Q4_K,
                _ => self.base,
            },
            _ if matches!(
                name,
                "IQ1_S" | "IQ1_M" | "IQ2_XXS" | "IQ2_XS" | "IQ2_S" | "IQ2_M"
            ) =>
            {
                self.choose_of_two_bits(part, place, model)
            }
            TensorRole::Value => self.choose_for_values(place, model),
            // With eight experts, attention is a small part of the model.
            TensorRole::Key if model.experts == 8 => Q8_0,
            TensorRole::Key | TensorRole::Query => match name {
                "IQ3_XS" => IQ3_XXS,
                "IQ3_XXS" => IQ2_S,
                _ => self.base,
            },
            TensorRole::Down => self.choose_for_down(place, model),
            TensorRole::AttentionOutput => self.choose_for_attention_output(model),
            TensorRole::Gate | TensorRole::Up
                if name == "IQ3_XS" && !place.is_early() && place.layer < 7 * place.layers / 8 =>
            {
                IQ3_XXS
            }
            _ => self.base,
        }
    }

    /// Applies the rules of the mixtures with one and two bits.
    fn choose_of_two_bits(&self, part: TensorRole, place: TensorPosition, model: &Traits) -> DType {
        use DType::*;
        let is_larger = matches!(self.name, "IQ2_S" | "IQ2_M");
        let better = if is_larger { IQ3_S } else { Q2_K };
        match part {
            TensorRole::Value if model.shared >= 4 || model.experts >= 4 => Q4_K,
            TensorRole::Value => better,
            TensorRole::Key if model.experts == 8 => Q4_K,
            TensorRole::Down if place.nth < place.layers / 8 => better,
            TensorRole::AttentionOutput if model.experts == 8 => Q5_K,
            TensorRole::AttentionOutput if is_larger => IQ3_S,
            TensorRole::AttentionOutput if matches!(self.name, "IQ1_S" | "IQ1_M") => IQ2_XXS,
            _ => self.base,
        }
    }

    fn choose_for_values(&self, place: TensorPosition, model: &Traits) -> DType {
        use DType::*;
        let are_shared = model.shared >= 4;
        let chosen = match self.name {
            "Q2_K" if are_shared => Q4_K,
            "Q2_K" => Q3_K,
            "Q2_K_S" | "IQ3_XXS" | "IQ3_XS" | "IQ3_S" if are_shared => Q4_K,
            "IQ3_XXS" if !model.has_importance => IQ3_S,
            "IQ3_M" => Q4_K,
            "Q3_K_M" if place.nth < 2 => Q5_K,
            "Q3_K_M" => Q4_K,
            "Q3_K_L" => Q5_K,
            "IQ4_NL" | "IQ4_XS" if are_shared => Q5_K,
            "Q4_K_M" | "Q5_K_M" if is_important(place.nth, model.values) => Q6_K,
            "Q4_K_S" if place.nth < 4 => Q5_K,
            _ => self.base,
        };
        match chosen {
            _ if model.experts == 8 => Q8_0,
            // Eight heads share these values, so they are small.
            Q3_K | Q4_K if model.is_llama_70b => Q5_K,
            chosen => chosen,
        }
    }

    fn choose_for_down(&self, place: TensorPosition, model: &Traits) -> DType {
        use DType::*;
        let is_important = is_important(place.layer, place.layers);
        match self.name {
            "Q2_K" => Q3_K,
            "Q2_K_S" if place.is_early() => Q4_K,
            "IQ3_XXS" if !model.has_importance && place.is_early() => Q4_K,
            "IQ3_XXS" if !model.has_importance => Q3_K,
            "Q3_K_M" if place.layer < place.layers / 16 => Q5_K,
            "Q3_K_M" if !model.is_falcon || is_important => Q4_K,
            "IQ3_M" if place.is_early() || model.experts == 8 && is_important => Q4_K,
            "Q3_K_L" if model.is_falcon => Q4_K,
            "Q3_K_L" => Q5_K,
            "Q4_K_M" if model.is_falcon && place.layer < place.layers / 16 => Q6_K,
            "Q4_K_M" if model.is_falcon && is_important => Q5_K,
            "Q4_K_M" if model.is_falcon => Q4_K,
            "Q4_K_M" | "Q5_K_M" if is_important => Q6_K,
            "IQ4_NL" | "IQ4_XS" if place.is_early() && !model.has_importance => Q5_K,
            "Q4_K_S" if place.is_early() && !model.is_falcon => Q5_K,
            // With an importance matrix, these types work badly in the first layers.
            "Q4_0" if place.is_early() && model.has_importance => Q4_1,
            "Q5_0" if place.is_early() && model.has_importance => Q5_1,
            _ => self.base,
        }
    }

    fn choose_for_attention_output(&self, model: &Traits) -> DType {
        use DType::*;
        match self.name {
            "Q3_K_L" if model.is_falcon => Q4_K,
            _ if model.is_falcon => self.base,
            "Q2_K" | "Q3_K_S" | "Q3_K_M" | "Q4_K_S" | "Q4_K_M" | "IQ3_XXS" | "IQ3_XS" | "IQ3_S"
            | "IQ3_M" | "IQ4_NL" | "IQ4_XS"
                if model.experts == 8 =>
            {
                Q5_K
            }
            _ if model.experts == 8 => self.base,
            "Q2_K" => Q3_K,
            "IQ3_XXS" => IQ3_S,
            "Q3_K_M" | "IQ3_M" => Q4_K,
            "Q3_K_L" => Q5_K,
            _ => self.base,
        }
    }

    /// Returns whether `to` makes this tensor unusable without an importance matrix.
    fn demands_importance(&self, name: &str, to: DType) -> bool {
        use DType::*;
        match to {
            IQ1_S | IQ2_XXS | IQ2_XS => true,
            _ if matches!(
                TensorRole::from_name(name),
                TensorRole::Embedding | TensorRole::Output
            ) =>
            {
                false
            }
            IQ1_M | IQ2_S | IQ3_XXS => true,
            Q2_K => self.name == "Q2_K_S",
            _ => false,
        }
    }
}

/// Part of the model that a tensor belongs to, as far as the rules distinguish it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum TensorRole {
    Output,
    Embedding,
    /// Values of attention, alone or fused with other products.
    Value,
    Key,
    Query,
    AttentionOutput,
    Up,
    Gate,
    Down,
    Other,
}

impl TensorRole {
    fn from_name(name: &str) -> Self {
        let has = |part: &str| name.contains(part);
        match name {
            "output.weight" => TensorRole::Output,
            "token_embd.weight" | "per_layer_token_embd.weight" => TensorRole::Embedding,
            _ if has("attn_qkv.weight") || has("attn_kv_b.weight") || has("attn_v.weight") => {
                TensorRole::Value
            }
            _ if has("attn_k.weight") => TensorRole::Key,
            _ if has("attn_q.weight") => TensorRole::Query,
            _ if has("attn_output.weight") => TensorRole::AttentionOutput,
            _ if has("ffn_up") => TensorRole::Up,
            _ if has("ffn_gate") => TensorRole::Gate,
            _ if has("ffn_down") => TensorRole::Down,
            _ => TensorRole::Other,
        }
    }
}

/// Position of a tensor among those of its part.
#[derive(Clone, Copy)]
struct TensorPosition {
    /// Number of such tensors before it.
    nth: usize,
    /// Layer of the tensor. In models with experts, where layers have different numbers of such
    /// tensors, it comes from the name. Otherwise it equals `nth`.
    layer: usize,
    /// Number of layers in the model.
    layers: usize,
}

impl TensorPosition {
    fn is_early(self) -> bool {
        self.layer < self.layers / 8
    }
}

/// Returns whether the layer is one of the first or last layers, or every third of the others.
fn is_important(layer: usize, layers: usize) -> bool {
    let early = layers / 8;
    layer < early || layer >= 7 * layers / 8 || (layer - early) % 3 == 2
}

impl FromStr for Mixture {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let name = name.to_ascii_uppercase();
        let name = ALIASES
            .iter()
            .find(|(alias, _)| *alias == name)
            .map_or(name.as_str(), |(_, full)| full);
        Mixture::all()
            .chain([COPY])
            .find(|mixture| mixture.name == name)
            .ok_or_else(|| {
                let known: Vec<_> = Mixture::all().map(|mixture| mixture.name).collect();
                format!(
                    "unknown quantization '{name}'; known are {}",
                    known.join(", ")
                )
            })
    }
}

/// Properties of a model that the rules of mixtures depend on.
struct Traits {
    layers: usize,
    /// Number of tensors with values of attention.
    values: usize,
    /// Number of query heads that share keys and values.
    shared: usize,
    /// Number of experts in each layer; 0 for none.
    experts: usize,
    /// True if the model has a separate output matrix.
    has_output: bool,
    has_importance: bool,
    is_falcon: bool,
    is_bailing: bool,
    is_llama_70b: bool,
}

impl Traits {
    fn from_file(source: &GgufFile, has_importance: bool) -> Result<Self, Error> {
        let metadata = source.metadata();
        let arch: String = metadata.get_or("general.architecture", String::new())?;
        // Some models have a number for each layer; the rules use the first.
        let first = |key: &str| -> Option<u32> {
            let key = format!("{arch}.{key}");
            match metadata.get::<Vec<u32>>(&key) {
                Ok(values) => values?.first().copied(),
                Err(_) => metadata.get(&key).ok()?,
            }
        };
        let number = |key: &str| metadata.get_or(&format!("{arch}.{key}"), 0usize);
        let heads = first("attention.head_count").unwrap_or(1);
        let key_heads = first("attention.head_count_kv").unwrap_or(heads);
        let layers = number("block_count")?;
        let values = |t: &&TensorInfo| TensorRole::from_name(&t.name) == TensorRole::Value;
        Ok(Traits {
            layers,
            values: source.tensors().iter().filter(values).count(),
            shared: heads.checked_div(key_heads).unwrap_or(0) as usize,
            experts: number("expert_count")?,
            has_output: source.tensor("output.weight").is_some(),
            has_importance,
            is_falcon: arch == "falcon",
            is_bailing: arch == "bailingmoe3",
            is_llama_70b: arch == "llama" && layers == 80 && heads != key_heads,
        })
    }

    /// Returns the place of each tensor that is converted, in the order of layers: files may have
    /// any order.
    fn places(&self, tensors: &[TensorInfo]) -> Vec<Option<TensorPosition>> {
        let mut order: Vec<_> = tensors
            .iter()
            .enumerate()
            .filter(|(_, tensor)| is_converted(tensor))
            .map(|(index, tensor)| (layer_of(&tensor.name), &*tensor.name, index))
            .collect();
        order.sort_unstable();
        let mut seen = std::collections::BTreeMap::new();
        let mut places = vec![None; tensors.len()];
        for (layer, name, index) in order {
            let count = seen.entry(TensorRole::from_name(name)).or_insert(0usize);
            let nth = *count;
            let in_name = layer.filter(|_| self.experts > 1);
            places[index] = Some(TensorPosition {
                nth,
                layer: in_name.unwrap_or(nth),
                layers: self.layers,
            });
            *count += 1;
        }
        places
    }
}

/// Returns whether a tensor gets a type from the mixture instead of keeping its own.
fn is_converted(tensor: &TensorInfo) -> bool {
    let is_matrix = tensor.n_dims >= 2 && tensor.name.ends_with("weight");
    let is_kept = KEPT.iter().any(|part| tensor.name.contains(part));
    is_matrix && !is_kept && !tensor.dtype.is_integer()
}

fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Substrings in the names of matrices that keep their type, as in llama.cpp: norms, routers (small
/// and influential), embeddings that are added to every token, convolutions, and other small
/// matrices.
const KEPT: &[&str] = &[
    "_norm",
    "ffn_gate_inp",
    "position_embd",
    "token_types",
    "ssm_conv1d",
    "shortconv.conv",
    "per_layer_model_proj",
    "altup",
    "laurel",
    "indexer.k_proj",
    "indexer.q_proj",
    "time_mix_first",
    "time_mix_w0",
    "time_mix_w1",
    "time_mix_w2",
    "time_mix_v0",
    "time_mix_v1",
    "time_mix_v2",
    "time_mix_a0",
    "time_mix_a1",
    "time_mix_a2",
    "time_mix_g1",
    "time_mix_g2",
    "time_mix_decay_w1",
    "time_mix_decay_w2",
    "time_mix_lerp_fused",
    "attn_rel_b",
];

/// Returns a type with a smaller block length if rows of `columns` elements are not whole blocks of
/// `dtype`.
pub(crate) fn for_rows_of(mut dtype: DType, columns: usize) -> DType {
    use DType::*;
    if !columns.is_multiple_of(dtype.block_len()) {
        dtype = match dtype {
            IQ4_XS | IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => IQ4_NL,
            Q2_K | Q3_K | TQ1_0 | TQ2_0 | Q2_0 => Q4_0,
            Q4_K => Q5_0,
            Q5_K => Q5_1,
            Q6_K => Q8_0,
            other => other,
        };
    }
    if columns.is_multiple_of(dtype.block_len()) {
        dtype
    } else {
        F16
    }
}

/// Conversion of one tensor.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// Name of the tensor.
    pub name: String,
    /// Type in the source.
    pub from: DType,
    /// Type in the result.
    pub to: DType,
    /// Bytes in the source.
    pub bytes_before: usize,
    /// Bytes in the result.
    pub bytes_after: usize,
    /// True if the type was chosen, not kept.
    pub is_chosen: bool,
    /// True if the importance matrix covers the tensor.
    pub is_weighed: bool,
}

/// Types that override the mixture.
#[derive(Clone, Debug, Default)]
pub struct TypeChoices {
    /// Type of the output matrix.
    pub output: Option<DType>,
    /// True if the output matrix keeps its type.
    pub keep_output: bool,
    /// Type of the token embeddings.
    pub embedding: Option<DType>,
    /// Types of tensors whose names match; the first match applies. Only for mixtures of quantized
    /// types.
    pub of_tensors: Vec<(TensorPattern, DType)>,
}

/// A regular expression that is searched for in tensor names.
#[derive(Clone, Debug)]
pub struct TensorPattern(fancy_regex::Regex);

impl FromStr for TensorPattern {
    type Err = String;

    fn from_str(pattern: &str) -> Result<Self, String> {
        // Sufficient for any name, and it soon stops a pattern that backtracks excessively.
        let mut regex = fancy_regex::RegexBuilder::new(pattern);
        let regex = regex.backtrack_limit(10_000).build();
        regex
            .map(TensorPattern)
            .map_err(|error| format!("'{pattern}' is no regular expression: {error}"))
    }
}

impl TensorPattern {
    fn is_match(&self, name: &str) -> bool {
        // A pattern that takes too many steps does not match.
        self.0.is_match(name).unwrap_or(false)
    }
}

impl TypeChoices {
    /// Returns the patterns that match no converted tensor.
    pub fn unused(&self, conversions: &[Conversion]) -> impl Iterator<Item = &str> {
        let is_used = |pattern: &TensorPattern| {
            let mut named = conversions.iter().filter(|c| pattern.is_match(&c.name));
            named.any(|c| c.is_chosen)
        };
        let patterns = self.of_tensors.iter().map(|(pattern, _)| pattern);
        patterns
            .filter(move |pattern| !is_used(pattern))
            .map(|pattern| pattern.0.as_str())
    }

    fn for_tensor(&self, name: &str) -> Option<DType> {
        let mut patterns = self.of_tensors.iter();
        let found = patterns.find(|(pattern, _)| pattern.is_match(name));
        found.map(|(_, dtype)| *dtype)
    }
}

/// Options of a quantization.
pub struct QuantizeOptions<'a> {
    /// Types of the tensors.
    pub mixture: Mixture,
    /// Exceptions to the mixture.
    pub types: TypeChoices,
    /// Importance of the columns of matrices.
    pub importance: Option<&'a ImportanceMatrix>,
    /// Number of threads.
    pub threads: usize,
    /// Allows sources that are already quantized, at a loss of quality.
    pub allow_requantize: bool,
    /// True if tensors that would get more bits in the mixture get its base type instead.
    pub pure: bool,
    /// Called with the number of elements that are done, and of all elements.
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
    /// Token that stops the work.
    pub cancel: &'a CancelToken,
}

impl QuantizeOptions<'_> {
    /// Returns the type for a tensor. `place` is set if the tensor is [converted](is_converted).
    fn choose(&self, tensor: &TensorInfo, place: Option<TensorPosition>, model: &Traits) -> DType {
        if self.mixture == COPY {
            return tensor.dtype;
        }
        let part = TensorRole::from_name(&tensor.name);
        let Some(place) = place.filter(|_| !(part == TensorRole::Output && self.types.keep_output))
        else {
            return tensor.dtype;
        };
        let named = self.types.for_tensor(&tensor.name);
        let given = match part {
            TensorRole::Output => self.types.output,
            // Per-layer embeddings are large: an explicit pattern takes precedence for them.
            TensorRole::Embedding if tensor.name.starts_with("per_layer") && named.is_some() => {
                None
            }
            TensorRole::Embedding => self.types.embedding,
            _ => None,
        };
        if let Some(dtype) = given {
            return dtype;
        }
        let base = self.mixture.base;
        let wanted = match named {
            _ if !base.is_quantized() => base,
            Some(dtype) => dtype,
            None if self.pure => base,
            // The embedding is also the output matrix.
            None if part == TensorRole::Embedding
                && !model.has_output
                && self.types.output.is_some() =>
            {
                self.types.output.unwrap_or(base)
            }
            None => self.mixture.choose(tensor, place, model),
        };
        for_rows_of(wanted, tensor.shape[0])
    }

    /// Returns the importance of a tensor's columns, by matrix, if it is known.
    fn importance_of(&self, tensor: &TensorInfo) -> Result<Option<Vec<f32>>, Error> {
        let importance = self
            .importance
            .and_then(|matrix| matrix.importance(&tensor.name));
        let wanted = tensor.shape[0] * tensor.shape[2];
        match importance {
            Some(importance) if importance.len() != wanted => {
                // For some models, llama.cpp writes other data for these tensors.
                if TensorRole::from_name(&tensor.name) == TensorRole::Embedding {
                    return Ok(None);
                }
                let message = format!(
                    "has {wanted} columns, and the importance matrix {} for it: it is of another model",
                    importance.len()
                );
                Err(Error::new(
                    ErrorKind::InvalidArgument,
                    field(tensor),
                    message,
                ))
            }
            importance => Ok(importance),
        }
    }
}

fn field(tensor: &TensorInfo) -> String {
    format!("tensor '{}'", tensor.name.escape_debug())
}

/// Plans the type of each tensor of `source`.
///
/// # Errors
/// Returns an error if a tensor is already quantized and that is not allowed, if its type cannot be
/// decoded, or if its new type needs an importance matrix.
pub fn plan(source: &GgufFile, options: &QuantizeOptions<'_>) -> Result<Vec<Conversion>, Error> {
    let model = Traits::from_file(source, options.importance.is_some())?;
    let places = model.places(source.tensors());
    let convert = |(tensor, place): (&TensorInfo, Option<TensorPosition>)| {
        let to = options.choose(tensor, place, &model);
        let is_weighed = to != tensor.dtype && options.importance_of(tensor)?.is_some();
        if to != tensor.dtype {
            let refuse =
                |message: String| Err(Error::new(ErrorKind::Unsupported, field(tensor), message));
            if !can_decode(tensor.dtype) || !can_quantize(to) {
                return refuse(format!("cannot be converted from {} to {to}", tensor.dtype));
            }
            if !tensor.shape[0].is_multiple_of(to.block_len()) {
                return refuse(format!(
                    "has rows of {}, which are no whole blocks of {to}",
                    tensor.shape[0]
                ));
            }
            if tensor.dtype.is_quantized() && !options.allow_requantize {
                return refuse(format!(
                    "is {} already; quantize the F16 or F32 model, or allow requantizing at a loss of quality",
                    tensor.dtype
                ));
            }
            if !is_weighed && options.mixture.demands_importance(&tensor.name, to) {
                return refuse(match options.importance {
                    Some(_) => format!(
                        "would be {to}, and the importance matrix says nothing about it: give it another type, or make the matrix from more text"
                    ),
                    None => format!(
                        "would be {to}, which is nonsense without an importance matrix: make one from a text with 'samite imatrix'"
                    ),
                });
            }
        }
        Ok(Conversion {
            name: tensor.name.to_string(),
            from: tensor.dtype,
            to,
            bytes_before: tensor.size,
            bytes_after: TensorSpec::from_info(tensor, to)?.size(),
            is_chosen: place.is_some() && options.mixture.base.is_quantized(),
            is_weighed,
        })
    };
    source.tensors().iter().zip(places).map(convert).collect()
}

/// Removes the metadata that marks a file as one of several parts.
pub(crate) fn unsplit(metadata: &mut Metadata) {
    for key in [
        samite_gguf::KEY_SPLIT_COUNT,
        samite_gguf::KEY_SPLIT_NO,
        samite_gguf::KEY_SPLIT_TENSORS_COUNT,
    ] {
        metadata.remove(key);
    }
}

/// Writes `source` with converted weights to `target`. The file appears complete or not at all.
///
/// # Errors
/// Fails like [`plan`]. Also fails if reading, writing or allocating memory fails, or with
/// [`ErrorKind::Cancelled`].
pub fn quantize(
    source: &GgufFile,
    target: &Path,
    options: &QuantizeOptions<'_>,
) -> Result<Vec<Conversion>, Error> {
    let conversions = plan(source, options)?;
    let mut metadata: Metadata = source.metadata().clone();
    if options.mixture != COPY {
        metadata.set("general.file_type", options.mixture.file_type)?;
        metadata.set("general.quantization_version", 2u32)?;
    }
    if let Some(matrix) = options.importance {
        matrix.describe(&mut metadata)?;
    }
    unsplit(&mut metadata);
    let specs = source
        .tensors()
        .iter()
        .zip(&conversions)
        .map(|(tensor, conversion)| TensorSpec::from_info(tensor, conversion.to))
        .collect::<Result<_, _>>()?;
    let mut writer = Writer::create(target, &metadata, specs)?;

    let total = source.tensors().total_elements();
    let mut done = 0u64;
    let converter = Converter::new(source, options.threads, options.cancel);
    for (tensor, conversion) in source.tensors().iter().zip(&conversions) {
        let importance = options.importance_of(tensor)?;
        writer.fill_tensor(|slot| {
            let progress = |elements| (options.progress)(done + elements, total);
            let change = importance.as_deref().map_or(Change::Nothing, Change::Weigh);
            converter.convert(tensor, conversion.to, slot, change, &progress)
        })?;
        done += tensor.elements() as u64;
        (options.progress)(done, total);
        if options.cancel.is_cancelled() {
            return Err(cancelled());
        }
    }
    writer.commit()?;
    Ok(conversions)
}
