//! High-bandwidth host memory, such as that of Xeon Max, through the memkind library, which is
//! loaded at run time.

use samite_core::BufferType;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Host memory that is faster than ordinary memory, for all data of a CPU device.
///
/// If there is too little of it, allocations fail. They do not fall back to ordinary memory.
#[derive(Clone)]
pub struct HighBandwidth {
    pub(crate) plain: Arc<dyn BufferType>,
    pub(crate) packed: Arc<dyn BufferType>,
}

impl fmt::Debug for HighBandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HighBandwidth")
    }
}

impl HighBandwidth {
    /// Finds the high-bandwidth memory of this machine. The process searches only once.
    ///
    /// # Errors
    /// The reason why there is none, as a message for users.
    pub fn find() -> Result<Self, String> {
        static FOUND: OnceLock<Result<HighBandwidth, String>> = OnceLock::new();
        FOUND.get_or_init(memkind::find).clone()
    }
}

#[cfg(not(target_os = "linux"))]
mod memkind {
    pub fn find() -> Result<super::HighBandwidth, String> {
        Err("it is known on Linux only".to_owned())
    }
}

#[cfg(target_os = "linux")]
mod memkind {
    use super::HighBandwidth;
    use crate::packed::buffer::HIGH_BANDWIDTH_NAME;
    use crate::packed_buffer_type::packed_in;
    use libloading::Library;
    use samite_core::memory::HOST_ALIGNMENT;
    use samite_core::{Buffer, BufferType, Error, HostMemory, Result, Usage, host_buffer_of};
    use std::error::Error as _;
    use std::ffi::{c_int, c_void};
    use std::fmt;
    use std::ptr::{self, NonNull};
    use std::sync::{Arc, Weak};

    /// Library names to load: the library's own, and that of its development files.
    const NAMES: [&str; 2] = ["libmemkind.so.0", "libmemkind.so"];

    /// Name of the buffer type.
    const PLAIN: &str = "hbm";

    /// `memkind_t`, a kind of memory.
    type Kind = *mut c_void;
    type Allocate = unsafe extern "C" fn(Kind, *mut *mut c_void, usize, usize) -> c_int;
    type Free = unsafe extern "C" fn(Kind, *mut c_void);

    /// The library with its kind for high-bandwidth memory. It is never unloaded.
    struct Memkind {
        kind: Kind,
        allocate: Allocate,
        free: Free,
    }

    // SAFETY: the kind is one of the library's global values, which belong to no thread, and
    // several threads may call its functions at once.
    unsafe impl Send for Memkind {}
    // SAFETY: as above. Nothing here changes.
    unsafe impl Sync for Memkind {}

    pub fn find() -> Result<HighBandwidth, String> {
        load(&NAMES)
    }

    /// Loads the memory from the first of the libraries that can be loaded.
    pub(super) fn load(names: &[&str]) -> Result<HighBandwidth, String> {
        let mut reasons = Vec::new();
        for name in names {
            // SAFETY: loading runs the library's initialisers. It is a well-known library, found by
            // the system's loader.
            match unsafe { Library::new(*name) } {
                Ok(library) => {
                    let memkind = Memkind::new(library).map_err(|why| format!("{name}: {why}"))?;
                    return Ok(HighBandwidth::with_memkind(memkind));
                }
                Err(error) => reasons.push(said(&error)),
            }
        }
        let reason = reasons.into_iter().next().unwrap_or_default();
        Err(format!("libmemkind is not installed ({reason})"))
    }

    /// Returns the loader's message, which names the file or the symbol.
    fn said(error: &libloading::Error) -> String {
        error
            .source()
            .map_or_else(|| error.to_string(), |source| source.to_string())
    }

    impl Memkind {
        fn new(library: Library) -> Result<Self, String> {
            let absent = |error: libloading::Error| said(&error);
            // SAFETY: `memkind.h` has declared the variable and the functions like this since
            // version 1.0. The library's initialisers set the variable.
            let (kind, check, allocate, free) = unsafe {
                let kind = library.get::<*mut Kind>("MEMKIND_HBW").map_err(absent)?;
                let check = library
                    .get::<unsafe extern "C" fn(Kind) -> c_int>("memkind_check_available")
                    .map_err(absent)?;
                let allocate = library
                    .get::<Allocate>("memkind_posix_memalign")
                    .map_err(absent)?;
                let free = library.get::<Free>("memkind_free").map_err(absent)?;
                (**kind, *check, *allocate, *free)
            };
            // SAFETY: the kind is the library's own.
            let status = unsafe { check(kind) };
            // The library's memory lives as long as the last buffer.
            std::mem::forget(library);
            match status {
                0 => Ok(Memkind {
                    kind,
                    allocate,
                    free,
                }),
                status => Err(format!("this machine has none (status {status})")),
            }
        }

        fn allocate(self: &Arc<Self>, size: usize, what: &str) -> Result<Arc<HostMemory>> {
            let mut base = ptr::null_mut();
            // SAFETY: the alignment is a power of two and a multiple of a pointer's size. The
            // address is written to `base`.
            let status =
                unsafe { (self.allocate)(self.kind, &mut base, HOST_ALIGNMENT, size.max(1)) };
            let base = NonNull::new(base.cast::<u8>()).filter(|_| status == 0);
            let base = base.ok_or_else(|| Error::OutOfMemory {
                device: "cpu (high-bandwidth memory)".into(),
                what: what.into(),
                asked: size,
                free: None,
            })?;
            let owner = MemkindAllocation {
                memkind: Arc::clone(self),
                base,
            };
            // SAFETY: the library returned at least `size` bytes, which belong only to `owner`
            // until it frees them. All of them are written here before they are read.
            Ok(unsafe {
                base.write_bytes(0, size);
                HostMemory::borrow(base, size, true, Box::new(owner))
            })
        }
    }

    /// Memory of the library, freed on drop.
    struct MemkindAllocation {
        memkind: Arc<Memkind>,
        base: NonNull<u8>,
    }

    // SAFETY: the memory belongs to no thread, so any thread may free it.
    unsafe impl Send for MemkindAllocation {}
    // SAFETY: a shared piece offers no operations.
    unsafe impl Sync for MemkindAllocation {}

    impl Drop for MemkindAllocation {
        fn drop(&mut self) {
            // SAFETY: the library gave this address for this kind, and it is freed once.
            unsafe { (self.memkind.free)(self.memkind.kind, self.base.as_ptr().cast()) }
        }
    }

    /// Buffer type for tensors in the standard layout.
    struct Plain {
        memkind: Arc<Memkind>,
        itself: Weak<Self>,
    }

    impl fmt::Debug for Plain {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("HighBandwidthBufferType")
        }
    }

    impl BufferType for Plain {
        fn name(&self) -> &str {
            PLAIN
        }

        fn alignment(&self) -> usize {
            HOST_ALIGNMENT
        }

        fn is_host(&self) -> bool {
            true
        }

        fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
            let itself = self.itself.upgrade();
            let itself =
                itself.ok_or_else(|| Error::invalid("the buffer type is being dropped"))?;
            let memory = self.memkind.allocate(size, "a buffer")?;
            Ok(host_buffer_of(itself, memory, usage))
        }
    }

    impl HighBandwidth {
        fn with_memkind(memkind: Memkind) -> Self {
            let memkind = Arc::new(memkind);
            let packs = Arc::clone(&memkind);
            HighBandwidth {
                packed: packed_in(
                    HIGH_BANDWIDTH_NAME,
                    Box::new(move |size| packs.allocate(size, "packed weights")),
                ),
                plain: Arc::new_cyclic(|itself| Plain {
                    memkind,
                    itself: Weak::clone(itself),
                }),
            }
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)] // Helpers of tests are tests.
mod tests {
    use super::*;
    use crate::device::{CpuDevice, CpuOptions};
    use libloading::Library;
    use samite_core::{DType, Device, Error, Graph, HostMemory, Layout, TensorGroup, Usage};
    use std::path::Path;
    use std::process::Command;

    /// Compiles a library that replaces memkind in tests.
    fn stand_in(folder: &Path, name: &str, flags: &[&str]) -> Option<String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = folder.join(name);
        let status = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-shared", "-fPIC", "-o"])
            .args([&path, &root.join("tests/fixtures/memkind.c")])
            .args(flags)
            .status();
        match status {
            Ok(status) => assert!(status.success(), "the fixture does not compile"),
            Err(error) => {
                eprintln!("skipped: no C compiler ({error})");
                return None;
            }
        }
        Some(path.to_str().unwrap().to_owned())
    }

    fn load(path: &str) -> Result<HighBandwidth, String> {
        memkind::load(&["/nowhere/libmemkind.so.0", path])
    }

    /// Returns the numbers of allocations, frees and refusals in the library, and of calls with a
    /// wrong kind.
    fn counts(path: &str) -> [i32; 4] {
        // SAFETY: the library is loaded already, and has these variables.
        unsafe {
            let library = Library::new(path).unwrap();
            ["allocations", "frees", "refusals", "wrong_kinds"]
                .map(|name| **library.get::<*const i32>(name).unwrap())
        }
    }

    #[test]
    fn all_device_memory_is_high_bandwidth() {
        let folder = tempfile::tempdir().unwrap();
        let Some(path) = stand_in(folder.path(), "libhbm.so", &["-DLIMIT=1000000"]) else {
            return;
        };
        let memory = load(&path).unwrap();
        let device = CpuDevice::new(CpuOptions::default().with_memory(memory));
        let plain = device.buffer_type();
        let packed = device.extra_buffer_types().remove(0);
        assert_eq!((plain.name(), packed.name()), ("hbm", "hbm-packed"));
        for memory in [&plain, &packed] {
            assert!(device.supports_buffer_type(memory));
        }
        assert!(!device.supports_buffer_type(&crate::packed_buffer_type::packed_buffer_type()));

        // Memory is zeroed, has the right type, and is freed.
        let layout = Layout::contiguous(DType::Q8_0, [64, 100, 1, 1]).unwrap();
        for (number, memory) in [&plain, &packed].into_iter().enumerate() {
            let tensors = [("w", layout)];
            let group = TensorGroup::allocate(memory, Usage::Weights, &tensors).unwrap();
            let tensor = group.tensors[0].tensor();
            assert!(samite_core::same_buffer_type(
                tensor.buffer.buffer_type(),
                memory
            ));
            assert_eq!(tensor.buffer.location().offset % 64, 0);
            let mut read = vec![1; layout.bytes()];
            tensor.read(0, &mut read).unwrap();
            assert!(read.iter().all(|&byte| byte == 0));
            let taken = number as i32 + 1;
            assert_eq!(counts(&path), [taken, taken - 1, 0, 0]);
            drop(group);
            assert_eq!(counts(&path), [taken, taken, 0, 0]);
        }

        // Too little memory is an error. Allocations do not fall back to other memory.
        let error = plain.allocate(2_000_000, Usage::Compute).unwrap_err();
        assert!(matches!(
            error,
            Error::OutOfMemory {
                asked: 2_000_000,
                ..
            }
        ));
        assert!(
            error.to_string().contains("high-bandwidth memory"),
            "{error}"
        );
        assert!(packed.allocate(2_000_000, Usage::Weights).is_err());
        assert_eq!(counts(&path), [2, 2, 2, 0]);

        // Mapped files are not imported.
        assert!(!device.capabilities().import_host);
        let other = HostMemory::allocate(64, "host", "a test").unwrap();
        assert!(device.import_host(other, Usage::Weights).is_err());
        assert_eq!(device.memory().free, None);
    }

    #[test]
    fn packed_weights_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let Some(path) = stand_in(folder.path(), "libhbm.so", &[]) else {
            return;
        };
        let memory = load(&path).unwrap();
        let layout = Layout::contiguous(DType::F32, [96, 40, 1, 1]).unwrap();
        let mut g = Graph::new();
        let w = g.leaf("w", DType::F32, layout.shape()).unwrap();
        let x = g.input("x", DType::F32, [96, 3, 1, 1]).unwrap();
        let y = g.mul_mat(w, x).unwrap();
        assert!(memory.packed.accepts(g.node(y)).is_yes());
        let values: Vec<f32> = (0..96 * 40).map(|i| (i % 37) as f32 - 18.0).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let group =
            TensorGroup::allocate(&memory.packed, Usage::Weights, &[("w", layout)]).unwrap();
        group.tensors[0].tensor().write(0, bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        group.tensors[0].tensor().read(0, &mut back).unwrap();
        assert!(back == bytes);
    }

    #[test]
    fn missing_high_bandwidth_memory_has_a_reason() {
        let folder = tempfile::tempdir().unwrap();
        let nowhere = memkind::load(&["/nowhere/libmemkind.so.0"]).unwrap_err();
        assert!(
            nowhere.starts_with("libmemkind is not installed (/nowhere/"),
            "{nowhere}"
        );
        let Some(path) = stand_in(folder.path(), "libnone.so", &["-DSTATUS=-1"]) else {
            return;
        };
        let reason = load(&path).unwrap_err();
        assert!(
            reason.ends_with("libnone.so: this machine has none (status -1)"),
            "{reason}"
        );
        let Some(path) = stand_in(folder.path(), "libold.so", &["-Dmemkind_free=other"]) else {
            return;
        };
        let reason = load(&path).unwrap_err();
        assert!(
            reason.contains("libold.so") && reason.contains("memkind_free"),
            "{reason}"
        );
    }
}
