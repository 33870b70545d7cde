//! Matrix products on any CBLAS library found at run time.
//!
//! The device is an *accelerator*: it works on host memory, has no memory of its own, and takes large F32, F16, BF16 and
//! quantized matrix products from the CPU by standing before it in a scheduler's order of preference. Weights that are
//! not F32 are decoded into scratch memory first, a matrix at a time.
//!
//! Nothing is linked: OpenBLAS, MKL, BLIS or Accelerate are looked for through the system's loader, or at the absolute path
//! in [`PATH_VARIABLE`]. Without a library there is no device, and [`BlasBackend`] says what was tried.

mod device;
mod library;

pub use device::{BlasBackend, BlasDevice};
pub use library::PATH_VARIABLE;
