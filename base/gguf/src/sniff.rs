//! Recognition of other file formats, so that the error can say what to do.

/// Describes a file by its first bytes, which are not those of GGUF.
pub(crate) fn not_gguf(start: &[u8]) -> &'static str {
    /// First bytes of other formats, with a message.
    const KNOWN: [(&[u8], &str); 17] = [
        (b"lmgg", OLD), // The magic numbers of ggml's old formats, as little-endian bytes.
        (b"fmgg", OLD),
        (b"tjgg", OLD),
        (b"algg", OLD),
        (b"GGML", OLD),
        (
            b"FUGG",
            "a big-endian GGUF file: get the little-endian file",
        ),
        (
            b"PK\x03\x04",
            "a zip archive or a PyTorch checkpoint: unpack it, or convert the model to GGUF",
        ),
        (b"\x80\x02", PICKLE),
        (b"\x80\x03", PICKLE),
        (b"\x80\x04", PICKLE),
        (b"\x80\x05", PICKLE),
        (b"\x1f\x8b", "a gzip file: decompress it first"),
        (b"\x28\xb5\x2f\xfd", "a zstd file: decompress it first"),
        (b"\x89HDF", "an HDF5 file: convert the model to GGUF"),
        (
            b"version https://git-lfs",
            "a git-lfs pointer, not the model itself: run `git lfs pull`",
        ),
        (b"\x7fELF", "a program or library"),
        (
            b"\0\0\0\0",
            "full of zeros at its beginning: download it again",
        ),
    ];
    const OLD: &str = "a model in one of ggml's formats before GGUF: get a GGUF file, or convert the original model again";
    const PICKLE: &str =
        "a Python pickle, probably a PyTorch checkpoint: convert the model to GGUF";

    if let Some((_, what)) = KNOWN.iter().find(|(magic, _)| start.starts_with(magic)) {
        return what;
    }
    // safetensors: the length of a JSON header, then the header.
    if start.get(4..9) == Some(b"\0\0\0\0{") {
        return "a safetensors file: convert the model to GGUF";
    }
    match start.trim_ascii_start().first() {
        Some(b'<') => "a web page: the download went wrong, download the model again",
        Some(b'{' | b'[') => "a JSON file: name the .gguf file instead",
        _ => "no kind of file known here: name a .gguf file",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_file_formats_are_recognised() {
        for (start, words) in [
            (&b"lmgg\x01\0\0\0"[..], "before GGUF"),
            (b"GGML", "before GGUF"),
            (b"FUGG\0\0\0\x03", "big-endian"),
            (b"PK\x03\x04\x14\0", "zip"),
            (b"\x80\x02}q", "pickle"),
            (b"\x68\x01\0\0\0\0\0\0{\"__metadata__\"", "safetensors"),
            (
                b"version https://git-lfs.github.com/spec/v1\n",
                "git lfs pull",
            ),
            (b"\n <!DOCTYPE html>", "web page"),
            (b"{\"error\"", "JSON"),
            (b"\0\0\0\0\0\0\0\0", "zeros"),
            (b"hello", "no kind"),
        ] {
            assert!(
                not_gguf(start).contains(words),
                "{start:?} -> {}",
                not_gguf(start)
            );
        }
    }
}
