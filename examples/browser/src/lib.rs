//! samite in a browser: a small embedded model writes stories, on the visitor's GPU through WebGPU
//! or on the CPU.
//!
//! The program uses samite's blocking functions as everywhere else. Where it waits for the GPU, the
//! browser suspends it (promise integration), so exports that may wait return promises in
//! JavaScript. The page runs the program in a worker and stays responsive.
//!
//! | file | content |
//! |---|---|
//! | `writer` | the JavaScript interface |
//! | `main.rs` | a program for the developer's machine, which builds the page |
//! | `page/` | the page and its worker |
#![forbid(unsafe_code)]

#[cfg(target_arch = "wasm32")]
mod writer;
