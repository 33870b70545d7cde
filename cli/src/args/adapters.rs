//! Typed flags for adapters and control vectors.

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use samite::llm::ScaledAdapter;
use std::path::PathBuf;

/// Flags for adapters of a model.
#[derive(Clone, Debug, Args)]
pub struct AdapterArgs {
    /// LoRA adapters to apply: GGUF files, several separated by `,`
    #[arg(long, value_name = "FILE", value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new())]
    pub lora: Vec<String>,

    /// LoRA adapters with a scale other than 1, which may be negative: `FILE:SCALE`, several
    /// separated by `,`
    #[arg(long, value_name = "FILE:SCALE", value_delimiter = ',', value_parser = scaled_file)]
    pub lora_scaled: Vec<(PathBuf, f32)>,
}

/// Flags for control vectors.
#[derive(Clone, Debug, Args)]
pub struct ControlArgs {
    /// Control vectors to add to the outputs of layers: GGUF files, several separated by `,`
    #[arg(long, value_name = "FILE", value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new(), group = "vectors")]
    pub control_vector: Vec<String>,

    /// Control vectors with a scale other than 1, which may be negative: `FILE:SCALE`, several
    /// separated by `,`
    #[arg(long, value_name = "FILE:SCALE", value_delimiter = ',', value_parser = scaled_file,
        group = "vectors")]
    pub control_vector_scaled: Vec<(PathBuf, f32)>,

    /// Layers that control vectors change, from START to END inclusive; never the first layer,
    /// number 0 [default: all]
    #[arg(long, value_names = ["START", "END"], num_args = 2, requires = "vectors")]
    pub control_vector_layer_range: Option<Vec<usize>>,
}

/// Parses a file with a scale.
fn scaled_file(text: &str) -> Result<(PathBuf, f32), String> {
    match text.rsplit_once(':') {
        Some((file, scale)) if !file.is_empty() => match scale.parse::<f32>() {
            Ok(number) if ScaledAdapter::is_share(number) => Ok((file.into(), number)),
            _ => {
                let most = ScaledAdapter::MAX_SHARE;
                Err(format!("'{scale}' is not a number from -{most} to {most}"))
            }
        },
        _ => Err("must be a file and a number, such as adapter.gguf:0.5".to_owned()),
    }
}
