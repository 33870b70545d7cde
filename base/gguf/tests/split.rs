//! Models in several files: those written by Python, and those that do not fit together.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod common;

use common::Bytes;
use samite_core::environment::{File, Files};
use samite_gguf::{ErrorKind, GgufFile, LoadMode, LoadOptions, rewrite};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

fn fixture(no: u32) -> PathBuf {
    let name = format!("parts-0000{no}-of-00002.gguf");
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

#[test]
fn a_split_model_opens_from_any_of_its_files() {
    for (no, mode) in [(1, LoadMode::Mmap), (2, LoadMode::Read)] {
        let file = GgufFile::open(fixture(no), mode).unwrap();
        assert_eq!(file.path(), fixture(1));
        assert_eq!(file.parts().len(), 2);
        assert_eq!(
            file.metadata().require::<&str>("general.architecture"),
            Ok("test")
        );
        let places: Vec<_> = file
            .tensors()
            .iter()
            .map(|info| (&*info.name, info.file))
            .collect();
        assert_eq!(places, [("t0", 0), ("t1", 0), ("t2", 1)]);
        for (index, info) in file.tensors().iter().enumerate() {
            let mut data = vec![0; info.size];
            file.read_tensor_into(info, &mut data).unwrap();
            assert_eq!(data, (index as f32).to_le_bytes().repeat(index + 1));
        }
    }
}

/// The parts, available only under their names.
#[derive(Debug)]
struct Parts([Vec<u8>; 2]);

impl Files for Parts {
    fn open(&self, path: &Path) -> std::io::Result<Arc<dyn File>> {
        let index = (1..=2).position(|no| path.file_name() == fixture(no).file_name());
        let part = index.map(|index| self.0[index].clone());
        let part = part.ok_or(std::io::ErrorKind::NotFound)?;
        let part: &'static [u8] = Vec::leak(part);
        Ok(Arc::new(part))
    }
}

#[test]
fn all_split_files_come_from_the_given_file_source() {
    let parts = Parts([1, 2].map(|no| std::fs::read(fixture(no)).unwrap()));
    for no in [1, 2] {
        let name = fixture(no).file_name().unwrap().to_owned();
        let file = GgufFile::open_in(&parts, name, LoadMode::Read).unwrap();
        assert_eq!((file.parts().len(), file.tensors().len()), (2, 3));
    }
}

#[test]
fn split_headers_open_without_the_tensor_data() {
    let dir = tempfile::tempdir().unwrap();
    for no in [1, 2] {
        // Padding, and the last four bytes of data.
        let bytes = std::fs::read(fixture(no)).unwrap();
        let path = dir.path().join(fixture(no).file_name().unwrap());
        std::fs::write(path, &bytes[..bytes.len() - 28]).unwrap();
    }
    for no in [1, 2] {
        let path = dir.path().join(fixture(no).file_name().unwrap());
        assert!(GgufFile::open(&path, LoadMode::Mmap).is_err());
        let file = GgufFile::open_header(&path, LoadMode::Mmap).unwrap();
        assert_eq!((file.parts().len(), file.tensors().len()), (2, 3));
    }
}

#[test]
fn a_rewrite_joins_split_files() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("joined.gguf");
    let file = GgufFile::open(fixture(1), LoadMode::Mmap).unwrap();
    rewrite(&file, &target, file.metadata(), &LoadOptions::default()).unwrap();
    let joined = GgufFile::open(&target, LoadMode::Mmap).unwrap();
    assert_eq!(joined.parts().len(), 1);
    assert!(!joined.metadata().contains("split.count"));
    for (before, after) in file.tensors().iter().zip(joined.tensors()) {
        assert_eq!(before.name, after.name);
        assert_eq!(file.tensor_bytes(before), joined.tensor_bytes(after));
    }
}

/// Returns a part with one tensor, whose metadata has these values.
fn part(no: u32, count: u32, tensors: u32, architecture: &str, tensor: &str) -> Vec<u8> {
    Bytes::header(1, 4)
        .key_str("general.architecture", architecture)
        .key_u32("split.no", no)
        .key_u32("split.count", count)
        .key_u32("split.tensors.count", tensors)
        .tensor(tensor, &[8], 0, 0)
        .data(32)
        .0
}

/// Returns a folder with `m-00001-of-00002.gguf` and so on.
fn folder(parts: &[Vec<u8>]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (no, bytes) in parts.iter().enumerate() {
        std::fs::write(
            dir.path()
                .join(samite_gguf::split_file_name("m", no as u16, 2)),
            bytes,
        )
        .unwrap();
    }
    dir
}

#[track_caller]
fn refused(parts: &[Vec<u8>], file: &str, words: &str) {
    let dir = folder(parts);
    let error =
        GgufFile::open(dir.path().join("m-00001-of-00002.gguf"), LoadMode::Mmap).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Split, "{error}");
    assert!(error.to_string().contains(words), "{error}");
    assert!(
        error.path().is_some_and(|path| path.ends_with(file)),
        "{error}"
    );
}

#[test]
fn mismatched_split_files_are_refused() {
    let (first, second) = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf");
    let a = || part(0, 2, 2, "llama", "a");
    let dir = folder(&[a(), part(1, 2, 2, "llama", "b")]);
    assert_eq!(
        GgufFile::open(dir.path().join(first), LoadMode::Mmap)
            .unwrap()
            .tensors()
            .len(),
        2
    );

    refused(&[a()], second, "part 2 of 2 of the model is missing");
    refused(
        &[a(), part(0, 2, 2, "llama", "b")],
        second,
        "says that it is part 1",
    );
    refused(
        &[a(), part(1, 3, 2, "llama", "b")],
        second,
        "does not say 2",
    );
    refused(&[a(), common::valid()], second, "does not say 2");
    refused(
        &[a(), part(1, 2, 2, "gemma", "b")],
        second,
        r#"is "gemma", but "llama" in the first part"#,
    );
    refused(
        &[a(), part(1, 2, 3, "llama", "b")],
        second,
        "is 3, but 2 in the first part",
    );
    refused(
        &[a(), part(1, 2, 2, "llama", "a")],
        first,
        "occurs in more than one part",
    );
    refused(
        &[part(0, 2, 7, "llama", "a"), part(1, 2, 7, "llama", "b")],
        first,
        "is 7, but the parts have 2 tensors",
    );
    refused(
        &[part(2, 2, 2, "llama", "a")],
        first,
        "is 2, but there are only 2 parts",
    );
}

#[test]
fn a_renamed_split_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, part(0, 2, 2, "llama", "a")).unwrap();
    let error = GgufFile::open(&path, LoadMode::Mmap)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(r#"must end in "-00001-of-00002.gguf""#),
        "{error}"
    );
}
