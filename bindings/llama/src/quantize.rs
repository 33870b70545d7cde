//! Quantization of files.

use crate::context::dtype;
use crate::entry::{Failure, Outcome, export, required_text};
use crate::layout::{QuantizeParams, TYPE_COUNT};
use crate::load::apply_overrides;
use crate::log::{self, Level};
use crate::names::mixture;
use samite_core::{CancelToken, DType};
use samite_gguf::{GgufFile, LoadMode};
use samite_llm::importance::ImportanceMatrix;
use samite_llm::quantize::{QuantizeOptions, TypeChoices, plan, quantize};
use std::ffi::{c_char, c_int};
use std::path::Path;

/// Fails for unsupported parameters.
fn check(params: &QuantizeParams) -> Outcome<()> {
    let wanted = [
        (params.only_copy.is_on(), "only_copy"),
        (params.keep_split.is_on(), "keep_split"),
        (!params.prune_layers.is_null(), "prune_layers"),
    ];
    match wanted.iter().find(|wanted| wanted.0) {
        Some((_, name)) => Err(Failure::unsupported(&format!("quantization with {name}"))),
        None => Ok(()),
    }
}

/// Returns the type with ggml's number; `None` for the number that means no type.
fn chosen(name: &str, number: c_int) -> Outcome<Option<DType>> {
    match number {
        TYPE_COUNT => Ok(None),
        number => dtype(name, number).map(Some),
    }
}

/// Reads the exceptions from a mixture.
///
/// # Safety
/// The contract of the header for these parameters applies.
unsafe fn types(params: &QuantizeParams) -> Outcome<TypeChoices> {
    let mut types = TypeChoices {
        output: chosen("output_tensor_type", params.output_tensor_type)?,
        keep_output: !params.quantize_output_tensor.is_on(),
        embedding: chosen("token_embedding_type", params.token_embedding_type)?,
        of_tensors: Vec::new(),
    };
    let mut at = params.tt_overrides;
    // SAFETY: the list ends with an entry without a pattern.
    while let Some(entry) = unsafe { at.as_ref() }.filter(|entry| !entry.pattern.is_null()) {
        // SAFETY: the caller upholds the header's contract.
        let pattern = unsafe { required_text("tt_overrides", entry.pattern) }?;
        if let Some(dtype) = chosen("tt_overrides", entry.dtype)? {
            types
                .of_tensors
                .push((pattern.parse().map_err(Failure::new)?, dtype));
        }
        // SAFETY: this was not the last entry.
        at = unsafe { at.add(1) };
    }
    Ok(types)
}

/// Reads the importance matrix, if the caller provides one.
///
/// # Safety
/// The contract of the header for these parameters applies.
unsafe fn importance(params: &QuantizeParams) -> Outcome<Option<ImportanceMatrix>> {
    let mut weights = Vec::new();
    let mut at = params.imatrix;
    // SAFETY: the list ends with an entry without a name.
    while let Some(entry) = unsafe { at.as_ref() }.filter(|entry| !entry.name.is_null()) {
        // SAFETY: the caller upholds the header's contract.
        let name = unsafe { required_text("imatrix", entry.name) }?;
        // SAFETY: as above.
        let values = unsafe { crate::entry::array("imatrix", entry.data, entry.size) }?;
        weights.push((name.to_owned(), values.to_vec()));
        // SAFETY: this was not the last entry.
        at = unsafe { at.add(1) };
    }
    if weights.is_empty() {
        Ok(None)
    } else {
        Ok(Some(ImportanceMatrix::of_importance(weights)?))
    }
}

export! {
    /// Writes a file with weights of other types. Returns 0 on success.
    fn llama_model_quantize(from: *const c_char, to: *const c_char,
        params: *const QuantizeParams) -> u32, or 1; {
        log::listen();
        // SAFETY: the caller upholds the header's contract.
        let (from, to) = unsafe {
            (
                required_text("fname_inp", from)?,
                required_text("fname_out", to)?,
            )
        };
        // SAFETY: as above.
        let params = unsafe { crate::entry::array("params", params, 1) }?[0];
        check(&params)?;
        let mixture = mixture(params.ftype).ok_or_else(|| {
            Failure::new(format!(
                "ftype {}: this quantization is not supported",
                params.ftype
            ))
        })?;
        // SAFETY: as above.
        let (types, importance) = unsafe { (types(&params)?, importance(&params)?) };
        let mut source = GgufFile::open(from, LoadMode::Mmap)?;
        // SAFETY: as above.
        unsafe { apply_overrides(source.metadata_mut(), params.kv_overrides) }?;
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let options = QuantizeOptions {
            mixture,
            types,
            importance: importance.as_ref(),
            threads: usize::try_from(params.nthread)
                .ok()
                .filter(|&n| n > 0)
                .unwrap_or(available),
            allow_requantize: params.allow_requantize.is_on(),
            pure: params.pure.is_on(),
            progress: &|_, _| {},
            cancel: &CancelToken::new(),
        };
        let done = if params.dry_run.is_on() {
            plan(&source, &options)?
        } else {
            quantize(&source, Path::new(to), &options)?
        };
        let sum = |bytes: fn(&samite_llm::quantize::Conversion) -> usize| {
            done.iter().map(bytes).sum::<usize>() as f64 / f64::from(1 << 20)
        };
        log::line(
            Level::Info,
            &format!(
                "llama_model_quantize: {:.2} MiB become {:.2} MiB",
                sum(|one| one.bytes_before),
                sum(|one| one.bytes_after)
            ),
        );
        Ok(0)
    }

    /// Returns the default parameters.
    fn llama_model_quantize_default_params() -> QuantizeParams, or QuantizeParams::DEFAULT; {
        Ok(QuantizeParams::DEFAULT)
    }
}
