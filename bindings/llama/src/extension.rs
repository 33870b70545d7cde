//! Functions of llama.cpp's `llama-ext.h`, which its own programs need. They use the C ABI, but
//! have mangled C++ names.

use crate::context::context;
use crate::entry::{Failure, run};
use crate::layout::{Opaque, QuantizeParams};
use crate::model::model;
use std::ffi::{c_int, c_void};

/// Exports functions with C++ names.
macro_rules! extension {
    ($($(#[$attribute:meta])* $symbol:literal fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? , or $failed:expr; $body:block)*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        /// The caller must uphold the header's contract.
        #[unsafe(export_name = $symbol)]
        #[allow(clippy::too_many_arguments, clippy::unused_unit)]
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            run(stringify!($name), $failed, || $body)
        }
    )*};
}

/// libstdc++'s `std::map`: an empty comparator, the tree's header node, and the node count.
#[repr(C)]
pub struct Map {
    order: usize,
    color: usize,
    parent: *mut c_void,
    left: *mut c_void,
    right: *mut c_void,
    count: usize,
}

/// Returns memory use by buffer type. Buffer types belong to the caller's library, so the map is
/// empty.
///
/// # Safety
/// The caller must uphold the header's contract: `map` points to memory for the result.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[unsafe(export_name = "_Z26llama_get_memory_breakdownPK13llama_context")]
pub unsafe extern "C" fn llama_get_memory_breakdown(
    map: *mut Map,
    handle: *const Opaque,
) -> *mut Map {
    run("llama_get_memory_breakdown", (), || {
        context(handle).map(drop)
    });
    if !map.is_null() {
        // SAFETY: the caller provides memory for the result.
        unsafe {
            let head: *mut c_void = (&raw mut (*map).color).cast();
            map.write(Map {
                order: 0,
                color: 0,
                parent: std::ptr::null_mut(),
                left: head,
                right: head,
                count: 0,
            });
        }
    }
    map
}

extension! {
    /// Reserves a graph: not supported, because ggml graphs are not built.
    "_Z19llama_graph_reserveP13llama_contextjjj"
    fn llama_graph_reserve(handle: *mut Opaque, _tokens: u32, _sequences: u32,
        _outputs: u32) -> *mut c_void, or std::ptr::null_mut(); {
        context(handle)?;
        Err(Failure::unsupported("graphs of ggml"))
    }

    /// Returns ggml's number of the main tensor type of a file type.
    "_Z28llama_ftype_get_default_type11llama_ftype"
    fn llama_ftype_get_default_type(file_type: c_int) -> c_int, or 43; {
        let mixture = crate::names::mixture(file_type);
        let mixture = mixture.ok_or_else(|| {
            Failure::new(format!(
                "ftype {file_type}: this quantization is not supported"
            ))
        })?;
        Ok(mixture.base().id() as c_int)
    }

    /// Plans a quantization: not supported.
    "_Z16llama_quant_initPK11llama_modelPK27llama_model_quantize_params"
    fn llama_quant_init(_model: *const Opaque, _params: *const QuantizeParams) -> *mut c_void,
        or std::ptr::null_mut(); {
        Err(Failure::unsupported("plans of a quantization"))
    }

    /// See the previous function.
    "_Z16llama_quant_freeP19quantize_state_impl"
    fn llama_quant_free(_state: *mut c_void), or (); {
        Ok(())
    }

    /// See the previous function.
    "_Z31llama_quant_model_from_metadataPK22llama_quant_model_desc"
    fn llama_quant_model_from_metadata(_model: *const c_void) -> *mut Opaque,
        or std::ptr::null_mut(); {
        Err(Failure::unsupported("plans of a quantization"))
    }

    /// See the previous function.
    "_Z38llama_quant_tensor_allows_quantizationPK19quantize_state_implPK11ggml_tensor"
    fn llama_quant_tensor_allows_quantization(_state: *const c_void,
        _tensor: *const c_void) -> bool, or false; {
        Err(Failure::unsupported("plans of a quantization"))
    }

    /// See the previous function.
    "_Z25llama_quant_compute_typesP19quantize_state_impl11llama_ftypePP11ggml_tensorP9ggml_typem"
    fn llama_quant_compute_types(_state: *mut c_void, _type: c_int, _tensors: *mut *mut c_void,
        _types: *mut c_int, _count: usize), or (); {
        Err(Failure::unsupported("plans of a quantization"))
    }

    /// Returns the number of experts.
    "_Z20llama_model_n_expertPK11llama_model"
    fn llama_model_n_expert(handle: *const Opaque) -> i32, or 0; {
        Ok(model(handle)?.number("expert_count").map_or(0, |number| number as i32))
    }

    /// Returns the number of ggml devices in use: none.
    "_Z21llama_model_n_devicesPK11llama_model"
    fn llama_model_n_devices(handle: *const Opaque) -> i32, or 0; {
        model(handle).map(|_| 0)
    }

    /// See the previous function.
    "_Z22llama_model_get_devicePK11llama_modeli"
    fn llama_model_get_device(handle: *const Opaque, _index: c_int) -> *mut c_void,
        or std::ptr::null_mut(); {
        model(handle).map(|_| std::ptr::null_mut())
    }

    /// Enables embeddings for MTP layers: not supported.
    "_Z26llama_set_embeddings_nextnP13llama_contextbb"
    fn llama_set_embeddings_nextn(handle: *mut Opaque, value: crate::layout::Flag,
        _masked: crate::layout::Flag), or (); {
        context(handle)?;
        if value.is_on() {
            Err(Failure::unsupported("layers that predict further tokens"))
        } else {
            Ok(())
        }
    }

    /// See the previous function.
    "_Z28llama_set_nextn_layer_offsetP13llama_contexti"
    fn llama_set_nextn_layer_offset(handle: *mut Opaque, _offset: i32), or (); {
        context(handle).map(drop)
    }

    /// See the previous function.
    "_Z26llama_get_embeddings_nextnP13llama_context"
    fn llama_get_embeddings_nextn(handle: *mut Opaque) -> *mut f32, or std::ptr::null_mut(); {
        context(handle).map(|_| std::ptr::null_mut())
    }

    /// See the previous function.
    "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"
    fn llama_get_embeddings_nextn_ith(handle: *mut Opaque, _index: i32) -> *mut f32,
        or std::ptr::null_mut(); {
        context(handle).map(|_| std::ptr::null_mut())
    }

    /// Enables the output of layer inputs: not supported.
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
    fn llama_set_embeddings_layer_inp(handle: *mut Opaque, _layer: u32,
        value: crate::layout::Flag), or (); {
        context(handle)?;
        if value.is_on() {
            Err(Failure::unsupported("what goes into a layer"))
        } else {
            Ok(())
        }
    }

    /// See the previous function.
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
    fn llama_get_embeddings_layer_inp(handle: *mut Opaque, _layer: u32) -> *mut f32,
        or std::ptr::null_mut(); {
        context(handle).map(|_| std::ptr::null_mut())
    }

    /// Returns the context paired with this one: none.
    "_Z19llama_get_ctx_otherP13llama_context"
    fn llama_get_ctx_other(handle: *mut Opaque) -> *mut Opaque, or std::ptr::null_mut(); {
        context(handle).map(|_| std::ptr::null_mut())
    }

    /// Returns a parameter of an architecture that is not supported.
    "_Z33llama_model_dflash_selector_top_kPK11llama_model"
    fn llama_model_dflash_selector_top_k(handle: *const Opaque) -> i32, or 0; {
        model(handle).map(|_| 0)
    }

    /// Returns the layers of a target model that this one uses: none.
    "_Z28llama_model_target_layer_idsPK11llama_model"
    fn llama_model_target_layer_ids(handle: *const Opaque) -> *const i32, or std::ptr::null(); {
        model(handle).map(|_| std::ptr::null())
    }

    /// See the previous function.
    "_Z30llama_model_target_layer_ids_nPK11llama_model"
    fn llama_model_target_layer_ids_n(handle: *const Opaque) -> u32, or 0; {
        model(handle).map(|_| 0)
    }

    /// Writes the embeddings of all tokens: not supported.
    "_Z24llama_model_get_tok_embdPK11llama_modelPf"
    fn llama_model_get_tok_embd(handle: *const Opaque, _out: *mut f32) -> u32, or 0; {
        model(handle)?;
        Err(Failure::unsupported("the table of embeddings"))
    }
}
