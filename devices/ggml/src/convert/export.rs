//! A part of a samite graph as tensors of ggml.
