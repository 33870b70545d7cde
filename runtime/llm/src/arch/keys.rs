//! The metadata of a model under the prefix of its architecture, read with checks.

use crate::error::{Error, Result};
use samite_gguf::{FromValue, Metadata, Value};

/// Largest extent that is accepted. No extent of a model comes near it, and products of a few
/// extents do not overflow.
const MAX_EXTENT: usize = 1 << 28;

/// The description of a model in a file: the keys under the prefix of its architecture and the
/// names of its tensors.
pub struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
    n_tensors: usize,
    has_tensor: &'a dyn Fn(&str) -> bool,
}

impl std::fmt::Debug for Keys<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys")
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl<'a> Keys<'a> {
    /// Wraps the keys of `metadata` that start with `prefix` and a dot, from a file with
    /// `n_tensors` tensors.
    pub fn new(
        metadata: &'a Metadata,
        prefix: &'a str,
        n_tensors: usize,
        has_tensor: &'a dyn Fn(&str) -> bool,
    ) -> Self {
        Keys {
            metadata,
            prefix,
            n_tensors,
            has_tensor,
        }
    }

    /// Returns all keys of the file.
    pub fn metadata(&self) -> &'a Metadata {
        self.metadata
    }

    /// Returns the number of tensors in the file.
    pub(super) fn n_tensors(&self) -> usize {
        self.n_tensors
    }

    /// Returns whether the file has a tensor with this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        (self.has_tensor)(name)
    }

    /// Returns the full key for `name`.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// Returns a value of any type.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn get<T: FromValue<'a>>(&self, name: &str) -> Result<Option<T>> {
        Ok(self.metadata.get(&self.key(name))?)
    }

    /// Returns a flag, which is false if the file does not have the key.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn flag(&self, name: &str) -> Result<bool> {
        Ok(self.get(name)?.unwrap_or(false))
    }

    /// Returns a count, which may be 0.
    ///
    /// # Errors
    /// Returns an error if the value has another type or is absurdly large.
    pub fn count(&self, name: &str) -> Result<Option<usize>> {
        let key = self.key(name);
        let value = self.metadata.get::<u64>(&key)?;
        value.map(|value| check_count(&key, value)).transpose()
    }

    /// Returns a count for each layer, which may be 0. The file has a list, or one number for all
    /// layers.
    ///
    /// # Errors
    /// Returns an error if the value has another type or is absurdly large, or if the list has
    /// another length.
    pub fn counts(&self, name: &str, layers: usize) -> Result<Option<Vec<usize>>> {
        let key = self.key(name);
        let values = self.metadata.get_scalar_or_array::<u64>(&key, layers)?;
        let check = |values: Vec<u64>| values.into_iter().map(|v| check_count(&key, v)).collect();
        values.map(check).transpose()
    }

    /// Returns whether the value is a list.
    pub fn is_list(&self, name: &str) -> bool {
        matches!(self.metadata.value(&self.key(name)), Some(Value::Array(_)))
    }

    /// Returns a flag for each layer. The file has a list, or one flag for all layers. Numbers
    /// other than 0 count as true.
    ///
    /// # Errors
    /// Returns an error if the value has another type, or if the list has another length.
    pub fn flags(&self, name: &str, layers: usize) -> Result<Option<Vec<bool>>> {
        let key = self.key(name);
        if let Ok(flags) = self.metadata.get_scalar_or_array::<bool>(&key, layers) {
            return Ok(flags);
        }
        let numbers = self.metadata.get_scalar_or_array::<i64>(&key, layers)?;
        Ok(numbers.map(|numbers| numbers.into_iter().map(|number| number != 0).collect()))
    }

    /// Returns a number for each layer. The file has a list, or one number for all layers.
    ///
    /// # Errors
    /// Returns an error if the value has another type, or if the list has another length.
    pub fn floats(&self, name: &str, layers: usize) -> Result<Option<Vec<f32>>> {
        Ok(self
            .metadata
            .get_scalar_or_array::<f32>(&self.key(name), layers)?)
    }

    /// Returns an extent, which is at least 1.
    ///
    /// # Errors
    /// Returns an error if the value has another type, is 0, or is absurdly large.
    pub fn extent(&self, name: &str) -> Result<Option<usize>> {
        let count = self.count(name)?;
        count.map(|count| self.at_least_1(name, count)).transpose()
    }

    /// Returns an extent that the file must have.
    ///
    /// # Errors
    /// Fails like [`extent`](Self::extent), or if the key is missing.
    pub fn require_extent(&self, name: &str) -> Result<usize> {
        let key = self.key(name);
        self.at_least_1(
            name,
            check_count(&key, self.metadata.require::<u64>(&key)?)?,
        )
    }

    /// Checks an extent that was read from the key `name`.
    pub(super) fn at_least_1(&self, name: &str, count: usize) -> Result<usize> {
        match count {
            0 => Err(Error::model(format!(
                "key \"{}\": is 0, must be at least 1",
                self.key(name)
            ))),
            count => Ok(count),
        }
    }

    /// Returns a number for which `accepts` returns true; `wanted` describes these numbers.
    ///
    /// # Errors
    /// Returns an error if the value has another type or is not accepted.
    pub fn float(
        &self,
        name: &str,
        accepts: impl Fn(f32) -> bool,
        wanted: &str,
    ) -> Result<Option<f32>> {
        let key = self.key(name);
        match self.metadata.get::<f32>(&key)? {
            Some(value) if !accepts(value) => Err(Error::model(format!(
                "key \"{key}\": is {value}, must be {wanted}"
            ))),
            value => Ok(value),
        }
    }

    /// Returns a finite number.
    ///
    /// # Errors
    /// Returns an error if the value has another type, is infinite, or is NaN.
    pub fn finite(&self, name: &str) -> Result<Option<f32>> {
        self.float(name, f32::is_finite, "a finite number")
    }

    /// Returns a factor, which is a finite number. 0 stands for no factor.
    ///
    /// # Errors
    /// Fails like [`finite`](Self::finite).
    pub fn factor(&self, name: &str) -> Result<Option<f32>> {
        Ok(self.finite(name)?.filter(|&factor| factor != 0.0))
    }

    /// Returns a positive number.
    ///
    /// # Errors
    /// Returns an error if the value has another type or is not positive.
    pub fn positive(&self, name: &str, default: f32) -> Result<f32> {
        let value = self.float(
            name,
            |v| v > 0.0 && v.is_finite(),
            "a positive finite number",
        )?;
        Ok(value.unwrap_or(default))
    }

    /// Returns the epsilon of a norm.
    ///
    /// # Errors
    /// Returns an error if the value has another type, is out of range, or is missing.
    pub fn epsilon(&self, name: &str) -> Result<f32> {
        match self.float(name, |v| (0.0..1.0).contains(&v), "between 0 and 1")? {
            Some(eps) => Ok(eps),
            None => Ok(self.metadata.require::<f32>(&self.key(name))?),
        }
    }

    /// Creates an error about the key `name`.
    pub fn error(&self, name: &str, what: impl std::fmt::Display) -> Error {
        Error::model(format!("key \"{}\": {what}", self.key(name)))
    }
}

/// Checks a count that was read from the key called `key`.
pub(super) fn check_count(key: &str, value: u64) -> Result<usize> {
    match usize::try_from(value) {
        Ok(value) if value <= MAX_EXTENT => Ok(value),
        _ => Err(Error::model(format!(
            "key \"{key}\": is {value}, at most {MAX_EXTENT} is possible"
        ))),
    }
}
