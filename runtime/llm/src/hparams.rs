//! Hyper-parameters: the numbers that describe a model, read from metadata and checked before anything is built.

use crate::error::{Error, Result};
use samite_core::{Rope, RopeMode};
use samite_gguf::Metadata;

/// Numbers beyond this are mistakes: no extent of a model comes near it, and products of a few stay countable.
const LARGEST_EXTENT: usize = 1 << 28;

/// The shape of one layer. Most models have the same for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Heads of queries.
    pub n_head: usize,
    /// Heads of keys and values; divides `n_head`.
    pub n_head_kv: usize,
    /// Width of the feed-forward part.
    pub n_ff: usize,
}

/// The experts of a model whose feed-forward parts are mixtures. All layers have as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts of each layer.
    pub count: usize,
    /// How many of them each token uses; at most `count`.
    pub used: usize,
    /// Width of each expert.
    pub n_ff: usize,
}

/// Whether models of an architecture are mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertUse {
    /// None are.
    Never,
    /// Some are: those whose metadata say so.
    Maybe,
    /// All are.
    Always,
}

/// How a model stretches rotary positions beyond the context that it was trained with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All frequencies divided by a factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// YaRN: low frequencies interpolate, high ones do not.
    Yarn {
        /// The divisor of interpolated frequencies.
        factor: f32,
        /// Context length of the training before scaling.
        original_context: usize,
        /// Mix of interpolation and extrapolation; 1 for plain YaRN.
        ext_factor: f32,
        /// Rotations above which a dimension extrapolates.
        beta_fast: f32,
        /// Rotations below which a dimension interpolates.
        beta_slow: f32,
    },
}

/// The numbers that describe a model. All extents are at least 1 and consistent with each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Hyperparameters {
    /// Tokens of the vocabulary.
    pub n_vocab: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Each layer's own numbers.
    pub layers: Vec<LayerShape>,
    /// Experts in the place of the feed-forward part, if the model has any.
    pub experts: Option<Experts>,
    /// Elements of one head of queries and keys.
    pub head_dim_k: usize,
    /// Elements of one head of values.
    pub head_dim_v: usize,
    /// Added to the mean of squares in normalisations.
    pub rms_eps: f32,
    /// Context length that the model was trained with.
    pub n_ctx_train: usize,
    /// Elements of each head that are rotated. Even.
    pub rope_dims: usize,
    /// Which elements are rotated together.
    pub rope_mode: RopeMode,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Factor of the rotated vectors' magnitude.
    pub rope_attn_factor: f32,
}

/// Metadata under the prefix of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn extent(&self, name: &str) -> Result<Option<usize>> {
        let key = self.key(name);
        let value = self.metadata.get::<u64>(&key)?;
        value.map(|value| check_extent(&key, value)).transpose()
    }

    fn require_extent(&self, name: &str) -> Result<usize> {
        let key = self.key(name);
        check_extent(&key, self.metadata.require::<u64>(&key)?)
    }

    fn per_layer(&self, name: &str, layers: usize) -> Result<Option<Vec<usize>>> {
        let key = self.key(name);
        let values = self.metadata.get_scalar_or_array::<u64>(&key, layers)?;
        let check = |values: Vec<u64>| values.into_iter().map(|v| check_extent(&key, v)).collect();
        values.map(check).transpose()
    }

    fn require_per_layer(&self, name: &str, layers: usize) -> Result<Vec<usize>> {
        match self.per_layer(name, layers)? {
            Some(values) => Ok(values),
            None => Ok(vec![self.require_extent(name)?; layers]),
        }
    }

    fn float(
        &self,
        name: &str,
        accepts: impl Fn(f32) -> bool,
        wanted: &str,
    ) -> Result<Option<f32>> {
        let key = self.key(name);
        match self.metadata.get::<f32>(&key)? {
            Some(value) if !accepts(value) => Err(Error::model(format!(
                "key \"{key}\": is {value}, must be {wanted}"
            ))),
            value => Ok(value),
        }
    }

    fn positive(&self, name: &str, default: f32) -> Result<f32> {
        let value = self.float(
            name,
            |v| v > 0.0 && v.is_finite(),
            "a positive finite number",
        )?;
        Ok(value.unwrap_or(default))
    }
}

fn check_extent(key: &str, value: u64) -> Result<usize> {
    match usize::try_from(value) {
        Ok(0) => Err(Error::model(format!(
            "key \"{key}\": is 0, must be at least 1"
        ))),
        Ok(value) if value <= LARGEST_EXTENT => Ok(value),
        _ => Err(Error::model(format!(
            "key \"{key}\": is {value}, at most {LARGEST_EXTENT} is possible"
        ))),
    }
}

impl Hyperparameters {
    /// Reads and checks the numbers of a model of the architecture called `prefix`, whose file has `n_tensors` tensors.
    ///
    /// # Errors
    /// A key that is missing or of another type; a number that is zero, absurd, or contradicts another: by key.
    pub fn from_metadata(
        metadata: &Metadata,
        prefix: &str,
        rope_mode: RopeMode,
        expert_use: ExpertUse,
        n_tensors: usize,
    ) -> Result<Self> {
        let keys = Keys { metadata, prefix };
        let n_layer = keys.require_extent("block_count")?;
        if n_layer > n_tensors {
            return Err(Error::model(format!(
                "key \"{prefix}.block_count\": is {n_layer}, but the file has {n_tensors} tensors: too few for so many layers"
            )));
        }
        let n_embd = keys.require_extent("embedding_length")?;
        let heads = keys.require_per_layer("attention.head_count", n_layer)?;
        let heads_kv = keys.per_layer("attention.head_count_kv", n_layer)?;
        let heads_kv = heads_kv.unwrap_or_else(|| heads.clone());
        let widths = keys.per_layer("feed_forward_length", n_layer)?;
        let experts = experts(&keys, expert_use, widths.as_deref())?;
        let widths = match (widths, experts) {
            (Some(widths), _) => widths,
            (None, Some(experts)) => vec![experts.n_ff; n_layer],
            (None, None) => keys.require_per_layer("feed_forward_length", n_layer)?,
        };
        let layers: Vec<LayerShape> = (heads.iter().zip(heads_kv).zip(widths))
            .map(|((&n_head, n_head_kv), n_ff)| LayerShape {
                n_head,
                n_head_kv,
                n_ff,
            })
            .collect();
        if let Some((il, l)) =
            (layers.iter().enumerate()).find(|(_, l)| l.n_head % l.n_head_kv != 0)
        {
            return Err(Error::model(format!(
                "keys \"{prefix}.attention.head_count\" and \"{prefix}.attention.head_count_kv\": {} heads do not share {} key-value heads evenly in layer {il}",
                l.n_head, l.n_head_kv
            )));
        }

        let head_dim = |name: &str| -> Result<usize> {
            match keys.extent(name)? {
                Some(size) => Ok(size),
                None if n_embd.is_multiple_of(heads[0]) => Ok(n_embd / heads[0]),
                None => Err(Error::model(format!(
                    "key \"{prefix}.embedding_length\": {n_embd} is not a multiple of {} heads, and \"{prefix}.{name}\" is missing",
                    heads[0]
                ))),
            }
        };
        let head_dim_k = head_dim("attention.key_length")?;
        let head_dim_v = head_dim("attention.value_length")?;
        for l in &layers {
            for (dim, name) in [(head_dim_k, "key"), (head_dim_v, "value")] {
                check_extent(
                    &format!("{prefix}.attention.{name}_length (times heads)"),
                    l.n_head as u64 * dim as u64,
                )?;
            }
        }
        let rope_dims = keys.extent("rope.dimension_count")?.unwrap_or(head_dim_k);
        if rope_dims > head_dim_k || !rope_dims.is_multiple_of(2) {
            return Err(Error::model(format!(
                "key \"{prefix}.rope.dimension_count\": is {rope_dims}, must be even and at most the head size {head_dim_k}"
            )));
        }
        let n_ctx_train = keys.require_extent("context_length")?;
        let rms_eps = keys.float(
            "attention.layer_norm_rms_epsilon",
            |v| (0.0..1.0).contains(&v),
            "between 0 and 1",
        )?;
        let rms_eps = match rms_eps {
            Some(eps) => eps,
            None => metadata.require::<f32>(&keys.key("attention.layer_norm_rms_epsilon"))?,
        };
        Ok(Hyperparameters {
            n_vocab: n_vocab(&keys)?,
            n_embd,
            layers,
            experts,
            head_dim_k,
            head_dim_v,
            rms_eps,
            n_ctx_train,
            rope_dims,
            rope_mode,
            rope_base: keys.positive("rope.freq_base", 10_000.0)?,
            rope_scaling: rope_scaling(&keys, n_ctx_train)?,
            rope_attn_factor: keys.positive("rope.scaling.attn_factor", 1.0)?,
        })
    }

    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Elements of all keys of one token in layer `il`.
    pub fn n_embd_k(&self, il: usize) -> usize {
        self.head_dim_k * self.layers[il].n_head_kv
    }

    /// Elements of all values of one token in layer `il`.
    pub fn n_embd_v(&self, il: usize) -> usize {
        self.head_dim_v * self.layers[il].n_head_kv
    }

    /// The rotation of queries and keys.
    pub fn rope(&self) -> Rope {
        let rope = Rope {
            attn_factor: self.rope_attn_factor,
            ..Rope::new(self.rope_dims, self.rope_mode, self.rope_base)
        };
        match self.rope_scaling {
            RopeScaling::None => rope,
            RopeScaling::Linear { factor } => Rope {
                freq_scale: 1.0 / factor,
                ..rope
            },
            RopeScaling::Yarn {
                factor,
                original_context,
                ext_factor,
                beta_fast,
                beta_slow,
            } => Rope {
                original_context,
                freq_scale: 1.0 / factor,
                ext_factor,
                beta_fast,
                beta_slow,
                ..rope
            },
        }
    }

    /// The rotation that moves keys, rotated already, by a distance: as [`rope`](Self::rope) without a change of
    /// magnitude, which the keys have already.
    pub fn rope_shift(&self) -> Rope {
        let rope = self.rope();
        // With YaRN, the operation itself multiplies by 1 + 0.1 ln(1 / freq_scale).
        let magnitude = match self.rope_scaling {
            RopeScaling::Yarn { factor, .. } if rope.ext_factor != 0.0 => 1.0 + 0.1 * factor.ln(),
            _ => 1.0,
        };
        Rope {
            attn_factor: 1.0 / magnitude,
            ..rope
        }
    }
}

/// The experts that the metadata speak of. Without a width of their own, they are as wide as a feed-forward part, or share
/// its width if the architecture knows nothing but experts.
fn experts(
    keys: &Keys<'_>,
    expert_use: ExpertUse,
    widths: Option<&[usize]>,
) -> Result<Option<Experts>> {
    let key = keys.key("expert_count");
    let count = match (keys.metadata.get::<u64>(&key)?, expert_use) {
        (None | Some(0), ExpertUse::Never | ExpertUse::Maybe) => return Ok(None),
        (Some(count), ExpertUse::Never) => {
            return Err(Error::model(format!(
                "key \"{key}\": is {count}: mixtures of experts are not supported for this architecture"
            )));
        }
        (_, _) => keys.require_extent("expert_count")?,
    };
    let used = keys.require_extent("expert_used_count")?;
    if used > count {
        return Err(Error::model(format!(
            "key \"{}\": is {used}, but there are only {count} experts",
            keys.key("expert_used_count")
        )));
    }
    let own = match expert_use {
        ExpertUse::Always => {
            let key = keys.key("expert_feed_forward_length");
            // 0 stands for "not said".
            let value = keys.metadata.get::<u64>(&key)?.filter(|&value| value != 0);
            value.map(|value| check_extent(&key, value)).transpose()?
        }
        _ => None,
    };
    let n_ff = match (own, widths) {
        (Some(n_ff), _) => n_ff,
        (None, Some(&[n_ff, ref rest @ ..])) => {
            if rest.iter().any(|&other| other != n_ff) {
                return Err(Error::model(format!(
                    "key \"{}\": experts of different widths are not supported",
                    keys.key("feed_forward_length")
                )));
            }
            if expert_use == ExpertUse::Always {
                (n_ff / used).max(1)
            } else {
                n_ff
            }
        }
        (None, _) => keys.require_extent("feed_forward_length")?,
    };
    Ok(Some(Experts { count, used, n_ff }))
}

/// As many tokens as the vocabulary lists; only a file without vocabulary needs the number as such.
fn n_vocab(keys: &Keys<'_>) -> Result<usize> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    match keys.metadata.get::<&samite_gguf::StringArray>(TOKENS)? {
        Some(tokens) => check_extent(TOKENS, tokens.len() as u64),
        None => keys.require_extent("vocab_size"),
    }
}

fn rope_scaling(keys: &Keys<'_>, n_ctx_train: usize) -> Result<RopeScaling> {
    let key = keys.key("rope.scaling.type");
    let kind = keys.metadata.get::<&str>(&key)?.unwrap_or("linear");
    let at_least_0 = |v: f32| v >= 0.0 && v.is_finite();
    let mut factor = None;
    for name in ["rope.scaling.factor", "rope.scale_linear"] {
        if factor.is_none() {
            factor = keys.float(name, at_least_0, "a finite number, not negative")?;
        }
    }
    // 0 is how converters write "no scaling".
    let factor = factor.filter(|&factor| factor != 0.0).unwrap_or(1.0);
    match kind {
        "none" => Ok(RopeScaling::None),
        "linear" if factor == 1.0 => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor }),
        "yarn" => {
            if factor < 1.0 {
                return Err(Error::model(format!(
                    "key \"{}\": is {factor}, YaRN needs at least 1",
                    keys.key("rope.scaling.factor")
                )));
            }
            let ext_factor =
                keys.float("rope.scaling.yarn_ext_factor", f32::is_finite, "finite")?;
            Ok(RopeScaling::Yarn {
                factor,
                original_context: keys
                    .extent("rope.scaling.original_context_length")?
                    .unwrap_or(n_ctx_train),
                // Negative stands for "not said".
                ext_factor: ext_factor.filter(|&v| v >= 0.0).unwrap_or(1.0),
                beta_fast: keys.positive("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: keys.positive("rope.scaling.yarn_beta_slow", 1.0)?,
            })
        }
        other => Err(Error::model(format!(
            "key \"{key}\": scaling '{other}' is not supported; supported are: none, linear, yarn"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_gguf::Value;

    fn metadata(changes: &[(&str, Value)]) -> Metadata {
        let mut metadata = Metadata::new();
        let entries = [
            ("block_count", 2u32),
            ("embedding_length", 64),
            ("attention.head_count", 8),
            ("attention.head_count_kv", 4),
            ("feed_forward_length", 96),
            ("context_length", 128),
            ("vocab_size", 300),
        ];
        for (key, value) in entries {
            metadata.set(&format!("llama.{key}"), value).unwrap();
        }
        metadata
            .set("llama.attention.layer_norm_rms_epsilon", 1e-5f32)
            .unwrap();
        for (key, value) in changes {
            metadata
                .set(&format!("llama.{key}"), value.clone())
                .unwrap();
        }
        metadata
    }

    fn read(changes: &[(&str, Value)]) -> Result<Hyperparameters> {
        Hyperparameters::from_metadata(
            &metadata(changes),
            "llama",
            RopeMode::Normal,
            ExpertUse::Maybe,
            40,
        )
    }

    #[test]
    fn defaults_follow_from_the_others() {
        let hp = read(&[]).unwrap();
        assert_eq!((hp.head_dim_k, hp.head_dim_v, hp.rope_dims), (8, 8, 8));
        assert_eq!((hp.n_layer(), hp.n_embd_k(1), hp.n_vocab), (2, 32, 300));
        assert_eq!(hp.rope_scaling, RopeScaling::None);
        assert_eq!(hp.rope(), Rope::new(8, RopeMode::Normal, 10_000.0));
    }

    #[test]
    fn layers_may_differ() {
        let hp = read(&[("attention.head_count_kv", vec![8u32, 2].into())]).unwrap();
        assert_eq!((hp.n_embd_k(0), hp.n_embd_v(1)), (64, 16));
    }

    fn experts_of(changes: &[(&str, Value)], expert_use: ExpertUse) -> Result<Option<Experts>> {
        let metadata = metadata(changes);
        let hparams =
            Hyperparameters::from_metadata(&metadata, "llama", RopeMode::Normal, expert_use, 40)?;
        Ok(hparams.experts)
    }

    #[test]
    fn experts_have_a_width_or_share_one() {
        use ExpertUse::{Always, Maybe, Never};
        let [count, used] = [8u32, 3].map(Value::from);
        let keys = [("expert_count", count), ("expert_used_count", used)];
        let width = |changes: &[(&str, Value)], expert_use| {
            let changes = [&keys[..], changes].concat();
            let experts = experts_of(&changes, expert_use).unwrap().unwrap();
            assert_eq!((experts.count, experts.used), (8, 3));
            experts.n_ff
        };
        assert_eq!(width(&[], Maybe), 96);
        assert_eq!(width(&[], Always), 32);
        let own = [("expert_feed_forward_length", Value::from(40u32))];
        assert_eq!(width(&own, Always), 40);
        assert_eq!(
            width(&[("expert_feed_forward_length", 0u32.into())], Always),
            32
        );
        assert_eq!(experts_of(&[], Maybe).unwrap(), None);
        assert_eq!(
            experts_of(&[("expert_count", 0u32.into())], Never).unwrap(),
            None
        );

        let message = |changes: &[(&str, Value)], expert_use| {
            experts_of(changes, expert_use).unwrap_err().to_string()
        };
        assert!(message(&keys, Never).contains("not supported for this architecture"));
        assert!(message(&[], Always).contains("llama.expert_count"));
        assert!(message(&keys[..1], Maybe).contains("llama.expert_used_count"));
        let many = [keys[0].clone(), ("expert_used_count", 9u32.into())];
        assert!(message(&many, Maybe).contains("only 8 experts"));
        let none = [keys[0].clone(), ("expert_used_count", 0u32.into())];
        assert!(message(&none, Maybe).contains("is 0"));
        let uneven = [
            &keys[..],
            &[("feed_forward_length", vec![96u32, 64].into())],
        ]
        .concat();
        assert!(message(&uneven, Maybe).contains("different widths"));
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let cases: &[(&str, Value, &str)] = &[
            ("block_count", 0u32.into(), "is 0"),
            ("block_count", 41u32.into(), "40 tensors"),
            ("block_count", u64::MAX.into(), "at most"),
            ("embedding_length", 0u32.into(), "is 0"),
            (
                "embedding_length",
                65u32.into(),
                "not a multiple of 8 heads",
            ),
            ("attention.head_count", 0u32.into(), "is 0"),
            ("attention.head_count", (-1i32).into(), "does not fit"),
            ("attention.head_count", (1u32 << 28).into(), "multiple"),
            ("attention.head_count_kv", 0u32.into(), "is 0"),
            ("attention.head_count_kv", 3u32.into(), "evenly in layer 0"),
            ("attention.head_count_kv", vec![4u32].into(), "or 2 of them"),
            ("attention.key_length", (1u32 << 27).into(), "times heads"),
            ("feed_forward_length", "wide".into(), "found str"),
            ("rope.dimension_count", 7u32.into(), "even"),
            ("rope.dimension_count", 10u32.into(), "head size 8"),
            ("rope.freq_base", f32::NAN.into(), "positive"),
            ("rope.scaling.type", "spiral".into(), "none, linear, yarn"),
            (
                "attention.layer_norm_rms_epsilon",
                f32::NAN.into(),
                "between 0 and 1",
            ),
            ("expert_count", 8u32.into(), "expert_used_count"),
            ("context_length", 0u32.into(), "is 0"),
        ];
        for (key, value, expected) in cases {
            let message = read(&[(key, value.clone())]).unwrap_err().to_string();
            assert!(message.contains(expected), "{key}: {message}");
        }
        let mut without = metadata(&[]);
        without.remove("llama.context_length");
        let error = Hyperparameters::from_metadata(
            &without,
            "llama",
            RopeMode::Normal,
            ExpertUse::Maybe,
            40,
        );
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("llama.context_length")
        );
    }

    #[test]
    fn a_yarn_shift_keeps_the_magnitude() {
        let hp = read(&[
            ("rope.scaling.type", "yarn".into()),
            ("rope.scaling.factor", 4.0f32.into()),
        ])
        .unwrap();
        assert_eq!(hp.rope().freq_scale, 0.25);
        assert_eq!(hp.rope().original_context, 128);
        let total = hp.rope_shift().attn_factor * (1.0 + 0.1 * 4.0f32.ln());
        assert!((total - 1.0).abs() < 1e-6);
    }
}
