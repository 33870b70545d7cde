//! The metadata of a file: keys with values, in the file's order.

use crate::convert::FromValue;
use crate::error::{Error, ErrorKind, Result, quoted};
use crate::index::sorted_index;
use crate::value::Value;
use std::path::Path;
use std::sync::Arc;

/// Key of the alignment of tensor data; see [`crate::DEFAULT_ALIGNMENT`].
pub const KEY_ALIGNMENT: &str = "general.alignment";
/// Key with the name of the model's architecture.
pub const KEY_ARCHITECTURE: &str = "general.architecture";
/// Maximum length of a key in the specification, in bytes.
pub const MAX_KEY_BYTES: usize = 65_535;

/// Metadata: unique keys with values, in the order of the file.
///
/// Reading is typed and never panics: [`get`](Self::get) for optional keys,
/// [`require`](Self::require) for required ones. Both fail with the key, the wanted and the found
/// type if the value has another type.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(Box<str>, Value)>,
    /// Indices of `entries`, sorted by key.
    by_key: Vec<u32>,
    /// Name of the file, for errors.
    origin: Option<Arc<Path>>,
}

/// Compares keys and values, including their order, but not their origin.
impl PartialEq for Metadata {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl Metadata {
    /// Creates metadata without keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates metadata from entries whose keys were checked individually.
    ///
    /// # Errors
    /// The index and the key of the first entry with a repeated key.
    pub(crate) fn from_entries(
        mut entries: Vec<(Box<str>, Value)>,
    ) -> Result<Self, (usize, Box<str>)> {
        let by_key = sorted_index(&entries, |entry| &entry.0)
            .map_err(|repeated| (repeated, std::mem::take(&mut entries[repeated].0)))?;
        Ok(Metadata {
            entries,
            by_key,
            origin: None,
        })
    }

    pub(crate) fn set_origin(&mut self, path: &Path) {
        self.origin = Some(path.into());
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Iterates over all keys and values, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }

    /// Returns the position of `key` in `by_key`, or the position to insert it.
    fn rank(&self, key: &str) -> Result<usize, usize> {
        self.by_key
            .binary_search_by(|&index| (*self.entries[index as usize].0).cmp(key))
    }

    fn position(&self, key: &str) -> Option<usize> {
        self.rank(key).ok().map(|rank| self.by_key[rank] as usize)
    }

    /// Returns the value of `key`, of any type.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.position(key).map(|index| &self.entries[index].1)
    }

    /// Returns whether `key` exists.
    pub fn contains(&self, key: &str) -> bool {
        self.rank(key).is_ok()
    }

    /// Returns the value of `key`, or `None` if the key is absent.
    ///
    /// # Errors
    /// [`ErrorKind::WrongType`] if the value cannot be read as `T`.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let explain = |found| {
            self.error(
                ErrorKind::WrongType,
                key,
                format!("wanted {}, found {found}", T::wanted()),
            )
        };
        T::from_value(value).map(Some).map_err(explain)
    }

    /// Returns the value of `key`, or `default` if the key is absent.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn get_or<'a, T: FromValue<'a>>(&'a self, key: &str, default: T) -> Result<T> {
        Ok(self.get(key)?.unwrap_or(default))
    }

    /// Returns the value of `key`.
    ///
    /// # Errors
    /// [`ErrorKind::MissingKey`] if the key is absent. [`ErrorKind::WrongType`] if the value cannot
    /// be read as `T`.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        let missing = || {
            let message = format!("is missing, but needed ({} wanted)", T::wanted());
            self.error(ErrorKind::MissingKey, key, message)
        };
        self.get(key)?.ok_or_else(missing)
    }

    /// Returns the value of a key that holds either an array of exactly `len` elements, or one
    /// value that is repeated (as per-layer parameters are). `None` if the key is absent.
    ///
    /// # Errors
    /// [`ErrorKind::WrongType`] for another type or length.
    pub fn get_scalar_or_array<'a, T>(&'a self, key: &str, len: usize) -> Result<Option<Vec<T>>>
    where
        T: FromValue<'a> + Clone,
        Vec<T>: FromValue<'a>,
    {
        if !matches!(self.value(key), Some(Value::Array(_))) {
            return Ok(self.get::<T>(key)?.map(|value| vec![value; len]));
        }
        let values = self.get::<Vec<T>>(key)?;
        match values {
            Some(values) if values.len() != len => {
                let message = format!(
                    "wanted one {} or {len} of them, found {}",
                    T::wanted(),
                    values.len()
                );
                Err(self.error(ErrorKind::WrongType, key, message))
            }
            values => Ok(values),
        }
    }

    fn error(&self, kind: ErrorKind, key: &str, message: String) -> Error {
        let error = Error::new(kind, format!("key {}", quoted(key)), message);
        match &self.origin {
            Some(path) => error.in_file(path),
            None => error,
        }
    }

    /// Sets `key`: in its place if it exists, otherwise at the end. Returns the former value.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the key is empty or too long, or contains a NUL character.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> Result<Option<Value>> {
        match self.rank(key) {
            Ok(rank) => {
                let index = self.by_key[rank] as usize;
                Ok(Some(std::mem::replace(
                    &mut self.entries[index].1,
                    value.into(),
                )))
            }
            Err(rank) => {
                check_key(key)
                    .map_err(|message| self.error(ErrorKind::InvalidArgument, key, message))?;
                self.by_key.insert(rank, self.entries.len() as u32);
                self.entries.push((key.into(), value.into()));
                Ok(None)
            }
        }
    }

    /// Removes `key` and returns its value.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let rank = self.rank(key).ok()?;
        let removed = self.by_key.remove(rank);
        for index in &mut self.by_key {
            if *index > removed {
                *index -= 1;
            }
        }
        Some(self.entries.remove(removed as usize).1)
    }

    /// Renames the key `from` to `to`, in the same place.
    ///
    /// # Errors
    /// [`ErrorKind::MissingKey`] if `from` does not exist. [`ErrorKind::InvalidArgument`] if `to`
    /// already exists or is not a valid key.
    pub fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        let rank = self.rank(from).map_err(|_| {
            self.error(
                ErrorKind::MissingKey,
                from,
                "is missing, so it cannot be renamed".into(),
            )
        })?;
        if from == to {
            return Ok(());
        }
        if self.contains(to) {
            let message = format!(
                "exists already; remove it before renaming {} to it",
                quoted(from)
            );
            return Err(self.error(ErrorKind::InvalidArgument, to, message));
        }
        check_key(to).map_err(|message| self.error(ErrorKind::InvalidArgument, to, message))?;
        let index = self.by_key.remove(rank);
        self.entries[index as usize].0 = to.into();
        let (Ok(rank) | Err(rank)) = self.rank(to);
        self.by_key.insert(rank, index);
        Ok(())
    }
}

/// Checks `key`, and describes the problem if it is invalid.
pub(crate) fn check_key(key: &str) -> Result<(), String> {
    if key.is_empty() {
        Err("is empty".into())
    } else if key.len() > MAX_KEY_BYTES {
        Err(format!(
            "is {} bytes long; {MAX_KEY_BYTES} are allowed",
            key.len()
        ))
    } else if key.contains('\0') {
        Err("contains a NUL character".into())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Metadata {
        let mut metadata = Metadata::new();
        for (key, value) in [
            ("general.architecture", Value::from("llama")),
            ("llama.block_count", Value::U32(2)),
            ("llama.head_count", Value::from(vec![8i32, 4])),
        ] {
            metadata.set(key, value).unwrap();
        }
        metadata.set_origin(Path::new("m.gguf"));
        metadata
    }

    #[test]
    fn getter_errors_explain_the_mismatch() {
        let metadata = sample();
        assert_eq!(metadata.require::<usize>("llama.block_count"), Ok(2));
        assert_eq!(metadata.get::<u32>("absent"), Ok(None));
        assert_eq!(metadata.get_or("absent", 10_000.0f32), Ok(10_000.0));
        assert_eq!(
            metadata.require::<u32>("absent").unwrap_err().to_string(),
            r#"m.gguf: key "absent": is missing, but needed (u32 wanted)"#
        );
        assert_eq!(
            metadata
                .require::<&str>("llama.block_count")
                .unwrap_err()
                .to_string(),
            r#"m.gguf: key "llama.block_count": wanted str, found u32"#
        );
        assert_eq!(
            metadata
                .get::<u8>("general.architecture")
                .unwrap_err()
                .kind(),
            ErrorKind::WrongType
        );
    }

    #[test]
    fn a_scalar_applies_to_every_layer() {
        let metadata = sample();
        assert_eq!(
            metadata.get_scalar_or_array::<u32>("llama.block_count", 3),
            Ok(Some(vec![2, 2, 2]))
        );
        assert_eq!(
            metadata.get_scalar_or_array::<u32>("llama.head_count", 2),
            Ok(Some(vec![8, 4]))
        );
        assert_eq!(metadata.get_scalar_or_array::<u32>("absent", 2), Ok(None));
        assert_eq!(
            metadata
                .get_scalar_or_array::<u32>("llama.head_count", 3)
                .unwrap_err()
                .to_string(),
            r#"m.gguf: key "llama.head_count": wanted one u32 or 3 of them, found 2"#
        );
    }

    #[test]
    fn edits_keep_the_order() {
        let mut metadata = sample();
        assert_eq!(
            metadata.set("llama.block_count", 3u32),
            Ok(Some(Value::U32(2)))
        );
        metadata
            .rename("general.architecture", "z.architecture")
            .unwrap();
        let keys: Vec<_> = metadata.iter().map(|(key, _)| key).collect();
        assert_eq!(
            keys,
            ["z.architecture", "llama.block_count", "llama.head_count"]
        );
        assert_eq!(
            metadata.rename("nothing", "x").unwrap_err().kind(),
            ErrorKind::MissingKey
        );
        for bad in [
            "",
            "nul\0",
            "llama.head_count",
            &"k".repeat(MAX_KEY_BYTES + 1),
        ] {
            let error = metadata.rename("z.architecture", bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        assert_eq!(metadata.remove("llama.block_count"), Some(Value::U32(3)));
        assert_eq!(metadata.remove("llama.block_count"), None);
        assert_eq!(metadata.require::<&str>("z.architecture"), Ok("llama"));
        assert!(metadata.set("", 1u8).is_err());
    }

    proptest! {
        /// Compares a sequence of edits with the same edits of a plain list.
        #[test]
        fn edits_agree_with_a_list(edits in prop::collection::vec((0u8..3, 0u8..6, 0u8..6),
            0..40)) {
            let mut metadata = Metadata::new();
            let mut list: Vec<(String, u8)> = Vec::new();
            for (edit, a, b) in edits {
                let (key, other) = (format!("k{a}"), format!("k{b}"));
                let at = list.iter().position(|entry| entry.0 == key);
                match edit {
                    0 => {
                        metadata.set(&key, b).unwrap();
                        match at {
                            Some(at) => list[at].1 = b,
                            None => list.push((key, b)),
                        }
                    }
                    1 => prop_assert_eq!(
                        metadata.remove(&key),
                        at.map(|at| Value::U8(list.remove(at).1))
                    ),
                    _ => {
                        let free = key == other || list.iter().all(|entry| entry.0 != other);
                        prop_assert_eq!(
                            metadata.rename(&key, &other).is_ok(),
                            at.is_some() && free
                        );
                        if let (Some(at), true) = (at, free) {
                            list[at].0 = other;
                        }
                    }
                }
                prop_assert!(
                    metadata
                        .iter()
                        .map(|(k, v)| (k.to_owned(), v.clone()))
                        .eq(list.iter().map(|(k, v)| (k.clone(), Value::U8(*v))))
                );
                for (key, value) in &list {
                    prop_assert_eq!(metadata.require::<u8>(key), Ok(*value));
                }
            }
        }
    }
}
