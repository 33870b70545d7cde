//! No input makes the reader panic, or allocate more than its size plus a constant. Files are
//! written with little memory, or refused.

mod common;

use common::valid;
use proptest::prelude::*;
use samite_gguf::{
    AtomicFile, ErrorKind, GgufFile, Header, LoadMode, LoadOptions, Writer, rewrite,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;

/// Allocator that counts the current thread's allocations and their maximum, and refuses
/// allocations above a limit.
struct Counting;

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(usize::MAX) };
}

// SAFETY: every call is rejected or goes to the system's allocator unchanged; the counters do not
// allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if LARGEST.try_with(|largest| layout.size() > largest.get()) == Ok(true) {
            return std::ptr::null_mut();
        }
        // Thread-local values are gone while a thread ends.
        let _ = NOW.try_with(|now| {
            now.set(now.get().wrapping_add(layout.size()));
            let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
        });
        // SAFETY: the caller fulfils the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let _ = NOW.try_with(|now| now.set(now.get().saturating_sub(layout.size())));
        // SAFETY: the caller fulfils the contract, which is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Parses `bytes` and returns the peak memory use.
fn peak_of_parsing(bytes: &[u8]) -> usize {
    let before = NOW.get();
    PEAK.set(before);
    if let Ok(header) = Header::from_bytes(bytes) {
        // Accepted files are valid.
        for info in &header.tensors {
            assert!(info.offset as usize + info.size <= bytes.len());
            assert_eq!(
                info.offset % header.alignment,
                header.data_offset % header.alignment
            );
            assert_eq!(header.tensors.get(&info.name), Some(info));
        }
        for (key, value) in header.metadata.iter() {
            // Do not compare values: NaN would fail.
            assert!(
                header
                    .metadata
                    .value(key)
                    .is_some_and(|found| std::ptr::eq(found, value))
            );
        }
    }
    PEAK.get() - before
}

/// Limit for structures of keys, tensors and messages beyond the data that they describe,
/// independent of claimed counts.
const CONSTANT: usize = 64 << 10;

#[derive(Clone, Debug)]
enum Mutation {
    /// One byte is replaced.
    Byte(prop::sample::Index, u8),
    /// Eight bytes become a problematic number.
    Number(prop::sample::Index, u64),
    Cut(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
    Remove(prop::sample::Index),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<prop::sample::Index>;
    let numbers = prop_oneof![
        Just(0),
        Just(u64::MAX),
        (0u32..64).prop_map(|bit| 1 << bit),
        (0u32..64).prop_map(|bit| (1u64 << bit).wrapping_sub(1)),
        0u64..512,
    ];
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Mutation::Byte(at, byte)),
        (at(), numbers).prop_map(|(at, number)| Mutation::Number(at, number)),
        at().prop_map(Mutation::Cut),
        (at(), prop::collection::vec(any::<u8>(), 1..16))
            .prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        at().prop_map(Mutation::Remove),
    ]
}

fn mutate(bytes: &mut Vec<u8>, mutation: &Mutation) {
    if bytes.is_empty() {
        return;
    }
    match mutation {
        Mutation::Byte(at, byte) => {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        Mutation::Number(at, number) => {
            let start = at.index(bytes.len());
            let end = bytes.len().min(start + 8);
            bytes[start..end].copy_from_slice(&number.to_le_bytes()[..end - start]);
        }
        Mutation::Cut(at) => bytes.truncate(at.index(bytes.len())),
        Mutation::Insert(at, inserted) => {
            let at = at.index(bytes.len());
            bytes.splice(at..at, inserted.iter().copied());
        }
        Mutation::Remove(at) => {
            bytes.remove(at.index(bytes.len()));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn mutated_files_use_bounded_memory(mutations in prop::collection::vec(mutation(), 1..6)) {
        let mut bytes = valid();
        mutations.iter().for_each(|mutation| mutate(&mut bytes, mutation));
        let peak = peak_of_parsing(&bytes);
        prop_assert!(peak <= bytes.len() + CONSTANT, "{peak} bytes for a file of {}", bytes.len());
    }

    #[test]
    fn parsing_random_bytes_uses_bounded_memory(tensors in 0u64..8, keys in 0u64..8,
        rest in prop::collection::vec(any::<u8>(), 0..512)) {
        let bytes = common::Bytes::header(tensors, keys).raw(rest);
        let peak = peak_of_parsing(&bytes.0);
        prop_assert!(peak <= bytes.len() + CONSTANT, "{peak} bytes for a file of {}", bytes.len());
    }
}

#[test]
fn extreme_numbers_at_every_offset_use_bounded_memory() {
    let whole = valid();
    for at in 0..whole.len() - 8 {
        for number in [0, 1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX] {
            let mut bytes = whole.clone();
            bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(number));
            let peak = peak_of_parsing(&bytes);
            assert!(
                peak <= bytes.len() + CONSTANT,
                "{peak} bytes with {number} at {at}"
            );
        }
    }
}

#[test]
fn a_large_vocabulary_uses_no_more_memory_than_its_bytes() {
    let tokens: samite_gguf::StringArray = (0..150_000).map(|i| format!("token{i}")).collect();
    let mut metadata = samite_gguf::Metadata::new();
    metadata.set("tokenizer.ggml.tokens", tokens).unwrap();
    metadata
        .set("tokenizer.ggml.scores", vec![0.5f32; 150_000])
        .unwrap();
    let bytes = Writer::new(Vec::new(), &metadata, Vec::new())
        .unwrap()
        .finish()
        .unwrap();
    let peak = peak_of_parsing(&bytes);
    assert!(
        peak <= bytes.len() + CONSTANT,
        "{peak} bytes for a file of {}",
        bytes.len()
    );
    assert_eq!(Header::from_bytes(&bytes).unwrap().metadata, metadata);
}

#[test]
fn arrays_that_exceed_memory_are_named() {
    for (key, value) in [
        (
            "texts",
            samite_gguf::StringArray::from_iter(vec!["ab"; 50_000]).into(),
        ),
        ("numbers", samite_gguf::Value::from(vec![1i32; 50_000])),
    ] {
        let mut metadata = samite_gguf::Metadata::new();
        metadata.set(key, value).unwrap();
        let writer = Writer::new(Vec::new(), &metadata, Vec::new()).unwrap();
        let bytes = writer.finish().unwrap();
        // The strings themselves, their ends, and the numbers.
        for limit in [50_000, 150_000] {
            LARGEST.set(limit);
            let refused = Header::from_bytes(&bytes);
            LARGEST.set(usize::MAX);
            let refused = refused.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::OutOfMemory);
            assert!(refused.to_string().contains(key), "{refused}");
        }
        assert!(Header::from_bytes(&bytes).is_ok());
    }
}

#[test]
fn files_are_written_with_little_memory_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source.gguf");
    std::fs::write(&source, valid()).unwrap();
    let model = GgufFile::open(&source, LoadMode::Read).unwrap();
    let content = vec![1; 200_000];
    let written = dir.path().join("written");
    LARGEST.set(100_000);
    let mut file = AtomicFile::create(&written).unwrap();
    for piece in content.chunks(1000) {
        file.write_all(piece).unwrap();
    }
    file.commit().unwrap();
    let target = dir.path().join("target.gguf");
    let refused = rewrite(&model, &target, model.metadata(), &LoadOptions::default());
    LARGEST.set(usize::MAX);
    assert_eq!(std::fs::read(&written).unwrap(), content);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::OutOfMemory);
    // No other file is left.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}
