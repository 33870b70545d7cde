//! The sampling parameters of a model: `general.sampling.*`.

use crate::error::{Error, Result};
use samite_gguf::{FromValue, Metadata};
use samite_text::{SamplerParams, Stage};

/// Returns llama.cpp's defaults, overridden by the file.
///
/// # Errors
/// Returns an error that names the key if a value has another type or is out of range.
pub fn sampler_params(metadata: &Metadata) -> Result<SamplerParams> {
    let mut params = SamplerParams::default();
    let key = |name: &str| format!("general.sampling.{name}");
    if let Some(list) = metadata.get::<&str>(&key("sequence"))? {
        params.stages = Stage::parse_list(list)
            .map_err(|error| Error::model(format!("general.sampling.sequence: {error}")))?;
    }
    fn set<'m, T: FromValue<'m>>(metadata: &'m Metadata, name: &str, to: &mut T) -> Result<()> {
        if let Some(value) = metadata.get(&format!("general.sampling.{name}"))? {
            *to = value;
        }
        Ok(())
    }
    set(metadata, "top_p", &mut params.top_p)?;
    set(metadata, "min_p", &mut params.min_p)?;
    set(metadata, "xtc_probability", &mut params.xtc_probability)?;
    set(metadata, "xtc_threshold", &mut params.xtc_threshold)?;
    set(metadata, "temp", &mut params.temperature)?;
    set(metadata, "penalty_repeat", &mut params.repeat_penalty)?;
    set(metadata, "mirostat", &mut params.mirostat)?;
    set(metadata, "mirostat_tau", &mut params.mirostat_tau)?;
    set(metadata, "mirostat_eta", &mut params.mirostat_eta)?;
    // Negative values stand for all tokens.
    let count = |name, all: usize| -> Result<Option<usize>> {
        let count = metadata.get::<i64>(&key(name))?;
        Ok(count.map(|count| usize::try_from(count).unwrap_or(all)))
    };
    if let Some(top_k) = count("top_k", 0)? {
        params.top_k = top_k;
    }
    if let Some(last_n) = count("penalty_last_n", usize::MAX)? {
        params.last_n = last_n;
    }
    params
        .validate()
        .map_err(|error| Error::model(format!("general.sampling: {error}")))?;
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_gguf::Value;

    #[test]
    fn keys_replace_defaults() {
        let mut metadata = Metadata::new();
        assert_eq!(sampler_params(&metadata).unwrap(), SamplerParams::default());
        let keys: [(&str, Value); 12] = [
            ("sequence", "temperature;top_k".into()),
            ("top_k", 64i32.into()),
            ("top_p", 0.5f32.into()),
            ("min_p", 0.25f32.into()),
            ("xtc_probability", 0.125f32.into()),
            ("xtc_threshold", 0.375f32.into()),
            ("temp", 1.5f32.into()),
            ("penalty_last_n", (-1i32).into()),
            ("penalty_repeat", 1.25f32.into()),
            ("mirostat", 2i32.into()),
            ("mirostat_tau", 3.0f32.into()),
            ("mirostat_eta", 0.5f32.into()),
        ];
        for (name, value) in keys {
            let name = format!("general.sampling.{name}");
            metadata.set(&name, value).unwrap();
        }
        let expected = SamplerParams {
            stages: vec![Stage::Temperature, Stage::TopK],
            top_k: 64,
            top_p: 0.5,
            min_p: 0.25,
            xtc_probability: 0.125,
            xtc_threshold: 0.375,
            temperature: 1.5,
            last_n: usize::MAX,
            repeat_penalty: 1.25,
            mirostat: 2,
            mirostat_tau: 3.0,
            mirostat_eta: 0.5,
            ..SamplerParams::default()
        };
        assert_eq!(sampler_params(&metadata).unwrap(), expected);
    }

    #[test]
    fn errors_name_the_key() {
        for (name, value, part) in [
            ("sequence", "top_q".into(), "'top_q'"),
            ("temp", Value::from("hot"), "general.sampling.temp"),
            ("temp", (-1.0f32).into(), "temperature is -1"),
            ("mirostat", 3u32.into(), "mirostat is 3"),
        ] {
            let mut metadata = Metadata::new();
            let name = format!("general.sampling.{name}");
            metadata.set(&name, value).unwrap();
            let message = sampler_params(&metadata).unwrap_err().to_string();
            assert!(message.contains("general.sampling"), "{message}");
            assert!(message.contains(part), "{message}");
        }
    }
}
