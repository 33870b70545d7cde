//! Files with one error each: the message must name the field, the byte, and the problem.

mod common;

use common::{ARRAY, Bytes, STRING, U32, valid};
use samite_gguf::ErrorKind::{Corrupt, NotGguf, Truncated, Unsupported};
use samite_gguf::{ErrorKind, GgufFile, Header, LoadMode};

/// Checks kind, field, offset and a part of the message.
#[track_caller]
fn refused(bytes: &Bytes, kind: ErrorKind, field: &str, offset: usize, message: &str) {
    let error = Header::from_bytes(&bytes.0).expect_err("must be refused");
    assert_eq!(
        (error.kind(), error.field(), error.offset()),
        (kind, field, Some(offset as u64)),
        "{error}"
    );
    assert!(error.message().contains(message), "{error}");
    assert!(!error.to_string().contains('\n'), "{error:?}");
}

const HUGE: [u64; 6] = [
    1 << 32,
    (1 << 32) + 1,
    1 << 62,
    1 << 63,
    u64::MAX,
    u64::MAX / 8 + 1,
];

#[test]
fn the_small_file_is_valid() {
    let header = Header::from_bytes(&valid()).unwrap();
    assert_eq!(
        (header.version, header.alignment, header.metadata.len()),
        (3, 32, 4)
    );
    assert_eq!(
        header.tensors.require("b").unwrap().offset,
        header.data_offset + 64
    );
}

#[test]
fn huge_counts_are_refused_before_memory_is_taken() {
    for count in HUGE {
        refused(
            &Bytes::header(count, 0),
            Truncated,
            "number of tensors",
            8,
            "too many",
        );
        refused(
            &Bytes::header(0, count),
            Truncated,
            "number of keys",
            16,
            "too many",
        );

        let key = Bytes::header(0, 1).u64(count).raw([b'k'; 64]);
        refused(&key, Truncated, "name of key 0", 24, "too many");

        let start = Bytes::header(0, 1).string("k").u32(STRING);
        let string = start.clone().u64(count).raw([0; 64]);
        refused(
            &string,
            Truncated,
            "key \"k\", value",
            start.len(),
            "too many",
        );

        for element in [0, 4, 7, 8, 10, 12] {
            let start = Bytes::header(0, 1).string("k").u32(ARRAY).u32(element);
            let array = start.clone().u64(count).raw([0; 64]);
            refused(
                &array,
                Truncated,
                "key \"k\", array length",
                start.len(),
                "too many",
            );
        }

        let start = Bytes::header(0, 1)
            .string("k")
            .u32(ARRAY)
            .u32(STRING)
            .u64(2)
            .string("fine");
        let element = start.clone().u64(count).raw([0; 64]);
        refused(
            &element,
            Truncated,
            "key \"k\", element 1",
            start.len(),
            "too many",
        );

        let name = Bytes::header(1, 0).u64(count).raw([b'n'; 64]);
        refused(&name, Truncated, "name of tensor 0", 24, "too many");
    }
}

#[test]
fn lengths_just_past_the_end_are_refused() {
    let start = Bytes::header(0, 1).string("k").u32(STRING);
    let string = start.clone().u64(6).raw("short");
    refused(
        &string,
        Truncated,
        "key \"k\", value",
        start.len(),
        "5 bytes left",
    );
    let start = Bytes::header(0, 1).string("k").u32(ARRAY).u32(U32);
    let array = start.clone().u64(3).raw([0; 11]);
    refused(
        &array,
        Truncated,
        "key \"k\", array length",
        start.len(),
        "11 bytes left",
    );
}

#[test]
fn counts_above_the_limits_are_refused_in_large_files() {
    let keys = Bytes::header(0, (1 << 16) + 1).raw(vec![0; 1 << 21]);
    refused(&keys, Corrupt, "number of keys", 16, "65536");
    let tensors = Bytes::header((1 << 18) + 1, 0).raw(vec![0; 1 << 24]);
    refused(&tensors, Corrupt, "number of tensors", 8, "262144");
}

#[test]
fn nested_arrays_and_unknown_types_are_refused() {
    let start = Bytes::header(0, 1).string("k").u32(ARRAY);
    let nested = start.clone().u32(ARRAY).u64(1).u32(U32).u64(1).u32(0);
    refused(
        &nested,
        Corrupt,
        "key \"k\", element type",
        start.len(),
        "arrays of arrays",
    );
    for id in [13, 255, u32::MAX] {
        let unknown = start.clone().u32(id).u64(1).u64(0);
        refused(
            &unknown,
            Corrupt,
            "key \"k\", element type",
            start.len(),
            "no value type",
        );
        let unknown = Bytes::header(0, 1).string("k").u32(id).u64(0);
        refused(
            &unknown,
            Corrupt,
            "key \"k\", type",
            24 + 9,
            "no value type",
        );
    }
}

/// Returns a file with one tensor, and the offset of its description.
fn one_tensor(dims: &[u64], dtype: u32) -> Bytes {
    Bytes::header(1, 0).tensor("t", dims, dtype, 0).data(64)
}

#[test]
fn sizes_that_overflow_are_refused() {
    let dims_at = 24 + 9 + 4;
    // Element counts that wrap around to zero and to small numbers; then such byte counts.
    for dims in [
        &[1 << 32, 1 << 32][..],
        &[1 << 16, 1 << 16, 1 << 16, 1 << 16],
        &[(1 << 32) + 1, 1 << 32],
        &[1 << 62, 4],
        &[1 << 62, 2, 1],
        &[1 << 62],
        &[1 << 61, 1],
        &[1 << 31, 1 << 30],
    ] {
        refused(
            &one_tensor(dims, 0),
            Corrupt,
            "tensor \"t\", shape",
            dims_at,
            "overflows",
        );
    }
    // A block type whose row size times rows overflows.
    refused(
        &one_tensor(&[256, 1 << 55], 15),
        Corrupt,
        "tensor \"t\", shape",
        dims_at,
        "overflows",
    );
    // Sizes that fit individually, but not together.
    let sum = Bytes::header(4, 0)
        .tensor("a", &[1 << 59], 28, 0)
        .tensor("b", &[1 << 59], 28, 1 << 62)
        .tensor("c", &[1 << 59], 28, 1 << 63)
        .tensor("d", &[1 << 59], 28, 3 << 62)
        .data(64);
    let fourth = 24 + 4 * (9 + 4 + 8 + 4 + 8) - 8;
    refused(&sum, Corrupt, "tensor \"d\", offset", fourth, "overflows");
}

#[test]
fn bad_dimensions_are_refused() {
    let dims_at = 24 + 9 + 4;
    refused(
        &one_tensor(&[0, 2], 0),
        Corrupt,
        "tensor \"t\", dimension 0",
        dims_at,
        "is 0",
    );
    refused(
        &one_tensor(&[2, 2, 0], 0),
        Corrupt,
        "tensor \"t\", dimension 2",
        dims_at + 16,
        "is 0",
    );
    for negative in [-1i64, i64::MIN] {
        let dims = [2, negative as u64];
        refused(
            &one_tensor(&dims, 0),
            Corrupt,
            "tensor \"t\", dimension 1",
            dims_at + 8,
            "signed",
        );
    }
    let large = one_tensor(&[(1 << 42) + 1], 0);
    refused(
        &large,
        Truncated,
        "tensor \"t\", data",
        24 + 9 + 4 + 8 + 4,
        "17592186044356 bytes missing",
    );
    let field = "tensor \"t\", number of dimensions";
    for n_dims in [0, 5, u32::MAX] {
        let bad = Bytes::header(1, 0).string("t").u32(n_dims).raw([1; 64]);
        refused(&bad, Corrupt, field, 24 + 9, "1 to 4");
    }
    for (row, dtype) in [(33, 2), (1, 8), (128, 12), (257, 14)] {
        refused(
            &one_tensor(&[row, 2], dtype),
            Corrupt,
            "tensor \"t\", dimension 0",
            dims_at,
            "blocks",
        );
    }
}

#[test]
fn bad_tensor_types_are_refused() {
    let type_at = 24 + 9 + 4 + 8;
    for removed in [4, 5, 31, 32, 33, 36, 37, 38] {
        refused(
            &one_tensor(&[32], removed),
            Corrupt,
            "tensor \"t\", type",
            type_at,
            "removed",
        );
    }
    for unknown in [44, 1000, i32::MIN as u32, -1i32 as u32] {
        refused(
            &one_tensor(&[32], unknown),
            Corrupt,
            "tensor \"t\", type",
            type_at,
            "no type here",
        );
    }
}

#[test]
fn bad_alignments_are_refused() {
    let field = "key \"general.alignment\", value";
    let at = 24 + 8 + "general.alignment".len();
    for alignment in [0, 3, 24, 33, 1 << 30, 0x8000_0000, u32::MAX] {
        let bad = Bytes::header(0, 1).key_u32("general.alignment", alignment);
        refused(&bad, Corrupt, field, at, "power of two");
    }
    let wrong_type = Bytes::header(0, 1)
        .string("general.alignment")
        .u32(10)
        .u64(32);
    refused(&wrong_type, Corrupt, field, at, "wanted u32, found u64");
    let wrong_type = Bytes::header(0, 1).key_str("general.alignment", "32");
    refused(&wrong_type, Corrupt, field, at, "wanted u32, found str");
    for alignment in [1, 8, 16, 64, 4096] {
        let tensor = Bytes::header(1, 1)
            .key_u32("general.alignment", alignment)
            .tensor("t", &[4], 0, 0);
        let header = Header::from_bytes(&tensor.pad(alignment as usize).raw([0; 16]).0).unwrap();
        assert_eq!(header.alignment, u64::from(alignment));
        assert_eq!(header.data_offset % header.alignment, 0);
    }
}

#[test]
fn bad_offsets_are_refused() {
    let offset_at = |n: usize| 24 + n * (9 + 4 + 8 + 4 + 8) - 8;
    let two = |first, second| {
        Bytes::header(2, 0)
            .tensor("a", &[16], 0, first)
            .tensor("b", &[16], 0, second)
            .data(1024)
    };
    assert!(Header::from_bytes(&two(0, 64).0).is_ok());
    refused(
        &two(0, 65),
        Corrupt,
        "tensor \"b\", offset",
        offset_at(2),
        "alignment",
    );
    refused(
        &two(0, 32),
        Corrupt,
        "tensor \"b\", offset",
        offset_at(2),
        "overlap",
    );
    refused(
        &two(0, 0),
        Corrupt,
        "tensor \"b\", offset",
        offset_at(2),
        "overlap",
    );
    refused(
        &two(64, 0),
        Corrupt,
        "tensor \"a\", offset",
        offset_at(1),
        "gaps",
    );
    refused(
        &two(0, 96),
        Corrupt,
        "tensor \"b\", offset",
        offset_at(2),
        "gaps",
    );
    refused(
        &two(0, u64::MAX - 31),
        Corrupt,
        "tensor \"b\", offset",
        offset_at(2),
        "gaps",
    );
    let mut cut = two(0, 64);
    cut.0.truncate(cut.len() - 1024 + 127);
    refused(
        &cut,
        Truncated,
        "tensor \"b\", data",
        offset_at(2),
        "1 bytes missing; download it again",
    );
    cut.0.truncate(cut.len() - 100);
    refused(
        &cut,
        Truncated,
        "tensor \"a\", data",
        offset_at(1),
        "101 bytes missing",
    );
}

#[test]
fn bad_names_are_refused() {
    let twice = Bytes::header(2, 0)
        .tensor("a", &[8], 0, 0)
        .tensor("a", &[8], 0, 32)
        .data(64);
    refused(&twice, Corrupt, "tensor \"a\", name", 24 + 33, "twice");
    let twice = Bytes::header(0, 3)
        .key_u32("k", 1)
        .key_u32("other", 1)
        .key_u32("k", 2);
    refused(&twice, Corrupt, "key \"k\", name", 24 + 17 + 21, "twice");
    refused(
        &Bytes::header(0, 1).key_u32("", 1),
        Corrupt,
        "name of key 0",
        24,
        "empty",
    );
    refused(
        &Bytes::header(0, 1).key_u32("a\0b", 1),
        Corrupt,
        "name of key 0",
        24,
        "NUL",
    );
    refused(
        &Bytes::header(0, 1).string(b"\xff\xfe").u64(0),
        Corrupt,
        "name of key 0",
        24,
        "UTF-8",
    );
    let long = "k".repeat(65_536);
    refused(
        &Bytes::header(0, 1).key_u32(&long, 1),
        Corrupt,
        "name of key 0",
        24,
        "65536 bytes long",
    );

    let tensor = |name: &[u8]| {
        Bytes::header(1, 0)
            .string(name)
            .u32(1)
            .u64(8)
            .u32(0)
            .u64(0)
            .data(32)
    };
    refused(&tensor(b"a\xff"), Corrupt, "name of tensor 0", 24, "UTF-8");
    refused(&tensor(b"a\0"), Corrupt, "name of tensor 0", 24, "NUL");
    refused(
        &tensor(&[b'n'; 1025]),
        Corrupt,
        "name of tensor 0",
        24,
        "1025 bytes long",
    );
    assert!(Header::from_bytes(&tensor(&[b'n'; 1024]).0).is_ok());
}

#[test]
fn invalid_utf8_is_an_error_only_when_read_as_text() {
    let file = Bytes::header(0, 1)
        .string("general.name")
        .u32(STRING)
        .string(b"\xff");
    let header = Header::from_bytes(&file.0).unwrap();
    let error = header.metadata.require::<&str>("general.name").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongType);
    assert!(error.to_string().contains("not UTF-8"), "{error}");
}

#[test]
fn bad_magic_and_versions_are_refused() {
    let start = |magic: &str, version: u32| Bytes::default().raw(magic).u32(version).u64(0).u64(0);
    refused(&start("GGUX", 3), NotGguf, "magic", 0, "not a GGUF file");
    refused(&start("lmgg", 3), NotGguf, "magic", 0, "before GGUF");
    refused(&start("PK\x03\x04", 3), NotGguf, "magic", 0, "zip");
    refused(
        &Bytes::default().raw("G{"),
        NotGguf,
        "magic",
        0,
        "not a GGUF file",
    );
    refused(&start("GGUF", 0), Corrupt, "version", 4, "is 0");
    refused(&start("GGUF", 1), Unsupported, "version", 4, "convert");
    refused(&start("GGUF", 4), Unsupported, "version", 4, "update");
    refused(
        &start("GGUF", 3u32.swap_bytes()),
        Unsupported,
        "version",
        4,
        "big-endian",
    );
    refused(
        &start("GGUF", 2u32.swap_bytes()),
        Unsupported,
        "version",
        4,
        "big-endian",
    );
    assert_eq!(Header::from_bytes(&start("GGUF", 2).0).unwrap().version, 2);
    assert_eq!(
        Header::from_bytes(b"").unwrap_err().message(),
        "the file is empty: download it again"
    );
}

#[test]
fn truncation_at_every_byte_is_refused() {
    let whole = valid();
    for len in 0..whole.len() {
        let error = Header::from_bytes(&whole[..len]).expect_err("must be refused");
        assert_eq!(error.kind(), Truncated, "{len}: {error}");
        assert!(
            error.to_string().contains("download it again"),
            "{len}: {error}"
        );
    }
    // The padding after the last tensor may be missing, and anything may follow the data.
    assert!(Header::from_bytes(&[&whole[..], b"more"].concat()).is_ok());
}

#[test]
fn all_load_modes_report_the_same_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let whole = valid();
    for len in (0..whole.len()).step_by(17) {
        std::fs::write(&path, &whole[..len]).unwrap();
        let wanted = Header::from_bytes(&whole[..len]).unwrap_err();
        for mode in [LoadMode::Mmap, LoadMode::Read] {
            let error = GgufFile::open(&path, mode).unwrap_err();
            assert_eq!(error.path(), Some(&*path));
            assert_eq!(
                (error.kind(), error.field(), error.offset(), error.message()),
                (
                    wanted.kind(),
                    wanted.field(),
                    wanted.offset(),
                    wanted.message()
                )
            );
        }
    }
}

#[test]
fn paths_that_are_not_files_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &std::path::Path| {
        GgufFile::open(path, LoadMode::Mmap)
            .unwrap_err()
            .to_string()
    };
    assert!(open(dir.path()).contains("is a directory: name the .gguf file in it"));
    assert!(
        open(&dir.path().join("absent.gguf"))
            .contains("absent.gguf: cannot open the file: No such file")
    );
    assert!(open(std::path::Path::new("/dev/null")).contains("not a regular file"));
    let empty = dir.path().join("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    assert!(open(&empty).contains("empty: download it again"));
}
