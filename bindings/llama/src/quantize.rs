//! Quantization of files.

use crate::entry::{Failure, Outcome, export, required_text};
use crate::layout::{QuantizeParams, TYPE_COUNT};
use crate::log::{self, Level};
use crate::names::mixture;
use samite_core::CancelToken;
use samite_gguf::{GgufFile, LoadMode};
use samite_llm::quantize::{QuantizeOptions, plan, quantize};
use std::ffi::c_char;
use std::path::Path;

/// Fails for what is wanted and not there.
fn check(params: &QuantizeParams) -> Outcome<()> {
    let wanted = [
        (
            params.output_tensor_type != TYPE_COUNT,
            "output_tensor_type",
        ),
        (
            params.token_embedding_type != TYPE_COUNT,
            "token_embedding_type",
        ),
        (
            !params.quantize_output_tensor.is_on(),
            "quantize_output_tensor = false",
        ),
        (params.only_copy.is_on(), "only_copy"),
        (params.keep_split.is_on(), "keep_split"),
        (!params.imatrix.is_null(), "imatrix"),
        (!params.kv_overrides.is_null(), "kv_overrides"),
        (!params.tt_overrides.is_null(), "tt_overrides"),
        (!params.prune_layers.is_null(), "prune_layers"),
    ];
    match wanted.iter().find(|wanted| wanted.0) {
        Some((_, name)) => Err(Failure::unsupported(&format!("quantization with {name}"))),
        None => Ok(()),
    }
}

export! {
    /// Writes a file with weights of other types. 0 where it did.
    fn llama_model_quantize(from: *const c_char, to: *const c_char, params: *const QuantizeParams) -> u32, or 1; {
        log::listen();
        // SAFETY: the caller keeps to the header.
        let (from, to) = unsafe { (required_text("fname_inp", from)?, required_text("fname_out", to)?) };
        // SAFETY: as above.
        let params = unsafe { crate::entry::array("params", params, 1) }?[0];
        check(&params)?;
        let mixture = mixture(params.ftype).ok_or_else(|| {
            Failure::new(format!("ftype {}: this quantization is not supported", params.ftype))
        })?;
        let source = GgufFile::open(from, LoadMode::Mmap)?;
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let options = QuantizeOptions {
            mixture,
            threads: usize::try_from(params.nthread).ok().filter(|&n| n > 0).unwrap_or(available),
            allow_requantize: params.allow_requantize.is_on(),
            pure: params.pure.is_on(),
            progress: &|_, _| {},
            cancel: &CancelToken::new(),
        };
        let done = match params.dry_run.is_on() {
            true => plan(&source, &options)?,
            false => quantize(&source, Path::new(to), &options)?,
        };
        let sum = |bytes: fn(&samite_llm::quantize::Conversion) -> usize| {
            done.iter().map(bytes).sum::<usize>() as f64 / f64::from(1 << 20)
        };
        log::line(Level::Info, &format!(
            "llama_model_quantize: {:.2} MiB become {:.2} MiB",
            sum(|one| one.bytes_before), sum(|one| one.bytes_after)
        ));
        Ok(0)
    }

    /// The usual parameters.
    fn llama_model_quantize_default_params() -> QuantizeParams, or QuantizeParams::DEFAULT; {
        Ok(QuantizeParams::DEFAULT)
    }
}
