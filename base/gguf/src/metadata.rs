//! The metadata of a file: keys with values, in the file's order.

use crate::convert::FromValue;
use crate::error::{Error, ErrorKind, Result, quoted};
use crate::index::sorted_index;
use crate::value::Value;
use std::path::Path;
use std::sync::Arc;

/// The key of the alignment of tensor data; see [`crate::DEFAULT_ALIGNMENT`].
pub const KEY_ALIGNMENT: &str = "general.alignment";
/// The key that names the model's architecture.
pub const KEY_ARCHITECTURE: &str = "general.architecture";
/// The longest key that the specification allows, in bytes.
pub const MAX_KEY_BYTES: usize = 65_535;

/// Metadata: unique keys with values, in the order of the file.
///
/// Reading is typed and never panics: [`get`](Self::get) for what may be absent, [`require`](Self::require) for what
/// may not. Both fail with the key, the wanted and the found type if the value is of another type.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(Box<str>, Value)>,
    /// Indices of `entries`, sorted by key.
    by_key: Vec<u32>,
    /// The file that errors name.
    origin: Option<Arc<Path>>,
}

/// Equal keys and values in the same order, wherever they were read from.
impl PartialEq for Metadata {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl Metadata {
    /// No keys yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes over entries whose keys were checked one by one.
    ///
    /// # Errors
    /// The index and the key of the first entry whose key occurred before.
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

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All keys and values, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }

    /// Where `key` stands in `by_key`, or where it would have to be put.
    fn rank(&self, key: &str) -> Result<usize, usize> {
        self.by_key
            .binary_search_by(|&index| (*self.entries[index as usize].0).cmp(key))
    }

    fn position(&self, key: &str) -> Option<usize> {
        self.rank(key).ok().map(|rank| self.by_key[rank] as usize)
    }

    /// The value of `key`, of whatever type.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.position(key).map(|index| &self.entries[index].1)
    }

    /// Whether `key` is there.
    pub fn contains(&self, key: &str) -> bool {
        self.rank(key).is_ok()
    }

    /// The value of `key`, or `None` if the key is absent.
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

    /// The value of `key`, or `default` if the key is absent.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn get_or<'a, T: FromValue<'a>>(&'a self, key: &str, default: T) -> Result<T> {
        Ok(self.get(key)?.unwrap_or(default))
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// [`ErrorKind::MissingKey`] if the key is absent; [`ErrorKind::WrongType`] if the value cannot be read as `T`.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        let missing = || {
            let message = format!("is missing, but needed ({} wanted)", T::wanted());
            self.error(ErrorKind::MissingKey, key, message)
        };
        self.get(key)?.ok_or_else(missing)
    }

    /// The value of a key that holds either an array of exactly `len` elements, or one value that stands for all of them
    /// (as per-layer parameters do). `None` if the key is absent.
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

    /// Sets `key`: in its place if it is there, at the end otherwise. Returns the former value.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the key is empty, too long, or contains a NUL character.
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

    /// Gives the value of `from` the key `to`, in the same place.
    ///
    /// # Errors
    /// [`ErrorKind::MissingKey`] if there is no `from`; [`ErrorKind::InvalidArgument`] if there is a `to` already, or if
    /// `to` cannot be a key.
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

/// What is wrong with `key` as a key, if anything.
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
    fn getters_explain_what_they_miss() {
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
    fn a_scalar_stands_for_every_layer() {
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
        /// Any sequence of edits does what the same edits do to a plain list.
        #[test]
        fn edits_agree_with_a_list(edits in prop::collection::vec((0u8..3, 0u8..6, 0u8..6), 0..40)) {
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
                    1 => prop_assert_eq!(metadata.remove(&key), at.map(|at| Value::U8(list.remove(at).1))),
                    _ => {
                        let free = key == other || list.iter().all(|entry| entry.0 != other);
                        prop_assert_eq!(metadata.rename(&key, &other).is_ok(), at.is_some() && free);
                        if let (Some(at), true) = (at, free) {
                            list[at].0 = other;
                        }
                    }
                }
                prop_assert!(metadata.iter().map(|(k, v)| (k.to_owned(), v.clone()))
                    .eq(list.iter().map(|(k, v)| (k.clone(), Value::U8(*v)))));
                for (key, value) in &list {
                    prop_assert_eq!(metadata.require::<u8>(key), Ok(*value));
                }
            }
        }
    }
}
