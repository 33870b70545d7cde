//! Models in several files.
//!
//! Part `i` of `n` of a model is called `<prefix>-<i+1>-of-<n>.gguf`, both numbers with five
//! digits. Its metadata repeats this: `split.no` is `i`, `split.count` is `n`, and
//! `split.tensors.count` is the number of tensors in all parts. Only the first part must have other
//! metadata. Names of other parts are derived from the name that the user gave, never from the
//! content of a file, so no file can make another path be opened.

use crate::error::{Error, ErrorKind, Result};
use crate::metadata::Metadata;
use std::path::{Path, PathBuf};

/// Key with the number of parts.
pub const KEY_SPLIT_COUNT: &str = "split.count";
/// Key with the index of this part, from 0.
pub const KEY_SPLIT_NO: &str = "split.no";
/// Key with the number of tensors in all parts.
pub const KEY_SPLIT_TENSORS_COUNT: &str = "split.tensors.count";

/// Split information in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    pub(crate) no: u16,
    pub(crate) count: u16,
    pub(crate) tensors: Option<u64>,
}

impl Split {
    /// Returns `None` if the file is a whole model.
    pub(crate) fn from_metadata(metadata: &Metadata) -> Result<Option<Self>> {
        let count = metadata.get_or::<u16>(KEY_SPLIT_COUNT, 0)?;
        if count <= 1 {
            return Ok(None);
        }
        let split = Split {
            no: metadata.require(KEY_SPLIT_NO)?,
            count,
            tensors: metadata.get(KEY_SPLIT_TENSORS_COUNT)?,
        };
        if split.no >= count {
            let message = format!("is {}, but there are only {count} parts, from 0", split.no);
            return Err(Error::new(
                ErrorKind::Split,
                format!("key \"{KEY_SPLIT_NO}\""),
                message,
            ));
        }
        Ok(Some(split))
    }
}

/// Returns the file name of part `no` (from 0) of `count`.
pub fn split_file_name(prefix: &str, no: u16, count: u16) -> String {
    format!("{prefix}-{:05}-of-{count:05}.gguf", u32::from(no) + 1)
}

/// Returns the paths of all parts, derived from the path of one of them.
pub(crate) fn part_paths(path: &Path, split: Split) -> Result<Vec<PathBuf>> {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let ending = split_file_name("", split.no, split.count);
    let prefix = name.strip_suffix(&*ending).ok_or_else(|| {
        let message = format!(
            "is part {} of {} of a model, so its name must end in \"{ending}\" for the other \
             parts to be found: restore the original name",
            u32::from(split.no) + 1,
            split.count
        );
        Error::new(ErrorKind::Split, "", message).in_file(path)
    })?;
    let part = |no| path.with_file_name(split_file_name(prefix, no, split.count));
    Ok((0..split.count).map(part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_file_names_follow_the_pattern() {
        let split = Split {
            no: 1,
            count: 3,
            tensors: None,
        };
        let paths = part_paths(Path::new("dir/m-00002-of-00003.gguf"), split).unwrap();
        let names = [
            "dir/m-00001-of-00003.gguf",
            "dir/m-00002-of-00003.gguf",
            "dir/m-00003-of-00003.gguf",
        ];
        assert_eq!(paths, names.map(PathBuf::from));
        for bad in [
            "dir/m-00001-of-00003.gguf",
            "m.gguf",
            "m-2-of-3.gguf",
            "dir/..",
        ] {
            let error = part_paths(Path::new(bad), split).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Split);
            assert!(
                error.to_string().contains("-00002-of-00003.gguf"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_single_file_is_not_a_split() {
        let mut metadata = Metadata::new();
        assert_eq!(Split::from_metadata(&metadata), Ok(None));
        metadata.set(KEY_SPLIT_COUNT, 1u16).unwrap();
        assert_eq!(Split::from_metadata(&metadata), Ok(None));
        metadata.set(KEY_SPLIT_COUNT, 2u16).unwrap();
        assert_eq!(
            Split::from_metadata(&metadata).unwrap_err().kind(),
            ErrorKind::MissingKey
        );
        metadata.set(KEY_SPLIT_NO, 2u16).unwrap();
        assert_eq!(
            Split::from_metadata(&metadata).unwrap_err().kind(),
            ErrorKind::Split
        );
        metadata.set(KEY_SPLIT_NO, "../1").unwrap();
        assert_eq!(
            Split::from_metadata(&metadata).unwrap_err().kind(),
            ErrorKind::WrongType
        );
    }
}
