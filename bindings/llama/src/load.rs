//! Model loading.

use crate::devices::{DeviceSelection, registry};
use crate::entry::{Failure, Outcome, alias, array, export, required_text};
use crate::handles::fresh;
use crate::layout::{KvOverride, ModelParams, Opaque};
use crate::log;
use crate::model::{LlamaModel, MODELS};
use crate::names::now_us;
use crate::vocabulary::Vocabulary;
use samite_core::CancelToken;
use samite_gguf::{GgufFile, LoadMode, Metadata, Value};
use samite_llm::{Model as Engine, ModelOptions, vocab_data};
use samite_text::Tokenizer;
use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Applies a caller's overrides to the metadata.
///
/// # Safety
/// Null, or a list that ends with an empty key.
pub unsafe fn apply_overrides(metadata: &mut Metadata, mut next: *const KvOverride) -> Outcome<()> {
    let text = |bytes: &[c_char]| -> String {
        let bytes: Vec<u8> = bytes
            .iter()
            .map(|&c| c as u8)
            .take_while(|&b| b != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    // SAFETY: the caller guarantees such a list.
    while let Some(entry) = unsafe { next.as_ref() } {
        let key = text(&entry.key);
        if key.is_empty() {
            break;
        }
        // SAFETY: the tag selects the field, and all bit patterns are valid numbers.
        let value = unsafe {
            match entry.tag {
                0 => integer(metadata.value(&key), entry.value.integer),
                1 => Value::F32(entry.value.float as f32),
                2 => Value::Bool(entry.value.flag != 0),
                3 => Value::from(text(&entry.value.text).as_str()),
                tag => {
                    return Err(Failure::new(format!(
                        "override of {key:?}: {tag} is no kind of values"
                    )));
                }
            }
        };
        metadata.set(&key, value)?;
        // SAFETY: the entry was not the end of the list.
        next = unsafe { next.add(1) };
    }
    Ok(())
}

/// Returns an integer with the type of the previous value.
fn integer(before: Option<&Value>, number: i64) -> Value {
    match before {
        Some(Value::I32(_)) => Value::I32(number as i32),
        Some(Value::I64(_)) => Value::I64(number),
        Some(Value::U64(_)) => Value::U64(number as u64),
        _ => u32::try_from(number).map_or(Value::I64(number), Value::U32),
    }
}

fn load_mode(number: i32) -> LoadMode {
    match number {
        0 => LoadMode::Read,
        4 => LoadMode::Direct,
        _ => LoadMode::Mmap,
    }
}

/// Loads the model at `path`.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn load(path: &Path, params: &ModelParams) -> Outcome<*mut Opaque> {
    log::listen();
    let start_us = now_us();
    let is_header = params.vocab_only.is_on() || params.no_alloc.is_on();
    let mode = load_mode(params.load_mode);
    let mut file = if is_header {
        GgufFile::open_header(path, mode)?
    } else {
        GgufFile::open(path, mode)?
    };
    // SAFETY: the caller upholds the header's contract.
    unsafe { apply_overrides(file.metadata_mut(), params.kv_overrides) }?;
    // SAFETY: as above.
    let wanted = unsafe { DeviceSelection::from_params(params) }?;
    let data = vocab_data(file.metadata())?;
    let engine = if params.vocab_only.is_on() {
        None
    } else {
        Some(load_engine(&file, params, &wanted, mode)?)
    };
    let tokenizer = match (&engine, &data) {
        (Some(engine), _) => engine.tokenizer().ok().cloned(),
        (None, Some(data)) => Some(Arc::new(Tokenizer::new(data.clone())?)),
        (None, None) => None,
    };
    let vocabulary = data.zip(tokenizer);
    let vocabulary = vocabulary.map(|(data, tokenizer)| Vocabulary::new(&data, tokenizer));
    let mut model = LlamaModel::new(file.metadata().clone(), vocabulary);
    model.n_params = file.tensors().total_elements();
    model.bytes = file.tensors().iter().map(|tensor| tensor.size as u64).sum();
    model.engine = engine;
    model.start_us = start_us;
    model.load_us = now_us() - start_us;
    model.handle = fresh();
    Ok(MODELS.insert(model.handle, model))
}

fn load_engine(
    file: &GgufFile,
    params: &ModelParams,
    wanted: &DeviceSelection,
    mode: LoadMode,
) -> Outcome<Arc<Engine>> {
    let placement = wanted.choose(registry())?;
    let mut options = ModelOptions::new(placement.devices);
    options.rules = placement.rules;
    options.load_mode = mode;
    options.lock = matches!(params.load_mode, 2 | 3);
    options.repack = params.use_extra_bufts.is_on();
    options.fit = None;
    if params.no_alloc.is_on() {
        return Ok(Engine::without_weights(file, &options)?);
    }
    let was_stopped = Arc::new(AtomicBool::new(false));
    if let Some(callback) = params.progress_callback {
        let data = params.progress_callback_user_data.expose_provenance();
        let cancel = CancelToken::new();
        options.cancel = cancel.clone();
        let was_stopped = Arc::clone(&was_stopped);
        let tell = move |share: f32| {
            let data = std::ptr::with_exposed_provenance_mut(data);
            // SAFETY: the caller guarantees a function that can be called with its data while the
            // model loads.
            let goes_on = unsafe { callback(share, data) };
            if !goes_on && !was_stopped.swap(true, Ordering::AcqRel) {
                cancel.cancel();
            }
        };
        tell(0.0);
        options.progress = Some(Arc::new(move |done, all| {
            tell(done as f32 / all.max(1) as f32);
        }));
    }
    match Engine::from_gguf(file, &options) {
        Err(_) if was_stopped.load(Ordering::Acquire) => {
            Err(Failure::new("the caller stopped the loading"))
        }
        Ok(_) if was_stopped.load(Ordering::Acquire) => {
            Err(Failure::new("the caller stopped the loading"))
        }
        result => Ok(result?),
    }
}

/// Returns the path of an open C file at its start.
///
/// # Safety
/// Null, or an open file.
unsafe fn path_of(file: *mut libc::FILE) -> Outcome<CString> {
    if file.is_null() {
        return Err(Failure::new("the file is null"));
    }
    // SAFETY: the file is open.
    let (position, descriptor) = unsafe { (libc::ftell(file), libc::fileno(file)) };
    if position != 0 {
        return Err(Failure::unsupported(
            "a model inside of a file; the file's position must be 0",
        ));
    }
    CString::new(format!("/proc/self/fd/{descriptor}")).map_err(|_| Failure::silent())
}

export! {
    /// Loads a model; for a split model, any part may be named.
    fn llama_model_load_from_file(path: *const c_char, params: ModelParams) -> *mut Opaque,
        or std::ptr::null_mut(); {
        // SAFETY: the caller upholds the header's contract.
        unsafe { load(Path::new(required_text("path", path)?), &params) }
    }

    /// Loads a model from an open C file.
    fn llama_model_load_from_file_ptr(file: *mut libc::FILE, params: ModelParams) -> *mut Opaque,
        or std::ptr::null_mut(); {
        // SAFETY: the caller upholds the header's contract.
        unsafe {
            let path = path_of(file)?;
            load(Path::new(required_text("path", path.as_ptr())?), &params)
        }
    }

    /// Loads a split model from its parts, which must have llama.cpp's names.
    fn llama_model_load_from_splits(paths: *const *const c_char, count: usize,
        params: ModelParams) -> *mut Opaque, or std::ptr::null_mut(); {
        // SAFETY: the caller upholds the header's contract.
        let paths = unsafe { array("paths", paths, count) }?;
        let first = paths.first().ok_or_else(|| Failure::new("no path is given"))?;
        // SAFETY: as above.
        unsafe { load(Path::new(required_text("path", *first)?), &params) }
    }

    /// Creates a model from the caller's own weights: not supported.
    fn llama_model_init_from_user(
        _metadata: *mut c_void, _set: *const c_void, _data: *mut c_void, _params: ModelParams
    ) -> *mut Opaque, or std::ptr::null_mut(); {
        Err(Failure::unsupported("a model without a file"))
    }

    /// Returns the default parameters.
    fn llama_model_default_params() -> ModelParams, or ModelParams::DEFAULT; {
        Ok(ModelParams::DEFAULT)
    }
}

alias! {
    fn llama_load_model_from_file(path: *const c_char,
        params: ModelParams) -> *mut Opaque = llama_model_load_from_file;
}
