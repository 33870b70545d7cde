//! The library as a program finds it, and models for it.

// Test programs use some of the helpers each.
#![allow(dead_code, clippy::unwrap_used, clippy::macro_metavars_in_unsafe)]

use llama::layout::*;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};

/// Returns the address of a function.
pub fn symbol(name: &str) -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        // Built next to the test.
        let path = std::env::current_exe().unwrap();
        let path = path.parent().unwrap().join("libllama.so");
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the library has no initializers.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "{path:?}");
        library.expose_provenance()
    });
    let name = CString::new(name).unwrap();
    // SAFETY: only looks up an address.
    unsafe {
        libc::dlsym(
            std::ptr::with_exposed_provenance_mut(*library),
            name.as_ptr(),
        )
    }
}

/// Calls a function of the library: `call!(name(arguments: types) -> result)`.
#[macro_export]
macro_rules! call {
    ($name:ident($($value:expr => $type:ty),* $(,)?) $(-> $result:ty)?) => {{
        let function = $crate::common::symbol(stringify!($name));
        assert!(!function.is_null(), stringify!($name));
        #[allow(unused_unsafe, clippy::macro_metavars_in_unsafe)]
        // SAFETY: the function has this type in the header, and the test follows its contract.
        unsafe {
            std::mem::transmute::<*mut std::ffi::c_void,
                unsafe extern "C" fn($($type),*) $(-> $result)?>(function)($($value),*)
        }
    }};
}

/// Log messages of the library.
pub static SAID: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());

unsafe extern "C" fn listen(level: c_int, text: *const c_char, _data: *mut c_void) {
    // SAFETY: the library passes a C string.
    let text = unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned();
    SAID.lock().unwrap().push((level, text));
}

/// Sends the library's log to the test.
pub fn listen_to_all() {
    call!(llama_log_set(Some(listen) => LogCallback, std::ptr::null_mut() => *mut c_void));
}

/// Returns whether a log message contains this text.
pub fn was_logged(part: &str) -> bool {
    SAID.lock()
        .unwrap()
        .iter()
        .any(|(_, text)| text.contains(part))
}

/// Returns the path of a small model.
pub fn path() -> CString {
    static PATH: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = PATH.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stories.gguf");
        std::fs::write(&path, samite_stories::MODEL).unwrap();
        (folder, path)
    });
    CString::new(path.to_str().unwrap()).unwrap()
}

/// Loads a model.
pub fn load() -> *mut Opaque {
    let path = path();
    let model = call!(llama_model_load_from_file(path.as_ptr() => *const c_char,
        ModelParams::DEFAULT => ModelParams) -> *mut Opaque);
    assert!(!model.is_null());
    model
}

/// Creates a context.
pub fn context(model: *mut Opaque, change: impl Fn(&mut ContextParams)) -> *mut Opaque {
    let mut params = ContextParams {
        n_threads: 1,
        n_threads_batch: 1,
        ..ContextParams::DEFAULT
    };
    change(&mut params);
    let context =
        call!(llama_init_from_model(model => *mut Opaque, params => ContextParams) -> *mut Opaque);
    assert!(!context.is_null());
    context
}

/// Tokenizes a text.
pub fn tokenize(model: *mut Opaque, text: &str) -> Vec<i32> {
    let mut tokens = vec![0; text.len() + 2];
    let count = call!(llama_tokenize(
        model => *const Opaque, text.as_ptr().cast() => *const c_char, text.len() as i32 => i32,
            tokens.as_mut_ptr() => *mut i32,
        tokens.len() as i32 => i32, true => bool, false => bool
    ) -> i32);
    tokens.truncate(count.try_into().unwrap());
    tokens
}

/// Decodes tokens after those of sequence 0.
pub fn decode(context: *mut Opaque, tokens: &mut [i32]) -> i32 {
    let batch = call!(llama_batch_get_one(tokens.as_mut_ptr() => *mut i32,
        tokens.len() as i32 => i32) -> Batch);
    call!(llama_decode(context => *mut Opaque, batch => Batch) -> i32)
}

/// Generates the most likely tokens after a text.
pub fn greedy(context: *mut Opaque, prompt: &[i32], count: usize) -> Vec<i32> {
    let sampler = call!(llama_sampler_init_greedy() -> *mut Sampler);
    let mut tokens = prompt.to_vec();
    let mut written = Vec::new();
    while written.len() < count {
        assert_eq!(decode(context, &mut tokens), 0);
        let token = call!(llama_sampler_sample(sampler => *mut Sampler, context => *mut Opaque,
            -1 => i32) -> i32);
        written.push(token);
        tokens = vec![token];
    }
    call!(llama_sampler_free(sampler => *mut Sampler));
    written
}
