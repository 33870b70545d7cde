//! The configuration of a training run: a TOML file.

use crate::error::{Error, Result};
use crate::optimizer::Optimizer;
use crate::schedule::Schedule;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// A training run. Two runs with the same configuration and the same data are bit-identical.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the model, for its file.
    #[serde(default = "untitled")]
    pub name: String,
    /// License of the model, for its file.
    #[serde(default)]
    pub license: Option<String>,
    /// Seed of all random numbers: initial weights and the order of the data.
    #[serde(default)]
    pub seed: u64,
    /// Shape of a model that is trained from scratch.
    #[serde(default)]
    pub model: Option<ModelConfig>,
    /// Adapter that is trained for an existing model instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// Training texts.
    pub data: DataConfig,
    /// Steps and rates.
    pub training: TrainingConfig,
}

/// Shape of a model with the llama architecture whose embedding table is also its output matrix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Size of the vocabulary that the tokenizer is trained to: special tokens, bytes, letters, and
    /// pieces of words.
    pub vocabulary: usize,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads: a divisor of `heads`.
    pub kv_heads: usize,
    /// Width of the feed-forward network.
    pub feed_forward: usize,
    /// Context length in tokens.
    pub context: usize,
    /// Number of tokens of a text in a training window, if fewer than the context.
    #[serde(default)]
    pub window: Option<usize>,
    /// Base of the RoPE frequencies.
    #[serde(default = "rope_base")]
    pub rope_base: f32,
    /// Epsilon of norms.
    #[serde(default = "norm_eps")]
    pub norm_eps: f32,
}

/// Shape of an adapter: for each of some matrices `W` of a model, two low-rank ones, so that `W x`
/// becomes `W x + alpha / rank · B (A x)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// Model: a GGUF file, which is only read. A relative path is relative to the configuration
    /// file.
    pub base: PathBuf,
    /// Rows of `A` and columns of `B`.
    pub rank: usize,
    /// Scale of the adapter, times its rank.
    pub alpha: f32,
    /// Matrices to change: `attn_q` for that of every layer; `output`.
    #[serde(default = "targets")]
    pub targets: Vec<String>,
    /// Number of tokens of a text that are seen together.
    pub context: usize,
}

/// Text files with one text per line. Relative paths are relative to the configuration file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Training texts.
    pub train: PathBuf,
    /// Held-out texts for measuring the model.
    pub held_out: PathBuf,
}

/// Parameters of the training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingConfig {
    /// Total number of steps.
    pub steps: u64,
    /// Number of texts that are computed together.
    pub batch: usize,
    /// Number of batches whose gradients are added for one step.
    #[serde(default = "one")]
    pub accumulate: usize,
    /// Learning rate over time.
    pub schedule: Schedule,
    /// Optimizer.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Maximum norm of the gradient of all weights together; larger ones are scaled down. 0 for no
    /// limit.
    #[serde(default)]
    pub clip: f32,
    /// True to recompute intermediate results of layers for gradients instead of keeping them: less
    /// memory, more time, the same results.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recompute: bool,
    /// Number of steps between measurements on held-out texts.
    #[serde(default = "hundred")]
    pub evaluate_every: u64,
    /// Number of batches of held-out texts in a measurement.
    #[serde(default = "eight")]
    pub evaluate_batches: usize,
    /// Number of steps between checkpoints.
    #[serde(default = "hundred")]
    pub checkpoint_every: u64,
}

fn targets() -> Vec<String> {
    vec!["attn_q".into(), "attn_v".into()]
}

fn untitled() -> String {
    "untitled".into()
}

fn rope_base() -> f32 {
    10_000.0
}

fn norm_eps() -> f32 {
    1e-5
}

fn one() -> usize {
    1
}

fn eight() -> usize {
    8
}

fn hundred() -> u64 {
    100
}

/// Limit of all sizes that determine memory, far below an overflow.
const MOST: usize = 1 << 24;

/// Maximum size of a configuration file. Some files, such as devices, have no end.
const MAX_BYTES: u64 = 1 << 20;

impl Config {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// Returns [`Error::Io`], or [`Error::Config`] with line and field.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let wrong = |problem: &dyn std::fmt::Display| {
            Error::config(format!("{}: {problem}", path.display()))
        };
        let mut text = String::new();
        let read =
            File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text));
        match read {
            Ok(length) if length as u64 <= MAX_BYTES => {}
            Err(error) if error.kind() != ErrorKind::InvalidData => {
                return Err(Error::io(path, error));
            }
            _ => return Err(wrong(&"is no configuration: name a TOML file")),
        }
        let mut config = Self::from_toml(&text).map_err(|error| wrong(&error))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        config.data.train = folder.join(&config.data.train);
        config.data.held_out = folder.join(&config.data.held_out);
        if let Some(lora) = &mut config.lora {
            lora.base = folder.join(&lora.base);
        }
        Ok(config)
    }

    /// Parses and checks a configuration.
    ///
    /// # Errors
    /// Returns [`Error::Config`] with line and field.
    pub fn from_toml(text: &str) -> Result<Self> {
        let config: Config = toml::from_str(text).map_err(|error| in_line(text, &error))?;
        config.check()?;
        Ok(config)
    }

    /// Returns the number of tokens of a text in a training window.
    pub fn context(&self) -> usize {
        let lora = self.lora.as_ref().map(|lora| lora.context);
        let model = || {
            self.model
                .map(|model| model.window.unwrap_or(model.context))
        };
        lora.or_else(model).unwrap_or(0)
    }

    /// Checks that the numbers are consistent.
    ///
    /// # Errors
    /// Returns [`Error::Config`] with the field.
    pub fn check(&self) -> Result<()> {
        match (&self.model, &self.lora) {
            (Some(model), None) => model.check()?,
            (None, Some(lora)) => lora.check()?,
            _ => {
                return Err(Error::config(
                    "either [model] says what is trained, or [lora] does: one of the two is needed",
                ));
            }
        }
        let training = &self.training;
        for (field, value) in [
            ("batch", training.batch),
            ("accumulate", training.accumulate),
            ("evaluate_batches", training.evaluate_batches),
        ] {
            bounded(&format!("training.{field}"), value)?;
        }
        for (field, value) in [
            ("steps", training.steps),
            ("evaluate_every", training.evaluate_every),
            ("checkpoint_every", training.checkpoint_every),
        ] {
            if value == 0 {
                return Err(Error::config(format!("training.{field} is 0")));
            }
        }
        if !(training.clip >= 0.0 && training.clip.is_finite()) {
            return Err(Error::config("training.clip is negative or not a number"));
        }
        training.schedule.check()?;
        training.optimizer.check()
    }
}

fn bounded(field: &str, value: usize) -> Result<()> {
    if (1..=MOST).contains(&value) {
        Ok(())
    } else {
        Err(Error::config(format!(
            "{field} is {value}, not from 1 to {MOST}"
        )))
    }
}

impl LoraConfig {
    /// Checks that the numbers are consistent.
    ///
    /// # Errors
    /// Returns [`Error::Config`] with the field.
    pub fn check(&self) -> Result<()> {
        bounded("lora.rank", self.rank)?;
        bounded("lora.context", self.context)?;
        if !(self.alpha > 0.0 && self.alpha.is_finite()) {
            return Err(Error::config("lora.alpha is not above 0"));
        }
        if self.targets.is_empty() {
            return Err(Error::config("lora.targets is empty"));
        }
        Ok(())
    }
}

impl ModelConfig {
    /// Returns the number of elements in a head.
    pub fn head(&self) -> usize {
        self.width / self.heads.max(1)
    }

    /// Checks that the numbers are consistent.
    ///
    /// # Errors
    /// Returns [`Error::Config`] with the field.
    pub fn check(&self) -> Result<()> {
        for (field, value) in [
            ("vocabulary", self.vocabulary),
            ("layers", self.layers),
            ("width", self.width),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("feed_forward", self.feed_forward),
            ("context", self.context),
        ] {
            bounded(&format!("model.{field}"), value)?;
        }
        if let Some(window) = self.window {
            bounded("model.window", window)?;
            if window > self.context {
                return Err(Error::config(format!(
                    "model.window {window} is more than model.context {}",
                    self.context
                )));
            }
        }
        if !self.width.is_multiple_of(2 * self.heads) {
            return Err(Error::config(format!(
                "model.width {} is not an even number for each of {} heads",
                self.width, self.heads
            )));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::config(format!(
                "model.heads {} is no multiple of model.kv_heads {}",
                self.heads, self.kv_heads
            )));
        }
        let numbers = [("rope_base", self.rope_base), ("norm_eps", self.norm_eps)];
        for (field, value) in numbers {
            if !(value > 0.0 && value.is_finite()) {
                return Err(Error::config(format!("model.{field} is not above 0")));
            }
        }
        Ok(())
    }
}

/// Converts a parse error to one with the line number.
fn in_line(text: &str, error: &toml::de::Error) -> Error {
    let before = error.span().and_then(|span| text.get(..span.start));
    Error::config(match before {
        Some(before) => {
            let line = before.matches('\n').count() + 1;
            format!("line {line}: {}", error.message())
        }
        None => error.message().to_owned(),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const SMALL: &str = r#"
        [model]
        vocabulary = 300
        layers = 2
        width = 32
        heads = 4
        kv_heads = 2
        feed_forward = 48
        context = 16
        [data]
        train = "train.txt"
        held_out = "held-out.txt"
        [training]
        steps = 20
        batch = 3
        schedule = { rate = 0.01, warmup = 5 }
        clip = 1.0
    "#;

    #[test]
    fn files_are_checked_field_by_field() {
        let config = Config::from_toml(SMALL).unwrap();
        assert_eq!(config.model.unwrap().head(), 8);
        assert_eq!(config.training.accumulate, 1);
        for (from, to, message) in [
            ("heads = 4", "heads = 5", "model.width"),
            ("kv_heads = 2", "kv_heads = 3", "model.kv_heads"),
            ("batch = 3", "batch = 0", "training.batch"),
            ("batch = 3", "bach = 3", "line 15: unknown field `bach`"),
            ("clip = 1.0", "clip = -1.0", "training.clip"),
            ("rate = 0.01", "rate = nan", "training.schedule.rate"),
            ("context = 16", "context = 99999999999", "model.context"),
            ("context = 16", "context = 16\nwindow = 17", "model.window"),
        ] {
            let error = Config::from_toml(&SMALL.replacen(from, to, 1)).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    #[test]
    fn an_adapter_replaces_the_model_section() {
        const LORA: &str = "[lora]\nbase = 'base.gguf'\nrank = 4\nalpha = 8.0\ncontext = 16\n";
        let (_, rest) = SMALL.split_once("[data]").unwrap();
        let text = format!("{LORA}[data]{rest}");
        let config = Config::from_toml(&text).unwrap();
        assert_eq!(config.context(), 16);
        assert_eq!(config.lora.unwrap().targets, ["attn_q", "attn_v"]);
        for (text, message) in [
            (format!("{LORA}{SMALL}"), "either [model]"),
            (format!("[data]{rest}"), "either [model]"),
            (text.replacen("rank = 4", "rank = 0", 1), "lora.rank"),
            (text.replacen("8.0", "0.0", 1), "lora.alpha"),
            (
                text.replacen("context = 16", "context = 0", 1),
                "lora.context",
            ),
            (
                text.replacen("rank", "targets = []\nrank", 1),
                "lora.targets",
            ),
        ] {
            let error = Config::from_toml(&text).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
