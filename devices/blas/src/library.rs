//! Loads and calls a CBLAS library. Contains all FFI of the crate.

use libloading::Library;
use samite_core::Rejected;
use std::error::Error;
use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Environment variable with the path of a library to use instead of the default ones.
pub const PATH_VARIABLE: &str = "SAMITE_BLAS_PATH";

/// Names passed to the system's loader, in order of preference. The loader does not search the
/// current directory for them.
#[cfg(target_os = "macos")]
const CANDIDATES: &[&str] = &[
    "/System/Library/Frameworks/Accelerate.framework/Accelerate",
    "libopenblas.dylib",
];
#[cfg(target_os = "windows")]
const CANDIDATES: &[&str] = &["libopenblas.dll", "mkl_rt.2.dll"];
#[cfg(not(any(target_os = "macos", target_os = "windows")))]
const CANDIDATES: &[&str] = &[
    "libopenblas.so.0",
    "libmkl_rt.so.2",
    "libblis.so.4",
    "libcblas.so.3",
];

const ROW_MAJOR: c_int = 101;
const NO_TRANSPOSE: c_int = 111;
const TRANSPOSE: c_int = 112;

type Sgemm = unsafe extern "C" fn(
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    f32,
    *const f32,
    c_int,
    *const f32,
    c_int,
    f32,
    *mut f32,
    c_int,
);

/// A loaded CBLAS library. It is never unloaded, because its threads may still run.
pub struct Cblas {
    path: PathBuf,
    description: String,
    sgemm: Sgemm,
}

/// A product `c = b · aᵀ` of row-major matrices: `a` is `[m][k]`, `b` is `[n][k]`, `c` is `[n][m]`.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Rows of `a`.
    pub m: usize,
    /// Rows of `b`.
    pub n: usize,
    /// Row length.
    pub k: usize,
    /// Row stride of `a` in elements.
    pub lda: usize,
    /// Row stride of `b` in elements.
    pub ldb: usize,
}

impl Product {
    /// Returns whether the extents fit into CBLAS's 32-bit integers.
    pub fn fits(&self) -> bool {
        [self.m, self.n, self.k, self.lda, self.ldb]
            .iter()
            .all(|&extent| c_int::try_from(extent).is_ok())
    }
}

/// Returns the loader's message, which names the file or the symbol.
fn said(error: &libloading::Error) -> String {
    error
        .source()
        .map_or_else(|| error.to_string(), |source| source.to_string())
}

impl Cblas {
    /// Loads the library in `SAMITE_BLAS_PATH`, or else the first known one on the system. On
    /// failure, returns the candidates and why each was rejected.
    pub fn find() -> Result<Arc<Self>, Vec<Rejected>> {
        let named = std::env::var_os(PATH_VARIABLE).map(PathBuf::from);
        let reject = |path: &Path, why: String| Rejected {
            what: path.display().to_string(),
            why,
            named: named.is_some(),
        };
        let candidates = match &named {
            Some(path) if !path.is_absolute() => {
                let why = format!("{PATH_VARIABLE} must be an absolute path");
                return Err(vec![reject(path, why)]);
            }
            Some(path) => vec![path.clone()],
            None => CANDIDATES.iter().map(PathBuf::from).collect(),
        };
        let mut rejected = Vec::new();
        for path in candidates {
            match Self::load(&path) {
                Ok(library) => return Ok(Arc::new(library)),
                Err(reason) => rejected.push(reject(&path, reason)),
            }
        }
        Err(rejected)
    }

    fn load(path: &Path) -> Result<Self, String> {
        // SAFETY: loading runs the library's initializers. The candidates are well-known numerical
        // libraries found by the system's loader, or one that the user named.
        let library = unsafe { Library::new(path) }.map_err(|error| said(&error))?;
        // SAFETY: this is the symbol's type in every CBLAS with 32-bit integers.
        let sgemm =
            *unsafe { library.get::<Sgemm>(b"cblas_sgemm\0") }.map_err(|error| said(&error))?;
        // SAFETY: this is OpenBLAS's declaration; it returns a static, zero-terminated string.
        let description = unsafe {
            library
                .get::<unsafe extern "C" fn() -> *const c_char>(b"openblas_get_config\0")
                .ok()
                .map(|config| {
                    let text = config();
                    if text.is_null() {
                        String::new()
                    } else {
                        std::ffi::CStr::from_ptr(text)
                            .to_string_lossy()
                            .trim()
                            .to_owned()
                    }
                })
        };
        let name = path.file_name().map_or_else(
            || path.display().to_string(),
            |name| name.to_string_lossy().into_owned(),
        );
        // The library's worker threads run until the process exits, so its code must stay loaded.
        std::mem::forget(library);
        Ok(Cblas {
            path: path.to_owned(),
            description: description.filter(|d| !d.is_empty()).unwrap_or(name),
            sgemm,
        })
    }

    /// Returns the path of the library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the library's own description.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Computes one product.
    ///
    /// # Safety
    /// [`Product::fits`] must hold; `a`, `b` and `c` must be valid for the matrices that `product`
    /// describes, and `c` must not be accessed otherwise during the call.
    pub unsafe fn multiply(&self, product: Product, a: *const f32, b: *const f32, c: *mut f32) {
        let int = |extent: usize| extent as c_int;
        // SAFETY: the caller guarantees valid pointers and extents; the leading dimensions are at
        // least the row lengths.
        unsafe {
            (self.sgemm)(
                ROW_MAJOR,
                NO_TRANSPOSE,
                TRANSPOSE,
                int(product.n),
                int(product.m),
                int(product.k),
                1.0,
                b,
                int(product.ldb),
                a,
                int(product.lda),
                0.0,
                c,
                int(product.m),
            );
        }
    }
}
