//! NumPy's file format, version 1.0: a text header and the elements.

use samite::quant::{RowReader, gather_row};
use samite::{DType, Layout};
use std::fs::File;
use std::io::{BufWriter, Error, Result, Write};
use std::path::Path;

/// Returns NumPy's name of a type, and the type of the stored elements. Unsupported types are
/// written as F32.
fn described(dtype: DType) -> (&'static str, Option<DType>) {
    match dtype {
        DType::F16 => ("<f2", Some(dtype)),
        DType::F32 => ("<f4", Some(dtype)),
        DType::F64 => ("<f8", Some(dtype)),
        DType::I8 => ("|i1", Some(dtype)),
        DType::I16 => ("<i2", Some(dtype)),
        DType::I32 => ("<i4", Some(dtype)),
        DType::I64 => ("<i8", Some(dtype)),
        _ => ("<f4", None),
    }
}

/// Returns the header of a tensor.
fn header(layout: &Layout) -> Vec<u8> {
    // NumPy lists the outermost extent first.
    let extents: Vec<_> = super::extents(layout).into_iter().rev().collect();
    header_of(&extents, layout.dtype())
}

/// Returns the header of an array, outermost extent first.
pub fn header_of(extents: &[usize], dtype: DType) -> Vec<u8> {
    let mut shape: Vec<_> = extents.iter().map(ToString::to_string).collect();
    if shape.len() == 1 {
        // A tuple of one element needs a trailing comma.
        shape.push(String::new());
    }
    let (name, shape) = (described(dtype).0, shape.join(", "));
    let shape = shape.trim_end();
    let mut words = format!("{{'descr': '{name}', 'fortran_order': False, 'shape': ({shape}), }}");
    // Elements start at a multiple of 64 bytes.
    let used = 10 + words.len() + 1;
    words.push_str(&" ".repeat(used.next_multiple_of(64) - used));
    words.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((words.len() as u16).to_le_bytes());
    header.extend(words.as_bytes());
    header
}

/// Returns the size of the file in bytes.
pub fn size(layout: &Layout) -> u64 {
    let (_, kept) = described(layout.dtype());
    let element = kept.map_or(4, DType::block_bytes);
    (header(layout).len() + layout.elements() * element) as u64
}

/// Writes a tensor from the bytes that it spans.
pub fn write(path: &Path, layout: &Layout, span: &[u8]) -> Result<()> {
    let mut file = BufWriter::new(File::create_new(path)?);
    file.write_all(&header(layout))?;
    let (_, kept) = described(layout.dtype());
    let (mut reader, mut bytes) = (RowReader::default(), Vec::new());
    for row in 0..layout.rows() {
        if kept.is_some() {
            gather_row(layout, span, row, &mut bytes).map_err(Error::other)?;
        } else {
            let values = reader.read(layout, span, row).map_err(Error::other)?;
            bytes.clear();
            bytes.extend(
                values
                    .iter()
                    .flat_map(|&value| (value as f32).to_le_bytes()),
            );
        }
        file.write_all(&bytes)?;
    }
    file.into_inner()
        .map(|_| ())
        .map_err(|error| error.into_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files are identical to those that NumPy 2 writes with `np.save`.
    #[test]
    fn npy_files_match_those_of_numpy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.npy");
        let bytes: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let plain = Layout::contiguous(DType::F32, [3, 2, 1, 1]).unwrap();
        write(&path, &plain, &bytes).unwrap();
        let file = std::fs::read(&path).unwrap();
        let words = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
        assert_eq!(&file[..10], b"\x93NUMPY\x01\x00\x76\x00");
        assert_eq!(&file[10..10 + words.len()], words.as_bytes());
        assert_eq!(
            (file.len() as u64, &file[127..128]),
            (size(&plain), &b"\n"[..])
        );
        assert_eq!(file[128..], bytes);
        // The file exists.
        assert!(write(&path, &plain, &bytes).is_err());
    }

    #[test]
    fn other_types_and_strides_are_written_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let read = |name: &str, layout: &Layout, span: &[u8]| {
            let path = dir.path().join(name);
            write(&path, layout, span).unwrap();
            let file = std::fs::read(path).unwrap();
            assert_eq!(file.len() as u64, size(layout));
            (
                String::from_utf8_lossy(&file[..128]).into_owned(),
                file[128..].to_vec(),
            )
        };
        let halves = [0u8, 1, 2, 3, 4, 5, 6, 7];
        let turned = Layout::contiguous(DType::F16, [2, 2, 1, 1]).unwrap();
        let turned = turned.permuted([1, 0, 2, 3]).unwrap();
        let (header, data) = read("turned", &turned, &halves);
        assert!(
            header.contains("'<f2'") && header.contains("(2, 2)"),
            "{header}"
        );
        assert_eq!(data, [0, 1, 4, 5, 2, 3, 6, 7]);
        let mut block = [0u8; 34];
        (block[1], block[2]) = (0x3c, 5);
        let layout = Layout::contiguous(DType::Q8_0, [32, 1, 1, 1]).unwrap();
        let (header, data) = read("block", &layout, &block);
        assert!(
            header.contains("'<f4'") && header.contains("(32,)"),
            "{header}"
        );
        assert_eq!(data[..8], [5.0f32, 0.0].map(f32::to_le_bytes).concat());
        assert_eq!(data.len(), 128);
    }
}
