//! Matrix products with any CBLAS library found at run time.
//!
//! The device is an *accelerator*: it works on host memory and has no memory of its own. Placed
//! before the CPU in a scheduler's order of preference, it takes over large F32, F16, BF16 and
//! quantized matrix products. Weights other than F32 are first decoded into scratch memory, one
//! matrix at a time.
//!
//! No library is linked: OpenBLAS, MKL, BLIS or Accelerate are located by the system's loader, or
//! at the absolute path in [`PATH_VARIABLE`]. Without a library there is no device, and
//! [`BlasBackend`] reports which ones were tried.

mod device;
mod library;

pub use device::{BlasBackend, BlasDevice};
pub use library::PATH_VARIABLE;
