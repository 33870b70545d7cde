//! Agreement with the Python package `gguf`, and round trips.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use proptest::prelude::*;
use samite_core::DType;
use samite_gguf::{
    AtomicFile, ErrorKind, GgufFile, Header, LoadMode, LoadOptions, Metadata, StringArray,
    TensorSpec, Value, Writer, rewrite,
};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// Returns the metadata of `all-types.gguf`, as in `make.py`.
fn all_types_metadata() -> Metadata {
    let strings: [&[u8]; 4] = [b"<s>", b"", "\u{2581}the".as_bytes(), b"\xff\x80"];
    let mut metadata = Metadata::new();
    for (key, value) in [
        ("general.architecture", Value::from("test")),
        ("scalar.u8", u8::MAX.into()),
        ("scalar.i8", i8::MIN.into()),
        ("scalar.u16", u16::MAX.into()),
        ("scalar.i16", i16::MIN.into()),
        ("scalar.u32", u32::MAX.into()),
        ("scalar.i32", i32::MIN.into()),
        ("scalar.u64", u64::MAX.into()),
        ("scalar.i64", i64::MIN.into()),
        ("scalar.f32", 0.1f32.into()),
        ("scalar.f64", 0.1f64.into()),
        ("scalar.bool", true.into()),
        ("scalar.str", "w\u{f6}rter\n".into()),
        ("array.u8", vec![0, u8::MAX].into()),
        ("array.i8", vec![i8::MIN, i8::MAX].into()),
        ("array.u16", vec![0, u16::MAX].into()),
        ("array.i16", vec![i16::MIN, i16::MAX].into()),
        ("array.u32", vec![0, u32::MAX].into()),
        ("array.i32", vec![i32::MIN, i32::MAX].into()),
        ("array.u64", vec![0, u64::MAX].into()),
        ("array.i64", vec![i64::MIN, i64::MAX].into()),
        ("array.f32", vec![0.5f32, -1.25].into()),
        ("array.f64", vec![0.1f64, -1e300].into()),
        ("array.bool", vec![true, false, true].into()),
        (
            "array.str",
            strings.into_iter().collect::<StringArray>().into(),
        ),
    ] {
        metadata.set(key, value).unwrap();
    }
    metadata
}

/// Returns the tensors of `all-types.gguf` with their data, as in `make.py`.
fn all_types_tensors() -> Vec<(TensorSpec, Vec<u8>)> {
    let raw = |count: usize| (0..count).map(|i| (i * 7 % 256) as u8).collect();
    let halves = [0x0000u16, 0x3c00, 0x4000, 0x4200, 0x4400]; // 0 to 4
    [
        (
            "f32",
            DType::F32,
            &[3, 2][..],
            (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect(),
        ),
        (
            "f16",
            DType::F16,
            &[5],
            halves.iter().flat_map(|half| half.to_le_bytes()).collect(),
        ),
        (
            "i32",
            DType::I32,
            &[4, 3, 2, 1],
            (0..24i32).flat_map(i32::to_le_bytes).collect(),
        ),
        ("q8_0", DType::Q8_0, &[32, 2], raw(68)),
        ("q4_K", DType::Q4_K, &[512, 3], raw(864)),
        ("bf16", DType::BF16, &[1, 5], raw(10)),
    ]
    .map(|(name, dtype, dims, data)| (TensorSpec::new(name, dtype, dims).unwrap(), data))
    .into()
}

fn to_bytes(metadata: &Metadata, tensors: &[(TensorSpec, Vec<u8>)]) -> Vec<u8> {
    let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let mut writer = Writer::new(Vec::new(), metadata, specs).unwrap();
    for (spec, data) in tensors {
        writer.write_tensor(spec.name(), data).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn several_threads_fill_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let spec = |name: &str, len| TensorSpec::new(name, DType::I8, &[len]).unwrap();
    let create = || {
        let specs = vec![spec("a", 33), spec("b", 100_000), spec("c", 5)];
        Writer::create(&path, &Metadata::new(), specs).unwrap()
    };
    let content: Vec<u8> = (0..100_000u32).map(|i| (i % 253) as u8).collect();
    let mut writer = create();
    writer.write_tensor("a", &[1; 33]).unwrap();
    writer
        .fill_tensor(|slot| {
            std::thread::scope(|scope| {
                for (i, piece) in content.chunks(999).enumerate().rev() {
                    scope.spawn(move || slot.write_at(i * 999, piece).unwrap());
                }
            });
            Ok::<_, samite_gguf::Error>(())
        })
        .unwrap();
    writer.append(&[7; 5]).unwrap();
    writer.commit().unwrap();
    let file = GgufFile::open(&path, LoadMode::Mmap).unwrap();
    let bytes = |name| file.tensor_bytes(file.tensor(name).unwrap()).unwrap();
    assert!(bytes("b") == content);
    assert_eq!((bytes("a"), bytes("c")), (&[1; 33][..], &[7; 5][..]));

    let fill = |writer: &mut Writer<AtomicFile>, offset, len: usize| {
        let result = writer.fill_tensor(|slot| slot.write_at(offset, &vec![0; len]));
        result.map_err(|error| error.to_string())
    };
    assert!(
        fill(&mut create(), 0, 32)
            .unwrap_err()
            .contains("takes 33 bytes, but 32")
    );
    assert!(
        fill(&mut create(), 30, 4)
            .unwrap_err()
            .contains("not within it")
    );
    assert!(
        fill(&mut create(), usize::MAX, 1)
            .unwrap_err()
            .contains("not within it")
    );
    let mut writer = create();
    writer.append(&[0; 3]).unwrap();
    assert!(
        fill(&mut writer, 0, 33)
            .unwrap_err()
            .contains("written already")
    );
}

#[test]
fn files_written_by_python_are_read() {
    for mode in [LoadMode::Mmap, LoadMode::Read] {
        let file = GgufFile::open(fixture("all-types.gguf"), mode).unwrap();
        assert_eq!(file.metadata(), &all_types_metadata());
        let tensors = all_types_tensors();
        assert_eq!(file.tensors().len(), tensors.len());
        for (info, (spec, data)) in file.tensors().iter().zip(&tensors) {
            assert_eq!(&TensorSpec::from_info(info, info.dtype).unwrap(), spec);
            let mut read = vec![0; info.size];
            file.read_tensor_into(info, &mut read).unwrap();
            assert_eq!(&read, data, "{}", info.name);
            match mode {
                LoadMode::Read => assert!(file.tensor_bytes(info).is_err()),
                _ => assert_eq!(file.tensor_bytes(info).unwrap(), data),
            }
        }
        assert_eq!(file.tensor("i32").unwrap().shape, [4, 3, 2, 1]);
        assert_eq!(file.tensor("q4_K").unwrap().shape, [512, 3, 1, 1]);
        assert_eq!(file.tensors().total_elements(), 6 + 5 + 24 + 64 + 1536 + 5);
        let missing = file.require_tensor("absent").unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::MissingTensor);
        assert!(missing.to_string().contains("all-types.gguf"), "{missing}");
    }
}

#[test]
fn written_bytes_match_those_of_python() {
    let ours = to_bytes(&all_types_metadata(), &all_types_tensors());
    assert!(ours == std::fs::read(fixture("all-types.gguf")).unwrap());

    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "test").unwrap();
    metadata.set("general.alignment", 64u32).unwrap();
    let a = TensorSpec::new("a", DType::F32, &[3]).unwrap();
    let b = TensorSpec::new("b", DType::I8, &[4]).unwrap();
    let a_data = [0f32, 1.0, 2.0].map(f32::to_le_bytes).concat();
    let ours = to_bytes(&metadata, &[(a, a_data), (b, vec![0, 1, 2, 3])]);
    assert!(ours == std::fs::read(fixture("aligned.gguf")).unwrap());
}

#[test]
fn a_rewrite_without_changes_is_identical() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["all-types.gguf", "aligned.gguf"] {
        let target = dir.path().join(name);
        let file = GgufFile::open(fixture(name), LoadMode::Read).unwrap();
        rewrite(&file, &target, file.metadata(), &LoadOptions::default()).unwrap();
        assert!(std::fs::read(&target).unwrap() == std::fs::read(fixture(name)).unwrap());
    }
}

#[test]
fn a_file_can_be_edited_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::copy(fixture("all-types.gguf"), &path).unwrap();
    let file = GgufFile::open(&path, LoadMode::Mmap).unwrap();
    let mut metadata = file.metadata().clone();
    metadata
        .set("general.name", "a longer file than before")
        .unwrap();
    metadata.set("general.alignment", 128u32).unwrap();
    metadata.remove("array.f64");
    metadata.rename("scalar.u8", "renamed").unwrap();
    let reports = Mutex::new(Vec::new());
    let progress = |done, total| reports.lock().unwrap().push((done, total));
    let options = LoadOptions {
        progress: &progress,
        ..LoadOptions::default()
    };
    rewrite(&file, &path, &metadata, &options).unwrap();
    let total = file.tensors().total_bytes();
    assert_eq!(reports.lock().unwrap().last(), Some(&(total, total)));

    let edited = GgufFile::open(&path, LoadMode::Mmap).unwrap();
    assert_eq!(edited.metadata(), &metadata);
    assert_eq!(edited.parts()[0].alignment(), 128);
    for (before, after) in file.tensors().iter().zip(edited.tensors()) {
        assert_eq!(file.tensor_bytes(before), edited.tensor_bytes(after));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_cancelled_rewrite_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = GgufFile::open(fixture("all-types.gguf"), LoadMode::Read).unwrap();
    let options = LoadOptions {
        cancel: &|| true,
        ..LoadOptions::default()
    };
    let error = rewrite(&file, dir.path().join("m.gguf"), file.metadata(), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_writer_accepts_data_in_chunks_of_any_size() {
    let tensors = all_types_tensors();
    let whole = to_bytes(&all_types_metadata(), &tensors);
    for piece in [1, 3, 64, 1000] {
        let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let mut writer = Writer::new(Vec::new(), &all_types_metadata(), specs).unwrap();
        for (spec, data) in &tensors {
            assert_eq!(writer.next_tensor(), Some(spec));
            data.chunks(piece)
                .for_each(|chunk| writer.append(chunk).unwrap());
        }
        assert_eq!(writer.next_tensor(), None);
        assert!(writer.finish().unwrap() == whole);
    }
}

#[test]
fn the_writer_refuses_data_of_the_wrong_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let specs = || {
        ["a", "b"]
            .map(|name| TensorSpec::new(name, DType::F32, &[2]).unwrap())
            .to_vec()
    };
    let metadata = Metadata::new();
    let mut writer = Writer::create(&path, &metadata, specs()).unwrap();
    for (name, bytes, words) in [
        ("b", 8, r#"tensor "b": is not the one that comes next, "a""#),
        ("a", 7, r#"tensor "a": takes 8 bytes, not 7"#),
    ] {
        let error = writer.write_tensor(name, &vec![0; bytes]).unwrap_err();
        assert_eq!(error.to_string(), format!("{}: {words}", path.display()));
    }
    assert!(
        writer
            .append(&[0; 9])
            .unwrap_err()
            .to_string()
            .contains("8 are lacking")
    );
    writer.write_tensor("a", &[0; 8]).unwrap();
    writer.append(&[0; 3]).unwrap();
    let error = writer.commit().unwrap_err();
    assert!(
        error
            .to_string()
            .contains(r#"tensor "b": lacks 5 of its 8 bytes"#),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    let refused = |metadata: &Metadata, specs| {
        Writer::<AtomicFile>::create(&path, metadata, specs)
            .err()
            .unwrap()
    };
    let twice = vec![specs()[0].clone(), specs()[0].clone()];
    assert!(
        refused(&metadata, twice)
            .to_string()
            .contains("occurs twice")
    );
    let mut bad = Metadata::new();
    bad.set("general.alignment", 12u32).unwrap();
    assert!(refused(&bad, specs()).to_string().contains("power of two"));
    bad.set("general.alignment", 32u64).unwrap();
    assert!(refused(&bad, specs()).to_string().contains("must be u32"));
    for (name, dtype, dims) in [
        ("n".repeat(64), DType::F32, &[1][..]),
        ("n".into(), DType::F32, &[]),
        ("n".into(), DType::F32, &[1, 1, 1, 1, 1]),
        ("n".into(), DType::F32, &[2, 0]),
        ("n".into(), DType::Q4_0, &[31]),
        ("n".into(), DType::F32, &[usize::MAX / 2, 2]),
    ] {
        let error = TensorSpec::new(&name, dtype, dims).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
}

#[test]
fn version_2_is_read_as_version_3() {
    let mut bytes = std::fs::read(fixture("all-types.gguf")).unwrap();
    bytes[4] = 2;
    let header = Header::from_bytes(&bytes).unwrap();
    assert_eq!(header.version, 2);
    assert_eq!(header.metadata, all_types_metadata());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Written data is read back: any keys, strings of any bytes, tensors of any type, any
    /// alignment.
    #[test]
    fn written_files_are_read_back(
        keys in prop::collection::btree_map("[^\0]{1,12}",
            prop::collection::vec(any::<u8>(), 0..20), 0..6),
        strings in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..6), 0..6),
        shapes in prop::collection::vec((0usize..35, prop::collection::vec(1usize..4, 1..5)), 0..5),
        alignment in prop::option::of(0u32..8),
    ) {
        let mut metadata = Metadata::new();
        for (key, bytes) in &keys {
            metadata
                .set(key, Value::String(bytes.as_slice().into()))
                .unwrap();
        }
        metadata
            .set("strings", strings.iter().collect::<StringArray>())
            .unwrap();
        if let Some(bits) = alignment {
            metadata.set("general.alignment", 1u32 << bits).unwrap();
        }
        let tensors: Vec<(TensorSpec, Vec<u8>)> = shapes
            .iter()
            .enumerate()
            .map(|(index, (dtype, dims))| {
                let dtype = DType::all().nth(*dtype).unwrap();
                let mut dims = dims.clone();
                dims[0] *= dtype.block_len();
                let spec = TensorSpec::new(&format!("t{index}"), dtype, &dims).unwrap();
                let data = vec![index as u8 + 1; spec.size()];
                (spec, data)
            })
            .collect();
        let bytes = to_bytes(&metadata, &tensors);
        let header = Header::from_bytes(&bytes).unwrap();
        prop_assert_eq!(&header.metadata, &metadata);
        prop_assert_eq!(header.tensors.len(), tensors.len());
        for (info, (spec, data)) in header.tensors.iter().zip(&tensors) {
            prop_assert_eq!(&TensorSpec::from_info(info, info.dtype).unwrap(), spec);
            prop_assert_eq!(&bytes[info.offset as usize..][..info.size], &data[..]);
        }
    }
}
