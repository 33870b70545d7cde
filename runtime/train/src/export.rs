//! Exports trained weights as GGUF models and adapters.

use crate::error::{Error, Result};
use crate::parameters::{Stored, buffer, numbers};
use crate::trainer::Trainer;
use crate::vocabulary::Vocabulary;
use samite_core::DType;
use samite_gguf::{AtomicFile, KEY_ARCHITECTURE, Metadata, TensorSpec, Writer};
use samite_llm::adapter::{KEY_ADAPTER_TYPE, KEY_ALPHA, KEY_TYPE};
use samite_quant::{can_encode, encode_row};
use std::path::Path;

/// Writes the weights of `trainer` with `vocabulary` to `path`: matrices as `dtype`, vectors as
/// F32. The file appears complete or not at all.
///
/// # Errors
/// Returns [`Error::Config`] if an adapter is trained, if `dtype` cannot be written, or if its
/// blocks do not fill the rows of a matrix. Also fails if the file cannot be written.
pub fn export(
    path: impl AsRef<Path>,
    trainer: &mut Trainer,
    vocabulary: &Vocabulary,
    dtype: DType,
) -> Result<()> {
    let Some(model) = trainer.config().model else {
        return Err(Error::config(
            "an adapter is no model: it is written by export_adapter",
        ));
    };
    let mut metadata = model.metadata()?;
    vocabulary.write(&mut metadata)?;
    write(path, trainer, metadata, dtype)
}

/// Writes the adapter that `trainer` trains to `path`, as `dtype`, for `samite run --lora` and
/// llama.cpp. The file appears complete or not at all.
///
/// # Errors
/// Returns [`Error::Config`] if no adapter is trained, if `dtype` cannot be written, or if its
/// blocks do not fill the rows of a matrix. Also fails if the file cannot be written.
pub fn export_adapter(path: impl AsRef<Path>, trainer: &mut Trainer, dtype: DType) -> Result<()> {
    let (Some(lora), Some(base)) = (&trainer.config().lora, trainer.base()) else {
        return Err(Error::config(
            "a model is no adapter: it is written by export",
        ));
    };
    let mut metadata = Metadata::new();
    metadata.set(KEY_TYPE, "adapter")?;
    metadata.set(KEY_ARCHITECTURE, base.architecture().name)?;
    metadata.set(KEY_ADAPTER_TYPE, "lora")?;
    metadata.set(KEY_ALPHA, lora.alpha)?;
    write(path, trainer, metadata, dtype)
}

fn write(
    path: impl AsRef<Path>,
    trainer: &mut Trainer,
    mut metadata: Metadata,
    dtype: DType,
) -> Result<()> {
    if !can_encode(dtype) {
        return Err(Error::config(format!(
            "matrices of type {dtype} cannot be written"
        )));
    }
    trainer.scheduler_mut().synchronize()?;
    let config = trainer.config();
    metadata.set("general.name", config.name.as_str())?;
    if let Some(license) = &config.license {
        metadata.set("general.license", license.as_str())?;
    }
    let mut specs = Vec::new();
    for parameter in trainer.parameters() {
        let spec = &parameter.spec;
        let (dtype, dims) = if spec.is_matrix() {
            (dtype, &spec.shape[..2])
        } else {
            (DType::F32, &spec.shape[..1])
        };
        specs.push(TensorSpec::new(&spec.name, dtype, dims)?);
    }
    let types: Vec<_> = specs.iter().map(TensorSpec::dtype).collect();
    let mut writer = Writer::create(path, &metadata, specs)?;
    for (parameter, dtype) in trainer.parameters().iter().zip(types) {
        append(&mut writer, parameter, dtype)?;
    }
    Ok(writer.commit()?)
}

fn append(writer: &mut Writer<AtomicFile>, parameter: &Stored, dtype: DType) -> Result<()> {
    let width = parameter.spec.shape[0];
    let place = parameter.weights.tensor();
    let mut row = buffer(DType::F32.row_bytes(width)?)?;
    let mut encoded = buffer(dtype.row_bytes(width)?)?;
    for start in (0..place.layout().bytes()).step_by(row.len()) {
        place.read(start, &mut row)?;
        encode_row(dtype, &numbers(&row), &mut encoded)?;
        writer.append(&encoded)?;
    }
    Ok(())
}
