//! Builds a shared library without code, in memory. Its symbols are absolute addresses in this
//! process.

use super::Symbol;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::c_void;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};

// Names and values of the System V ABI (ELF, 64-bit).
const ELFCLASS64: u8 = 2;
const ELFDATA2LSB: u8 = 1;
const EV_CURRENT: u8 = 1;
const ET_DYN: u16 = 3;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
/// Without this header, loaders assume that the stack must be executable.
const PT_GNU_STACK: u32 = 0x6474_e551;
const PF_W: u32 = 2;
const PF_R: u32 = 4;
const SHN_ABS: u16 = 0xfff1;
const STB_GLOBAL_STT_FUNC: u8 = 1 << 4 | 2;
const DT_NULL: u64 = 0;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_SYMENT: u64 = 11;
const DT_SONAME: u64 = 14;

#[cfg(target_arch = "x86_64")]
const EM_MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const EM_MACHINE: u16 = 183;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const PROGRAM_HEADERS: usize = 3;
const SYMBOL: usize = 24;
const DYNAMIC_ENTRIES: usize = 7;
const DYNAMIC: usize = DYNAMIC_ENTRIES * 16;
const PAGE: u64 = 0x1000;

/// Hash function of the System V ABI.
fn hash(name: &str) -> u32 {
    name.bytes().fold(0, |hash: u32, byte| {
        let hash = (hash << 4).wrapping_add(u32::from(byte));
        let high = hash & 0xf000_0000;
        (hash ^ high >> 24) & !high
    })
}

/// Writer of little-endian fields.
#[derive(Default)]
struct FieldWriter(Vec<u8>);

impl FieldWriter {
    fn u16(&mut self, values: &[u16]) {
        self.0.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }

    fn u32(&mut self, values: &[u32]) {
        self.0.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }

    fn u64(&mut self, values: &[u64]) {
        self.0.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
}

/// Builds the library's file: headers, then the dynamic section, symbols, hash table and strings,
/// all in one segment.
fn build(soname: &str, symbols: &[Symbol]) -> Vec<u8> {
    let mut strings = vec![0];
    let mut string = |text: &str| {
        let at = strings.len();
        strings.extend(text.bytes());
        strings.push(0);
        at
    };
    let soname = string(soname);
    let names: Vec<usize> = symbols.iter().map(|symbol| string(symbol.name)).collect();

    let count = symbols.len() + 1; // the first symbol is always empty
    let dynamic = HEADER + PROGRAM_HEADERS * PROGRAM_HEADER;
    let symbol_table = dynamic + DYNAMIC;
    let hash_table = symbol_table + count * SYMBOL;
    let string_table = hash_table + (2 + 2 * count) * 4;
    let end = string_table + strings.len();

    let mut out = FieldWriter::default();
    out.0.extend(*b"\x7fELF");
    out.0.extend([ELFCLASS64, ELFDATA2LSB, EV_CURRENT]);
    out.0.resize(16, 0);
    out.u16(&[ET_DYN, EM_MACHINE]);
    out.u32(&[EV_CURRENT.into()]);
    out.u64(&[0, HEADER as u64, 0]); // entry, program headers, section headers
    out.u32(&[0]);
    let counts = [HEADER, PROGRAM_HEADER, PROGRAM_HEADERS, 0, 0, 0];
    out.u16(&counts.map(|count| count as u16));

    // On some architectures, the loader writes to the dynamic section.
    let (all, end) = ((0, end), end as u64);
    for (kind, (start, len), align) in [
        (PT_LOAD, all, PAGE),
        (PT_DYNAMIC, (dynamic, DYNAMIC), 8),
        (PT_GNU_STACK, (0, 0), 16),
    ] {
        let (start, len) = (start as u64, len as u64);
        out.u32(&[kind, PF_R | PF_W]);
        out.u64(&[start, start, start, len, len, align]);
    }

    out.u64(&[DT_HASH, hash_table as u64]);
    out.u64(&[DT_SYMTAB, symbol_table as u64]);
    out.u64(&[DT_SYMENT, SYMBOL as u64]);
    out.u64(&[DT_STRTAB, string_table as u64]);
    out.u64(&[DT_STRSZ, strings.len() as u64]);
    out.u64(&[DT_SONAME, soname as u64]);
    out.u64(&[DT_NULL, 0]);

    out.u64(&[0; SYMBOL / 8]);
    for (symbol, name) in symbols.iter().zip(names) {
        out.u32(&[name as u32]);
        out.0.extend([STB_GLOBAL_STT_FUNC, 0]);
        out.u16(&[SHN_ABS]);
        out.u64(&[symbol.address as u64, 0]);
    }

    // One bucket per symbol. Chains link symbol indices and end with 0.
    let (mut buckets, mut chains) = (vec![0u32; count], vec![0u32; count]);
    for (number, symbol) in (1u32..).zip(symbols) {
        let bucket = &mut buckets[hash(symbol.name) as usize % count];
        chains[number as usize] = std::mem::replace(bucket, number);
    }
    out.u32(&[count as u32, count as u32]);
    out.u32(&buckets);
    out.u32(&chains);

    out.0.extend(&strings);
    debug_assert_eq!(out.0.len() as u64, end);
    out.0
}

/// Loads a library called `soname` with these symbols. It stays loaded until the process ends. The
/// loader identifies it by the path of the returned file, which must stay open.
///
/// # Errors
/// Returns an error if the system does not support files in memory, or if its loader does not
/// support absolute symbols.
pub fn load(soname: &str, symbols: &[Symbol]) -> Result<File, String> {
    // SAFETY: the name is a string, and the answer is checked.
    let descriptor = unsafe { libc::memfd_create(c"libggml-base".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error().to_string());
    }
    // SAFETY: a new descriptor with no other owner.
    let mut file = unsafe { File::from_raw_fd(descriptor) };
    file.write_all(&build(soname, symbols))
        .map_err(|error| error.to_string())?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // SAFETY: the library has no code, so nothing runs.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| crate::host::loader_error(&error))?;
    for symbol in symbols {
        // SAFETY: only the address is taken.
        let found = unsafe { library.get::<*mut c_void>(symbol.name.as_bytes()) };
        let found = found.ok().map(|found| found.as_raw_ptr().cast_const());
        if found != Some(symbol.address.cast()) {
            return Err("the system's loader has no absolute symbols".into());
        }
    }
    std::mem::forget(library);
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbol_hashes_match_the_elf_abi() {
        assert_eq!(hash(""), 0);
        assert_eq!(hash("exit"), 0x0006cf04);
        assert_eq!(hash("printf"), 0x077905a6);
    }

    #[test]
    fn the_loader_finds_every_symbol_and_the_name() {
        unsafe extern "C" fn seven() -> i32 {
            7
        }
        let name = "libsamite-image-test.so";
        let symbols = [Symbol {
            name: "samite_seven",
            address: seven as *const (),
        }];
        let file = load(name, &symbols).unwrap();
        // The loader now knows the library by its name, although no such file exists.
        // SAFETY: it has no code.
        let again = unsafe { Library::open(Some(name), RTLD_NOW) }.unwrap();
        // SAFETY: this is its type.
        let function =
            unsafe { again.get::<unsafe extern "C" fn() -> i32>(b"samite_seven") }.unwrap();
        // SAFETY: the function has no preconditions.
        assert_eq!(unsafe { function() }, 7);
        // SAFETY: only the address is looked up.
        let other = unsafe { again.get::<*mut c_void>(b"samite_eight") };
        assert!(other.is_err());
        // Another file has another inode, so it is another library.
        assert!(load("libsamite-image-test-2.so", &symbols).is_ok());
        drop(file);
    }
}
