//! The GGUF file format: hardened reader, writer, loading.
