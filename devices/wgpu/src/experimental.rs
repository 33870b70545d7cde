//! Enables wgpu's experimental feature, cooperative matrices.
#![allow(unsafe_code)]

/// Returns the token that enables experimental features.
///
/// # Safety
/// The caller acknowledges that wgpu may have bugs there that kernels could trigger. Only the
/// kernels that multiply cooperative matrices use the feature. They load from and store to
/// workgroup memory only, at offsets that are known at compile time and inside the arrays, after
/// barriers that all invocations reach. They run only on adapters that report a matching matrix
/// type and pass the self-test when they are opened.
pub fn allowed() -> wgpu::ExperimentalFeatures {
    // SAFETY: see the documentation above.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}
