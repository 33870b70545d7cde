//! The CUDA driver's library. Contains all FFI of the crate.
//!
//! Constants and signatures are those of the driver's documented interface, in the versions that
//! drivers from CUDA 12.0 on export.

#[cfg(any(unix, windows))]
mod functions;
#[cfg(any(unix, windows))]
mod system;

#[cfg(any(unix, windows))]
pub use system::load;

/// Reports that this system has no driver.
///
/// # Errors
/// Always.
#[cfg(not(any(unix, windows)))]
pub fn load() -> Result<std::sync::Arc<dyn crate::driver::Driver>, String> {
    Err("this system cannot load it".to_owned())
}
