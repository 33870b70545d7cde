//! Checks structure layouts against the C compiler: `layout/v0_5.txt` is the output of `layout.c`
//! for llama.cpp 0.5.0. If SAMITE_TEST_LLAMA_HEADER names a folder with that release's sources, the
//! program is compiled and run again.

#![cfg(unix)]
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use llama::layout::*;
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

fn ours() -> BTreeMap<String, usize> {
    let mut all = BTreeMap::new();
    macro_rules! structure {
        ($c:literal $name:ident: $($field:literal $own:ident),*) => {
            all.insert($c.to_owned(), size_of::<$name>());
            $(all.insert(concat!($c, ".", $field).to_owned(), offset_of!($name, $own));)*
        };
    }
    structure!("llama_token_data" TokenData: "id" id, "logit" logit, "p" p);
    structure!("llama_token_data_array" TokenDataArray: "data" data, "size" size,
        "selected" selected, "sorted" sorted);
    structure!("ggml_tensor" GgmlTensor: "type" dtype, "buffer" buffer, "ne" ne, "nb" nb, "op" op,
        "op_params" op_params, "flags" flags, "src" src, "view_src" view_src,
        "view_offs" view_offs, "data" data, "name" name, "extra" extra, "padding" padding);
    all.insert("GGML_OP_MUL_MAT".to_owned(), 29);
    all.insert(
        "GGML_OP_COUNT".to_owned(),
        samite_wire::numbers::V25.operations() as usize,
    );
    structure!("llama_batch" Batch: "n_tokens" n_tokens, "token" token, "embd" embd, "pos" pos,
        "n_seq_id" n_seq_id, "seq_id" seq_id, "logits" logits);
    structure!("llama_embd" Embd: "data" data, "n_rows" n_rows, "n_embd" n_embd);
    structure!("llama_model_kv_override" KvOverride: "tag" tag, "key" key, "val_i64" value);
    structure!("llama_model_tensor_buft_override" BufferOverride: "pattern" pattern,
        "buft" buffer_type);
    structure!("llama_model_params" ModelParams: "devices" devices,
        "tensor_buft_overrides" tensor_buft_overrides, "n_gpu_layers" n_gpu_layers,
        "split_mode" split_mode, "load_mode" load_mode, "lazy_mode" lazy_mode, "main_gpu" main_gpu,
        "tensor_split" tensor_split, "progress_callback" progress_callback,
        "progress_callback_user_data" progress_callback_user_data, "kv_overrides" kv_overrides,
        "vocab_only" vocab_only, "check_tensors" check_tensors, "use_extra_bufts" use_extra_bufts,
        "no_host" no_host, "no_alloc" no_alloc, "load_mtp" load_mtp);
    structure!("llama_sampler_seq_config" SamplerSeqConfig: "seq_id" seq_id, "sampler" sampler);
    structure!("llama_context_params" ContextParams: "n_ctx" n_ctx, "n_batch" n_batch,
        "n_ubatch" n_ubatch, "n_seq_max" n_seq_max, "n_rs_seq" n_rs_seq,
        "n_outputs_max" n_outputs_max, "n_outputs_max_per_seq" n_outputs_max_per_seq,
        "n_threads" n_threads, "n_threads_batch" n_threads_batch, "ctx_type" ctx_type,
        "rope_scaling_type" rope_scaling_type, "pooling_type" pooling_type,
        "attention_type" attention_type, "flash_attn_type" flash_attn_type,
        "rope_freq_base" rope_freq_base, "rope_freq_scale" rope_freq_scale,
        "yarn_ext_factor" yarn_ext_factor, "yarn_attn_factor" yarn_attn_factor,
        "yarn_beta_fast" yarn_beta_fast, "yarn_beta_slow" yarn_beta_slow,
        "yarn_orig_ctx" yarn_orig_ctx, "defrag_thold" defrag_thold, "cb_eval" cb_eval,
        "cb_eval_user_data" cb_eval_user_data, "type_k" type_k, "type_v" type_v,
        "abort_callback" abort_callback, "abort_callback_data" abort_callback_data,
        "embeddings" embeddings, "offload_kqv" offload_kqv, "no_perf" no_perf,
        "op_offload" op_offload, "swa_full" swa_full, "kv_unified" kv_unified, "samplers" samplers,
        "n_samplers" n_samplers, "ctx_other" ctx_other);
    structure!("llama_model_tensor_override" TypeOverride: "pattern" pattern, "type" dtype);
    structure!("llama_model_imatrix_data" ImportanceData: "name" name, "data" data, "size" size);
    structure!("llama_model_quantize_params" QuantizeParams: "nthread" nthread, "ftype" ftype,
        "output_tensor_type" output_tensor_type, "token_embedding_type" token_embedding_type,
        "allow_requantize" allow_requantize, "quantize_output_tensor" quantize_output_tensor,
        "only_copy" only_copy, "pure" pure, "keep_split" keep_split, "dry_run" dry_run,
        "imatrix" imatrix, "kv_overrides" kv_overrides, "tt_overrides" tt_overrides,
        "prune_layers" prune_layers, "max_buf_size" max_buf_size);
    structure!("llama_logit_bias" LogitBias: "token" token, "bias" bias);
    structure!("llama_sampler_chain_params" SamplerChainParams: "no_perf" no_perf);
    structure!("llama_chat_message" ChatMessage: "role" role, "content" content);
    structure!("llama_sampler_i" SamplerI: "name" name, "accept" accept, "apply" apply,
        "reset" reset, "clone" clone, "free" free, "backend_init" backend_init,
        "backend_accept" backend_accept, "backend_apply" backend_apply,
        "backend_set_input" backend_set_input, "backend_reset" backend_reset,
        "copy_state" copy_state);
    structure!("llama_sampler" Sampler: "iface" iface, "ctx" ctx);
    structure!("llama_perf_context_data" PerfContext: "t_start_ms" t_start_ms,
        "t_load_ms" t_load_ms, "t_p_eval_ms" t_p_eval_ms, "t_eval_ms" t_eval_ms,
        "n_p_eval" n_p_eval, "n_eval" n_eval, "n_reused" n_reused);
    structure!("llama_perf_sampler_data" PerfSampler: "t_sample_ms" t_sample_ms,
        "n_sample" n_sample);
    structure!("llama_opt_params" OptParams: "n_ctx_train" n_ctx_train,
        "param_filter" param_filter, "param_filter_ud" param_filter_ud,
        "get_opt_pars" get_opt_pars, "get_opt_pars_ud" get_opt_pars_ud,
        "optimizer_type" optimizer_type);
    all
}

fn parse(text: &str) -> BTreeMap<String, usize> {
    let lines = text.lines().map(|line| line.split_once(' ').unwrap());
    lines
        .map(|(name, number)| (name.to_owned(), number.parse().unwrap()))
        .collect()
}

#[test]
#[cfg(target_pointer_width = "64")]
fn struct_sizes_and_offsets_match_the_c_compiler() {
    assert_eq!(ours(), parse(include_str!("layout/v0_5.txt")));
}

#[test]
fn the_c_program_prints_the_recorded_layout() {
    let Some(sources) = std::env::var_os("SAMITE_TEST_LLAMA_HEADER") else {
        samite_testing::skipped(format_args!(
            "SAMITE_TEST_LLAMA_HEADER names no sources of llama.cpp"
        ));
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("layout");
    let compiled = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/layout.c"))
        .arg("-I")
        .arg(Path::new(&sources).join("include"))
        .arg("-I")
        .arg(Path::new(&sources).join("ggml/include"))
        .arg("-o")
        .arg(&program)
        .status()
        .unwrap();
    assert!(compiled.success());
    let printed = Command::new(program).output().unwrap();
    assert_eq!(ours(), parse(str::from_utf8(&printed.stdout).unwrap()));
    // The table must contain exactly the functions of the header.
    let header = std::fs::read_to_string(Path::new(&sources).join("include/llama.h")).unwrap();
    let words: Vec<&str> = header
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .collect();
    let in_header = |name: &str| words.contains(&name);
    for (name, _) in llama::table::TABLE {
        assert!(in_header(name), "{name} is not in the header");
    }
    let api = header.lines().filter(|line| {
        let line = line.trim_start();
        (line.starts_with("LLAMA_API") || line.starts_with("DEPRECATED(LLAMA_API"))
            && line.contains('(')
    });
    assert_eq!(
        api.count(),
        llama::table::TABLE.len(),
        "as many functions as the table has"
    );
}
