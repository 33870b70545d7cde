//! What wgpu calls experimental: cooperative matrices.
#![allow(unsafe_code)]

/// Leave to use experimental features.
///
/// # Safety
/// Who asks for it acknowledges that wgpu may have errors there, which kernels could meet. One kernel uses them, `mul_mat_matrices`; it loads from and stores
/// to workgroup memory only, at places that are known when it is compiled and inside of arrays, after barriers that all invocations reach. It is used on adapters
/// that say that they have matrices of its kind, where its results are right in the test at opening.
pub fn allowed() -> wgpu::ExperimentalFeatures {
    // SAFETY: as said above.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}
