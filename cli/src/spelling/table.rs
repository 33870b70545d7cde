//! The table of llama.cpp's spellings.

use super::Commands::{self, All, Others, Serve};
use super::Meaning::{
    self, Flag, FlashAttention, Ignored, IgnoredValue, Offline, Unsupported, Verbosity,
};

/// A spelling, the commands that it applies to, and its meaning there.
pub(super) type Spelling = (&'static str, Commands, Meaning);

#[cfg(not(feature = "hub"))]
const NO_DOWNLOADS: Meaning = Unsupported(
    "this samite was built without downloads: get the GGUF file yourself and name it with -m",
);
#[cfg(not(feature = "kv-events"))]
const NO_KV_EVENTS: Meaning =
    Unsupported("this samite was built without KV events: build it with --features kv-events");
const ADDRESSES: Meaning = Unsupported(
    "models are named by their repository, with -hf: or get the GGUF file yourself and name it with -m",
);
const CHAT: Meaning =
    Unsupported("`samite chat` holds a conversation, and `samite run --chat` answers one message");
const NO_DRAFTS: Meaning = Unsupported(
    "only `samite serve` has draft models, on the devices of the model: leave this out",
);
const FLASH: Meaning =
    Unsupported("flash attention is on unless --no-flash turns it off: leave this out");

/// All spellings that are not samite's own. Without those of several letters after one dash, such
/// arguments would be parsed as other flags.
pub(super) const SPELLINGS: &[Spelling] = &[
    // Models by name.
    #[cfg(feature = "hub")]
    ("-hf", All, Flag("--hf-repo")),
    #[cfg(feature = "hub")]
    ("-hfr", All, Flag("--hf-repo")),
    #[cfg(feature = "hub")]
    ("-hff", All, Flag("--hf-file")),
    #[cfg(feature = "hub")]
    ("-hft", All, Flag("--hf-token")),
    #[cfg(not(feature = "hub"))]
    ("-hf", All, NO_DOWNLOADS),
    #[cfg(not(feature = "hub"))]
    ("-hfr", All, NO_DOWNLOADS),
    #[cfg(not(feature = "hub"))]
    ("-hff", All, NO_DOWNLOADS),
    #[cfg(not(feature = "hub"))]
    ("-hft", All, NO_DOWNLOADS),
    #[cfg(not(feature = "hub"))]
    ("--hf-repo", All, NO_DOWNLOADS),
    #[cfg(not(feature = "hub"))]
    ("--hf-file", All, NO_DOWNLOADS),
    ("-mu", All, ADDRESSES),
    ("--model-url", All, ADDRESSES),
    ("--offline", Serve, Offline),
    // Placement and loading. The first device gets everything that is not placed elsewhere.
    ("-dev", All, Flag("--device")),
    ("-ngl", All, Flag("--ngl")),
    ("--gpu-layers", Serve, Flag("--ngl")),
    ("-ot", All, Flag("--override-tensor")),
    ("-cmoe", All, Flag("--cpu-moe")),
    ("-ncmoe", All, Flag("--n-cpu-moe")),
    ("-ts", All, Flag("--tensor-split")),
    ("-sm", All, Flag("--split-mode")),
    ("-mg", All, Flag("--main-gpu")),
    ("-fit", All, Flag("--fit")),
    ("-fitt", All, Flag("--fit-target")),
    ("-lm", Serve, Flag("--load-mode")),
    ("-nr", All, Flag("--no-repack")),
    ("--repack", Serve, Ignored),
    ("--op-offload", Serve, Ignored),
    // Contexts.
    ("-ub", All, Flag("--ubatch-size")),
    ("-ctk", All, Flag("--cache-type-k")),
    ("-ctv", All, Flag("--cache-type-v")),
    ("-fa", Serve, FlashAttention),
    ("-fa", Others, FLASH),
    ("--flash-attn", Serve, FlashAttention),
    ("--flash-attn", Others, FLASH),
    ("-kvo", Serve, Ignored),
    ("--kv-offload", Serve, Ignored),
    ("-ctxcp", Serve, IgnoredValue),
    ("--ctx-checkpoints", Serve, IgnoredValue),
    ("--swa-checkpoints", Serve, IgnoredValue),
    ("--checkpoint-every-n-tokens", Serve, IgnoredValue),
    ("-cms", Serve, IgnoredValue),
    ("--checkpoint-min-step", Serve, IgnoredValue),
    ("-dt", Serve, IgnoredValue),
    ("--defrag-thold", Serve, IgnoredValue),
    // Threads.
    ("-tb", All, Flag("--threads-batch")),
    ("-Cr", All, Flag("--cpu-range")),
    ("-Cb", All, Flag("--cpu-mask-batch")),
    ("-Crb", All, Flag("--cpu-range-batch")),
    ("--threads-http", Serve, IgnoredValue),
    // Texts and conversations.
    ("-jf", All, Flag("--json-schema-file")),
    ("-sys", All, Flag("--system")),
    ("-cnv", All, CHAT),
    ("-sysf", All, CHAT),
    ("-st", All, CHAT),
    ("--conversation", All, CHAT),
    ("-no-cnv", All, Ignored),
    ("--no-conversation", All, Ignored),
    ("-rea", Serve, Flag("--reasoning")),
    ("-e", Serve, Ignored),
    ("--escape", Serve, Ignored),
    ("--no-escape", Serve, Ignored),
    ("--jinja", Serve, Ignored),
    ("--no-jinja", Serve, Ignored),
    ("--skip-chat-parsing", Serve, Ignored),
    ("--no-skip-chat-parsing", Serve, Ignored),
    ("-bs", Serve, Ignored),
    ("--backend-sampling", Serve, Ignored),
    ("--backend_sampling", Serve, Ignored),
    // Draft models. samite tunes the draft length by measurement, and a draft model has the model's
    // context size.
    ("-md", Serve, Flag("--model-draft")),
    ("-md", Others, NO_DRAFTS),
    ("-ngld", All, NO_DRAFTS),
    ("-devd", All, NO_DRAFTS),
    ("--spec-draft-model", Serve, Flag("--model-draft")),
    ("--draft-n", Serve, Flag("--draft")),
    ("--spec-draft-n-max", Serve, Flag("--draft")),
    ("--spec-draft-p-min", Serve, Flag("--draft-p-min")),
    ("--draft-min", Serve, IgnoredValue),
    ("--draft-n-min", Serve, IgnoredValue),
    ("--spec-draft-n-min", Serve, IgnoredValue),
    ("--draft-p-split", Serve, IgnoredValue),
    ("--spec-draft-p-split", Serve, IgnoredValue),
    ("-cd", Serve, IgnoredValue),
    ("--ctx-size-draft", Serve, IgnoredValue),
    ("--spec-type", Serve, IgnoredValue),
    ("--spec-draft-sampling", Serve, IgnoredValue),
    ("--spec-draft-backend-sampling", Serve, Ignored),
    ("--no-spec-draft-backend-sampling", Serve, Ignored),
    // Slots and the cache.
    ("-np", Serve, Flag("--parallel")),
    ("--n-parallel", Serve, Flag("--parallel")),
    ("-kvu", Serve, Flag("--kv-unified")),
    ("-no-kvu", Serve, Flag("--no-kv-unified")),
    ("-cram", Serve, Flag("--cache-ram")),
    ("-cb", Serve, Ignored),
    ("--cont-batching", Serve, Ignored),
    ("--cache-reuse", Serve, IgnoredValue),
    ("--cache-idle-slots", Serve, Ignored),
    ("--no-cache-idle-slots", Serve, Ignored),
    ("-sps", Serve, IgnoredValue),
    ("--slot-prompt-similarity", Serve, IgnoredValue),
    #[cfg(not(feature = "kv-events"))]
    ("--kv-events", Serve, NO_KV_EVENTS),
    #[cfg(not(feature = "kv-events"))]
    ("--kv-events-replay", Serve, NO_KV_EVENTS),
    #[cfg(not(feature = "kv-events"))]
    ("--kv-events-topic", Serve, NO_KV_EVENTS),
    #[cfg(not(feature = "kv-events"))]
    ("--kv-events-block", Serve, NO_KV_EVENTS),
    // The server and its log.
    ("--ui", Serve, Ignored),
    ("--webui", Serve, Ignored),
    ("-to", Serve, IgnoredValue),
    ("--timeout", Serve, IgnoredValue),
    ("--warmup", Serve, Ignored),
    ("--no-warmup", Serve, Ignored),
    ("--perf", Serve, Ignored),
    ("--no-perf", Serve, Ignored),
    ("--log-disable", Serve, Ignored),
    ("--log-prefix", Serve, Ignored),
    ("--no-log-prefix", Serve, Ignored),
    ("--log-timestamps", Serve, Ignored),
    ("--no-log-timestamps", Serve, Ignored),
    ("--log-colors", Serve, IgnoredValue),
    ("-lv", Serve, Verbosity),
    ("--verbosity", Serve, Verbosity),
    ("--log-verbosity", Serve, Verbosity),
    // Images.
    ("-mm", All, Flag("--mmproj")),
    ("--no-mmproj", Serve, Ignored),
    ("--mmproj-auto", Serve, Ignored),
    ("--no-mmproj-auto", Serve, Ignored),
    ("--mmproj-offload", Serve, Ignored),
    ("--mtmd-batch-max-tokens", Serve, IgnoredValue),
];
