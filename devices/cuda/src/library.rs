//! The CUDA driver's library. Contains all FFI of the crate.
//!
//! Constants and signatures are those of the driver's documented interface, in the versions that
//! drivers from CUDA 12.0 on export.

#[cfg(all(any(unix, windows), target_pointer_width = "64"))]
mod functions;
#[cfg(all(any(unix, windows), target_pointer_width = "64"))]
mod system;

#[cfg(all(any(unix, windows), target_pointer_width = "64"))]
pub use system::load;

/// Reports that this system has no driver.
///
/// # Errors
/// Always.
#[cfg(not(all(any(unix, windows), target_pointer_width = "64")))]
pub fn load() -> Result<std::sync::Arc<dyn crate::driver::Driver>, String> {
    Err("this system cannot load it".to_owned())
}
