//! Loading with threads, progress and cancellation.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::DType;
use samite_core::environment::{File, Files, Threads};
use samite_gguf::{
    Error, ErrorKind, GgufFile, LoadMode, LoadOptions, Metadata, TensorInfo, TensorSpec, Writer,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MODES: [LoadMode; 3] = [LoadMode::Mmap, LoadMode::Read, LoadMode::Direct];

fn content_of(index: usize, size: usize) -> Vec<u8> {
    (0..size).map(|i| (i * (index + 3) % 253) as u8).collect()
}

/// Writes a model with tensors of these sizes.
fn model(path: &Path, sizes: &[usize]) {
    let spec = |(index, &size)| TensorSpec::new(&format!("t{index}"), DType::I8, &[size]).unwrap();
    let specs = sizes.iter().enumerate().map(spec).collect();
    let mut writer = Writer::create(path, &Metadata::new(), specs).unwrap();
    for (index, &size) in sizes.iter().enumerate() {
        writer.append(&content_of(index, size)).unwrap();
    }
    writer.commit().unwrap();
}

#[test]
fn all_modes_and_thread_counts_load_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let sizes = [5, 3 << 20, 1, (1 << 20) + 1, 4096, 100_000];
    model(&path, &sizes);
    for mode in MODES {
        let file = GgufFile::open(&path, mode).unwrap();
        assert_eq!(file.parts()[0].mapping().is_some(), mode == LoadMode::Mmap);
        for (threads, in_place) in [(0, true), (1, true), (2, false), (5, true), (5, false)] {
            let reports = Mutex::new(Vec::new());
            let progress = |done, total| reports.lock().unwrap().push((done, total));
            let options = LoadOptions {
                threads,
                in_place,
                progress: &progress,
                ..LoadOptions::default()
            };
            let seen = Mutex::new(BTreeMap::new());
            let sink = |info: &TensorInfo, bytes: &[u8]| {
                assert!(
                    seen.lock()
                        .unwrap()
                        .insert(info.name.clone(), bytes.to_vec())
                        .is_none()
                );
                file.release(info)
            };
            file.load(file.tensors(), &options, sink).unwrap();
            let seen = seen.into_inner().unwrap();
            assert_eq!(seen.len(), sizes.len());
            for (index, &size) in sizes.iter().enumerate() {
                assert!(seen[&*format!("t{index}")] == content_of(index, size));
            }
            let reports = reports.into_inner().unwrap();
            let total = sizes.iter().sum::<usize>() as u64;
            assert!(reports.is_sorted());
            assert!(reports.iter().all(|report| report.1 == total));
            assert_eq!(reports.last(), Some(&(total, total)));
        }
    }
}

#[test]
fn chunks_cover_each_tensor_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let sizes = [10, 2_500_000, 1000];
    model(&path, &sizes);
    for mode in MODES {
        let file = GgufFile::open(&path, mode).unwrap();
        let whole = Mutex::new(sizes.map(|size| vec![0xff; size]));
        let sink = |info: &TensorInfo, offset: usize, bytes: &[u8]| {
            assert!(bytes.len() == 1000 || offset + bytes.len() == info.size);
            let index = file
                .tensors()
                .iter()
                .position(|other| other == info)
                .unwrap();
            let mut whole = whole.lock().unwrap();
            let target = &mut whole[index][offset..offset + bytes.len()];
            assert!(target.iter().all(|&byte| byte == 0xff));
            target.copy_from_slice(bytes);
            Ok::<_, Error>(())
        };
        file.load_chunks(file.tensors(), |_| 1000, &LoadOptions::default(), sink)
            .unwrap();
        for (index, &size) in sizes.iter().enumerate() {
            assert!(whole.lock().unwrap()[index] == content_of(index, size));
        }
        let zero = file.load_chunks(
            file.tensors(),
            |_| 0,
            &LoadOptions::default(),
            |_, _, _| Ok::<_, Error>(()),
        );
        assert_eq!(zero.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn cancellation_stops_loading_soon() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    model(&path, &[64 << 20, 8 << 20, 8 << 20]);
    for mode in [LoadMode::Mmap, LoadMode::Read] {
        let file = GgufFile::open(&path, mode).unwrap();
        let asked = AtomicUsize::new(0);
        let read = Mutex::new(0);
        let options = LoadOptions {
            threads: 2,
            in_place: true,
            progress: &|done, _| *read.lock().unwrap() = done,
            cancel: &|| asked.fetch_add(1, Ordering::Relaxed) >= 5,
            ..LoadOptions::default()
        };
        let error = file
            .load(file.tensors(), &options, |_, _| -> Result<(), Error> {
                panic!("no tensor can be complete")
            })
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        assert!(
            *read.lock().unwrap() <= 5 << 20,
            "in the middle of a tensor"
        );
        // Each thread calls the function once more, before its next piece, and ends.
        assert!(asked.load(Ordering::Relaxed) <= 5 + options.threads);
    }
}

#[test]
fn sink_errors_stop_loading_and_are_returned() {
    #[derive(Debug, PartialEq)]
    enum Failure {
        Gguf(Error),
        Own(String),
    }
    impl From<Error> for Failure {
        fn from(error: Error) -> Self {
            Failure::Gguf(error)
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    model(&path, &[1000; 200]);
    let file = GgufFile::open(&path, LoadMode::Read).unwrap();
    let (calls, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let options = LoadOptions {
        threads: 2,
        ..LoadOptions::default()
    };
    let result = file.load(file.tensors(), &options, |info, _| {
        calls.fetch_add(1, Ordering::Relaxed);
        match &*info.name {
            "t3" => {
                has_failed.store(true, Ordering::Relaxed);
                Err(Failure::Own("no".into()))
            }
            _ => {
                // Time for the failing thread to stop the other one, however busy the machine is.
                if has_failed.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Ok(())
            }
        }
    });
    assert_eq!(result, Err(Failure::Own("no".into())));
    assert!(calls.load(Ordering::Relaxed) < 100);
}

#[test]
fn foreign_tensors_and_wrong_buffers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    model(&path, &[100]);
    let file = GgufFile::open(&path, LoadMode::Mmap).unwrap();
    let own = file.tensor("t0").unwrap();
    assert_eq!(
        file.read_tensor_into(own, &mut [0; 99]).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let foreign = [
        TensorInfo {
            file: 1,
            ..own.clone()
        },
        TensorInfo {
            offset: 1 << 40,
            ..own.clone()
        },
        TensorInfo {
            offset: u64::MAX,
            ..own.clone()
        },
        TensorInfo {
            size: usize::MAX,
            ..own.clone()
        },
    ];
    for info in &foreign {
        let errors = [
            file.tensor_bytes(info).map(drop),
            file.read_tensor_into(info, &mut []),
            file.prefetch(info),
            file.release(info),
            file.load([info], &LoadOptions::default(), |_, _| Ok(())),
            file.load_chunks([info], |_| 1, &LoadOptions::default(), |_, _, _| Ok(())),
        ];
        for error in errors {
            assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }
    file.prefetch(own).unwrap();
    file.release(own).unwrap();
    assert_eq!(file.tensor_bytes(own).unwrap(), content_of(0, 100));
}

#[test]
fn reading_a_truncated_file_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    model(&path, &[5000]);
    let file = GgufFile::open(&path, LoadMode::Read).unwrap();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1000)
        .unwrap();
    let error = file
        .load(file.tensors(), &LoadOptions::default(), |_, _| {
            Ok::<_, Error>(())
        })
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Truncated);
    assert!(
        error
            .to_string()
            .contains("m.gguf: cannot read 5000 bytes at byte"),
        "{error}"
    );
}

#[test]
fn large_headers_are_read_in_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut metadata = Metadata::new();
    metadata
        .set("many", (0..1_000_000u64).collect::<Vec<_>>())
        .unwrap();
    metadata.set("long", "x".repeat(12 << 20)).unwrap();
    let spec = TensorSpec::new("t", DType::I8, &[3]).unwrap();
    let mut writer = Writer::create(&path, &metadata, vec![spec]).unwrap();
    writer.append(b"abc").unwrap();
    writer.commit().unwrap();
    for mode in MODES {
        let file = GgufFile::open(&path, mode).unwrap();
        assert_eq!(file.metadata(), &metadata);
        let mut data = [0; 3];
        file.read_tensor_into(file.tensor("t").unwrap(), &mut data)
            .unwrap();
        assert_eq!(&data, b"abc");
    }
}

/// A file that is truncated after `reads` reads.
#[derive(Debug)]
struct Shrinking {
    content: Vec<u8>,
    left: usize,
    reads: Arc<AtomicUsize>,
    advised: Arc<AtomicUsize>,
}

impl File for Shrinking {
    fn advise_in_order(&self) {
        self.advised.fetch_add(1, Ordering::Relaxed);
    }

    fn size(&self) -> std::io::Result<u64> {
        Ok(self.content.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        let read = self.reads.fetch_add(1, Ordering::Relaxed);
        let size = self.content.len() >> usize::from(read >= self.left);
        let start = offset as usize;
        let part = self.content[..size].get(start..start + buffer.len());
        buffer.copy_from_slice(part.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A disk with one file.
#[derive(Debug)]
struct Disk {
    content: Vec<u8>,
    left: usize,
    reads: Arc<AtomicUsize>,
    advised: Arc<AtomicUsize>,
}

impl Files for Disk {
    fn open(&self, _: &Path) -> std::io::Result<Arc<dyn File>> {
        Ok(Arc::new(Shrinking {
            content: self.content.clone(),
            left: self.left,
            reads: Arc::clone(&self.reads),
            advised: Arc::clone(&self.advised),
        }))
    }
}

/// Threads that take turns, starting with the last one.
#[derive(Debug)]
struct Turns;

impl Threads for Turns {
    fn parallelism(&self) -> usize {
        3
    }

    fn run_all(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..count).rev().for_each(work);
    }
}

#[test]
fn a_file_that_shrinks_at_any_read_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    model(&path, &[5, 3 << 20, 1, 100_000]);
    let content = std::fs::read(&path).unwrap();
    let attempt = |left: usize| {
        let reads = Arc::new(AtomicUsize::new(0));
        let disk = Disk {
            content: content.clone(),
            left,
            reads: Arc::clone(&reads),
            advised: Arc::default(),
        };
        let load = || {
            let file = GgufFile::open_in(&disk, "m.gguf", LoadMode::Read)?;
            let options = LoadOptions {
                system: &Turns,
                ..LoadOptions::default()
            };
            file.load(file.tensors(), &options, |info, bytes| {
                let index = info.name[1..].parse().unwrap();
                assert_eq!(bytes, content_of(index, info.size));
                Ok::<(), Error>(())
            })
        };
        (load(), reads.load(Ordering::Relaxed))
    };
    let (whole, reads) = attempt(usize::MAX);
    whole.unwrap();
    assert!(reads > 4);
    for left in 0..reads {
        // The first half still exists, so only reads after it fail.
        let (result, _) = attempt(left);
        let error = result.expect_err("the end of the file is gone");
        assert!(error.to_string().contains("m.gguf"), "{error}");
        assert!(error.to_string().contains("read"), "{error}");
    }
    let disk = Disk {
        content,
        left: 0,
        reads: Arc::default(),
        advised: Arc::default(),
    };
    let error = GgufFile::open_in(&disk, "m.gguf", LoadMode::Mmap).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

/// Returns how many bytes of a file are in the page cache.
#[cfg(target_os = "linux")]
fn cached(path: &Path) -> usize {
    let file = std::fs::File::open(path).unwrap();
    // SAFETY: the file is in a folder of this test, so it does not change.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    // Pages are at least this large, so there are enough bytes.
    let mut pages = vec![0u8; map.len().div_ceil(4096)];
    // SAFETY: the range is mapped, and there is a byte for each of its pages.
    let result = unsafe { libc::mincore(map.as_ptr() as *mut _, map.len(), pages.as_mut_ptr()) };
    assert_eq!(result, 0);
    pages.iter().filter(|&&page| page & 1 == 1).count() * samite_core::page_bytes()
}

#[cfg(target_os = "linux")]
#[test]
fn direct_reads_bypass_the_page_cache() {
    use std::os::fd::AsRawFd;
    const SIZE: usize = 4 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    model(&path, &[SIZE]);
    let written = std::fs::File::open(&path).unwrap();
    written.sync_all().unwrap();
    // SAFETY: the descriptor is open, and the call does not touch memory.
    unsafe { libc::posix_fadvise(written.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    let load = |mode| {
        let file = GgufFile::open(&path, mode).unwrap();
        let sink = |info: &TensorInfo, bytes: &[u8]| {
            assert!(bytes == content_of(0, info.size));
            Ok::<(), Error>(())
        };
        file.load(file.tensors(), &LoadOptions::default(), sink)
            .unwrap();
        file.parts()[0].direct_refused().map(Error::to_string)
    };
    if cached(&path) > SIZE / 8 {
        return println!("skipped: temporary files stay in memory");
    }
    if let Some(refused) = load(LoadMode::Direct) {
        return println!("skipped: {refused}");
    }
    assert!(cached(&path) <= SIZE / 8, "{}", cached(&path));
    assert_eq!(load(LoadMode::Read), None);
    assert!(cached(&path) >= SIZE, "{}", cached(&path));
}

#[test]
fn refused_direct_reads_fall_back_to_the_page_cache() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    model(&path, &[5, 100]);
    let disk = Disk {
        content: std::fs::read(&path).unwrap(),
        left: usize::MAX,
        reads: Arc::default(),
        advised: Arc::default(),
    };
    let file = GgufFile::open_in(&disk, "m.gguf", LoadMode::Direct).unwrap();
    let refused = file.parts()[0].direct_refused().unwrap().to_string();
    for part in ["m.gguf", "page cache", "O_DIRECT"] {
        assert!(refused.contains(part), "{refused}");
    }
    let mut bytes = [0; 100];
    file.read_tensor_into(&file.tensors()[1], &mut bytes)
        .unwrap();
    assert_eq!(bytes[..], content_of(1, 100));
    let read = GgufFile::open_in(&disk, "m.gguf", LoadMode::Read).unwrap();
    assert!(read.parts()[0].direct_refused().is_none());
    // As always, a missing file is an error.
    let missing = dir.path().join("missing");
    let error = GgufFile::open(missing, LoadMode::Direct).unwrap_err();
    assert!(error.to_string().contains("cannot open"), "{error}");
}

#[test]
fn sequential_reads_are_announced_to_the_system_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    model(&path, &[5, 3 << 20, 1]);
    let disk = Disk {
        content: std::fs::read(&path).unwrap(),
        left: usize::MAX,
        reads: Arc::default(),
        advised: Arc::default(),
    };
    let file = GgufFile::open_in(&disk, "m.gguf", LoadMode::Read).unwrap();
    let advised = || disk.advised.load(Ordering::Relaxed);
    let reads = || disk.reads.load(Ordering::Relaxed);
    let header = reads();
    assert_eq!(advised(), 0, "for the header, nothing else has to be read");
    let options = LoadOptions::default();
    let sink = |_: &TensorInfo, _: &[u8]| {
        assert_eq!(advised(), 1, "before data is read, and once");
        Ok::<(), Error>(())
    };
    file.load(file.tensors(), &options, sink).unwrap();
    assert!(reads() > header);
    assert_eq!(advised(), 1);
    file.load([], &options, sink).unwrap();
    assert_eq!(advised(), 1);
}

/// Opens a model whose last bytes are missing, in one file or in two parts.
#[test]
fn headers_open_without_the_tensor_data() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let sizes = [4096, 100, 5000];
    model(&path, &sizes);
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1000]).unwrap();
    for mode in MODES {
        let error = GgufFile::open(&path, mode).unwrap_err();
        assert!(error.to_string().contains("truncated"), "{error}");
        let file = GgufFile::open_header(&path, mode).unwrap();
        assert_eq!(file.tensors().len(), sizes.len());
        // The existing data can be read.
        let read = |name: &str| {
            let info = file.tensor(name).unwrap();
            let mut bytes = vec![0; info.size];
            let result = file.read_tensor_into(info, &mut bytes);
            result.map(|()| bytes)
        };
        assert_eq!(read("t0").unwrap(), content_of(0, 4096));
        assert_eq!(read("t1").unwrap(), content_of(1, 100));
        let error = read("t2").unwrap_err().to_string();
        assert!(
            error.contains("t2") && error.contains("its data is missing"),
            "{error}"
        );
        let last = file.tensor("t2").unwrap();
        assert!(file.tensor_bytes(last).is_err());
        assert!(file.prefetch(last).is_err() && file.release(last).is_err());
    }
}
