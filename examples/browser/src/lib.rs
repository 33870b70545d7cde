//! samite in a browser: the small model that is part of the program writes stories, on the visitor's GPU by WebGPU, or on the processor.
//!
//! samite is used as everywhere else, through functions that block. Where the GPU has to be waited for, the browser suspends the program (promise
//! integration), so exports that may wait are promises in JavaScript. The page runs all of it in a worker, and stays free.
//!
//! | file | what |
//! |---|---|
//! | `writer` | what JavaScript calls |
//! | `main.rs` | a program for the developer's machine: builds the page |
//! | `page/` | the page and its worker |
#![forbid(unsafe_code)]

#[cfg(target_arch = "wasm32")]
mod writer;
