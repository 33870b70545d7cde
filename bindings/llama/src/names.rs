//! Names and numbers that depend on no model.

use crate::devices::registry;
use crate::entry::{export, print, required_text, text};
use crate::layout::{MAX_BUFFER_OVERRIDES, MAX_DEVICES, MAX_SEQUENCES, VERSION};
use crate::log;
use samite_core::DeviceKind;
use samite_llm::quantize::Mixture;
use std::ffi::{CStr, c_char, c_int};

/// Flag of a file type that was guessed.
const GUESSED: i32 = 1024;

/// llama.cpp's names of file types, by number.
const FILE_TYPES: [(i32, &CStr, &CStr); 37] = {
    macro_rules! table {
        ($($number:literal $name:literal),*) => {
            [$(($number, {
                const TEXT: &str = concat!($name, "\0");
                match CStr::from_bytes_with_nul(TEXT.as_bytes()) { Ok(text) => text, Err(_) => c"" }
            }, {
                const TEXT: &str = concat!("(guessed) ", $name, "\0");
                match CStr::from_bytes_with_nul(TEXT.as_bytes()) { Ok(text) => text, Err(_) => c"" }
            })),*]
        };
    }
    table! {
        0 "all F32", 1 "F16", 2 "Q4_0", 3 "Q4_1", 7 "Q8_0", 8 "Q5_0", 9 "Q5_1", 10 "Q2_K - Medium",
        11 "Q3_K - Small", 12 "Q3_K - Medium",
        13 "Q3_K - Large", 14 "Q4_K - Small", 15 "Q4_K - Medium", 16 "Q5_K - Small",
        17 "Q5_K - Medium", 18 "Q6_K", 19 "IQ2_XXS - 2.0625 bpw",
        20 "IQ2_XS - 2.3125 bpw", 21 "Q2_K - Small", 22 "IQ3_XS - 3.3 bpw",
        23 "IQ3_XXS - 3.0625 bpw", 24 "IQ1_S - 1.5625 bpw",
        25 "IQ4_NL - 4.5 bpw", 26 "IQ3_S - 3.4375 bpw", 27 "IQ3_S mix - 3.66 bpw",
        28 "IQ2_S - 2.5 bpw", 29 "IQ2_M - 2.7 bpw",
        30 "IQ4_XS - 4.25 bpw", 31 "IQ1_M - 1.75 bpw", 32 "BF16", 36 "TQ1_0 - 1.69 bpw ternary",
        37 "TQ2_0 - 2.06 bpw ternary", 38 "MXFP4 MoE",
        39 "NVFP4", 40 "Q1_0", 41 "Q2_0", -1 "unknown, may not work"
    }
};

/// Returns the name of a file type.
pub fn file_type(number: i32) -> &'static CStr {
    let find = |wanted: i32| FILE_TYPES.iter().find(|row| row.0 == wanted);
    let row = find((number & !GUESSED).max(0)).or_else(|| find(-1));
    match row {
        Some((_, _, guessed)) if number & GUESSED != 0 => guessed,
        Some((_, name, _)) => name,
        None => c"",
    }
}

/// Returns the time in microseconds of the clock that ggml also uses, because callers subtract one
/// from the other.
pub fn now_us() -> i64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` has space for the result.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec * 1_000_000 + time.tv_nsec / 1000
}

const LOAD_MODES: [(c_int, &CStr); 6] = [
    (-1, c"auto"),
    (0, c"none"),
    (1, c"mmap"),
    (2, c"mlock"),
    (3, c"mmap+mlock"),
    (4, c"dio"),
];

/// Metadata keys of recommended sampling parameters, by number.
const SAMPLING_KEYS: [&CStr; 12] = [
    c"general.sampling.sequence",
    c"general.sampling.top_k",
    c"general.sampling.top_p",
    c"general.sampling.min_p",
    c"general.sampling.xtc_probability",
    c"general.sampling.xtc_threshold",
    c"general.sampling.temp",
    c"general.sampling.penalty_last_n",
    c"general.sampling.penalty_repeat",
    c"general.sampling.mirostat",
    c"general.sampling.mirostat_tau",
    c"general.sampling.mirostat_eta",
];

export! {
    /// Returns the release of llama.cpp whose header this library implements.
    fn llama_version() -> *const c_char, or std::ptr::null(); {
        Ok(VERSION.as_ptr())
    }

    /// Initializes the library. Not required.
    fn llama_backend_init(), or (); {
        log::listen();
        now_us();
        Ok(())
    }

    /// Releases the library. Not required.
    fn llama_backend_free(), or (); {
        Ok(())
    }

    /// Sets the NUMA strategy: left to the system.
    fn llama_numa_init(_strategy: c_int), or (); {
        Ok(())
    }

    /// Returns the microseconds since some fixed time.
    fn llama_time_us() -> i64, or 0; {
        Ok(now_us())
    }

    /// Returns the maximum number of devices of a model.
    fn llama_max_devices() -> usize, or 0; {
        Ok(MAX_DEVICES)
    }

    /// Returns the maximum number of sequences of a context.
    fn llama_max_parallel_sequences() -> usize, or 0; {
        Ok(MAX_SEQUENCES)
    }

    /// Returns the maximum number of buffer type overrides.
    fn llama_max_tensor_buft_overrides() -> usize, or 0; {
        Ok(MAX_BUFFER_OVERRIDES)
    }

    /// Returns whether files can be memory-mapped.
    fn llama_supports_mmap() -> bool, or false; {
        Ok(true)
    }

    /// Returns whether memory can be locked.
    fn llama_supports_mlock() -> bool, or false; {
        Ok(true)
    }

    /// Returns whether there is a device other than the CPU.
    fn llama_supports_gpu_offload() -> bool, or false; {
        Ok(registry().automatic().iter().any(|device| device.kind() != DeviceKind::Cpu))
    }

    /// Returns whether RPC devices are supported: always false.
    fn llama_supports_rpc() -> bool, or false; {
        Ok(false)
    }

    /// Returns the name of a file type.
    fn llama_ftype_name(number: c_int) -> *const c_char, or c"".as_ptr(); {
        Ok(file_type(number).as_ptr())
    }

    /// Returns the name of a flash attention setting.
    fn llama_flash_attn_type_name(number: c_int) -> *const c_char, or c"".as_ptr(); {
        Ok(match number {
            -1 => c"auto",
            0 => c"disabled",
            1 => c"enabled",
            _ => c"unknown",
        }.as_ptr())
    }

    /// Returns the name of a load mode.
    fn llama_load_mode_name(number: c_int) -> *const c_char, or c"".as_ptr(); {
        let known = LOAD_MODES.iter().find(|mode| mode.0 == number);
        Ok(known.map_or(c"unknown", |mode| mode.1).as_ptr())
    }

    /// Returns the load mode with this name; "auto" for unknown names.
    fn llama_load_mode_from_str(name: *const c_char) -> c_int, or -1; {
        // SAFETY: the caller upholds the header's contract.
        let name = unsafe { required_text("name", name) }?;
        let known = LOAD_MODES.iter().find(|mode| mode.1.to_bytes() == name.as_bytes());
        known.map(|mode| mode.0).ok_or_else(|| {
            crate::entry::Failure::new(format!("there is no way to load called {name:?}"))
        })
    }

    /// Returns the metadata key of a recommended sampling parameter, or null.
    fn llama_model_meta_key_str(number: c_int) -> *const c_char, or std::ptr::null(); {
        let key = usize::try_from(number).ok().and_then(|number| SAMPLING_KEYS.get(number));
        Ok(key.map_or(std::ptr::null(), |key| key.as_ptr()))
    }

    /// Returns a description of the library.
    fn llama_print_system_info() -> *const c_char, or c"".as_ptr(); {
        Ok(c"samite | CPU : kernels are chosen at run time | ".as_ptr())
    }

    /// Writes the file name of a part of a split model.
    fn llama_split_path(buffer: *mut c_char, size: usize, prefix: *const c_char, number: i32,
        count: i32) -> i32, or 0; {
        // SAFETY: the caller upholds the header's contract.
        let prefix = unsafe { required_text("prefix", prefix) }?;
        let path = format!("{prefix}-{:05}-of-{count:05}.gguf", number.saturating_add(1));
        // SAFETY: as above.
        Ok(unsafe { print(path.as_bytes(), buffer, size) })
    }

    /// Writes the prefix before the numbers in such a name. Returns 0 if the numbers differ.
    fn llama_split_prefix(buffer: *mut c_char, size: usize, path: *const c_char, number: i32,
        count: i32) -> i32, or 0; {
        // SAFETY: the caller upholds the header's contract.
        let Some(path) = (unsafe { text(path) }) else { return Ok(0) };
        let ending = format!("-{:05}-of-{count:05}.gguf", number.saturating_add(1));
        // SAFETY: as above.
        Ok(path.to_bytes().strip_suffix(ending.as_bytes()).map_or(0, |prefix| unsafe {
            print(prefix, buffer, size)
        }))
    }
}

/// Returns the mixture with llama.cpp's number.
pub fn mixture(file_type: i32) -> Option<Mixture> {
    Mixture::of_file_type(u32::try_from(file_type).ok()?)
}
