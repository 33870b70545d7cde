//! llama-server's environment variables.

use std::ffi::OsString;

/// Flag of each variable, without its prefix `LLAMA_ARG_`, and whether the flag has a value.
const VARIABLES: &[(&str, &str, bool)] = &[
    ("MODEL", "--model", true),
    ("HF_REPO", "--hf-repo", true),
    ("HF_FILE", "--hf-file", true),
    ("MMPROJ", "--mmproj", true),
    ("NO_MMPROJ_OFFLOAD", "--no-mmproj-offload", false),
    ("IMAGE_MIN_TOKENS", "--image-min-tokens", true),
    ("IMAGE_MAX_TOKENS", "--image-max-tokens", true),
    ("CTX_SIZE", "--ctx-size", true),
    ("N_PARALLEL", "--parallel", true),
    ("BATCH", "--batch-size", true),
    ("UBATCH", "--ubatch-size", true),
    ("THREADS", "--threads", true),
    ("THREADS_BATCH", "--threads-batch", true),
    ("N_GPU_LAYERS", "--ngl", true),
    ("DEVICE", "--device", true),
    ("SPLIT_MODE", "--split-mode", true),
    ("TENSOR_SPLIT", "--tensor-split", true),
    ("MAIN_GPU", "--main-gpu", true),
    ("FIT", "--fit", true),
    ("FIT_TARGET", "--fit-target", true),
    ("HOST", "--host", true),
    ("PORT", "--port", true),
    ("ALIAS", "--alias", true),
    ("TAGS", "--tags", true),
    ("API_PREFIX", "--api-prefix", true),
    ("N_PREDICT", "--n-predict", true),
    ("FLASH_ATTN", "--flash-attn", true),
    ("CACHE_TYPE_K", "--cache-type-k", true),
    ("CACHE_TYPE_V", "--cache-type-v", true),
    ("CACHE_RAM", "--cache-ram", true),
    ("KV_UNIFIED", "--kv-unified", false),
    ("EMBEDDINGS", "--embeddings", false),
    ("RERANKING", "--reranking", false),
    ("POOLING", "--pooling", true),
    ("ENDPOINT_METRICS", "--metrics", false),
    ("ENDPOINT_PROPS", "--props", false),
    ("NO_ENDPOINT_SLOTS", "--no-slots", false),
    ("NO_UI", "--no-ui", false),
    ("NO_WEBUI", "--no-ui", false),
    ("CHAT_TEMPLATE", "--chat-template", true),
    ("CHAT_TEMPLATE_FILE", "--chat-template-file", true),
    ("CHAT_TEMPLATE_KWARGS", "--chat-template-kwargs", true),
    ("THINK", "--reasoning-format", true),
    ("REASONING", "--reasoning", true),
    ("THINK_BUDGET", "--reasoning-budget", true),
    ("CONTEXT_SHIFT", "--context-shift", false),
    ("SLOT_SAVE_PATH", "--slot-save-path", true),
    ("MLOCK", "--mlock", false),
    ("SWA_FULL", "--swa-full", false),
    ("MODEL_DRAFT", "--model-draft", true),
    ("DRAFT_MAX", "--draft", true),
    ("SPEC_DRAFT_MODEL", "--model-draft", true),
    ("SPEC_DRAFT_N_MAX", "--draft", true),
    ("SPEC_DRAFT_P_MIN", "--draft-p-min", true),
    ("API_KEY", "--api-key", true),
    ("API_KEY_FILE", "--api-key-file", true),
    ("SSL_KEY_FILE", "--ssl-key-file", true),
    ("SSL_CERT_FILE", "--ssl-cert-file", true),
    ("MODELS_DIR", "--models-dir", true),
    ("MODELS_MAX", "--models-max", true),
];

/// Returns the variables as flags. `get` returns the value of a variable.
pub fn flags(get: impl Fn(&str) -> Option<String>) -> Vec<OsString> {
    let mut flags: Vec<OsString> = Vec::new();
    let key = ("API_KEY", "LLAMA_API_KEY");
    for (name, flag, has_value) in VARIABLES {
        let value = get(&format!("LLAMA_ARG_{name}"));
        let value = value.or_else(|| if *name == key.0 { get(key.1) } else { None });
        let Some(value) = value.filter(|value| !value.is_empty()) else {
            continue;
        };
        if *has_value {
            flags.extend([OsString::from(*flag), value.into()]);
        } else if ["1", "on", "true", "enabled"].contains(&value.to_lowercase().as_str()) {
            flags.push((*flag).into());
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_become_flags() {
        let get = |name: &str| match name {
            "LLAMA_ARG_HOST" => Some("::1".to_owned()),
            "LLAMA_ARG_ENDPOINT_METRICS" => Some("1".to_owned()),
            "LLAMA_ARG_KV_UNIFIED" => Some("0".to_owned()),
            "LLAMA_ARG_FIT_TARGET" => Some("1024".to_owned()),
            "LLAMA_API_KEY" => Some("k".to_owned()),
            _ => None,
        };
        let expected = "--fit-target 1024 --host ::1 --metrics --api-key k";
        assert_eq!(flags(get).join(" ".as_ref()), expected);
    }
}
