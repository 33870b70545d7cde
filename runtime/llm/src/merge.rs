//! Merges adapters into the weights of a model file.

use crate::adapter::{self, AdapterFile, FilePair, ScaledAdapter};
use crate::convert::{Change, Converter, cancelled};
use crate::error::{Error, Result};
use crate::quantize::unsplit;
use samite_core::environment::SystemFiles;
use samite_core::{CancelToken, DType};
use samite_gguf::{GgufFile, KEY_ARCHITECTURE, TensorInfo, TensorSpec, Writer};
use samite_quant::{can_decode, can_quantize, decode_row, needs_importance};
use std::path::{Path, PathBuf};

/// Options of a merge.
pub struct MergeOptions<'a> {
    /// Adapters with their [scales](crate::ScaledAdapter::share).
    pub adapters: &'a [(PathBuf, f32)],
    /// Type of the matrices that change; `None` keeps their type.
    pub dtype: Option<DType>,
    /// Number of threads.
    pub threads: usize,
    /// Called with the number of elements that are done, and of all elements.
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
    /// Token that stops the work.
    pub cancel: &'a CancelToken,
}

/// Change of one tensor by adapters: the sum of rows of `right`, each times an element of a row of
/// `left`.
struct Delta {
    rank: usize,
    /// `[rank]` for each row of the tensor, including the factor.
    left: Vec<f32>,
    /// `[columns, rank]` for each matrix of the tensor.
    right: Vec<f32>,
}

impl Delta {
    fn read(file: &AdapterFile, pair: &FilePair, share: f32) -> Result<Self> {
        let rank = pair.rank();
        let [a, b] = [decoded(&file.file, &pair.a)?, decoded(&file.file, &pair.b)?];
        let (mut left, right) = if pair.is_embedding {
            (a, turned(&b, rank))
        } else {
            (b, a)
        };
        let factor = share * file.factor(rank);
        left.iter_mut().for_each(|x| *x *= factor);
        Ok(Delta { rank, left, right })
    }

    /// Adds the change of row `row` of a tensor whose matrices have `rows` rows.
    fn add(&self, row: usize, rows: usize, values: &mut [f32]) {
        let columns = values.len();
        let weights = self.left.chunks_exact(self.rank).nth(row);
        let matrix = row / rows.max(1);
        let matrix = self.right.chunks_exact(columns * self.rank).nth(matrix);
        let (Some(weights), Some(matrix)) = (weights, matrix) else {
            return;
        };
        for (weight, row) in weights.iter().zip(matrix.chunks_exact(columns)) {
            for (value, x) in values.iter_mut().zip(row) {
                *value += weight * x;
            }
        }
    }
}

/// Transposes rows of `len` elements.
fn turned(values: &[f32], len: usize) -> Vec<f32> {
    let column = |i: usize| values.iter().skip(i).step_by(len).copied();
    (0..len).flat_map(column).collect()
}

fn decoded(file: &GgufFile, info: &TensorInfo) -> Result<Vec<f32>> {
    let data = adapter::read(file, info)?;
    let columns = info.shape[0];
    let mut values = crate::error::try_filled(0.0, Some(info.elements()), "an adapter")?;
    let rows = data.chunks_exact(info.dtype.row_bytes(columns)?);
    for (row, values) in rows.zip(values.chunks_exact_mut(columns)) {
        decode_row(info.dtype, row, values)?;
    }
    Ok(values)
}

/// Merges adapters into the weights of the model in `source` and writes it to `target`. The file
/// appears complete or not at all. Returns the number of changed tensors.
///
/// # Errors
/// Returns [`Error::InvalidArgument`] if there are no adapters, or if a scale is not a number.
/// Returns [`Error::Model`] if an adapter is invalid or belongs to another model, or if a type
/// cannot be converted. Also fails if reading, writing or allocating memory fails, or if the merge
/// is cancelled.
pub fn merge(source: &GgufFile, target: &Path, options: &MergeOptions<'_>) -> Result<usize> {
    if options.adapters.is_empty() {
        return Err(Error::invalid("there is no adapter to merge: name one"));
    }
    let architecture = source.metadata().require::<&str>(KEY_ARCHITECTURE)?;
    let mut adapters = Vec::new();
    for (path, share) in options.adapters {
        if !ScaledAdapter::is_share(*share) {
            let most = ScaledAdapter::MAX_SHARE;
            return Err(Error::invalid(format!(
                "{}: the adapter's share is {share}; it must be from -{most} to {most}",
                path.display()
            )));
        }
        let shape_of = |name: &str| source.tensor(name).map(|info| info.shape);
        adapters.push((
            AdapterFile::open(&SystemFiles, path, architecture, shape_of)?,
            *share,
        ));
    }
    let changes = |info: &TensorInfo| {
        adapters
            .iter()
            .any(|(a, _)| a.pairs.contains_key(&*info.name))
    };
    let mut specs = Vec::new();
    for info in source.tensors().iter() {
        let dtype = options
            .dtype
            .filter(|_| changes(info))
            .unwrap_or(info.dtype);
        if changes(info)
            && !(can_decode(info.dtype) && can_quantize(dtype) && !needs_importance(dtype))
        {
            return Err(Error::model(format!(
                "tensor {:?} of type {} cannot be written as {dtype}: choose another type",
                info.name, info.dtype
            )));
        }
        specs.push(TensorSpec::from_info(info, dtype)?);
    }
    let types: Vec<DType> = specs.iter().map(TensorSpec::dtype).collect();
    let mut metadata = source.metadata().clone();
    unsplit(&mut metadata);
    let mut writer = Writer::create(target, &metadata, specs)?;
    let converter = Converter::new(source, options.threads, options.cancel);
    let total = source.tensors().total_elements();
    let (mut done, mut changed) = (0, 0);
    for (info, dtype) in source.tensors().iter().zip(types) {
        let mut deltas = Vec::new();
        for (adapter, share) in &adapters {
            if let Some(pair) = adapter.pairs.get(&*info.name) {
                deltas.push(Delta::read(adapter, pair, *share)?);
            }
        }
        changed += usize::from(!deltas.is_empty());
        let change = |row: usize, values: &mut [f32]| {
            for delta in &deltas {
                delta.add(row, info.shape[1], values);
            }
        };
        let change = if deltas.is_empty() {
            Change::Nothing
        } else {
            Change::Values(&change)
        };
        writer.fill_tensor(|slot| {
            let progress = |elements| (options.progress)(done + elements, total);
            converter.convert(info, dtype, slot, change, &progress)
        })?;
        done += info.elements() as u64;
        (options.progress)(done, total);
        if options.cancel.is_cancelled() {
            return Err(cancelled().into());
        }
    }
    writer.commit()?;
    Ok(changed)
}
