//! Converts the weights of a model file to other types.
//!
//! A [`Mixture`] names a quantization the way llama.cpp does: mostly one type, with more bits where they matter. Which
//! tensors get which type follows llama.cpp's rules for models of the llama family.

use crate::convert::{Converter, cancelled};
use samite_core::{CancelToken, DType};
use samite_gguf::{Error, ErrorKind, GgufFile, Metadata, TensorInfo, TensorSpec, Writer};
use samite_quant::{can_decode, can_encode};
use std::path::Path;
use std::str::FromStr;

/// A named choice of types: name, llama.cpp's number for `general.file_type`, the type of most tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    name: &'static str,
    file_type: u32,
    base: DType,
}

const MIXTURES: &[Mixture] = &[
    Mixture {
        name: "F32",
        file_type: 0,
        base: DType::F32,
    },
    Mixture {
        name: "F16",
        file_type: 1,
        base: DType::F16,
    },
    Mixture {
        name: "BF16",
        file_type: 32,
        base: DType::BF16,
    },
    Mixture {
        name: "Q8_0",
        file_type: 7,
        base: DType::Q8_0,
    },
    Mixture {
        name: "Q4_0",
        file_type: 2,
        base: DType::Q4_0,
    },
    Mixture {
        name: "Q4_1",
        file_type: 3,
        base: DType::Q4_1,
    },
    Mixture {
        name: "Q5_0",
        file_type: 8,
        base: DType::Q5_0,
    },
    Mixture {
        name: "Q5_1",
        file_type: 9,
        base: DType::Q5_1,
    },
    Mixture {
        name: "Q2_K",
        file_type: 10,
        base: DType::Q2_K,
    },
    Mixture {
        name: "Q3_K_S",
        file_type: 11,
        base: DType::Q3_K,
    },
    Mixture {
        name: "Q3_K_M",
        file_type: 12,
        base: DType::Q3_K,
    },
    Mixture {
        name: "Q3_K_L",
        file_type: 13,
        base: DType::Q3_K,
    },
    Mixture {
        name: "Q4_K_S",
        file_type: 14,
        base: DType::Q4_K,
    },
    Mixture {
        name: "Q4_K_M",
        file_type: 15,
        base: DType::Q4_K,
    },
    Mixture {
        name: "Q5_K_S",
        file_type: 16,
        base: DType::Q5_K,
    },
    Mixture {
        name: "Q5_K_M",
        file_type: 17,
        base: DType::Q5_K,
    },
    Mixture {
        name: "Q6_K",
        file_type: 18,
        base: DType::Q6_K,
    },
    Mixture {
        name: "IQ4_NL",
        file_type: 25,
        base: DType::IQ4_NL,
    },
    Mixture {
        name: "IQ4_XS",
        file_type: 30,
        base: DType::IQ4_XS,
    },
    Mixture {
        name: "TQ1_0",
        file_type: 36,
        base: DType::TQ1_0,
    },
    Mixture {
        name: "TQ2_0",
        file_type: 37,
        base: DType::TQ2_0,
    },
    Mixture {
        name: "Q1_0",
        file_type: 40,
        base: DType::Q1_0,
    },
    Mixture {
        name: "Q2_0",
        file_type: 41,
        base: DType::Q2_0,
    },
];

/// Mixtures of llama.cpp whose types are only read here, and the type of most tensors; of those with the same one, that of a file of nothing else comes first.
const READ_ONLY: &[(&str, u32, DType)] = &[
    ("IQ2_XXS", 19, DType::IQ2_XXS),
    ("IQ2_XS", 20, DType::IQ2_XS),
    ("IQ3_XXS", 23, DType::IQ3_XXS),
    ("IQ1_S", 24, DType::IQ1_S),
    ("IQ3_S", 26, DType::IQ3_S),
    ("IQ3_XS", 22, DType::IQ3_S),
    ("IQ3_M", 27, DType::IQ3_S),
    ("IQ2_S", 28, DType::IQ2_S),
    ("IQ2_M", 29, DType::IQ2_S),
    ("IQ1_M", 31, DType::IQ1_M),
];

/// Short names that llama.cpp accepts, too.
const ALIASES: &[(&str, &str)] = &[("Q3_K", "Q3_K_M"), ("Q4_K", "Q4_K_M"), ("Q5_K", "Q5_K_M")];

impl Mixture {
    /// All mixtures.
    pub fn all() -> impl Iterator<Item = Mixture> {
        MIXTURES.iter().copied()
    }

    /// llama.cpp's name, such as `Q4_K_M`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The type of most tensors.
    pub fn base(&self) -> DType {
        self.base
    }

    /// The one with llama.cpp's number.
    pub fn of_file_type(number: u32) -> Option<Self> {
        Mixture::all().find(|mixture| mixture.file_type == number)
    }

    /// llama.cpp's number for a file whose matrices have this type.
    pub(crate) fn file_type_of(dtype: DType) -> Option<u32> {
        match dtype {
            DType::MXFP4 => return Some(38),
            DType::NVFP4 => return Some(39),
            _ => {}
        }
        if let Some((_, number, _)) = READ_ONLY.iter().find(|row| row.2 == dtype) {
            return Some(*number);
        }
        let pure = |mixture: &&Mixture| mixture.base == dtype;
        MIXTURES.iter().find(pure).map(|mixture| mixture.file_type)
    }

    /// The type that `tensor` gets. `layer` counts `attn_v` or `ffn_down` tensors seen before it, of `layers`; `shared` is the
    /// number of query heads for each key head.
    fn choose(&self, tensor: &TensorInfo, layer: usize, layers: usize, model: &Traits) -> DType {
        use DType::*;
        let name = &*tensor.name;
        let quantizes = self.base.is_quantized();
        let is_output = name == "output.weight" || model.tied && name == "token_embd.weight";
        let early = layer < layers / 8;
        let important = early || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
        let is_down = name.contains("ffn_down");
        let kind = |part: &str| name.split('.').any(|piece| piece == part);
        match self.name {
            _ if !quantizes => self.base,
            _ if is_output && !tensor.shape[0].is_multiple_of(self.base.block_len()) => Q8_0,
            "Q8_0" => Q8_0,
            _ if is_output => Q6_K,
            "TQ1_0" | "TQ2_0" | "Q2_0" if name == "token_embd.weight" => Q4_K,
            // With eight experts, attention is a small part of the model.
            _ if model.experts == 8 && (kind("attn_v") || kind("attn_k")) => Q8_0,
            "Q2_K" | "Q3_K_S" | "Q3_K_M" | "IQ4_NL" | "IQ4_XS" | "Q4_K_S" | "Q4_K_M"
                if model.experts == 8 && kind("attn_output") =>
            {
                Q5_K
            }
            "Q3_K_L" if model.experts == 8 && kind("attn_output") => Q3_K,
            "Q2_K" if kind("attn_v") => {
                if model.shared >= 4 {
                    Q4_K
                } else {
                    Q3_K
                }
            }
            "Q2_K" if is_down || kind("attn_output") => Q3_K,
            "Q3_K_M" if kind("attn_v") => {
                if layer < 2 {
                    Q5_K
                } else {
                    Q4_K
                }
            }
            "Q3_K_M" if is_down => {
                if layer < layers / 16 {
                    Q5_K
                } else {
                    Q4_K
                }
            }
            "Q3_K_M" if kind("attn_output") => Q4_K,
            "Q3_K_L" if kind("attn_v") || is_down || kind("attn_output") => Q5_K,
            "Q3_K_M" | "Q3_K_L" if kind("attn_qkv") => Q4_K,
            "Q4_K_S" if kind("attn_v") && layer < 4 => Q5_K,
            "Q4_K_S" if is_down && early => Q5_K,
            "Q4_K_M" | "Q5_K_M" if (kind("attn_v") || is_down) && important => Q6_K,
            "Q4_K_M" if kind("attn_qkv") => Q5_K,
            "Q5_K_M" if kind("attn_qkv") => Q6_K,
            "IQ4_NL" | "IQ4_XS" if kind("attn_v") && model.shared >= 4 => Q5_K,
            "IQ4_NL" | "IQ4_XS" if is_down && early => Q5_K,
            _ => self.base,
        }
    }
}

impl FromStr for Mixture {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let name = name.to_ascii_uppercase();
        let name = ALIASES
            .iter()
            .find(|(alias, _)| *alias == name)
            .map_or(name.as_str(), |(_, full)| full);
        if READ_ONLY.iter().any(|row| row.0 == name) {
            return Err(format!(
                "files of {name} can be read, but not made: its codes are chosen with an importance matrix, which samite does not have; \
                 Q2_K is the smallest type that it makes of any model"
            ));
        }
        Mixture::all()
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

/// What the rules of mixtures ask about a model.
struct Traits {
    /// Query heads that share keys and values.
    shared: usize,
    /// Experts of each layer; 0 for none.
    experts: usize,
    /// The embedding is the output matrix, too.
    tied: bool,
}

/// Parts of the names of matrices that keep their type, as in llama.cpp: norms; routers, which are small and decide much; what is added to every
/// token; convolutions; and other small ones.
const KEPT: [&str; 9] = [
    "_norm",
    "ffn_gate_inp",
    "position_embd",
    "token_types",
    "ssm_conv1d",
    "shortconv.conv",
    "per_layer_model_proj",
    "altup",
    "laurel",
];

/// The next smaller demand on the row length, for rows that are not whole blocks of `dtype`.
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

/// What is done with one tensor.
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
}

/// How to quantize.
pub struct QuantizeOptions<'a> {
    /// Which types.
    pub mixture: Mixture,
    /// Threads that convert.
    pub threads: usize,
    /// Allows sources that are quantized already, at a loss of quality.
    pub allow_requantize: bool,
    /// Everything that the mixture would give more bits gets its base type, too.
    pub pure: bool,
    /// Told the number of elements done and in all.
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
    /// Stops the work.
    pub cancel: &'a CancelToken,
}

/// Which type each tensor of `source` gets.
///
/// # Errors
/// If a tensor is quantized already and that is not allowed, or its type cannot be decoded.
pub fn plan(source: &GgufFile, options: &QuantizeOptions<'_>) -> Result<Vec<Conversion>, Error> {
    let metadata = source.metadata();
    let arch: String = metadata.get_or("general.architecture", String::new())?;
    let heads = metadata
        .get_or(&format!("{arch}.attention.head_count"), 1usize)
        .unwrap_or(1);
    let key_heads = metadata
        .get_or(&format!("{arch}.attention.head_count_kv"), heads)
        .unwrap_or(heads);
    let model = Traits {
        shared: heads / key_heads.max(1),
        experts: metadata.get_or(&format!("{arch}.expert_count"), 0usize)?,
        tied: source.tensor("output.weight").is_none(),
    };
    let is_value = |t: &TensorInfo| t.name.ends_with("attn_v.weight");
    let is_down = |t: &TensorInfo| t.name.contains("ffn_down");
    let values = source.tensors().iter().filter(|t| is_value(t)).count();
    let downs = source.tensors().iter().filter(|t| is_down(t)).count();

    // In the order of layers, as the rules count; files may be in any order.
    let layer_of = |t: &TensorInfo| {
        t.name
            .strip_prefix("blk.")
            .and_then(|rest| rest.split('.').next()?.parse::<usize>().ok())
    };
    let mut conversions = Vec::with_capacity(source.tensors().len());
    for tensor in source.tensors().iter() {
        let layers = if is_value(tensor) { values } else { downs };
        let is_matrix = tensor.n_dims >= 2 && tensor.name.ends_with("weight");
        let is_kept = KEPT.iter().any(|part| tensor.name.contains(part));
        let to = if !is_matrix || is_kept || tensor.dtype.is_integer() {
            tensor.dtype
        } else {
            let layer = layer_of(tensor).unwrap_or(0).min(layers.saturating_sub(1));
            let wanted = if options.pure {
                options.mixture.base
            } else {
                options.mixture.choose(tensor, layer, layers, &model)
            };
            for_rows_of(wanted, tensor.shape[0])
        };
        if to != tensor.dtype {
            let refuse = |message: &str| {
                Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("tensor '{}'", tensor.name),
                    message.to_owned(),
                ))
            };
            if !can_decode(tensor.dtype) || !can_encode(to) {
                return refuse(&format!(
                    "cannot be converted from {} to {to}",
                    tensor.dtype
                ));
            }
            if tensor.dtype.is_quantized() && !options.allow_requantize {
                return refuse(&format!(
                    "is {} already; quantize the F16 or F32 model, or allow requantizing at a loss of quality",
                    tensor.dtype
                ));
            }
        }
        let bytes_after = TensorSpec::from_info(tensor, to)?.size();
        conversions.push(Conversion {
            name: tensor.name.to_string(),
            from: tensor.dtype,
            to,
            bytes_before: tensor.size,
            bytes_after,
        });
    }
    Ok(conversions)
}

/// Removes what says that a file is one of several parts.
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
/// As [`plan`]; if reading, writing or memory fails; [`ErrorKind::Cancelled`].
pub fn quantize(
    source: &GgufFile,
    target: &Path,
    options: &QuantizeOptions<'_>,
) -> Result<Vec<Conversion>, Error> {
    let conversions = plan(source, options)?;
    let mut metadata: Metadata = source.metadata().clone();
    metadata.set("general.file_type", options.mixture.file_type)?;
    metadata.set("general.quantization_version", 2u32)?;
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
        writer.fill_tensor(|slot| {
            let progress = |elements| (options.progress)(done + elements, total);
            converter.convert(tensor, conversion.to, slot, None, &progress)
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
