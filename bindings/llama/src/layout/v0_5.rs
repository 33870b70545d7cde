//! Structures of llama.cpp 0.5.0, with the layout of its C header.
//!
//! Callers pass these by value, so each must match the header exactly; `tests/layout.rs` compares
//! them with the output of a C program. Booleans are [`Flag`]s, because callers may pass bytes that
//! are not a valid `bool`.

use std::ffi::{c_char, c_int, c_void};

/// Release of llama.cpp.
pub const VERSION: &std::ffi::CStr = c"0.5.0";

/// A caller's boolean: anything but 0 is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Flag(u8);

impl Flag {
    /// Creates a C boolean.
    pub const fn new(is_on: bool) -> Self {
        Flag(is_on as u8)
    }

    /// Returns whether it is not 0.
    pub const fn is_on(self) -> bool {
        self.0 != 0
    }
}

/// Token id that means no token.
pub const TOKEN_NULL: i32 = -1;
/// Seed that means a random one.
pub const DEFAULT_SEED: u32 = u32::MAX;
/// Maximum number of sequences in a context.
pub const MAX_SEQUENCES: usize = 256;
/// Maximum number of devices.
pub const MAX_DEVICES: usize = 16;
/// Maximum number of buffer type overrides.
pub const MAX_BUFFER_OVERRIDES: usize = 4096;

/// An object that callers only access through a pointer.
#[repr(C)]
pub struct Opaque {
    _private: [u8; 0],
}

/// `llama_token_data`
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct TokenData {
    pub id: i32,
    pub logit: f32,
    pub p: f32,
}

/// `llama_token_data_array`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TokenDataArray {
    pub data: *mut TokenData,
    pub size: usize,
    pub selected: i64,
    pub sorted: Flag,
}

/// `llama_progress_callback`
pub type ProgressCallback = Option<unsafe extern "C" fn(f32, *mut c_void) -> bool>;
/// `ggml_abort_callback`
pub type AbortCallback = Option<unsafe extern "C" fn(*mut c_void) -> bool>;
/// `ggml_log_callback`
pub type LogCallback = Option<unsafe extern "C" fn(c_int, *const c_char, *mut c_void)>;
/// `ggml_backend_sched_eval_callback`
pub type EvalCallback = Option<unsafe extern "C" fn(*mut c_void, bool, *mut c_void) -> bool>;

/// `ggml_tensor`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GgmlTensor {
    pub dtype: c_int,
    pub buffer: *mut c_void,
    pub ne: [i64; 4],
    pub nb: [usize; 4],
    pub op: c_int,
    pub op_params: [i32; 16],
    pub flags: i32,
    pub src: [*mut GgmlTensor; 10],
    pub view_src: *mut GgmlTensor,
    pub view_offs: usize,
    pub data: *mut c_void,
    pub name: [c_char; 64],
    pub extra: *mut c_void,
    pub padding: [u8; 8],
}

impl GgmlTensor {
    /// Empty tensor.
    pub const EMPTY: Self = GgmlTensor {
        dtype: 0,
        buffer: std::ptr::null_mut(),
        ne: [0; 4],
        nb: [0; 4],
        op: 0,
        op_params: [0; 16],
        flags: 0,
        src: [std::ptr::null_mut(); 10],
        view_src: std::ptr::null_mut(),
        view_offs: 0,
        data: std::ptr::null_mut(),
        name: [0; 64],
        extra: std::ptr::null_mut(),
        padding: [0; 8],
    };
}

/// `llama_batch`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Batch {
    pub n_tokens: i32,
    pub token: *mut i32,
    pub embd: *mut f32,
    pub pos: *mut i32,
    pub n_seq_id: *mut i32,
    pub seq_id: *mut *mut i32,
    pub logits: *mut i8,
}

/// `llama_embd`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Embd {
    pub data: *const f32,
    pub n_rows: usize,
    pub n_embd: usize,
}

/// Value of a `llama_model_kv_override`.
#[derive(Clone, Copy)]
#[repr(C)]
pub union OverrideValue {
    pub integer: i64,
    pub float: f64,
    pub flag: u8,
    pub text: [c_char; 128],
}

/// `llama_model_kv_override`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct KvOverride {
    pub tag: c_int,
    pub key: [c_char; 128],
    pub value: OverrideValue,
}

/// `llama_model_tensor_buft_override`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BufferOverride {
    pub pattern: *const c_char,
    pub buffer_type: *mut c_void,
}

/// `llama_model_params`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ModelParams {
    pub devices: *mut *mut c_void,
    pub tensor_buft_overrides: *const BufferOverride,
    pub n_gpu_layers: i32,
    pub split_mode: c_int,
    pub load_mode: c_int,
    pub lazy_mode: c_int,
    pub main_gpu: i32,
    pub tensor_split: *const f32,
    pub progress_callback: ProgressCallback,
    pub progress_callback_user_data: *mut c_void,
    pub kv_overrides: *const KvOverride,
    pub vocab_only: Flag,
    pub check_tensors: Flag,
    pub use_extra_bufts: Flag,
    pub no_host: Flag,
    pub no_alloc: Flag,
    pub load_mtp: Flag,
}

/// `llama_sampler_seq_config`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SamplerSeqConfig {
    pub seq_id: i32,
    pub sampler: *mut Sampler,
}

/// `llama_context_params`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ContextParams {
    pub n_ctx: u32,
    pub n_batch: u32,
    pub n_ubatch: u32,
    pub n_seq_max: u32,
    pub n_rs_seq: u32,
    pub n_outputs_max: u32,
    pub n_outputs_max_per_seq: u32,
    pub n_threads: i32,
    pub n_threads_batch: i32,
    pub ctx_type: c_int,
    pub rope_scaling_type: c_int,
    pub pooling_type: c_int,
    pub attention_type: c_int,
    pub flash_attn_type: c_int,
    pub rope_freq_base: f32,
    pub rope_freq_scale: f32,
    pub yarn_ext_factor: f32,
    pub yarn_attn_factor: f32,
    pub yarn_beta_fast: f32,
    pub yarn_beta_slow: f32,
    pub yarn_orig_ctx: u32,
    pub defrag_thold: f32,
    pub cb_eval: EvalCallback,
    pub cb_eval_user_data: *mut c_void,
    pub type_k: c_int,
    pub type_v: c_int,
    pub abort_callback: AbortCallback,
    pub abort_callback_data: *mut c_void,
    pub embeddings: Flag,
    pub offload_kqv: Flag,
    pub no_perf: Flag,
    pub op_offload: Flag,
    pub swa_full: Flag,
    pub kv_unified: Flag,
    pub samplers: *mut SamplerSeqConfig,
    pub n_samplers: usize,
    pub ctx_other: *mut Opaque,
}

/// `llama_model_tensor_override`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TypeOverride {
    pub pattern: *const c_char,
    pub dtype: c_int,
}

/// `llama_model_imatrix_data`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ImportanceData {
    pub name: *const c_char,
    pub data: *const f32,
    pub size: usize,
}

/// `llama_model_quantize_params`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QuantizeParams {
    pub nthread: i32,
    pub ftype: c_int,
    pub output_tensor_type: c_int,
    pub token_embedding_type: c_int,
    pub allow_requantize: Flag,
    pub quantize_output_tensor: Flag,
    pub only_copy: Flag,
    pub pure: Flag,
    pub keep_split: Flag,
    pub dry_run: Flag,
    pub imatrix: *const ImportanceData,
    pub kv_overrides: *const KvOverride,
    pub tt_overrides: *const TypeOverride,
    pub prune_layers: *const i32,
    pub max_buf_size: usize,
}

/// `llama_logit_bias`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LogitBias {
    pub token: i32,
    pub bias: f32,
}

/// `llama_sampler_chain_params`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SamplerChainParams {
    pub no_perf: Flag,
}

/// `llama_chat_message`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ChatMessage {
    pub role: *const c_char,
    pub content: *const c_char,
}

/// `llama_sampler_i`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SamplerI {
    pub name: Option<unsafe extern "C" fn(*const Sampler) -> *const c_char>,
    pub accept: Option<unsafe extern "C" fn(*mut Sampler, i32)>,
    pub apply: Option<unsafe extern "C" fn(*mut Sampler, *mut TokenDataArray)>,
    pub reset: Option<unsafe extern "C" fn(*mut Sampler)>,
    pub clone: Option<unsafe extern "C" fn(*const Sampler) -> *mut Sampler>,
    pub free: Option<unsafe extern "C" fn(*mut Sampler)>,
    pub backend_init: Option<unsafe extern "C" fn(*mut Sampler, *mut c_void, u32) -> bool>,
    pub backend_accept:
        Option<unsafe extern "C" fn(*mut Sampler, *mut c_void, *mut c_void, *mut c_void)>,
    pub backend_apply:
        Option<unsafe extern "C" fn(*mut Sampler, *mut c_void, *mut c_void, *mut c_void)>,
    pub backend_set_input: Option<unsafe extern "C" fn(*mut Sampler)>,
    pub backend_reset: Option<unsafe extern "C" fn(*mut Sampler)>,
    pub copy_state: Option<unsafe extern "C" fn(*const Sampler, *mut Sampler)>,
}

/// `llama_sampler`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Sampler {
    pub iface: *const SamplerI,
    pub ctx: *mut c_void,
}

/// `llama_perf_context_data`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct PerfContext {
    pub t_start_ms: f64,
    pub t_load_ms: f64,
    pub t_p_eval_ms: f64,
    pub t_eval_ms: f64,
    pub n_p_eval: i32,
    pub n_eval: i32,
    pub n_reused: i32,
}

/// `llama_perf_sampler_data`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct PerfSampler {
    pub t_sample_ms: f64,
    pub n_sample: i32,
}

/// `llama_opt_params`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct OptParams {
    pub n_ctx_train: u32,
    pub param_filter: *const c_void,
    pub param_filter_ud: *mut c_void,
    pub get_opt_pars: *const c_void,
    pub get_opt_pars_ud: *mut c_void,
    pub optimizer_type: c_int,
}

impl ModelParams {
    /// Result of `llama_model_default_params`.
    pub const DEFAULT: Self = ModelParams {
        devices: std::ptr::null_mut(),
        tensor_buft_overrides: std::ptr::null(),
        n_gpu_layers: -1,
        split_mode: 1,
        load_mode: -1,
        lazy_mode: 1,
        main_gpu: 0,
        tensor_split: std::ptr::null(),
        progress_callback: None,
        progress_callback_user_data: std::ptr::null_mut(),
        kv_overrides: std::ptr::null(),
        vocab_only: Flag::new(false),
        check_tensors: Flag::new(false),
        use_extra_bufts: Flag::new(true),
        no_host: Flag::new(false),
        no_alloc: Flag::new(false),
        load_mtp: Flag::new(false),
    };
}

impl ContextParams {
    /// Result of `llama_context_default_params`.
    pub const DEFAULT: Self = ContextParams {
        n_ctx: 512,
        n_batch: 2048,
        n_ubatch: 512,
        n_seq_max: 1,
        n_rs_seq: 0,
        n_outputs_max: 0,
        n_outputs_max_per_seq: 1,
        n_threads: 4,
        n_threads_batch: 4,
        ctx_type: 0,
        rope_scaling_type: -1,
        pooling_type: -1,
        attention_type: -1,
        flash_attn_type: -1,
        rope_freq_base: 0.0,
        rope_freq_scale: 0.0,
        yarn_ext_factor: -1.0,
        yarn_attn_factor: -1.0,
        yarn_beta_fast: -1.0,
        yarn_beta_slow: -1.0,
        yarn_orig_ctx: 0,
        defrag_thold: -1.0,
        cb_eval: None,
        cb_eval_user_data: std::ptr::null_mut(),
        type_k: 1,
        type_v: 1,
        abort_callback: None,
        abort_callback_data: std::ptr::null_mut(),
        embeddings: Flag::new(false),
        offload_kqv: Flag::new(true),
        no_perf: Flag::new(true),
        op_offload: Flag::new(true),
        swa_full: Flag::new(true),
        kv_unified: Flag::new(false),
        samplers: std::ptr::null_mut(),
        n_samplers: 0,
        ctx_other: std::ptr::null_mut(),
    };
}

/// Number that means "no type" in quantization parameters: ggml's type count.
pub const TYPE_COUNT: c_int = 43;

impl QuantizeParams {
    /// Result of `llama_model_quantize_default_params`.
    pub const DEFAULT: Self = QuantizeParams {
        nthread: 0,
        ftype: 7,
        output_tensor_type: TYPE_COUNT,
        token_embedding_type: TYPE_COUNT,
        allow_requantize: Flag::new(false),
        quantize_output_tensor: Flag::new(true),
        only_copy: Flag::new(false),
        pure: Flag::new(false),
        keep_split: Flag::new(false),
        dry_run: Flag::new(false),
        imatrix: std::ptr::null(),
        kv_overrides: std::ptr::null(),
        tt_overrides: std::ptr::null(),
        prune_layers: std::ptr::null(),
        max_buf_size: 8 << 30,
    };
}
