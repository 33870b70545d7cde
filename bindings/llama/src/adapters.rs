//! Adapters and control vectors.

use crate::context::context;
use crate::entry::{Failure, Outcome, array, export, required_text};
use crate::handles::Handles;
use crate::layout::Opaque;
use crate::metadata::Readable;
use crate::model::model;
use samite_llm::{Adapter as Engine, ScaledAdapter};
use std::ffi::c_char;
use std::path::Path;
use std::sync::Arc;

/// A caller's adapter.
pub struct Adapter {
    /// Handle of its model.
    pub model: usize,
    engine: Arc<Engine>,
    readable: Readable,
}

/// All adapters.
pub static ADAPTERS: Handles<Adapter> = Handles::new("adapter");

fn load(handle: *const Opaque, path: &str) -> Outcome<*mut Opaque> {
    let model = model(handle)?;
    let engine = Engine::load(Path::new(path), model.engine()?)?;
    Ok(ADAPTERS.add(Adapter {
        model: model.handle,
        readable: Readable::new(engine.metadata()),
        engine,
    }))
}

export! {
    /// Loads an adapter for a model.
    fn llama_adapter_lora_init(handle: *mut Opaque, path: *const c_char) -> *mut Opaque,
        or std::ptr::null_mut(); {
        // SAFETY: the caller upholds the header's contract.
        load(handle, unsafe { required_text("path", path) }?)
    }

    /// Loads an adapter from an open C file: not supported.
    fn llama_adapter_lora_init_from_file_ptr(handle: *mut Opaque,
        _file: *mut libc::FILE) -> *mut Opaque, or std::ptr::null_mut(); {
        model(handle)?;
        Err(Failure::unsupported("an adapter from an open file; load it by its path"))
    }

    /// Frees an adapter.
    fn llama_adapter_lora_free(adapter: *mut Opaque), or (); {
        ADAPTERS.remove(adapter).map(drop)
    }

    /// Writes a metadata value as text.
    fn llama_adapter_meta_val_str(adapter: *const Opaque, key: *const c_char, buffer: *mut c_char,
        size: usize) -> i32, or -1; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { ADAPTERS.get(adapter)?.readable.print_value_of(key, buffer, size) }
    }

    /// Returns the number of metadata values that are not arrays.
    fn llama_adapter_meta_count(adapter: *const Opaque) -> i32, or 0; {
        Ok(ADAPTERS.get(adapter)?.readable.len() as i32)
    }

    /// Writes a metadata key by its index.
    fn llama_adapter_meta_key_by_index(adapter: *const Opaque, index: i32, buffer: *mut c_char,
        size: usize) -> i32, or -1; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { ADAPTERS.get(adapter)?.readable.print_key(index, buffer, size) }
    }

    /// Writes a metadata value by its index.
    fn llama_adapter_meta_val_str_by_index(adapter: *const Opaque, index: i32, buffer: *mut c_char,
        size: usize) -> i32, or -1; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { ADAPTERS.get(adapter)?.readable.print_value(index, buffer, size) }
    }

    /// Returns the number of aLoRA invocation tokens: always 0, because loading rejects aLoRA
    /// adapters.
    fn llama_adapter_get_alora_n_invocation_tokens(adapter: *const Opaque) -> u64, or 0; {
        ADAPTERS.get(adapter).map(|_| 0)
    }

    /// See the previous function.
    fn llama_adapter_get_alora_invocation_tokens(adapter: *const Opaque) -> *const i32,
        or std::ptr::null(); {
        ADAPTERS.get(adapter).map(|_| std::ptr::null())
    }

    /// Replaces the adapters of a context's model, each with its scale.
    fn llama_set_adapters_lora(handle: *mut Opaque, adapters: *mut *mut Opaque, count: usize,
        shares: *mut f32) -> i32, or -1; {
        let context = context(handle)?;
        // SAFETY: the caller upholds the header's contract.
        let (adapters, shares) = unsafe {
            (
                array("adapters", adapters, count)?,
                array("scales", shares, count)?,
            )
        };
        let scaled = adapters.iter().zip(shares).map(|(&adapter, &share)| {
            let adapter = Arc::clone(&ADAPTERS.get(adapter.cast_const())?.engine);
            Ok(ScaledAdapter { adapter, share })
        });
        context
            .set_adapters(scaled.collect::<Outcome<_>>()?)
            .map(|()| 0)
    }

    /// Sets a control vector, which is added to the output of layers; null removes it.
    fn llama_set_adapter_cvec(handle: *mut Opaque, data: *const f32, length: usize, width: i32,
        first: i32, last: i32) -> i32, or -1; {
        let context = context(handle)?;
        if data.is_null() {
            return context.set_directions(None).map(|()| 0);
        }
        // SAFETY: the caller upholds the header's contract.
        let data = unsafe { array("directions", data, length) }?;
        let engine = context.model.engine()?;
        let n_embd = engine.spec().n_embd;
        if usize::try_from(width).ok() != Some(n_embd) {
            return Err(Failure::new(format!(
                "directions of {width} elements: this model needs {n_embd}"
            )));
        }
        // The first direction belongs to layer 1.
        let layers = usize::try_from(first).unwrap_or(0)..=usize::try_from(last).unwrap_or(0);
        let directions = (1..).zip(data.chunks_exact(n_embd));
        let directions = directions.filter(|(layer, _)| layers.contains(layer));
        let adapter = Engine::control_vector(engine, directions)?;
        context
            .set_directions(Some(ScaledAdapter {
                adapter,
                share: 1.0,
            }))
            .map(|()| 0)
    }
}
