//! Memory, time, locks and threads.

use super::text::fail;
use super::{Symbol, exports};
use crate::abi::{BackendEvent, Device, Guid, Reg};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::time::Instant;

/// Alignment of memory for tensors.
const ALIGNMENT: usize = 64;
/// Maximum number of threads in a pool of ggml's.
const MAX_THREADS: usize = 512;
/// Polling level of a thread before it sleeps, from 0 to 100.
const POLL: u32 = 50;

pub fn symbols() -> Vec<Symbol> {
    exports![
        aligned_free as ggml_aligned_free,
        aligned_malloc as ggml_aligned_malloc,
        context_free as ggml_free,
        context_init as ggml_init,
        context_no_alloc as ggml_get_no_alloc,
        critical_section_end as ggml_critical_section_end,
        critical_section_start as ggml_critical_section_start,
        device_count as ggml_backend_reg_dev_count,
        device_name as ggml_backend_dev_name,
        device_of as ggml_backend_reg_dev_get,
        event_synchronize as ggml_backend_event_synchronize,
        guid_matches as ggml_guid_matches,
        new_buffer as ggml_new_buffer,
        new_tensor as ggml_new_tensor_1d,
        threadpool_params as ggml_threadpool_params_default,
        time_ms as ggml_time_ms,
        time_us as ggml_time_us,
    ]
}

/// `ggml_aligned_malloc`. Returns null for size 0, and if memory is short.
pub unsafe extern "C" fn aligned_malloc(size: usize) -> *mut c_void {
    if size == 0 {
        return null_mut();
    }
    let mut memory = null_mut();
    // SAFETY: the alignment is a power of two and a multiple of a pointer's size.
    match unsafe { libc::posix_memalign(&raw mut memory, ALIGNMENT, size) } {
        0 => memory,
        _ => null_mut(),
    }
}

/// `ggml_aligned_free`
pub unsafe extern "C" fn aligned_free(memory: *mut c_void, _size: usize) {
    // SAFETY: the caller got it from `aligned_malloc`.
    unsafe { libc::free(memory) };
}

/// A lock that one call acquires and another one releases.
struct CriticalSection(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a mutex is made for use by several threads.
unsafe impl Sync for CriticalSection {}

static CRITICAL_SECTION: CriticalSection =
    CriticalSection(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

unsafe extern "C" fn critical_section_start() {
    // SAFETY: it is initialised, and never moved.
    unsafe { libc::pthread_mutex_lock(CRITICAL_SECTION.0.get()) };
}

unsafe extern "C" fn critical_section_end() {
    // SAFETY: it is initialised, and never moved; the caller has locked it.
    unsafe { libc::pthread_mutex_unlock(CRITICAL_SECTION.0.get()) };
}

fn since_start() -> std::time::Duration {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    START.elapsed()
}

unsafe extern "C" fn time_us() -> i64 {
    i64::try_from(since_start().as_micros()).unwrap_or(i64::MAX)
}

unsafe extern "C" fn time_ms() -> i64 {
    i64::try_from(since_start().as_millis()).unwrap_or(i64::MAX)
}

unsafe extern "C" fn guid_matches(a: *const Guid, b: *const Guid) -> bool {
    // SAFETY: the caller passes two valid pointers.
    unsafe { *a == *b }
}

unsafe extern "C" fn device_count(reg: *mut Reg) -> usize {
    // SAFETY: the caller passes its own registration, and the function belongs to it.
    unsafe { (*reg).iface.get_device_count.map_or(0, |count| count(reg)) }
}

unsafe extern "C" fn device_name(device: *mut Device) -> *const c_char {
    // SAFETY: the caller passes its own device, and the function belongs to it.
    unsafe {
        (*device)
            .iface
            .get_name
            .map_or(c"".as_ptr(), |name| name(device))
    }
}

unsafe extern "C" fn event_synchronize(event: *mut BackendEvent) {
    // SAFETY: the caller passes an event of one of its devices, and the function belongs to that.
    unsafe {
        let device = (*event).device;
        match (*device).iface.event_synchronize {
            Some(synchronize) => synchronize(device, event),
            None => fail("a device with events, but without event_synchronize"),
        }
    }
}

unsafe extern "C" fn device_of(reg: *mut Reg, index: usize) -> *mut Device {
    // SAFETY: the caller passes its own registration.
    match unsafe { (*reg).iface.get_device } {
        // SAFETY: the function belongs to it.
        Some(get) => unsafe { get(reg, index) },
        None => fail("a registration without get_device"),
    }
}

/// `ggml_threadpool_params`
#[repr(C)]
struct ThreadpoolParams {
    cpumask: [bool; MAX_THREADS],
    n_threads: c_int,
    priority: c_int,
    poll: u32,
    strict_cpu: bool,
    paused: bool,
}

unsafe extern "C" fn threadpool_params(threads: c_int) -> ThreadpoolParams {
    ThreadpoolParams {
        cpumask: [false; MAX_THREADS],
        n_threads: threads,
        priority: 0,
        poll: POLL,
        strict_cpu: false,
        paused: false,
    }
}

/// `ggml_init_params`
#[repr(C)]
struct ContextParams {
    size: usize,
    memory: *mut c_void,
    no_alloc: bool,
}

/// Dummy context. `ggml_cpu_init` opens and closes one only for side effects in upstream's library.
/// All contexts are this one, and nothing can be allocated in it.
static CONTEXT: u8 = 0;

unsafe extern "C" fn context_init(_params: ContextParams) -> *mut c_void {
    (&raw const CONTEXT).cast_mut().cast()
}

unsafe extern "C" fn context_free(_context: *mut c_void) {}

unsafe extern "C" fn context_no_alloc(_context: *mut c_void) -> bool {
    true
}

unsafe extern "C" fn new_tensor(_context: *mut c_void, _dtype: u32, _len: i64) -> *mut c_void {
    fail("ggml_new_tensor_1d: samite's libggml-base makes no tensors")
}

unsafe extern "C" fn new_buffer(_context: *mut c_void, _size: usize) -> *mut c_void {
    fail("ggml_new_buffer: samite's libggml-base has no memory in contexts")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn struct_layouts_match_upstream() {
        assert_eq!(size_of::<ThreadpoolParams>(), 528);
        assert_eq!(offset_of!(ThreadpoolParams, n_threads), 512);
        assert_eq!(offset_of!(ThreadpoolParams, poll), 520);
        assert_eq!(offset_of!(ThreadpoolParams, paused), 525);
        assert_eq!(size_of::<ContextParams>(), 24);
    }

    #[test]
    fn memory_is_aligned() {
        // SAFETY: all allocated memory is freed.
        unsafe {
            let memory = aligned_malloc(100);
            assert!(!memory.is_null() && (memory as usize).is_multiple_of(ALIGNMENT));
            aligned_free(memory, 100);
            assert!(aligned_malloc(0).is_null());
            assert!(aligned_malloc(usize::MAX / 2).is_null());
        }
    }

    #[test]
    fn critical_sections_admit_one_thread_at_a_time() {
        let mut count = 0u32;
        let address = &raw mut count as usize;
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(move || {
                    for _ in 0..1000 {
                        // SAFETY: the section is left after it was entered, and only one thread is
                        // in it.
                        unsafe {
                            critical_section_start();
                            let count = address as *mut u32;
                            count.write_volatile(count.read_volatile() + 1);
                            critical_section_end();
                        }
                    }
                });
            }
        });
        assert_eq!(count, 4000);
    }
}
