//! An array of strings in two allocations.

use std::str::Utf8Error;

/// Many strings, stored compactly as one block of bytes and the end of each string.
///
/// A vocabulary has a quarter of a million strings, and one allocation for each would make opening
/// a file slow. GGUF strings should be UTF-8, but vocabularies are known to violate that, so these
/// are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StringArray {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl StringArray {
    /// Returns an empty array with existing memory for the bytes of all strings, and for their
    /// ends.
    pub(crate) fn within(bytes: Vec<u8>, ends: Vec<usize>) -> Self {
        debug_assert!(bytes.is_empty() && ends.is_empty());
        StringArray { bytes, ends }
    }

    /// Appends one string.
    pub fn push(&mut self, string: impl AsRef<[u8]>) {
        self.bytes.extend_from_slice(string.as_ref());
        self.ends.push(self.bytes.len());
    }

    /// Returns the number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there are no strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the bytes of all strings together.
    pub fn total_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the string at `index` as bytes, or `None` past the end.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = match index.checked_sub(1) {
            Some(previous) => *self.ends.get(previous)?,
            None => 0,
        };
        self.bytes.get(start..end)
    }

    /// Returns the string at `index` as text, or `None` past the end.
    ///
    /// # Errors
    /// If the string is not valid UTF-8.
    pub fn get_str(&self, index: usize) -> Option<Result<&str, Utf8Error>> {
        self.get(index).map(std::str::from_utf8)
    }

    /// Iterates over all strings as bytes, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> + Clone {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let string = &self.bytes[start..end];
            start = end;
            string
        })
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for StringArray {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut array = StringArray::default();
        strings.into_iter().for_each(|string| array.push(string));
        array
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn string_arrays_return_their_strings() {
        let strings: [&[u8]; 4] = [b"one", b"", b"\xff\xfe", "\u{2581}two".as_bytes()];
        let array: StringArray = strings.into_iter().collect();
        assert_eq!((array.len(), array.total_bytes()), (4, 11));
        assert!(array.iter().eq(strings));
        for (index, string) in strings.iter().enumerate() {
            assert_eq!(array.get(index), Some(*string));
        }
        assert_eq!(array.get(4), None);
        assert_eq!(array.get_str(0), Some(Ok("one")));
        assert!(array.get_str(2).is_some_and(|text| text.is_err()));
        assert!(StringArray::default().is_empty());
    }
}
