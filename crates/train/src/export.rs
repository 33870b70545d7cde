//! Models: what was learnt, as a GGUF file that every program which reads them can run.

use crate::error::{Error, Result};
use crate::trainer::{Trainer, read};
use crate::vocabulary::Vocabulary;
use samite_core::DType;
use samite_gguf::{TensorSpec, Writer};
use samite_quant::{can_encode, encode_row};
use std::path::Path;

/// Writes the weights of `trainer` with `vocabulary` to `path`: matrices as `dtype`, vectors as F32. Complete, or not at all.
///
/// # Errors
/// [`Error::Config`] if `dtype` cannot be written or its blocks do not fill the rows of a matrix; if the file cannot be written.
pub fn export(
    path: impl AsRef<Path>,
    trainer: &mut Trainer,
    vocabulary: &Vocabulary,
    dtype: DType,
) -> Result<()> {
    if !can_encode(dtype) {
        return Err(Error::config(format!(
            "matrices of type {dtype} cannot be written"
        )));
    }
    trainer.scheduler_mut().synchronize()?;
    let config = trainer.config();
    let mut metadata = config.model.metadata()?;
    metadata.set("general.name", config.name.as_str())?;
    if let Some(license) = &config.license {
        metadata.set("general.license", license.as_str())?;
    }
    vocabulary.write(&mut metadata)?;
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
        let values = read(&parameter.weights)?;
        let width = parameter.spec.shape[0];
        let mut row_bytes = vec![0; dtype.row_bytes(width)?];
        for row in values.chunks_exact(width) {
            encode_row(dtype, row, &mut row_bytes)?;
            writer.append(&row_bytes)?;
        }
    }
    Ok(writer.commit()?)
}
