//! Language models: architectures, KV cache, contexts.
