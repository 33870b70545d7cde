//! Flags for sampling.

use crate::args::number_or_all;
use crate::failure::{CommandError, CommandResult};
use clap::Args;
use samite::text::{SamplerParams, Stage};

/// Sampling flags. Unset ones default to the values in the model's file, then to llama.cpp's
/// defaults.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Samplers in order, separated by `;` [default:
    /// penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature]. The model file may set
    /// other defaults of sampling flags
    #[arg(long, value_name = "LIST")]
    samplers: Option<String>,
    /// Samplers in order, as letters [default: edskypmxt]
    #[arg(
        long,
        visible_alias = "sampling-seq",
        value_name = "LETTERS",
        conflicts_with = "samplers"
    )]
    sampler_seq: Option<String>,
    /// Random seed; the same seed gives the same text, -1 a random one, which is printed at the end
    #[arg(short, long, value_name = "N", default_value = "-1", value_parser = seed,
        allow_negative_numbers = true)]
    seed: Seed,
    /// Temperature; 0 always takes the most likely token [default: 0.8]
    #[arg(
        long,
        visible_alias = "temperature",
        value_name = "T",
        allow_negative_numbers = true
    )]
    temp: Option<f32>,
    /// Keep the K most likely tokens; 0 or less for all [default: 40]
    #[arg(long, value_name = "K", value_parser = count_or_none, allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Keep the most likely tokens that together have this probability [default: 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the most likely one [default: 0.05]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Keep tokens whose logit is within N standard deviations of the maximum; -1 for all [default:
    /// -1]
    #[arg(
        long,
        visible_alias = "top-nsigma",
        value_name = "N",
        allow_negative_numbers = true
    )]
    top_n_sigma: Option<f32>,
    /// Probability of dropping the most likely tokens (XTC), see --xtc-threshold; 0 for never
    /// [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    xtc_probability: Option<f32>,
    /// Probability threshold of XTC: of the tokens that reach it, only the least likely is kept;
    /// above 0.5, none is dropped [default: 0.1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    xtc_threshold: Option<f32>,
    /// Keep the tokens whose surprise is closest to the expected one and that together have this
    /// probability (typical-p); 1 for all [default: 1]
    #[arg(
        long,
        visible_alias = "typical-p",
        value_name = "P",
        allow_negative_numbers = true
    )]
    typical: Option<f32>,
    /// Minimum number of tokens that top-p, min-p, typical-p and XTC keep [default: 0]
    #[arg(long, value_name = "N")]
    min_keep: Option<usize>,
    /// Recent tokens to penalize; 0 for none, -1 for all [default: 64]
    #[arg(long, value_name = "N", value_parser = number_or_all, allow_negative_numbers = true)]
    repeat_last_n: Option<usize>,
    /// Divisor for the logits of recent tokens; 1 for no effect [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Penalty subtracted from the logits of recent tokens [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Penalty subtracted from the logits of recent tokens for each of their occurrences [default:
    /// 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// DRY penalty of tokens that continue a repetition: this, times --dry-base to the power of the
    /// excess length; 0 for none [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    dry_multiplier: Option<f32>,
    /// Base of the DRY penalty, see --dry-multiplier [default: 1.75]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    dry_base: Option<f32>,
    /// Minimum length of repetitions with a DRY penalty, in tokens [default: 2]
    #[arg(long, value_name = "N")]
    dry_allowed_length: Option<usize>,
    /// Recent tokens that DRY searches for repetitions; 0 for none, -1 for all [default: 64]
    #[arg(long, value_name = "N", value_parser = number_or_all, allow_negative_numbers = true)]
    dry_penalty_last_n: Option<usize>,
    /// Text that interrupts a repetition for DRY; `none` for none [default: line end, `:`, `"` and
    /// `*`]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    dry_sequence_breaker: Vec<String>,
    /// Target probability of drawn tokens (adaptive-p); -1 for off [default: -1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    adaptive_target: Option<f32>,
    /// Decay of earlier probabilities for --adaptive-target [default: 0.9]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    adaptive_decay: Option<f32>,
    /// Maximum change of the temperature, up or down, with the model's entropy; 0 for a fixed
    /// temperature [default: 0]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    dynatemp_range: Option<f32>,
    /// Exponent of the entropy for --dynatemp-range [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    dynatemp_exp: Option<f32>,
    /// Mirostat version, 1 or 2, which keeps the text's surprise near a target; 0 for none. Of the
    /// other samplers, only temperature remains [default: 0]
    #[arg(long, value_name = "VERSION")]
    mirostat: Option<u8>,
    /// Learning rate of mirostat [default: 0.1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    mirostat_lr: Option<f32>,
    /// Target surprise of mirostat, in bits [default: 5]
    #[arg(long, value_name = "BITS", allow_negative_numbers = true)]
    mirostat_ent: Option<f32>,
    /// Bias to add to the logit of a token: `ID+X` or `ID-X`; `ID-inf` bans it
    #[arg(short, long, value_name = "ID+X", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
}

/// A seed; `None` for a random one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seed(Option<u64>);

fn seed(text: &str) -> Result<Seed, String> {
    match text {
        "-1" => Ok(Seed(None)),
        text => text
            .parse()
            .map(|seed| Seed(Some(seed)))
            .map_err(|_| "must be a number from 0, or -1 for a random one".to_owned()),
    }
}

/// Parses a number. Negative ones count as 0.
fn count_or_none(text: &str) -> Result<usize, String> {
    let number: i64 = text
        .parse()
        .map_err(|_| "must be a whole number".to_owned())?;
    Ok(usize::try_from(number).unwrap_or(0))
}

/// Parses a token and its logit bias.
fn bias(text: &str) -> Result<(u32, f32), String> {
    let parts = || {
        let end = text.find(|c: char| !c.is_ascii_digit())?;
        let (id, bias) = text.split_at(end);
        let is_signed = bias.starts_with(['+', '-']);
        let bias = bias
            .parse::<f32>()
            .ok()
            .filter(|bias| is_signed && !bias.is_nan())?;
        Some((id.parse().ok()?, bias))
    };
    parts().ok_or_else(|| "must be a token's number and what is added, such as 15+1.5".to_owned())
}

impl SamplingArgs {
    /// Returns whether a seed was set.
    pub fn has_seed(&self) -> bool {
        self.seed.0.is_some()
    }

    /// Returns the sampling parameters of the flags. Unset ones come from `defaults`.
    pub fn params(&self, defaults: SamplerParams) -> CommandResult<SamplerParams> {
        // Any number that differs from run to run will do.
        let random = || {
            std::time::SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |time| u64::from(time.subsec_nanos()) ^ time.as_secs())
        };
        let stages = match (&self.samplers, &self.sampler_seq) {
            (Some(list), _) => Stage::parse_list(list)
                .map_err(|error| CommandError::usage(format_args!("--samplers: {error}")))?,
            (None, Some(letters)) => Stage::parse_letters(letters)
                .map_err(|error| CommandError::usage(format_args!("--sampler-seq: {error}")))?,
            (None, None) => defaults.stages,
        };
        let dry_breakers = match &*self.dry_sequence_breaker {
            [] => defaults.dry_breakers,
            [none] if none == "none" => Vec::new(),
            breakers => breakers.to_vec(),
        };
        Ok(SamplerParams {
            seed: self.seed.0.unwrap_or_else(random),
            generator: defaults.generator,
            stages,
            temperature: self.temp.unwrap_or(defaults.temperature),
            dynatemp_range: self.dynatemp_range.unwrap_or(defaults.dynatemp_range),
            dynatemp_exponent: self.dynatemp_exp.unwrap_or(defaults.dynatemp_exponent),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            typical_p: self.typical.unwrap_or(defaults.typical_p),
            top_n_sigma: self.top_n_sigma.unwrap_or(defaults.top_n_sigma),
            xtc_probability: self.xtc_probability.unwrap_or(defaults.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(defaults.xtc_threshold),
            min_keep: self.min_keep.unwrap_or(defaults.min_keep),
            repeat_penalty: self.repeat_penalty.unwrap_or(defaults.repeat_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            last_n: self.repeat_last_n.unwrap_or(defaults.last_n),
            dry_multiplier: self.dry_multiplier.unwrap_or(defaults.dry_multiplier),
            dry_base: self.dry_base.unwrap_or(defaults.dry_base),
            dry_allowed_length: self
                .dry_allowed_length
                .unwrap_or(defaults.dry_allowed_length),
            dry_last_n: self.dry_penalty_last_n.unwrap_or(defaults.dry_last_n),
            dry_breakers,
            mirostat: self.mirostat.unwrap_or(defaults.mirostat),
            mirostat_tau: self.mirostat_ent.unwrap_or(defaults.mirostat_tau),
            mirostat_eta: self.mirostat_lr.unwrap_or(defaults.mirostat_eta),
            adaptive_target: self.adaptive_target.unwrap_or(defaults.adaptive_target),
            adaptive_decay: self.adaptive_decay.unwrap_or(defaults.adaptive_decay),
            logit_bias: self.logit_bias.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn params(line: &str, defaults: SamplerParams) -> SamplerParams {
        let words = std::iter::once("samite").chain(line.split_whitespace());
        let line = Line::try_parse_from(words).unwrap_or_else(|error| panic!("{error}"));
        line.sampling.params(defaults).unwrap()
    }

    #[test]
    fn sampling_flags_override_the_model() {
        let model = SamplerParams {
            top_k: 3,
            temperature: 0.25,
            stages: vec![Stage::TopK],
            ..SamplerParams::default()
        };
        let changed = params("--temp 0.5 --seed 1", model.clone());
        let expected = SamplerParams {
            temperature: 0.5,
            seed: 1,
            ..model.clone()
        };
        assert_eq!(changed, expected);
        let stages = params("--sampler-seq te --top-k 40", model).stages;
        assert_eq!(stages, [Stage::Temperature, Stage::Penalties]);
    }

    #[test]
    fn every_flag_has_its_parameter() {
        let line = "--seed 9 --samplers dry;top_k --temperature 0.11 --dynatemp-range 0.12 \
            --dynatemp-exp 0.13 --top-k 14 --top-p 0.15 --min-p 0.16 --typical-p 0.17 \
            --top-nsigma 0.18 --xtc-probability 0.19 --xtc-threshold 0.2 --min-keep 20 \
            --repeat-penalty 0.21 --frequency-penalty 0.22 --presence-penalty 0.23 \
            --repeat-last-n 24 --dry-multiplier 0.25 --dry-base 0.26 --dry-allowed-length 27 \
            --dry-penalty-last-n 28 --dry-sequence-breaker a --dry-sequence-breaker b \
            --mirostat 2 --mirostat-ent 0.29 --mirostat-lr 0.3 --adaptive-target 0.31 \
            --adaptive-decay 0.32 --logit-bias 33-1";
        let expected = SamplerParams {
            generator: samite::text::Generator::Xoshiro,
            seed: 9,
            stages: vec![Stage::Dry, Stage::TopK],
            temperature: 0.11,
            dynatemp_range: 0.12,
            dynatemp_exponent: 0.13,
            top_k: 14,
            top_p: 0.15,
            min_p: 0.16,
            typical_p: 0.17,
            top_n_sigma: 0.18,
            xtc_probability: 0.19,
            xtc_threshold: 0.2,
            min_keep: 20,
            repeat_penalty: 0.21,
            frequency_penalty: 0.22,
            presence_penalty: 0.23,
            last_n: 24,
            dry_multiplier: 0.25,
            dry_base: 0.26,
            dry_allowed_length: 27,
            dry_last_n: 28,
            dry_breakers: vec!["a".to_owned(), "b".to_owned()],
            mirostat: 2,
            mirostat_tau: 0.29,
            mirostat_eta: 0.3,
            adaptive_target: 0.31,
            adaptive_decay: 0.32,
            logit_bias: vec![(33, -1.0)],
        };
        assert_eq!(params(line, SamplerParams::default()), expected);
        let none = params("--dry-sequence-breaker none", SamplerParams::default());
        assert!(none.dry_breakers.is_empty());
    }

    #[test]
    fn the_help_names_the_defaults() {
        use clap::CommandFactory;
        let help = Line::command().render_long_help().to_string();
        let defaults = SamplerParams::default();
        for part in [
            Stage::list(Stage::DEFAULT),
            Stage::letters(Stage::DEFAULT),
            format!("[default: {}]", defaults.temperature),
            format!("[default: {}]", defaults.top_k),
            format!("[default: {}]", defaults.top_p),
            format!("[default: {}]", defaults.min_p),
            format!("[default: {}]", defaults.dry_base),
            format!("[default: {}]", defaults.last_n),
        ] {
            assert!(help.contains(&part), "no {part} in {help}");
        }
    }

    #[test]
    fn seeds_and_biases_are_parsed() {
        assert_eq!(seed("7"), Ok(Seed(Some(7))));
        assert_eq!(seed("-1"), Ok(Seed(None)));
        assert!(seed("-2").is_err() && seed("x").is_err());
        assert_eq!(bias("15+1.5"), Ok((15, 1.5)));
        assert_eq!(bias("15-inf"), Ok((15, f32::NEG_INFINITY)));
        for wrong in ["15", "+1", "15+", "15+nan", "15*2", "-1+2"] {
            assert!(bias(wrong).is_err(), "{wrong}");
        }
    }
}
